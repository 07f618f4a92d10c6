"""``python -m vllm_fp4_plugin report``: which kernel every layer of a model would get, and why."""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from vllm_fp4_plugin import command_line, meta_model
from vllm_fp4_plugin.report import Report


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
    given = command_line.parse_additional_config(additional_config)
    with command_line.refusals(model):
        layers = model_report(
            model, additional_config=given, dtype=dtype, attention_backend=attention_backend
        )
    console = command_line.output()
    console.print(_table(model, layers, every_layer=every_layer))
    console.print(layers.memory())
    for note in layers.notes:
        command_line.say(note)


def model_report(model: str, **engine_args: Any) -> Report:
    """Report of a model's linear and attention layers; see ``meta_model.built``."""
    with meta_model.built(model, **engine_args) as (_, config):
        from vllm_fp4_plugin.startup import idle

        startup = config.quant_config.startup
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
