"""``python -m examples.train_llama``: a Llama large enough to quantise, trained on this machine."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from examples.command_line import refusals
from examples.train_llama.sizes import SIZES

app = typer.Typer(add_completion=False)


@app.command()
def train_llama(
    out: Annotated[Path, typer.Option(help="Folder to write; holds no model yet.")],
    size: Annotated[str, typer.Option(metavar="|".join(SIZES), help="Parameters.")] = "125m",
    seconds: Annotated[
        float, typer.Option(min=1, help="Time to train for; text and compiling come before.")
    ] = 240,
    steps: Annotated[int | None, typer.Option(min=1, help="Train by steps, not by time.")] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of Python sources, repeatable; all that is installed."),
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(min=0.01, help="Text to read at most; as much as suits SIZE.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu", help="Where; a GPU if there is one.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the layers; on a GPU only."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads to train with; as many as CPUs.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the text.")
    ] = 0,
) -> None:
    """Train a Llama on the Python sources of this machine and write it in BF16.

    Texts for calibration and for measurement are written to the same folder, from separate files:
    the inputs of the quantising tool and of the examples that measure.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, below
    from examples.demo import display
    from examples.demo.corpus import installed_roots
    from examples.demo.train import TrainSettings
    from examples.devices import choose_device
    from examples.train_llama.run import run

    with refusals("no model was written"):
        if size not in SIZES:
            raise ValueError(f"size: is {size!r}, must be {', '.join(SIZES)}")
        chosen = SIZES[size]
        device = choose_device(device)
        compile = device == "cuda" if compile is None else compile
        if compile and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            raise ValueError(
                "compile: needs a C compiler, there is no gcc or clang; install one, or give "
                "--no-compile"
            )
        settings = TrainSettings(
            seconds=seconds,
            steps=steps,
            threads=threads or os.cpu_count() or 1,
            device=device,
            compile=compile,
            seed=seed,
            **(chosen.settings | ({"batch": batch} if batch else {})),
        )
        characters = round(megabytes * 1e6) if megabytes else chosen.characters
        roots = [path.resolve() for path in root] if root else installed_roots()
        file = run(out.resolve(), roots, characters, chosen.vocabulary, settings)
    display.console.print(f"all figures: {file}")


if __name__ == "__main__":
    app(prog_name="python -m examples.train_llama")
