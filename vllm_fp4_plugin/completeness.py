"""Completeness of a model: every parameter has come from the checkpoint, or nothing is served.

vLLM checks that itself for models that are not quantised, by name alone: a fused parameter of
which one shard came passes.
"""

from collections.abc import Container, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor import model_loader
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from nvfp4_kernels.devices import dtype_name
from vllm_fp4_plugin import batch_invariance, checkpoint_files, checkpoint_values
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.ignore import shard_names
from vllm_fp4_plugin.options import METHOD
from vllm_fp4_plugin.self_check import run as self_check
from vllm_fp4_plugin.write_coverage import Interval, WriteCoverage

LEDGER = "ledger"  # attribute of a method that knows by itself which tensors have come
_NAMED = 4  # missing tensors in a message
# Parameters by their module's class that stay as vLLM builds them: its model skips a checkpoint's.
_KEPT = {"RadioVisionEncoderLayer": ("ls1", "ls2")}
# What models and torch raise for a tensor of another shape or name.
_MISFITS = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
_INTEGERS = (torch.bool, torch.int16, torch.int32, torch.int64)
INCOMPLETE = "the checkpoint is incomplete, copy or download it again, or export the model again"


class _Needed(NamedTuple):
    """Parameter that a checkpoint has to fill."""

    name: str
    module: nn.Module
    parameter: nn.Parameter


class CompleteLoad:
    """Load of a model's weights that is refused unless it fills every parameter.

    Args:
        model: a model that is built and not loaded; on the meta device too.
        source: directory of the checkpoint, or its name on the hub.
        shared: kind of module whose weights need not come, as they may be another module's.
        has_values: whether tensors' values are the checkpoint's; they must be finite then.
    """

    def __init__(
        self,
        model: Any,
        source: str,
        *,
        shared: type[nn.Module] | None = None,
        has_values: bool = True,
    ) -> None:
        self._model = model
        self._has_values = has_values
        self._source = source
        self._shared = shared
        self._at: str | None = None  # tensor that the model is taking

    def expect(self) -> None:
        """Stand in front of the model's ``load_weights`` for the next call."""
        self._model.load_weights = self  # of the instance, before the class's

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Load weights as the model's ``load_weights`` does.

        Raises:
            UnsupportedCheckpoint: naming a tensor that is missing, unknown, or does not fit.
        """
        vars(self._model).pop("load_weights", None)
        needed = list(_needed(self._model, self._shared))
        for ledger in _ledgers(self._model):
            ledger.begin()
        numbers = [p for ledger in _ledgers(self._model) for p in ledger.number_parameters()]
        coverage = WriteCoverage([*(parameter for _, _, parameter in needed), *numbers])
        try:
            with coverage:
                claimed = self._model.load_weights(self._noted(weights), *args, **kwargs)
        except _MISFITS as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if self._at is None or isinstance(error, UnsupportedCheckpoint) or out_of_memory:
                raise
            raise UnsupportedCheckpoint(self._misfit(self._at, error)) from error
        missing = list(dict.fromkeys(self._missing(needed, coverage, claimed or ())))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise UnsupportedCheckpoint(
                f"{self._source}: holds no {', '.join(missing[:_NAMED])}{more}, which the model "
                f"needs; {INCOMPLETE}"
            )
        return claimed

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._at = name
            self._check(name, tensor)
            yield name, tensor
        self._at = None  # a model that gathers them first names the wrong one from here on

    def _check(self, name: str, tensor: Tensor) -> None:
        """Raise for what parameters would take, and no model can use."""
        is_weight = name.endswith((".weight", ".bias"))
        if is_weight and tensor.dtype in _INTEGERS:
            raise UnsupportedCheckpoint(
                f"{self._file(name)}: {name}: dtype is {dtype_name(tensor.dtype)}, must be a "
                "floating-point one, or uint8 of a quantised layer; export the model again"
            )
        if self._has_values:
            checkpoint_values.check_finite(lambda: f"{self._file(name)}: {name}", tensor)

    def _misfit(self, tensor: str, error: BaseException) -> str:
        where = self._file(tensor)
        unknown = ("no module or parameter named", "has no parameter")
        if isinstance(error, KeyError) or any(said in str(error) for said in unknown):
            return (
                f"{where}: holds {tensor}, for which the model has no parameter; if it belongs to "
                "a quantised layer, no ignore pattern of the config may cover that, otherwise "
                "remove it or serve the model that it was made for"
            )
        reason = str(error).partition("\n")[0] or type(error).__name__
        return (
            f"{where}: holds {tensor}, which does not fit the model ({reason}); mend the model's "
            "config.json, or export the model again"
        )

    def _file(self, tensor: str) -> str:
        directory = Path(self._source)
        headers = checkpoint_files.read_headers(directory) if directory.is_dir() else {}
        return str(headers[tensor].file if tensor in headers else self._source)

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
            # A model may fill a parameter otherwise; of one that it fills in part it cannot know.
            if holes and not (untouched and name in claimed):
                yield from _tensors(name, module, parameter, holes, packed)


def _needed(model: nn.Module, shared: type[nn.Module] | None) -> Iterator[_Needed]:
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            continue  # scales of a KV cache, 1 unless there are any
        if hasattr(method, LEDGER):
            continue  # which knows every expert's tensors, where a parameter has padding too
        if shared is not None and isinstance(module, shared):
            continue
        optional = getattr(method, "optional_parameters", ()) + _KEPT.get(type(module).__name__, ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() and name not in optional:
                yield _Needed(f"{prefix}.{name}" if prefix else name, module, parameter)


def _ledgers(model: nn.Module) -> Iterator[Any]:
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return (getattr(method, LEDGER) for method in methods if hasattr(method, LEDGER))


def _tensors(
    name: str,
    module: nn.Module,
    parameter: nn.Parameter,
    holes: list[Interval],
    packed: dict[str, list[str]],
) -> Iterator[str]:
    """Names that the missing parts of a parameter have in the checkpoint."""
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


# --- vLLM's loaders -----------------------------------------------------------------------------


class _CompleteLoader:
    """Loader before vLLM's: of our models, it lets no incomplete one pass."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        load: Any = super()
        # A draft model may take the target's embeddings once it is loaded.
        shared = VocabParallelEmbedding if model_config.runner_type == "draft" else None
        _expect(model, model_config, shared)
        load.load_weights(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **named: Any) -> Any:
        load: Any = super()
        model = load.load_model(vllm_config, model_config, *args, **named)
        if model_config.quantization == METHOD:
            self_check.check(model, vllm_config)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Any:
        load: Any = super()
        # A reload asks for the weights and loads them itself. It parts tied embeddings meanwhile.
        _expect(model, model_config, ParallelLMHead)
        return load.get_all_weights(model_config, model)


