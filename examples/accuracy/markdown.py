"""Rendering of the results as markdown, for a README."""

from examples.accuracy.results import Results
from examples.accuracy.table import FOOTNOTE, Table, heading, remarks, tables


def markdown(results: Results) -> str:
    """Render the results: heading, tables, failures and flags."""
    parts = ["  \n".join(heading(results)), *(_table(table) for table in tables(results)), FOOTNOTE]
    if lines := remarks(results):
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rule = ["---", *["---:"] * (len(table.headings) - 1)]
    lines = [table.headings, rule, *table.rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return f"**{table.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells)
