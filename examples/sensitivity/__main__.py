"""``python -m examples.sensitivity``: find the layers of a model that lose most in NVFP4."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from examples.command_line import refusals

WIN_BACK = 0.5

app = typer.Typer(add_completion=False)


@app.command()
def sensitivity(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Folder of a 16-bit checkpoint, a dense decoder.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to measure on, not trained on.")],
    out: Annotated[Path, typer.Option(help="Folder for ignore.txt, results.json and the plot.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text for the inputs' scales; without it, inputs stay in 16 bits."),
    ] = None,
    scales: Annotated[
        str, typer.Option(metavar="absmax|sweep|four-over-six", help="As the quantising tool's.")
    ] = "absmax",
    input_terms: Annotated[
        str,
        typer.Option(
            help="NVFP4 terms of inputs, 0 for inputs in 16 bits; further ones after a comma are "
            "measured beside them, and no list is chosen by them."
        ),
    ] = "1",
    win_back: Annotated[
        float | None,
        typer.Option(
            help=f"Share of the loss to win back with the fewest bytes; {WIN_BACK} by default."
        ),
    ] = None,
    max_ignored: Annotated[
        int | None, typer.Option(help="Instead: so many layers, the most sensitive ones.")
    ] = None,
    keep_bits: Annotated[
        float | None, typer.Option(help="Instead: what fits so many bits per weight in the mean.")
    ] = None,
    windows: Annotated[
        int, typer.Option(min=4, help="Windows of text; the list is chosen on every other one.")
    ] = 64,
    window_length: Annotated[int, typer.Option(min=2, help="Tokens in each.")] = 512,
    windows_at_once: Annotated[int, typer.Option(min=1, help="Run together.")] = 8,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="To calibrate on.")] = 128 * 512,
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu", help="Where; a GPU if there is one.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16", help="To compute in.")
    ] = "float32",
) -> None:
    """Quantise each layer of a model alone, and measure its divergence from the original model.

    Layers are the server's fused layers: q, k and v together, gate and up together. A list of
    layers to leave in 16 bits is chosen, for `python -m vllm_fp4_plugin quantize --ignore-file`,
    and the whole model measured with and without the list, on windows not used for the choice.
    """
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, below
    from examples.devices import choose_device, device_name
    from examples.paths import check_folder
    from examples.sensitivity import display
    from examples.sensitivity.budget import make_budget
    from examples.sensitivity.input_terms import parse_input_terms
    from examples.sensitivity.subject import open_subject
    from examples.versions import check_importable

    with refusals():
        check_importable("matplotlib", "the plot")
        check_folder(out, "out")
        from examples.sensitivity.run import run

        budget = make_budget(win_back, max_ignored, keep_bits, WIN_BACK)
        terms = parse_input_terms(input_terms, calibrate is not None)
        device = choose_device(device)
        subject = open_subject(
            model.resolve(),
            text,
            calibrate,
            calibration_tokens=calibration_tokens,
            windows=windows,
            window_length=window_length,
            device=device,
            dtype=dtype,
        )
        run(
            subject,
            scales,
            terms,
            budget,
            windows_at_once,
            context.params,
            device_name(device),
            out,
        )
    display.console.print(f"in {time.monotonic() - started:.0f} s: {out}", markup=False)


if __name__ == "__main__":
    app(prog_name="python -m examples.sensitivity")
