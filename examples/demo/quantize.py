"""Quantising with the project's own tool, run as a user would run it."""

import shlex
import subprocess
import sys
from pathlib import Path


class QuantizeError(RuntimeError):
    """The quantising tool failed."""


def quantize_command(source: Path, target: Path, calibration: Path, scales: str) -> list[str]:
    """Command line that writes ``source`` to ``target`` in NVFP4, in ModelOpt's format."""
    tool = [sys.executable, "-m", "vllm_fp4_plugin", "quantize", str(source), str(target)]
    return [*tool, "--format", "modelopt", "--scales", scales, "--calibrate", str(calibration)]


def quantize(source: Path, target: Path, calibration: Path, scales: str) -> None:
    """Run the tool; it shows its own progress.

    Args:
        source: a BF16 checkpoint.
        target: folder to write, not there yet.
        calibration: text file from which the ranges of activations are measured.
        scales: ``absmax`` or ``sweep``.

    Raises:
        QuantizeError: if the tool fails; it has then said why.
    """
    command = quantize_command(source, target, calibration, scales)
    if code := subprocess.run(command, check=False).returncode:
        raise QuantizeError(
            f"quantize: exited with code {code}, its message is above; it was run as "
            f"{shlex.join(command)}"
        )
