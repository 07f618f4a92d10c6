"""Quantisation by the project's own tool, run as a user would run it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class QuantizeError(RuntimeError):
    """Error for a failed run of the quantising tool."""


def quantize_command(source: Path, target: Path, options: Sequence[str]) -> list[str]:
    """Command line that quantises ``source`` to NVFP4 in ``target``; ``options`` go to the tool."""
    tool = [sys.executable, "-m", "vllm_fp4_plugin", "quantize"]
    return [*tool, str(source), str(target), *options]


def quantize(source: Path, target: Path, options: Sequence[str]) -> None:
    """Run the quantising tool, which shows its own progress.

    The tool runs in the parent of ``target`` and sees and prints only that folder's name, because a
    stage's folder is renamed once it is complete.

    Args:
        source: a BF16 checkpoint.
        target: folder to write, which must not exist.
        options: options of the tool, such as ``--scales sweep``; files by their absolute paths.

    Raises:
        QuantizeError: the tool fails, after printing the reason.
    """
    command = quantize_command(source.resolve(), Path(target.name), options)
    # As found from this folder.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    if code := subprocess.run(command, cwd=target.parent, env=environment, check=False).returncode:
        raise QuantizeError(
            f"quantize: exited with code {code}, its message is above; it was run as "
            f"{shlex.join(command)}"
        )
