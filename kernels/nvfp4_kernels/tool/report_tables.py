"""Tables that ``report`` prints: GEMMs, the indexer's scores, kernels."""

from rich.table import Table

from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.console import output
from nvfp4_kernels.tool.instructions import SHOWN
from nvfp4_kernels.tool.limits import FLOPS, MEMORY_BANDWIDTH
from nvfp4_kernels.tool.report import Choice, Found, configuration, describe
from nvfp4_kernels.tool.scoring import ScoreChoice
from nvfp4_kernels.tool.static import Static

NONE = "–"


def print_report(found: Found) -> None:
    """Print the tables of a report, and the kernels that spill registers."""
    screen, numbers = output(), found.numbers()
    screen.print(_products(found.products, numbers))
    if found.scores:
        screen.print(_scores(found.scores, numbers))
    screen.print(
        f"SOL, speed of light: {MEMORY_BANDWIDTH / 1e12:.0f} TB/s, {FLOPS / 1e15:.2f} PFLOP/s; "
        "published: the bound in µs that the GPU MODE contest gives for the shape. Tiles are "
        "chosen by the estimates, which are no measurements."
    )
    screen.print(_kernels(found.kernels, numbers))
    if spilling := found.spilling():
        numbered = ", ".join(map(str, spilling))
        screen.print(f"[red]Registers are spilled by kernel {numbered}.[/]")


def _products(choices: list[Choice], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Products", title_justify="left")
    for column in ("op", "M×N×K×L", "kernel", "tile"):
        table.add_column(column)
    for column in ("MB", "GFLOP", "SOL µs", "published", "estimate", "share of SOL"):
        table.add_column(column, justify="right")
    for each in choices:
        light = each.work.speed_of_light
        published = each.shape.published
        table.add_row(
            each.shape.name, each.shape.sizes, str(numbers[each.spec]), describe(each.tile),
            f"{each.work.nbytes / 1e6:.2f}", f"{each.work.flops / 1e9:.2f}", f"{1e6 * light:.2f}",
            f"{published:.2f}" if published else NONE, f"{1e6 * each.estimate:.2f}",
            f"{light / each.estimate:.0%}",
        )  # fmt: skip
    return table


def _scores(choices: list[ScoreChoice], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Scores of the indexer", title_justify="left")
    for column in ("shape", "format", "queries", "keys", "kernel", "splits"):
        table.add_column(column)
    for column in ("MB", "GFLOP", "SOL µs", "relu µs", "estimate", "share"):
        table.add_column(column, justify="right")
    for each in choices:
        shape, light = each.shape, each.shape.work.speed_of_light
        least = max(light, each.relu)
        table.add_row(
            shape.name, shape.fmt, f"{shape.sequences} × {shape.queries}", str(shape.keys),
            str(numbers[each.spec]), str(each.splits), f"{shape.work.nbytes / 1e6:.2f}",
            f"{shape.work.flops / 1e9:.2f}", f"{1e6 * light:.2f}",
            f"{1e6 * each.relu:.2f}", f"{1e6 * each.estimate:.2f}",
            f"{least / each.estimate:.0%}",
        )  # fmt: skip
    return table


def _kernels(found: dict[KernelSpec, Static], numbers: dict[KernelSpec, int]) -> Table:
    table = Table(title="Kernels", title_justify="left")
    for column in ("", "op", "configuration", "stages", "TMEM"):
        table.add_column(column)
    for column in ("registers", "spilled", "shared", "code", *SHOWN):
        table.add_column(column, justify="right")
    for spec, static in found.items():
        mix = [str(static.instructions.get(name, 0)) for name in SHOWN]
        mix = mix if static.instructions else [NONE] * len(SHOWN)
        words, *others = configuration(spec)
        stages, columns = (NONE if number is None else str(number) for number in others)
        table.add_row(
            str(numbers[spec]), spec.op, words, stages, columns, str(static.registers),
            f"{static.local_bytes} B", f"{static.shared_bytes / 1024:.0f} KB",
            f"{static.code_bytes / 1024:.0f} KB", *mix,
        )  # fmt: skip
    return table
