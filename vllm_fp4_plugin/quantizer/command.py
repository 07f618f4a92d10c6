"""The ``quantize`` command; torch and transformers are imported only when it runs."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from vllm_fp4_plugin.commands import command_line


def quantize(
    *,
    src: Annotated[
        str,
        typer.Argument(
            help="Folder of a 16-bit or 32-bit checkpoint, or name on the hub that is downloaded."
        ),
    ],
    dst: Annotated[
        Path, typer.Argument(help="Folder to write, with those above it; must not exist.")
    ],
    format: Annotated[
        str, typer.Option(metavar="modelopt|compressed-tensors", help="Layout to write.")
    ] = "modelopt",
    scales: Annotated[
        str,
        typer.Option(
            metavar="absmax|sweep|four-over-six",
            help="How block scales are chosen; the latter two search for less error.",
        ),
    ] = "absmax",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Text, or .jsonl with a "text" per line, to measure the inputs\' scales on. '
            "Without it the checkpoint is weight-only.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Linears to keep as they are: a name, a * wildcard or re:<regex>; repeatable.",
        ),
    ] = None,
    ignore_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="More such patterns, one a line; # begins a comment."),
    ] = None,
    lm_head: Annotated[
        bool, typer.Option("--lm-head", help="Quantise the head as well, which else is kept.")
    ] = False,
    kv_cache_scheme: Annotated[
        str | None,
        typer.Option(metavar="fp8", help="Also measure scales for an FP8 key/value cache."),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens to measure on, if FILE has that many; else 65536.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens run as one sequence; 512, or as many as the model takes."),
    ] = None,
    shared_fused_scale: Annotated[
        bool,
        typer.Option(
            "--shared-fused-scale",
            help="Give q/k/v and gate/up one global weight scale each, for engines that apply "
            "one of their scales to all, as vLLM's own loaders do. nvfp4-tc keeps each exactly.",
        ),
    ] = False,
    shared_gate_up_scale: Annotated[
        bool,
        typer.Option(
            "--shared-gate-up-scale",
            help="The same of gate and up alone, experts' among them.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, tell sizes and time, write nothing."),
    ] = False,
) -> None:
    """Quantise a decoder's checkpoint to NVFP4, dense or a mixture of experts.

    Experts may be stacked or stored one by one, without biases; their routers stay in 16 bits.
    Calibration sends every token to every expert, with one expert in memory at a time. A layer of
    experts is kept whole (--ignore layers.0.mlp.experts) or not at all.
    """
    from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
    from vllm_fp4_plugin.quantizer.errors import QuantizerError
    from vllm_fp4_plugin.quantizer.ignore_file import read_patterns

    console = command_line.output()
    if calibrate is None:
        console.print("no --calibrate: weight-only, activations stay in 16 bits")
    try:
        patterns = [*(ignore or []), *(read_patterns(ignore_file) if ignore_file else [])]
        summary = quantize_checkpoint(
            src,
            dst,
            format=format,
            scales=scales,
            calibrate=calibrate,
            ignore=patterns,
            lm_head=lm_head,
            kv_cache_scheme=kv_cache_scheme,
            calibration_tokens=calibration_tokens,
            seq_len=seq_len,
            shared_fused_scale=shared_fused_scale,
            shared_gate_up_scale=shared_gate_up_scale,
            dry_run=dry_run,
            console=console,
        )
    except (QuantizerError, OSError) as error:
        raise command_line.refusal(str(error)) from None
    except KeyboardInterrupt:
        command_line.say(f"interrupted: nothing has been left at {dst}")
        raise typer.Exit(128 + signal.SIGINT) from None
    except SystemExit:  # SIGTERM, SIGHUP
        command_line.say(f"ended by a signal: nothing has been left at {dst}")
        raise
    console.print(summary.table())
