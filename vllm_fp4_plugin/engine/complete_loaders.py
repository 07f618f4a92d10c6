"""vLLM's checkpoint loaders, extended to refuse incomplete checkpoints of our method.

See ``checkpoint.completeness``.
"""

from typing import Any

from torch import nn
from vllm.model_executor import model_loader
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint.arrivals import Checkpoint
from vllm_fp4_plugin.checkpoint.completeness import CompleteLoad
from vllm_fp4_plugin.checkpoint.placeholders import Placeholders
from vllm_fp4_plugin.fusion.self_check import run as self_check
from vllm_fp4_plugin.options import METHOD


class _CompleteLoader:
    """Mixin for vLLM's loaders: refuses an incomplete checkpoint served by our method."""

    load_config: Any
    checks_completeness = True  # read by completeness.check_load_format

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        load: Any = super()
        if model_config.quantization != METHOD:
            return load.create_model(vllm_config, model_config, prefix)
        with Placeholders() as placeholders:
            model = load.create_model(vllm_config, model_config, prefix)
        placeholders.keep(model)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        load: Any = super()
        # A draft model may share the target's embeddings after its load.
        shared = VocabParallelEmbedding if model_config.runner_type == "draft" else None
        self._expect(model, model_config, shared)
        load.load_weights(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **named: Any) -> Any:
        load: Any = super()
        model = load.load_model(vllm_config, model_config, *args, **named)
        if model_config.quantization == METHOD:
            self_check.schedule(model, vllm_config)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Any:
        load: Any = super()
        # A reload calls this and loads the weights itself. Tied embeddings are separate meanwhile.
        self._expect(model, model_config, ParallelLMHead)
        return load.get_all_weights(model_config, model)

    def _expect(self, model: Any, model_config: Any, shared: type[nn.Module] | None) -> None:
        if model_config.quantization == METHOD:
            batch_invariance.check_norms(model)
            cache = self.load_config.download_dir
            checkpoint = Checkpoint(model_config.model, model_config.revision, cache)
            CompleteLoad(model, checkpoint, shared=shared).expect()


class _CompleteDefaultLoader(_CompleteLoader, DefaultModelLoader):
    def load_weights(self, model: Any, model_config: Any) -> None:
        self._is_ours = model_config.quantization == METHOD
        super().load_weights(model, model_config)

    def _prepare_weights(self, source: str, *args: Any, **named: Any) -> Any:
        """Find a checkpoint's files; for our method, refuse all formats but safetensors.

        Files of other formats can execute code.
        """
        try:
            found = super()._prepare_weights(source, *args, **named)
        except RuntimeError as error:  # no such files
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
    """Replace vLLM's checkpoint loaders with loaders that check completeness."""
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for load_format, loader in loaders.items():
        loaders[load_format] = _REPLACED.get(loader, loader)
