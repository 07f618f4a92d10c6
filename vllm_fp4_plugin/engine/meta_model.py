"""A model built on the meta device as vLLM would build it: all layers and no weights."""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from vllm_fp4_plugin.versions import vllm_names

T = TypeVar("T")

_BUILDING: list[None] = []  # one entry per active ``built_for``


def is_building() -> bool:
    """Whether this process is building a model, or a model's config, that will never run."""
    return bool(_BUILDING)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _building() -> Iterator[None]:
    _BUILDING.append(None)
    try:
        yield
    finally:
        _BUILDING.pop()


@contextmanager
def built(model: str, *, arch: str = "", **engine_args: Any) -> Iterator[tuple[Any, Any]]:
    """Build a model as ``vllm serve --quantization nvfp4-tc`` would, but on the meta device.

    The model is built for a single rank.

    Args:
        model: checkpoint directory or hub name.
        arch: architecture of a GPU to build for, e.g. ``"sm_100"``; empty: this machine's device.
        engine_args: further arguments of vLLM's ``EngineArgs``.

    Yields:
        The model and vLLM's config, whose ``quant_config`` is ours.

    Raises:
        ValueError: the checkpoint or an option is refused; the message says why.
        NoKernelError: the device has no kernel for a layer.
        IncompatibleVllm: this vLLM lacks a name that the plugin uses.
    """
    with vllm_names():
        from vllm.engine.arg_utils import EngineArgs

        from vllm_fp4_plugin.options import METHOD, Options

    args = EngineArgs(model=model, quantization=METHOD, enforce_eager=True, **engine_args)
    Options.of(args)  # refused here in one line; vLLM's config would wrap the error in many
    with built_for(args, arch) as found:
        yield found


@contextmanager
def built_for(args: Any, arch: str = "") -> Iterator[tuple[Any, Any]]:
    """Build a model from ``args``, vLLM's ``EngineArgs`` for a single rank; see ``built``."""
    import torch

    with vllm_names():
        from vllm.config import set_current_vllm_config
        from vllm.distributed import (
            cleanup_dist_env_and_memory,
            destroy_model_parallel,
            ensure_model_parallel_initialized,
            init_distributed_environment,
            parallel_state,
        )
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.model_executor.models import registry
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.attention import selector

        from vllm_fp4_plugin.checkpoint.placeholders import Placeholders
        from vllm_fp4_plugin.config import Nvfp4TcConfig
        from vllm_fp4_plugin.device import planned_for
        from vllm_fp4_plugin.linear.method import resolve_fusions

    excepthook = sys.excepthook
    with (
        _building(),
        _quiet(),
        planned_for(arch),
        # vLLM asks another process, which imports everything anew, so as not to start CUDA here.
        patch.object(registry, "_run_in_subprocess", _run_here),
        # vLLM would pass these empty tensors to the next model of this process.
        patch.dict(rotary_embedding._ROPE_DICT, clear=True),
        # vLLM would keep a planned device's attention backends for the next model of this process.
        patch.object(
            selector, "_cached_get_attn_backend", _uncached(selector._cached_get_attn_backend)
        ),
        tempfile.TemporaryDirectory() as rendezvous,
    ):
        config = args.create_engine_config()
        assert isinstance(config.quant_config, Nvfp4TcConfig)
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
            try:
                if config.model_config.is_moe and parallel_state._EP is None:
                    destroy_model_parallel()  # a dense model's lack groups of experts
                ensure_model_parallel_initialized(1, 1)
                with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                    with Placeholders() as placeholders:
                        meta_model = initialize_model(config)
                    placeholders.keep(meta_model)
                    resolve_fusions(meta_model)
                yield meta_model, config
            finally:
                cleanup_dist_env_and_memory()
                sys.excepthook = excepthook  # torch wraps the hook again for every model


def _uncached(function: T) -> T:
    """Function behind a cache; ``function`` itself while another plan bypasses the cache."""
    return getattr(function, "__wrapped__", function)


def _run_here(function: Callable[[], T]) -> T:
    return function()
