"""``python -m examples.demo``: train, quantise, serve and measure a small language model."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from examples.command_line import refusals

CACHE = Path(__file__).parents[2] / ".cache" / "demo"
EXPERTS = 8  # experts of a layer, with --moe

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    cache_dir: Annotated[Path, typer.Option(help="Where everything made is kept.")] = CACHE,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make everything anew.")] = False,
    variants: Annotated[
        bool, typer.Option("--variants", help="Also measure `quantize --scales sweep`.")
    ] = False,
    moe: Annotated[
        bool, typer.Option("--moe", help="A mixture of experts, of which two take each token.")
    ] = False,
    train_seconds: Annotated[float, typer.Option(min=1, help="Time to train for.")] = 150,
    train_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Train by steps, not by time: gives the same model again."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads to train with.")] = 2,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the text.")
    ] = 0,
    windows: Annotated[int, typer.Option(min=2, help="Held-out windows to measure on.")] = 32,
    window_length: Annotated[int, typer.Option(min=2, max=1000, help="Tokens in each.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate a prompt.")] = 48,
    server_time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds until a server must be ready; 600, or more on a machine as slow or busy "
            "as this command takes to start.",
        ),
    ] = None,
) -> None:
    """Train a small language model, quantise it to NVFP4, serve both with vLLM and compare them.

    Ends with commands that serve and query the NVFP4 model. All models stay in --cache-dir.

    The text is this Python's standard library: no GPU and no network are needed. A second run finds
    the models in the cache, and serves and measures the NVFP4 model again.
    """
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Read when torch is loaded, hence the late imports: spinning idle threads halve the speed on a
    # busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from examples.demo.pipeline import MeasureSettings
    from examples.demo.run import run
    from examples.demo.train import TrainSettings
    from examples.paths import check_folder
    from examples.server import start_limit
    from examples.stages import StageCache
    from examples.versions import check_vllm

    training = TrainSettings(
        seconds=train_seconds,
        steps=train_steps,
        threads=threads,
        seed=seed,
        experts=EXPERTS if moe else 0,
    )
    limit = server_time_limit or start_limit(time.monotonic() - started)
    measuring = MeasureSettings(windows, window_length, max_tokens, limit)
    with refusals("finished stages are kept"):
        check_folder(cache_dir, "--cache-dir")
        check_vllm()
        run(StageCache(cache_dir.resolve(), fresh), training, measuring, variants, started)


if __name__ == "__main__":
    app(prog_name="python -m examples.demo")
