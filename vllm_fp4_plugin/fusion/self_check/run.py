"""Driver of the self-check over a model."""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger

from vllm_fp4_plugin.fusion.self_check import attention, mlp, norm
from vllm_fp4_plugin.fusion.self_check.neighbourhood import Neighbourhood, distance
from vllm_fp4_plugin.options import METHOD, Options
from vllm_fp4_plugin.plan import hash_kernels

logger = init_logger("vllm.nvfp4_tc")

# Adjacent codes differ by a sixth to a third of their size; where rounding moves a value before it
# is quantised, few codes change. A missing rotation moves results by more than half.
ROUNDING = 0.15


class Outcome(NamedTuple):
    """Outcome of the check of one kind of fused op.

    Attributes:
        distance: RMS difference between fused and unfused results, relative to the RMS of the
            unfused results; infinite if the fused op failed.
        unknown: reason why the unfused op could not run; empty if it ran.
    """

    distance: float
    unknown: str = ""


def schedule(model: Module, config: Any) -> None:
    """Schedule the check for the model's first call: vLLM's memory profiling.

    The check does not run right after the load, because ops keep tensors for later calls, and
    tensors allocated while weights are loaded are lost when an engine sleeps at level 2. Only a
    model whose class replaces ``__call__``, which skips hooks, is checked at once.

    Args:
        model: model whose weights are in place.
        config: config of the engine.
    """

    def first(*_: Any) -> None:
        handle.remove()
        check(model, config)

    if type(model).__call__ is not Module.__call__:  # compiled as a whole, without hooks
        check(model, config)
        return
    handle = model.register_forward_pre_hook(first)


@torch.no_grad()
def check(model: Module, config: Any) -> None:
    """Compare each kind of a model's fused ops with its unfused form; unfuse kinds that differ.

    Args:
        model: model whose weights are in place.
        config: config of the engine.
    """
    kinds: dict[Hashable, list[Neighbourhood]] = {}
    # A norm is checked through its consuming layer, so mlp comes first.
    found = mlp.neighbourhoods(model), norm.neighbourhoods(model)
    for each in chain(*found, attention.neighbourhoods(model, config)):
        kinds.setdefault(each.kind, []).append(each)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    agreeing: list[float] = []
    for members in kinds.values():
        outcome = _agreed(_outcome(members[0]), device)
        if outcome.unknown:
            _tell(logger.info, f"{_named(members)}: not run at start: {outcome.unknown}")
        elif outcome.distance <= ROUNDING:
            agreeing.append(outcome.distance)
        else:
            _separate(members, outcome.distance, config)
    if agreeing:
        note = f"self-check: {len(agreeing)} of {len(kinds)} kinds of fused ops agree with their"
        _tell(logger.info, f"{note} unfused forms (at most {max(agreeing):.2g} apart)")


def _outcome(first: Neighbourhood) -> Outcome:
    try:
        unfused = first.results(False)
    except Exception as error:
        return Outcome(0.0, f"{type(error).__name__}: {error}".partition("\n")[0])
    try:
        return Outcome(distance(first.results(True), unfused))
    except Exception as error:
        logger.warning("%s: %s: %s: %s", METHOD, first.name, type(error).__name__, error)
        return Outcome(float("inf"))


def _agreed(outcome: Outcome, device: torch.device) -> Outcome:
    """Outcome agreed on by all ranks of a tensor-parallel group."""
    if get_tensor_model_parallel_world_size() == 1:
        return outcome
    flags = torch.tensor([bool(outcome.unknown), not outcome.distance <= ROUNDING])
    unknown, differs = tensor_model_parallel_all_reduce(flags.float().to(device)).tolist()
    if unknown:
        return Outcome(0.0, outcome.unknown or "another rank cannot")
    return Outcome(max(outcome.distance, float("inf")) if differs else outcome.distance)


def _separate(members: Sequence[Neighbourhood], apart: float, config: Any) -> None:
    report = config.quant_config.startup.report
    for each in members:
        each.separate()
        report.amend(each.name.partition(" ")[0], "unfused at start: its results differed")
    # Compiled graphs contain these calls, and vLLM caches graphs under its hash.
    kept = [f"unfused at start: {each.name}" for each in members]
    hash_kernels(config, kept, 1, Options.of(config))
    _tell(
        logger.warning,
        f"{_named(members)}: unfused, as its results differ from the unfused form's by "
        f"{apart:.2g} of their size, where rounding moves them by at most {ROUNDING}; "
        "please report this, with the model's name",
    )


def _named(members: Sequence[Neighbourhood]) -> str:
    more = f" and {len(members) - 1} more of its kind" if len(members) > 1 else ""
    return f"{members[0].name}{more}"


def _tell(log: Any, line: str) -> None:
    if get_tensor_model_parallel_rank() == 0:
        log("%s: %s", METHOD, line)
