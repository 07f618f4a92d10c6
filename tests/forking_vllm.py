"""``vllm serve`` whose engine is a fork of the server: ``python -m tests.forking_vllm serve ...``.

On a CPU vLLM starts the engine's process anew, which then imports all that the server has.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

from examples.server import vllm_command


def forking_command(model: Path | str, *arguments: Any) -> list[str]:
    """``vllm_command`` with this module in the place of the program."""
    return [sys.executable, "-m", __name__, *vllm_command(model, *arguments)[1:]]


def main() -> None:
    """Do what the ``vllm`` command does."""
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    main()


if __name__ == "__main__":
    main()
