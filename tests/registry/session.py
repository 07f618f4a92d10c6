"""Single vLLM setup of a process, to build scaled-down models in turn without an engine."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.nn import Module
from transformers import PreTrainedConfig

from tests import devices
from tests.registry import configs, shrink
from vllm_fp4_plugin.checkpoint.placeholders import Placeholders
from vllm_fp4_plugin.linear.method import resolve_fusions
from vllm_fp4_plugin.options import METHOD

_FORMAT = "miniature"  # of configs, as vLLM's ``--config-format`` names it
_EXPERTS = "Qwen3MoeForCausalLM"  # any model of experts: ranks of others have no expert parallelism
ONLINE: dict[str, dict[str, Any]] = {"nvfp4_tc": {"activation": "16-bit"}}


@dataclass
class Built:
    """A model that vLLM built.

    Attributes:
        architecture: name in vLLM's registry.
        model: the model.
        config: vLLM's config that the model was built with.
    """

    architecture: str
    model: Module
    config: Any

    @property
    def model_config(self) -> Any:
        """Config in vLLM of the built model itself, not of a draft's target."""
        if self.architecture in configs.DRAFTS:
            return self.config.speculative_config.draft_model_config
        return self.config.model_config


@dataclass
class Session:
    """Process in which vLLM builds scaled-down models, on one rank.

    Attributes:
        folder: folder with a directory for each model, as for a checkpoint.
    """

    folder: Path
    _configs: dict[str, PreTrainedConfig] = field(default_factory=dict)

    def build(
        self,
        architecture: str,
        *,
        device: str = "meta",
        dtype: torch.dtype = torch.bfloat16,
        quantization: str | None = METHOD,
        changes: dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> Built:
        """Build vLLM's scaled-down model of an architecture; its weights are uninitialised.

        Args:
            architecture: name in vLLM's registry.
            device: ``"meta"`` or ``"cpu"``.
            dtype: dtype of the weights.
            quantization: the plugin's method, which quantises 16-bit weights at load, or None.
            changes: further fields of the config.
            engine_args: further arguments of vLLM's ``EngineArgs``.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = self.config(
            architecture,
            changes=changes,
            dtype=str(dtype).removeprefix("torch."),
            quantization=quantization,
            **engine_args,
        )
        built = Built(architecture, Module(), config)
        with (
            _runner(architecture),
            _stand_ins(),
            set_current_vllm_config(config),
            set_default_torch_dtype(dtype),
            torch.device(device),
            # vLLM caches rotary embeddings across models, which may be on another device.
            patch.dict(rotary_embedding._ROPE_DICT, clear=True),
            Placeholders() as record,
        ):
            built.model = initialize_model(config, model_config=built.model_config)
            if quantization == METHOD:
                resolve_fusions(built.model)
        record.keep(built.model)
        return built

    def config(
        self, architecture: str, *, changes: dict[str, Any] | None = None, **engine_args: Any
    ) -> Any:
        """Config that vLLM makes for a scaled-down model; for the arguments see ``build``."""
        from vllm.engine.arg_utils import EngineArgs

        draft = configs.DRAFTS.get(architecture)
        entry = configs.ENTRIES.get(architecture)
        given: dict[str, Any] = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "config_format": _FORMAT,
            "enable_prefix_caching": False,
        }
        if engine_args.get("quantization") == METHOD:
            ignored = {"ignore": list(entry.ignore)} if entry and entry.ignore else {}
            given["additional_config"] = {"nvfp4_tc": ONLINE["nvfp4_tc"] | ignored}
        if draft is None:
            model = self._place(architecture, configs.miniature(architecture, **(changes or {})))
        else:
            both = shrink.merged(draft.changes, (changes or {}) if draft.own is None else {})
            model = self._place(f"{architecture}-target", configs.miniature(draft.target, **both))
            own = model
            if draft.own is not None:
                own = self._place(
                    architecture, configs.made(architecture, draft.own, changes or {})
                )
            speculative = {"model": own, "method": draft.method, "num_speculative_tokens": 1}
            given["speculative_config"] = speculative
        with _runner(architecture):
            return EngineArgs(model=model, **(given | engine_args)).create_engine_config()

    def _place(self, name: str, config: PreTrainedConfig) -> str:
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        self._configs[str(directory)] = config
        return str(directory)


@contextmanager
def started() -> Iterator[Session]:
    """Set up this process's vLLM for ``Session.build`` on one rank; shut it down at the end."""
    from vllm.config import ModelConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils import config as vllm_config

    from tests.engine import inspect_models_here

    devices.bind_cutlass()
    load_general_plugins()
    inspect_models_here()
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="miniatures-") as folder:
        session = Session(Path(folder))
        parsers = {_FORMAT: _parser(session._configs)}
        with (
            patch.dict(vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER, parsers),
            # vLLM would ask the processor for its inputs; scaled-down models have no processor.
            patch.object(ModelConfig, "_supports_multimodal_inputs", _is_multimodal),
        ):
            first = session.config(_EXPERTS)
            with set_current_vllm_config(first):
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            try:
                yield session
            finally:
                logger.setLevel(level)
                cleanup_dist_env_and_memory()


@contextmanager
def _runner(architecture: str) -> Iterator[None]:
    """Make vLLM choose the second model runner, which never starts, on a machine without Triton."""
    from vllm.config import vllm as vllm_config

    if architecture not in configs.SECOND_RUNNER:
        yield
        return
    with (
        patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        patch.object(vllm_config, "HAS_TRITON", True),
    ):
        yield


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace the parts of CUDA and Triton that models use while they are built.

    The classes of transformers stay uncompiled for the rest of the process.
    """
    from vllm.model_executor.models.transformers import base as of_transformers
    from vllm.triton_utils import tl, triton

    with (
        patch.object(torch.cuda, "Stream", MagicMock),
        patch.object(torch.cuda, "Event", MagicMock),
        patch.object(triton, "set_allocator", MagicMock(), create=True),
        patch.object(tl, "extra", MagicMock(), create=True),
        patch.object(of_transformers, "support_torch_compile", lambda **_: lambda cls: cls),
    ):
        yield


def _is_multimodal(self: Any) -> bool:
    return bool(self.is_multimodal_model)


def _parser(placed: dict[str, PreTrainedConfig]) -> type[Any]:
    """Config parser for vLLM that finds the scaled-down configs."""
    import copy

    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    class MiniatureParser(ConfigParserBase):
        def parse(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            config = copy.deepcopy(placed[str(model)])
            return config.to_dict(), config

    return MiniatureParser
