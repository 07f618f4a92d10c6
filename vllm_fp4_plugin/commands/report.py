"""``python -m vllm_fp4_plugin report``: which kernel every layer of a model would get, and why."""

from typing import Annotated

import typer

from nvfp4_kernels.devices import FAMILIES, parse_arch, spellings
from nvfp4_kernels.tool.options import JsonOption
from vllm_fp4_plugin.commands import command_line
from vllm_fp4_plugin.engine import vllm_installation

ARCHS = ("cpu", *FAMILIES)


def report(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or name on the hub.")],
    *,
    additional_config: Annotated[
        str, typer.Option(help="JSON, as for vllm serve; options of ours under nvfp4_tc.")
    ] = "{}",
    dtype: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="As for vllm serve.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="As for vllm serve.")
    ] = False,
    arch: Annotated[
        str,
        typer.Option(help=f"Plan for another device than this machine's: {spellings(ARCHS)}."),
    ] = "",
    by_headers: Annotated[
        bool,
        typer.Option(
            "--by-headers",
            help="Plan from the files' headers alone, for a model that vLLM cannot build here.",
        ),
    ] = False,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="One row per layer instead of per group.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print which kernel every linear, expert and attention layer would get, and why.

    Builds the model without its weights: no weight is loaded, and no memory is taken for weights.

    Fields of --json: model; arch, empty for this machine's device; layers, a list of objects with
    layer, count, kernel, arithmetic and why; weights, by in_memory (of one rank) and in_files, each
    null where not known: for each kind its bytes, weights, bytes_per_weight and modules, a count by
    name; files, null or bytes, tensor_bytes and header_bytes; notes, also on standard error.
    """
    requested = command_line.parse_additional_config(additional_config)
    with command_line.nothing_printed(), command_line.refusals(model):
        from vllm_fp4_plugin.checkpoint import model_source
        from vllm_fp4_plugin.commands import model_report
        from vllm_fp4_plugin.commands.report_view import ReportView

        arch = parse_arch("--arch", arch, ARCHS) if arch else ""
        vllm_installation.check(to_plan=True)
        vllm_installation.check_planned_arch(arch)
        if by_headers:
            found = model_report.stored_report(model, arch, requested)
        else:
            model_source.check_config(model)
            found = model_report.report_here(
                model,
                arch=arch,
                additional_config=requested,
                dtype=dtype,
                attention_backend=attention_backend,
                trust_remote_code=trust_remote_code,
            )
        view = ReportView(model, arch, found, model_report.headers_here(model), every_layer)
    if as_json:
        command_line.print_json(view.json())
    else:
        view.print()
    for note in found.notes:
        command_line.say(note)
