"""``python -m vllm_fp4_plugin report``: which kernel every layer of a model would get, and why."""

import json
import logging
import os
import sys
import tempfile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_fp4_plugin.report import Report
from vllm_fp4_plugin.versions import IncompatibleVllm, vllm_names


def report(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or name on the hub.")],
    additional_config: Annotated[
        str, typer.Option(help="JSON, as for vllm serve; options of ours under nvfp4_tc.")
    ] = "{}",
    dtype: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="One row per layer instead of per group.")
    ] = False,
) -> None:
    """Print which kernel every linear and attention layer would get on this machine, and why.

    Builds the model without its weights: nothing is loaded and no memory is taken for it.
    """
    # In a file or a pipe, a row stays on its line.
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        given = json.loads(additional_config)
    except ValueError as error:
        raise _refusal(
            f"additional-config: is no JSON ({error}); quote it for the shell"
        ) from error
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        layers = model_report(
            model, additional_config=given, dtype=dtype, attention_backend=attention_backend
        )
    except (ValueError, NotImplementedError, OSError, IncompatibleVllm) as error:
        raise _refusal(str(error)) from error
    except Exception as error:  # of vLLM, which reads a model's files as if all were well
        raise _refusal(
            f"{model}: vLLM cannot read it ({type(error).__name__}: {error}), must be a model that "
            "it serves; mend its config.json"
        ) from error
    console.print(_table(model, layers, every_layer=every_layer))
    console.print(layers.memory())
    for note in layers.notes:
        _say(note)


def _refusal(message: str) -> typer.Exit:
    _say(message)
    return typer.Exit(1)


def _say(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def model_report(model: str, **engine_args: Any) -> Report:
    """Build a model on the meta device as ``vllm serve --quantization nvfp4-tc`` would.

    Args:
        model: checkpoint directory or hub name.
        engine_args: further arguments of vLLM's ``EngineArgs``.

    Returns:
        The report of its linear and attention layers.

    Raises:
        ValueError: the checkpoint or an option is refused, by name.
        NoKernelError: this machine's device has no kernel for a layer.
        IncompatibleVllm: this vLLM lacks a name that is needed.
    """
    import torch

    with vllm_names():
        from vllm.config import set_current_vllm_config
        from vllm.distributed import (
            cleanup_dist_env_and_memory,
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        from vllm_fp4_plugin.config import Nvfp4TcConfig
        from vllm_fp4_plugin.linear import settle
        from vllm_fp4_plugin.options import METHOD, Options
        from vllm_fp4_plugin.startup import idle

    logging.getLogger("vllm").setLevel(logging.ERROR)
    args = EngineArgs(model=model, quantization=METHOD, enforce_eager=True, **engine_args)
    Options.of(args)  # refused here in one line, and in many where vLLM builds its config
    config = args.create_engine_config()
    ropes = dict(rotary_embedding._ROPE_DICT)
    with tempfile.TemporaryDirectory() as rendezvous, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                settle(initialize_model(config))
        finally:
            cleanup_dist_env_and_memory()
            # vLLM would give these, which hold nothing, to the next model in this process.
            rotary_embedding._ROPE_DICT.clear()
            rotary_embedding._ROPE_DICT.update(ropes)
    quant = config.quant_config
    assert isinstance(quant, Nvfp4TcConfig)
    startup = quant.startup
    startup.report.notes = [idle(pattern) for pattern in startup.idle_patterns()]
    return startup.report


def _table(model: str, layers: Report, *, every_layer: bool) -> Table:
    table = Table(title=escape(f"nvfp4-tc on {model}"), title_justify="left")
    for column in ("layer", "count", "kernel", "arithmetic", "why"):
        table.add_column(column, overflow="fold", justify="right" if column == "count" else "left")
    rows = (
        [(r.name, 1, r.kernel, r.arithmetic, r.reason) for r in layers.layers]
        if every_layer
        else layers.grouped()
    )
    for layer, count, kernel, arithmetic, reason in rows:
        # Each device has one kernel for an op and arithmetic, so there is nothing else to say.
        cells = layer, str(count), kernel, arithmetic, reason or "the only kernel for it"
        table.add_row(*map(escape, cells))
    return table
