"""Completeness of a model: every parameter comes from the checkpoint, or the load is refused.

By default vLLM checks only unquantised models, and only by name: a fused parameter that received a
single shard passes.
"""

from collections.abc import Container, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from vllm.model_executor import model_loader
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from nvfp4_kernels.devices import dtype_name
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.checkpoint.arrivals import Arrivals, Checkpoint, source_of
from vllm_fp4_plugin.checkpoint.misfit import Misfit
from vllm_fp4_plugin.checkpoint.names import CheckpointNames
from vllm_fp4_plugin.checkpoint.offering import Buffer, wanted
from vllm_fp4_plugin.checkpoint.placeholders import placeholders
from vllm_fp4_plugin.checkpoint.write_coverage import Interval, WriteCoverage
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.ignore import shard_names
from vllm_fp4_plugin.options import METHOD

LEDGER = "ledger"  # attribute of a method that tracks the tensors it has received
_NAMED = 4  # missing tensors listed in a message
# Parameters, by their module's class, that keep their initial values: vLLM's model skips these
# tensors of a checkpoint.
_KEPT = {"RadioVisionEncoderLayer": ("ls1", "ls2")}
# Errors of models and torch for a tensor of unexpected shape or name.
_MISFITS = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
_INTEGERS = (torch.bool, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INCOMPLETE = "the checkpoint is incomplete, copy or download it again, or export the model again"


class _Needed(NamedTuple):
    """Parameter or buffer that a checkpoint must fill."""

    name: str
    module: nn.Module
    tensor: Tensor


class CompleteLoad:
    """Loader of a model's weights that raises unless all parameters and placeholders are filled.

    Placeholders are buffers, see ``placeholders``.

    Args:
        model: model that is built but not loaded; may be on the meta device.
        checkpoint: checkpoint that holds the weights.
        shared: class of modules whose weights may be missing, as another module may provide them.
        has_values: whether tensors hold the checkpoint's values, which must then be finite.
    """

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        *,
        shared: type[nn.Module] | None = None,
        has_values: bool = True,
    ) -> None:
        self._model = model
        self._has_values = has_values
        self._checkpoint = checkpoint
        self._shared = shared
        self._arrivals = Arrivals(checkpoint)
        self._numbers: set[int] = set()

    def expect(self) -> None:
        """Install this loader as the model's ``load_weights`` for the next call."""
        self._model.load_weights = self  # attribute of the instance, which hides the class's method

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Load weights with the model's ``load_weights``, and check them.

        Raises:
            UnsupportedCheckpoint: the message names a tensor that is missing, unknown, not finite,
                or of a shape or dtype that does not fit.
        """
        vars(self._model).pop("load_weights", None)
        needed = list(_needed(self._model, self._shared))
        buffers = list(_needed_buffers(self._model, self._shared))
        for ledger in _ledgers(self._model):
            ledger.begin()
        numbers = [p for ledger in _ledgers(self._model) for p in ledger.number_parameters()]
        self._numbers = {number.untyped_storage()._cdata for number in numbers}
        self._arrivals = arrivals = Arrivals(self._checkpoint)
        watched = [*(tensor for _, _, tensor in (*needed, *buffers)), *numbers]
        coverage = WriteCoverage(watched, self._check_copy)
        try:
            with arrivals, coverage:
                weights = self._checked(arrivals.follow(weights))
                claimed = self._model.load_weights(weights, *args, **kwargs)
        except _MISFITS as error:
            misfit = Misfit.found(error, arrivals)
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if misfit is None or isinstance(error, UnsupportedCheckpoint) or out_of_memory:
                raise
            raise UnsupportedCheckpoint(str(misfit)) from error
        for source, part in arrivals.read_in_part() if _is_alone() else ():
            raise UnsupportedCheckpoint(str(Misfit(source, part)))
        self._refuse_missing(needed, buffers, coverage, claimed or ())
        return claimed

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``; raise for a NaN, an infinity, or integers in a weight or bias.

        8-bit integers are allowed: packed codes.
        """
        for name, tensor in weights:
            is_weight = name.endswith((".weight", ".bias"))
            if is_weight and tensor.dtype in _INTEGERS:
                raise UnsupportedCheckpoint(
                    f"{self._checkpoint.file_of(name)}: {name}: dtype is "
                    f"{dtype_name(tensor.dtype)}, must be a floating-point one, or uint8 of a "
                    "quantised layer; export the model again"
                )
            if self._has_values:
                checkpoint_values.check_finite(
                    lambda name=name: f"{self._checkpoint.file_of(name)}: {name}",  # type: ignore[misc]
                    tensor,
                )
            yield name, tensor

    def _check_copy(self, to: Tensor, given: Tensor) -> None:
        """Record a copy; raise if numbers of elements differ, or dtypes do not fit (``_is_kept``).

        Numbers of elements may differ for a ledger's parameters of scalars
        (``number_parameters``).
        """
        self._arrivals.note_read(given)
        source = source_of(given)
        name = source or self._checkpoint.source
        is_number = to.untyped_storage()._cdata in self._numbers
        if given.numel() != to.numel() and not is_number:
            shape = tuple(given.shape) if source is None else source.shape
            raise UnsupportedCheckpoint(
                f"{name}: shape is {shape}, must be {tuple(to.shape)}; mend the model's "
                "config.json, or export the model again"
            )
        if not _is_kept(given.dtype, to.dtype):
            must = _FLOATS if to.dtype in _FLOATS else (to.dtype,)
            raise UnsupportedCheckpoint(
                f"{name}: dtype is {dtype_name(given.dtype)}, must be "
                f"{' or '.join(map(dtype_name, must))}; export the model again"
            )

    def _refuse_missing(
        self,
        needed: Iterable[_Needed],
        buffers: Iterable[_Needed],
        coverage: WriteCoverage,
        claimed: Container[str],
    ) -> None:
        lacking = list(self._missing(needed, coverage, claimed))
        unfilled = [
            Buffer(name, tensor)
            for name, _, tensor in buffers
            if coverage.holes(tensor) and name not in claimed
        ]
        if not lacking and not unfilled:
            return
        names = CheckpointNames(self._arrivals.names, dict(self._model.named_parameters()))
        missing = [names.likeliest(name) for name in lacking]
        missing += wanted(self._model, unfilled, names, _MISFITS)
        missing = list(dict.fromkeys(missing))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise UnsupportedCheckpoint(
                f"{self._checkpoint.source}: holds no {', '.join(missing[:_NAMED])}{more}, which "
                f"the model needs; {INCOMPLETE}"
            )

    def _missing(
        self, needed: Iterable[_Needed], coverage: WriteCoverage, claimed: Container[str]
    ) -> Iterator[str]:
        packed = getattr(self._model, "packed_modules_mapping", None) or {}
        for ledger in _ledgers(self._model):
            ledger.note_filled(lambda parameter: not coverage.holes(parameter))
            yield from ledger.missing()
        for name, module, parameter in needed:
            holes = coverage.holes(parameter)
            untouched = sum(end - start for start, end in holes) == parameter.nbytes
            # A model may claim parameters that it fills by other means, unless partly filled.
            if holes and not (untouched and name in claimed):
                yield from _tensors(name, module, parameter, holes, packed)


