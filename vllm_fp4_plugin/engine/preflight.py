"""Checks in the front-end process, before any worker starts: options and a checkpoint's tensors.

Without these checks the same errors would be raised later: for an option when a worker builds the
model, for a missing tensor once the weights have been read.
"""

import copy
import functools
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.batch_invariance import BatchInvarianceRefused
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import model_source
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.engine import meta_model, nvfp4_cache, refusal
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import METHOD, Options, refuse_misplaced

logger = init_logger("vllm.nvfp4_tc")

_SECONDS = 120  # limit of a dry load, which takes one or two
_COMPLETE, _REFUSED, _FAILED = b"C", b"R", b"F"
_ONE_RANK: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_expert_parallel": False,
    "distributed_executor_backend": None,
    "speculative_config": None,
    "kv_transfer_config": None,
}


def register() -> None:
    """Make every front end of vLLM run the checks before it starts workers."""
    nvfp4_cache.register()
    create = EngineArgs.create_engine_config
    if not hasattr(create, "checks_first"):
        checked = _checked(create)
        checked.checks_first = True  # type: ignore[attr-defined]
        EngineArgs.create_engine_config = checked


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(args: Any, *more: Any, **named: Any) -> Any:
        if not meta_model.is_building():
            refusal.tell_last()
        is_ours = args.quantization == METHOD
        check_options(args, is_ours)
        if is_ours and Path(args.model).is_dir():
            checkpoint_files.check_config(Path(args.model))
        try:
            config = create(args, *more, **named)
        except Exception as error:
            if is_ours and (refused := model_source.explained(args.model, error, args.revision)):
                raise refused from error
            raise
        if isinstance(config.quant_config, Nvfp4TcConfig) and not meta_model.is_building():
            check_options(args, is_ours=True)
            nvfp4_cache.check(config)
            batch_invariance.keep_norms(config)
            batch_invariance.refuse(config)
            model = config.model_config
            directory = checkpoint_files.local_directory(
                model.model, model.revision, args.download_dir
            )
            if directory is None:
                _say_later(f"{model.model} is to be downloaded")
            else:
                check_complete(args, directory)
        return config

    return create_engine_config


def check_options(args: Any, is_ours: bool) -> None:
    """Check that our options in ``--additional-config`` are valid and inside ``nvfp4_tc``.

    Args:
        args: vLLM's ``EngineArgs``.
        is_ours: whether our method is selected, see ``refuse_misplaced``.

    Raises:
        InvalidOption: see ``Options.of`` and ``refuse_misplaced``.
    """
    refuse_misplaced(args.additional_config, is_ours)
    Options.of(args)


def check_complete(args: Any, directory: Path) -> None:
    """Check, by a dry load of the headers, that a local checkpoint has all tensors of its model.

    The dry load runs in a child process: building a model leaves state behind, on a GPU too, that
    would disturb the engine. If it cannot be completed, the check is left to the workers.

    Args:
        args: vLLM's ``EngineArgs``.
        directory: directory of the checkpoint.

    Raises:
        UnsupportedCheckpoint: the dry load refuses the model or the checkpoint.
    """
    if args.load_format == "dummy":
        return
    if torch.distributed.is_initialized():
        _say_later("this process holds an engine already")
        return
    verdict = _in_a_child(functools.partial(_dry_load, args, directory))
    if verdict.startswith(_REFUSED):
        raise UnsupportedCheckpoint(verdict[1:].decode())
    if verdict.startswith(_FAILED):
        _say_later(verdict[1:].decode())


def _dry_load(args: Any, directory: Path) -> bytes:
    """Run a dry load of a checkpoint and return a verdict.

    Returns:
        ``_COMPLETE``; ``_REFUSED`` and a message if the checkpoint is incomplete or unsupported, or
        the model cannot be batch-invariant as requested; ``_FAILED`` and a message for any other
        error.
    """
    from vllm_fp4_plugin.checkpoint.dry_load import dry_load

    try:
        headers = checkpoint_files.read_headers(directory)
        if not headers:
            return _COMPLETE  # another format than safetensors
        with meta_model.built_for(_alone(args)) as (model, _):
            dry_load(model, directory, headers)
    except (UnsupportedCheckpoint, BatchInvarianceRefused) as error:
        return _REFUSED + str(error).encode()
    except Exception as error:  # the engine meets it too, or only this check
        return _FAILED + f"{type(error).__name__}: {error}".partition("\n")[0].encode()
    return _COMPLETE


def _alone(args: Any) -> Any:
    """Copy of the engine arguments ``args`` for one rank, eager, and without a draft model."""
    alone = copy.copy(args)
    for name, value in _ONE_RANK.items():
        setattr(alone, name, value)
    alone.quantization, alone.enforce_eager = METHOD, True
    return alone


def _in_a_child(function: Callable[[], bytes]) -> bytes:
    """Run ``function`` in a fork of this process and return its result.

    If the fork ends without a result or takes too long, return ``_FAILED`` and the reason.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            # The child has no threads of its parent, for which parallel ops would wait. torch's own
            # name of the function does nothing once a CPU engine has bound its threads.
            torch._C.set_num_threads(1)
            os.write(writer, function())
            status = 0
        finally:
            os._exit(status)  # skips the parent's exit handlers
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], _SECONDS)
            if ready:
                return pipe.read() or _FAILED + b"its process ended without a word"
        os.kill(child, signal.SIGKILL)
        return _FAILED + f"it took more than {_SECONDS} s".encode()
    finally:
        _, status = os.waitpid(child, 0)


def _say_later(why: str) -> None:
    logger.info(
        "%s: whether the checkpoint is complete is checked once its weights are read (%s)",
        METHOD,
        why,
    )
