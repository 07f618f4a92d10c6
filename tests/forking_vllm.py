"""``vllm serve`` whose processes are forks of it: ``python -m tests.forking_vllm serve ...``.

On a CPU vLLM starts the engine's process anew, and the worker's, which then import all that the
server has.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

from examples.server import vllm_command
from tests.engine import fork_workers


def forking_command(model: Path | str, *arguments: Any) -> list[str]:
    """``vllm_command`` with this module in the place of the program."""
    return [sys.executable, "-m", __name__, *vllm_command(model, *arguments)[1:]]


def main() -> None:
    """Do what the ``vllm`` command does."""
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    fork_workers()
    main()


if __name__ == "__main__":
    main()
