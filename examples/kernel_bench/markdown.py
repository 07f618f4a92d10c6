"""Rendering of the results as markdown, for a README."""

from examples.kernel_bench.results import Results
from examples.kernel_bench.table import LayerTable, footnote, heading, layer_tables, refusals


def markdown(results: Results) -> str:
    """Render the heading, a table for each layer, and the refusals."""
    parts = ["  \n".join(heading(results))]
    parts += [_table(layer) for layer in layer_tables(results)]
    parts.append(footnote(results))
    if missing := refusals(results):
        parts.append("\n".join(f"- none: {line}" for line in missing))
    return "\n\n".join(parts) + "\n"


def _table(layer: LayerTable) -> str:
    lines = [layer.headings, ["---:"] * len(layer.headings), *layer.rows]
    return f"**{layer.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
