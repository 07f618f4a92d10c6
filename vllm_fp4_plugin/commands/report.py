"""``python -m vllm_fp4_plugin report``: which kernel every layer of a model would get, and why."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.devices import FAMILIES, parse_arch, spellings
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.commands import command_line, model_source, weight_table
from vllm_fp4_plugin.engine import meta_model, vllm_installation
from vllm_fp4_plugin.report import Report

ARCHS = ("cpu", *FAMILIES)


def report(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or name on the hub.")],
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
) -> None:
    """Print which kernel every linear and attention layer would get, and why.

    Builds the model without its weights: nothing is loaded and no memory is taken for it.
    """
    given = command_line.parse_additional_config(additional_config)
    with command_line.refusals(model):
        arch = parse_arch("--arch", arch, ARCHS) if arch else ""
        vllm_installation.check(to_plan=True)
        vllm_installation.check_planned_arch(arch)
        if by_headers:
            layers = stored_report(model, arch, given)
        else:
            model_source.check_config(model)
            layers = _built(
                model,
                arch=arch,
                additional_config=given,
                dtype=dtype,
                attention_backend=attention_backend,
                trust_remote_code=trust_remote_code,
            )
    console = command_line.output()
    console.print(_table(model, arch, layers, every_layer=every_layer))
    for part in weight_table.lines(layers.weights, _headers(model)):
        console.print(part)
    for note in layers.notes:
        command_line.say(note)


def _built(model: str, **args: Any) -> Report:
    try:
        return model_report(model, **args)
    except NotImplementedError as error:  # by vLLM, for what only another device has
        raise NotImplementedError(
            f"{model}: vLLM cannot build it on this machine ({error}); plan it with --by-headers"
        ) from error


def model_report(model: str, *, arch: str = "", **engine_args: Any) -> Report:
    """Report of a model's linear and attention layers; see ``meta_model.built``.

    Raises:
        ValueError: the checkpoint is refused, or lacks a tensor.
    """
    from vllm_fp4_plugin.checkpoint.dry_load import rehearse  # which imports vLLM

    directory = checkpoint_files.local_directory(model)
    headers = {} if directory is None else checkpoint_files.read_headers(directory)
    with meta_model.built(model, arch=arch, **engine_args) as (built, config):
        startup = config.quant_config.startup
        from vllm_fp4_plugin.commands import built_weights  # which imports vLLM

        report: Report = startup.report
        report.weights = built_weights.of_model(built, report)
        if directory is not None and headers:
            rehearse(built, directory, headers)
    report.notes = startup.idle_patterns()
    return report


def stored_report(
    model: str, arch: str = "", additional_config: dict[str, Any] | None = None
) -> Report:
    """Report of a checkpoint by its headers, which are at hand; see ``headers_report``."""
    from vllm_fp4_plugin.commands.report_by_headers import headers_report
    from vllm_fp4_plugin.device import planned_for
    from vllm_fp4_plugin.options import Options

    options = Options.of(SimpleNamespace(additional_config=additional_config))
    with planned_for(arch):
        return headers_report(model_source.whole_directory(model), options)


def _headers(model: str) -> Mapping[str, TensorHeader]:
    """Headers of a model's files; none where not all of them are on this machine."""
    directory = checkpoint_files.local_directory(model)
    return {} if directory is None else checkpoint_files.read_headers(directory)


def _table(model: str, arch: str, layers: Report, *, every_layer: bool) -> Table:
    where = f" for {arch}" if arch else ""
    table = Table(title=escape(f"nvfp4-tc on {model}{where}"), title_justify="left")
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
