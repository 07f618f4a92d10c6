"""``vllm serve`` with forked child processes: ``python -m tests.forking_vllm serve ...``.

On a CPU, vLLM would otherwise start new processes for the engine and the worker, which import all
modules of the server again.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

from examples.server import vllm_command
from tests import preloaded
from tests.engine import count_without_compiling, fork_workers, inspect_models_here


def forking_command(model: Path | str, *arguments: Any) -> list[str]:
    """Command line like that of ``vllm_command``, with this module as the program."""
    return [sys.executable, "-m", __name__, *vllm_command(model, *arguments)[1:]]


def preloaded_command(model: Path | str, *arguments: Any) -> list[str]:
    """Command line like that of ``forking_command``; a fork with another pid runs the command."""
    return preloaded.command(__name__, *vllm_command(model, *arguments)[1:])


def fork_processes() -> None:
    """Make vLLM fork its engines and their workers."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    fork_workers()


def main() -> None:
    """Run the ``vllm`` command without compiling anything."""
    import torch
    from vllm.entrypoints.cli.main import main

    fork_processes()
    inspect_models_here()
    count_without_compiling()
    torch.compiler.set_stance("force_eager")  # vLLM compiles a mask even of an eager embedding
    main()


if __name__ == "__main__":
    main()
