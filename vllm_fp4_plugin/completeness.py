"""Completeness of a model: every parameter has come from the checkpoint, or nothing is served.

vLLM checks that itself for models that are not quantised, by name alone: a fused parameter of
which one shard came passes.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.model_executor import model_loader
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from vllm_fp4_plugin import checkpoint_files
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.ignore import shard_names
from vllm_fp4_plugin.options import METHOD
from vllm_fp4_plugin.write_coverage import Interval, WriteCoverage

_NAMED = 4  # missing tensors in a message
_INCOMPLETE = "the checkpoint is incomplete, copy or download it again, or export the model again"


class CompleteLoad:
    """Load of a model's weights that is refused unless it fills every parameter.

    While it is entered, the model's ``load_weights`` is watched.

    Args:
        model: a model that is built and not loaded; on the meta device too.
        source: what the checkpoint is called in errors.
        draft: it is a draft model, whose embeddings vLLM may take from the target.
    """

    def __init__(self, model: Any, source: str, *, draft: bool = False) -> None:
        self._model = model
        self._source = source
        self._needed = list(_needed(model, draft=draft))
        self._coverage = WriteCoverage(parameter for _, _, parameter in self._needed)
        self._claimed: set[str] = set()  # names that the model says it has loaded
        self._at: str | None = None  # tensor that the model is taking

    def __enter__(self) -> "CompleteLoad":
        load = self._model.load_weights

        def watched(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
            with self._coverage:
                claimed = load(self._noted(weights), *args, **kwargs)
            self._claimed.update(claimed or ())
            return claimed

        self._model.load_weights = watched  # of the instance, before the class's
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        del self._model.load_weights
        if error is None:
            self._check()
        elif self._at is not None and _is_misfit(error):
            raise UnsupportedCheckpoint(self._misfit(self._at, error)) from error

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._at = name
            yield name, tensor
        self._at = None  # a model that gathers them first names the wrong one from here on

    def _check(self) -> None:
        missing = list(dict.fromkeys(self._missing()))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise UnsupportedCheckpoint(
                f"{self._source}: holds no {', '.join(missing[:_NAMED])}{more}, which the model "
                f"needs; {_INCOMPLETE}"
            )

    def _misfit(self, tensor: str, error: BaseException) -> str:
        where = self._file(tensor)
        if isinstance(error, KeyError) or "no module or parameter named" in str(error):
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

    def _missing(self) -> Iterator[str]:
        packed = getattr(self._model, "packed_modules_mapping", None) or {}
        for name, module, parameter in self._needed:
            holes = self._coverage.holes(parameter)
            untouched = sum(end - start for start, end in holes) == parameter.nbytes
            # A model may fill a parameter otherwise; of one that it fills in part it cannot know.
            if holes and not (untouched and name in self._claimed):
                yield from _tensors(name, module, parameter, holes, packed)


def _is_misfit(error: BaseException) -> bool:
    """Whether a model raised it at a tensor, and did not refuse that by name."""
    named = isinstance(error, UnsupportedCheckpoint)
    return isinstance(error, AssertionError | IndexError | KeyError | ValueError) and not named


def _needed(model: nn.Module, *, draft: bool) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Parameters that a checkpoint has to fill, with their names and modules."""
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            continue  # scales of a KV cache, 1 unless there are any
        if draft and isinstance(module, VocabParallelEmbedding):
            continue
        optional = getattr(method, "optional_parameters", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() and name not in optional:
                yield (f"{prefix}.{name}" if prefix else name), module, parameter


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

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        load: Any = super()
        if model_config.quantization != METHOD:
            load.load_weights(model, model_config)
            return
        draft = model_config.runner_type == "draft"
        with CompleteLoad(model, model_config.model, draft=draft):
            load.load_weights(model, model_config)


class _CompleteDefaultLoader(_CompleteLoader, DefaultModelLoader):
    pass


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
