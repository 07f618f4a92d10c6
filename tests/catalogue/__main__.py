"""Plan every family and write the table that ``python -m vllm_fp4_plugin catalogue`` prints.

    python -m tests.catalogue [--only NAME] [--keep FOLDER]

Writes the verdicts for the installed vLLM and keeps the table's entries for other releases: run it
on each release, the oldest first.
"""

import os
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tests.catalogue.facts import FAMILIES
from vllm_fp4_plugin.commands import known_checkpoints
from vllm_fp4_plugin.versions import vllm_release


def main(
    only: Annotated[str, typer.Option(help="Families whose name contains this; none written")] = "",
    keep: Annotated[str, typer.Option(help="Folder that keeps the checkpoints")] = "",
) -> None:
    """Plan the families; without ``--only``, write the table."""
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    warnings.simplefilter("ignore")
    from tests.catalogue.plan import plan

    rows = []
    known = {row.family: row for row in known_checkpoints.read()}
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        for number, family in enumerate(FAMILIES):
            if only not in family.name:
                continue
            row = plan(family, Path(folder) / str(number))
            before = known.get(family.name, row)
            rows.append(replace(row, on=before.on, changed=before.changed))
            rows[-1] = rows[-1].with_release(vllm_release(), row.on)
            for arch, cell in row.on.items():
                how = " (by headers)" if cell.by_headers else ""
                typer.echo(f"{row.family} [{arch}]: {cell.verdict}{how}: {cell.why}")
    if not only:
        file = Path(known_checkpoints.__file__).with_name(known_checkpoints.FILE)
        file.write_text(known_checkpoints.dump(rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
