"""Checkpoint tensor that does not fit a model, found from the traceback of the loader's error."""

from collections.abc import Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Self

from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_fp4_plugin.checkpoint.arrivals import Arrivals, Source

_UNKNOWN = ("no module or parameter named", "has no parameter")
_PLACES = ("param_data", "param", "self")  # local names of a destination in loaders


def _place(tensors: Mapping[str, Tensor], owner: object) -> tuple[int, ...] | None:
    """Shape that a tensor must have for a loader's destination; None without a destination.

    Args:
        tensors: the loader's local variables that are tensors.
        owner: value of ``self`` in the loader.
    """
    place = next((tensors[name] for name in _PLACES if name in tensors), None)
    if place is None:
        return None
    if isinstance(owner, VocabParallelEmbedding):  # an embedding has padding rows
        return (owner.org_vocab_size, *place.shape[1:])
    return tuple(place.shape)


@dataclass(frozen=True)
class Misfit:
    """Checkpoint tensor that does not fit the model's parameter.

    Attributes:
        source: the tensor.
        must: shape that the loader expected; None: unknown, or equal to the tensor's shape.
        error: exception of the loader; None: no exception, but only a part of the tensor was read.
    """

    source: Source
    must: tuple[int, ...] | None
    error: BaseException | None = None

    @classmethod
    def found(cls, error: BaseException, arrivals: Arrivals) -> Self | None:
        """Find the checkpoint tensor that a loader failed on; None if it is unknown.

        The tensor is a local variable of the innermost stack frame that has such a variable. The
        tensor requested last is only the fallback, as a model may gather tensors before it loads
        any.
        """
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            values = dict(frame.f_locals)
            tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
            for given in tensors.values():
                source = arrivals.seen_by(given)
                if source is not None:
                    must = _place(tensors, values.get("self"))
                    return cls(source, None if must == tuple(given.shape) else must, error)
        return None if arrivals.last is None else cls(arrivals.last, None, error)

    def __str__(self) -> str:
        name, where = self.source.name, self.source.file
        if isinstance(self.error, KeyError) or any(text in str(self.error) for text in _UNKNOWN):
            return (
                f"{where}: holds {name}, for which the model has no parameter; if it belongs to "
                "a quantised layer, no ignore pattern of the config may cover that, otherwise "
                "remove it or serve the model that it was made for"
            )
        shape = tuple(self.source.shape)
        if self.must is not None:
            return (
                f"{where}: {name}: shape is {shape}, must be {self.must}; mend the model's "
                "config.json, or export the model again"
            )
        reason = str(self.error).partition("\n")[0] or type(self.error).__name__
        return (
            f"{where}: holds {name} of shape {shape}, which does not fit the model ({reason}); "
            "mend the model's config.json, or export the model again"
        )
