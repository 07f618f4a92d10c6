"""Rows of the results' tables, for the terminal and for markdown."""

from typing import NamedTuple

from examples.accuracy.results import Results, VariantResult, task_interval
from examples.accuracy.variants import REFERENCE, YARDSTICKS
from examples.perplexity import Interval

FOOTNOTE = (
    "Intervals are 95%: of the text, bootstrapped over its windows; of tasks, 1.96 of the "
    "harness's standard errors. KL divergence is from the 16-bit model's next-token "
    f"distributions, nats per token; top-1 the share of tokens with the same likeliest successor. "
    f"{' and '.join(YARDSTICKS)} are the 16-bit model with its weights, and with its activations "
    "too, rounded to NVFP4 and back: what the format explains."
)


class Table(NamedTuple):
    """Table whose ``rows`` have a cell for each of ``headings``; the first column is text."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def tables(results: Results) -> list[Table]:
    """Table of the figures on the text, and a table of task scores if there are any."""
    made = [_text(results)]
    if results.tasks:
        made.append(_tasks(results))
    return made


def heading(results: Results) -> list[str]:
    """Heading: model, windows, device and versions."""
    about = results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        f"{about['model']}, {about['windows']} windows of {about['window_length']} tokens",
        f"on {about['device']}",
        f"{versions}, commit {about['commit'] or 'unknown'}",
    ]


def kernels(results: Results) -> list[str]:
    """Each kernel line of the logs, with the variants whose logs have the line."""
    told: dict[str, list[str]] = {}
    for variant in results.variants:
        for line in variant.kernels:
            told.setdefault(line.removeprefix("nvfp4-tc: "), []).append(variant.name)
    return [f"{line} [{', '.join(names)}]" for line, names in told.items()]


def remarks(results: Results) -> list[str]:
    """Remarks: variants that failed, that are wrong, or that could not be judged."""
    lines = [f"{v.name} failed: {error}" for v in results.variants for error in v.errors]
    lines += [f"{v.name} is wrong: {flag}" for v in results.variants for flag in v.flags]
    found = [v for v in map(results.named, YARDSTICKS) if v is not None]
    if any(v.windows is None for v in found):
        lines.append(f"without {' and '.join(YARDSTICKS)}, no variant's distributions were judged")
    return lines


def _text(results: Results) -> Table:
    headings = ["variant", "what it is", "ppl", "Δ log ppl", "KL", "top-1", ""]
    rows = [[v.name, v.title, *_figures(results, v)] for v in results.variants]
    return Table("Text", headings, rows)


def _figures(results: Results, variant: VariantResult) -> list[str]:
    if variant.windows is None:
        return ["", "", "", "", "failed"]
    state = "wrong" if variant.flags else "failed" if variant.errors else ""
    perplexity = f"{variant.perplexity:.3f}"
    if variant.name == REFERENCE:
        return [perplexity, "", "", "", state]
    return [
        perplexity,
        _interval(results.difference(variant), "+.4f"),
        _interval(variant.kl, ".5f"),
        _interval(variant.agreement, ".2%"),
        state,
    ]


def _tasks(results: Results) -> Table:
    rows = []
    for variant in results.variants:
        scores = {(s.task, s.metric): s for s in variant.tasks}
        if scores:
            cells = [
                _interval(task_interval(scores[key]), ".2%") if key in scores else ""
                for key in results.tasks
            ]
            rows.append([variant.name, *cells])
    return Table("Tasks", ["variant", *(f"{t}, {m}" for t, m in results.tasks)], rows)


def _interval(found: Interval | None, form: str) -> str:
    if found is None:
        return ""
    return f"{found.estimate:{form}} [{found.low:{form}}, {found.high:{form}}]"