def _is_alone() -> bool:
    """Whether this rank is the only one, so that each tensor must be read whole."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _is_kept(given: torch.dtype, to: torch.dtype) -> bool:
    """Whether a copy from dtype ``given`` to dtype ``to`` is accepted.

    Accepted are: the same dtype, integers of 16 bits or more to any such integer, and floats of
    16 bits or more, or E8M0, to a float of 16 bits or more.
    """
    if to in _FLOATS:
        return given in (*_FLOATS, torch.float8_e8m0fnu)
    wide = torch.int16, torch.int32, torch.int64
    return given == to or (given in wide and to in wide)


def _needed(model: nn.Module, shared: type[nn.Module] | None) -> Iterator[_Needed]:
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not _must_come(module, shared):
            continue
        if hasattr(method, LEDGER):
            continue  # its ledger tracks each tensor, despite padding
        optional = getattr(method, "optional_parameters", ()) + _KEPT.get(type(module).__name__, ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() and name not in optional:
                yield _Needed(f"{prefix}.{name}" if prefix else name, module, parameter)


def _needed_buffers(model: nn.Module, shared: type[nn.Module] | None) -> Iterator[_Needed]:
    for name, module, buffer in placeholders(model):
        if _must_come(module, shared):
            yield _Needed(name, module, buffer)


def _must_come(module: nn.Module, shared: type[nn.Module] | None) -> bool:
    if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
        return False  # scales of a KV cache, 1 by default
    return shared is None or not isinstance(module, shared)


def _ledgers(model: nn.Module) -> Iterator[Any]:
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return (getattr(method, LEDGER) for method in methods if hasattr(method, LEDGER))


def _tensors(
    name: str,
    module: nn.Module,
    parameter: Tensor,
    holes: list[Interval],
    packed: dict[str, list[str]],
) -> Iterator[str]:
    """Yield names of the missing tensors: of a fused layer's shards with holes, else ``name``.

    Args:
        name: model-side name of the parameter.
        module: module of the parameter.
        parameter: the parameter.
        holes: byte intervals of the parameter that were never written.
        packed: shards of fused layers, by the last part of the layer's name.
    """
    prefix, _, last = name.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", [])
    shards = shard_names(prefix, packed)
    rows = len(parameter) if parameter.ndim else 1
    ends = list(accumulate([1] * len(sizes) if rows == len(sizes) else sizes))
    if len(shards) != len(sizes) or ends[-1:] != [rows]:
        yield name
        return
    row = parameter.nbytes // rows
    begin = 0
    for shard, end in zip(shards, ends, strict=True):
        if any(hole.start < end * row and hole.end > begin * row for hole in holes):
            yield f"{shard}.{last}"
        begin = end


def check_load_format(load_format: str) -> None:
    """Refuse a load format, except ``dummy``, whose loader does not check that a model is complete.

    Raises:
        UnsupportedCheckpoint: the message lists the accepted load formats.
    """
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    checked = sorted(
        f for f, loader in loaders.items() if getattr(loader, "checks_completeness", False)
    )
    if load_format not in {*checked, "dummy"}:
        raise UnsupportedCheckpoint(
            f"load-format: is {load_format}, must be one of {', '.join([*checked, 'dummy'])} with "
            f"{METHOD}; serve the checkpoint that the weights were read from"
        )
