"""Trial loads that tell whether a model would take an unfilled buffer from the checkpoint.

Only the model's ``load_weights`` knows: it may load every buffer, some, or none. A trial passes the
buffer's own value (zeros on the meta device) to ``load_weights`` under a likely checkpoint name,
then undoes changes to the model.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_fp4_plugin.checkpoint.names import CheckpointNames
from vllm_fp4_plugin.checkpoint.write_coverage import WriteCoverage


class Buffer(NamedTuple):
    """Buffer of a model, with its name in the model."""

    name: str
    tensor: Tensor


def wanted(
    model: Any,
    lacking: Iterable[Buffer],
    names: CheckpointNames,
    refused: tuple[type[Exception], ...],
) -> Iterator[str]:
    """Find the buffers that a model takes from a checkpoint.

    Of buffers whose names differ only in numbers, the first is tried and stands for all.

    Args:
        model: a model that has been loaded.
        lacking: buffers that the load did not write.
        names: guesser of checkpoint names.
        refused: exceptions that models raise for an unknown tensor.

    Yields:
        Checkpoint names of the buffers that the model takes.
    """
    alike: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in lacking:
        alike[re.sub(r"\d+", "#", buffer.name)].append(buffer)
    for first, *others in alike.values():
        # One layer stands for all layers, as a call may take a while.
        for number, guess in enumerate(names.guesses(first.name)):
            if _takes(model, guess, first.tensor, refused):
                yield guess
                for other in others:
                    guesses = names.guesses(other.name)
                    yield guesses[min(number, len(guesses) - 1)]
                break


def _takes(model: Any, name: str, buffer: Tensor, refused: tuple[type[Exception], ...]) -> bool:
    if buffer.is_meta:
        value = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    else:
        value = buffer.detach().clone()
    coverage = WriteCoverage([buffer])
    with _undone(model), coverage:
        try:
            model.load_weights([(name, value)])
        except torch.OutOfMemoryError:
            raise
        except refused:
            pass  # unknown name, or an error for the other tensors, which are missing
    return not coverage.holes(buffer)


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore, on exit, the attributes of a model's modules."""
    kept = []
    for module in model.modules():
        inner = {n: dict(v) for n, v in vars(module).items() if n in _REGISTERED}
        kept.append((module, dict(vars(module)), inner))
    try:
        yield
    finally:
        for module, attributes, inner in kept:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in inner.items():
                attributes[name].clear()
                attributes[name].update(content)


_REGISTERED = ("_parameters", "_buffers", "_modules")
