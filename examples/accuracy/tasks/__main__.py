"""``python -m examples.accuracy.tasks``: write the local tasks, for any run of the harness."""

from pathlib import Path
from typing import Annotated

import typer

from examples.accuracy.tasks import DOCUMENTS, make_tasks
from examples.command_line import refusals
from examples.demo.corpus import STANDARD_LIBRARY
from examples.paths import check_folder

app = typer.Typer(add_completion=False)


@app.command()
def tasks(
    out: Annotated[Path, typer.Option(help="Folder for the tasks.")],
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Python sources, e.g. site-packages; the standard library if not given."),
    ] = None,
    documents: Annotated[int, typer.Option(min=4, help="At most, of each task.")] = DOCUMENTS,
) -> None:
    """Write tasks made of Python sources that the demo's training leaves out.

    lm-evaluation-harness reads the tasks with --include_path.
    """
    with refusals():
        check_folder(out, "--out")
        made = make_tasks(out, root or (STANDARD_LIBRARY,), documents)
    for name, count in made.items():
        typer.echo(f"{name}: {count} documents")


if __name__ == "__main__":
    app(prog_name="python -m examples.accuracy.tasks")