def _expect(model: Any, model_config: Any, shared: type[nn.Module] | None) -> None:
    if model_config.quantization == METHOD:
        batch_invariance.check_norms(model)
        CompleteLoad(model, model_config.model, shared=shared).expect()


class _CompleteDefaultLoader(_CompleteLoader, DefaultModelLoader):
    def load_weights(self, model: Any, model_config: Any) -> None:
        self._is_ours = model_config.quantization == METHOD
        super().load_weights(model, model_config)

    def _prepare_weights(self, source: str, *args: Any, **named: Any) -> Any:
        """Find a checkpoint's files; of our models only those that cannot run code."""
        try:
            found = super()._prepare_weights(source, *args, **named)
        except RuntimeError as error:  # there are none
            if not getattr(self, "_is_ours", False):
                raise
            raise checkpoint_files.no_weights(source, []) from error
        _, files, is_safetensors, *_ = found
        if getattr(self, "_is_ours", False) and not is_safetensors:
            raise checkpoint_files.no_weights(source, files)
        return found


class _CompleteStreamer(_CompleteLoader, RunaiModelStreamerLoader):
    pass


_REPLACED = {
    DefaultModelLoader: _CompleteDefaultLoader,
    RunaiModelStreamerLoader: _CompleteStreamer,
}


def register() -> None:
    """Put loaders that check completeness in the place of vLLM's that read checkpoints."""
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for load_format, loader in loaders.items():
        loaders[load_format] = _REPLACED.get(loader, loader)


def check_load_format(load_format: str) -> None:
    """Refuse a load format whose loader does not check that a model is complete.

    Raises:
        UnsupportedCheckpoint: naming those that do.
    """
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    checked = sorted(f for f, loader in loaders.items() if issubclass(loader, _CompleteLoader))
    if load_format not in {*checked, "dummy"}:
        raise UnsupportedCheckpoint(
            f"load-format: is {load_format}, must be one of {', '.join([*checked, 'dummy'])} with "
            f"{METHOD}; serve the checkpoint that the weights were read from"
        )
