"""Engines of two ranks, each a process that ``python -m tests.ranks`` forks, one after the other.

``python -m tests.ranks MODEL '{"tensor_parallel_size": 2}' [MODEL ARGUMENTS ...]`` prints, for each
engine, a line of JSON: what each of its ranks said. vLLM is imported once for all of them.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2


def run_rank(rank: int, model: str, arguments: dict[str, Any], port: int, said: Connection) -> None:
    """Run one rank's engine, as torchrun would start it, and send what it said."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    from tests.engine import run

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    meet = (f"tcp://127.0.0.1:{port}", rank, rank)  # vLLM names shared memory after the address
    ExecutorWithExternalLauncher._distributed_args = lambda _: meet
    found = run(model, distributed_executor_backend="external_launcher", **arguments)
    said.send({"logprobs": found.logprobs, "generated": found.generated, "report": found.report})


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(models: Sequence[str], arguments: Sequence[str]) -> None:
    """Run one engine after the other."""
    import vllm.entrypoints.llm  # noqa: F401  what all processes would import
    from vllm.plugins import load_general_plugins

    from tests.engine import inspect_models_here

    load_general_plugins()
    inspect_models_here()
    context = multiprocessing.get_context("fork")
    for model, engine_args in zip(models, arguments, strict=True):
        port, processes, ends = free_port(), [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe(duplex=False)
            args = (rank, model, json.loads(engine_args), port, theirs)
            processes.append(context.Process(target=run_rank, args=args))
            processes[-1].start()
            theirs.close()
            ends.append(mine)
        try:
            print("\n" + json.dumps([end.recv() for end in ends]), flush=True)
        finally:
            for process in processes:
                process.kill()
                process.join()


if __name__ == "__main__":
    main(sys.argv[1::2], sys.argv[2::2])
