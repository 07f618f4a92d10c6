"""Terminal output of a run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.perplexity import Interval
from examples.sensitivity.results import Results

# In a file or a pipe, rows do not wrap.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
ROWS = 20


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress bar; yields the callback that advances it."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        task = bars.add_task(title, total=total)
        yield lambda: bars.advance(task)


def results(found: Results) -> None:
    """Print the most sensitive layers, then the whole model with and without the list."""
    layers = sorted(found.groups, key=lambda row: -row.kl.estimate)
    shown = layers[:ROWS]
    more = f", the first {ROWS} of {len(layers)}" if len(layers) > ROWS else ""
    table = _table(f"Each layer quantised alone, scales {found.rule}{more}")
    for heading in (
        "layer",
        "weight error",
        "KL",
        "95% interval",
        "Δ log ppl",
        *(_with_terms(terms) for terms in found.quantised_with_terms),
        "more in 16 bits",
        "",
    ):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for row in shown:
        table.add_row(
            row.group.name,
            f"{row.weight_error[found.rule]:.5f}",
            f"{row.kl.estimate:.2e}",
            _interval(row.kl, ".1e"),
            f"{row.log_perplexity.estimate:+.5f}",
            *(f"{kl.estimate:.2e}" for kl in row.kl_with_terms.values()),
            decimal(row.group.extra_bytes),
            "ignored" if row.ignored else "",
        )
    console.print(table)
    ignored = len(found.ignored)
    table = _table(f"All layers quantised; perplexity in 16 bits {found.perplexity:.3f}")
    for heading in (
        "",
        "bits/weight",
        "linears",
        "KL",
        "95% interval",
        "Δ log ppl",
        "95% interval",
    ):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = {
        "none ignored": found.quantised,
        **{f"{_with_terms(t)}, none ignored": w for t, w in found.quantised_with_terms.items()},
        f"{ignored} ignored": found.with_list,
    }
    for name, whole in rows.items():
        table.add_row(
            name,
            f"{whole.bits_per_weight:.3f}",
            decimal(whole.nbytes),
            f"{whole.kl.estimate:.5f}",
            _interval(whole.kl, ".5f"),
            f"{whole.log_perplexity.estimate:+.5f}",
            _interval(whole.log_perplexity, "+.5f"),
        )
    console.print(table)
    cost = found.with_list.nbytes - found.quantised.nbytes
    share = found.kl_won.estimate / found.quantised.kl.estimate
    console.print(
        f"The list costs {decimal(cost)} and wins {found.kl_won.estimate:.5f} of the KL "
        f"({share:.0%}), {found.log_perplexity_won.estimate:+.5f} of log perplexity "
        f"({_interval(found.log_perplexity_won, '+.5f')}), over {found.tokens:,} tokens it was not "
        "chosen on.",
        markup=False,
    )


def _with_terms(terms: int) -> str:
    return f"inputs ×{terms}" if terms else "16-bit inputs"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.low:{form}} … {interval.high:{form}}"
