"""Engines of two ranks, forked by ``python -m tests.ranks``, one engine after the other.

``python -m tests.ranks MODEL '{"tensor_parallel_size": 2}' [MODEL ARGUMENTS ...]`` prints, for each
engine, a line of JSON with the answers of its ranks. vLLM is imported once for all engines.

Data-parallel ranks get texts of different lengths.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_llama

RANKS = 2
SHORTER = tiny_llama.TEXT[:30]  # for the second data-parallel rank


def run_rank(rank: int, model: str, arguments: dict[str, Any], port: int, said: Connection) -> None:
    """Run one rank's engine, as though torchrun had started it, and send its answer.

    Besides engine arguments, ``flashinfer_tokens`` sets the number of tokens that a stand-in for
    FlashInfer serves, ``counts`` has launches counted, and ``pieces`` makes the engine compile
    piecewise, as on a GPU.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    from tests import launch_counts
    from tests.engine import run

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    meet = (f"tcp://127.0.0.1:{port}", rank, rank)  # vLLM names shared memory after the address
    ExecutorWithExternalLauncher._distributed_args = lambda _: meet
    text = SHORTER if rank and "data_parallel_size" in arguments else tiny_llama.TEXT
    patch = pytest.MonkeyPatch()
    if arguments.get("enforce_eager", True):
        torch.compiler.set_stance("force_eager")  # vLLM compiles a mask even of an eager embedding
    stand_in_for_flashinfer(patch, arguments.pop("flashinfer_tokens", 0))
    if arguments.pop("pieces", False):
        compile_in_pieces(patch)
    launched = launch_counts.watch(patch) if arguments.pop("counts", False) else Counter()
    found = run(model, text, distributed_executor_backend="external_launcher", **arguments)
    told = {"logprobs": found.logprobs, "generated": found.generated, "report": found.report}
    said.send(told | {"launches": launched} if launched else told)


def stand_in_for_flashinfer(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Make the plugin find FlashInfer without a GPU, for ``tokens`` tokens; 0: leave it missing."""
    from vllm.distributed import get_tp_group

    from tests import fake_flashinfer
    from vllm_fp4_plugin.ops import flashinfer_all_reduce

    if tokens:
        fake_flashinfer.install(patch, lambda x: get_tp_group().all_reduce(x), tokens)
        patch.setattr(flashinfer_all_reduce, "most_tokens", lambda *_: (tokens, ""))


def compile_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Make vLLM compile the code between attention layers piecewise, as only on a GPU."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    lower = CpuPlatform.check_and_update_config.__func__

    def keep(platform: Any, config: Any) -> None:
        lower(platform, config)
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.ir_enable_torch_wrap, compilation.compile_sizes = True, []
        compilation.inductor_compile_config.pop("dce", None)  # set once, or more often

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
    # The pass looks for CUDA's ops.
    patch.setattr(FixFunctionalizationPass, "__call__", lambda *_: None)
    patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")


def send_tokens_on_cpu() -> None:
    """Add the missing parts of ``allgather_reducescatter`` to vLLM's CPU communicator."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Gather the rows of all ranks; rank i has ``sizes[i]`` rows."""
        if isinstance(given, list):
            return [all_gatherv(self, each, dim, sizes) for each in given]
        assert dim == 0
        assert sizes is not None
        padded = given.new_zeros(max(sizes), *given.shape[1:])
        padded[: len(given)] = given
        gathered = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(
        self: Any, given: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """Sum the rows of this rank over all ranks."""
        assert dim == 0
        assert sizes is not None
        total = given.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def free_port() -> int:
    """Find a TCP port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def remove_segments(port: int) -> None:
    """Remove the shared memory that vLLM's ranks leave behind under names that contain the port."""
    for segment in Path("/dev/shm").glob(f"{port}-*"):
        segment.unlink(missing_ok=True)


def main(models: Sequence[str], arguments: Sequence[str]) -> None:
    """Run the engines one after the other."""
    import vllm.entrypoints.llm  # noqa: F401  what all processes would import
    from vllm.plugins import load_general_plugins

    from tests.engine import inspect_models_here

    load_general_plugins()
    inspect_models_here()
    send_tokens_on_cpu()
    context = multiprocessing.get_context("fork")
    for model, engine_args in zip(models, arguments, strict=True):
        port, processes, ends = free_port(), [], []
        remove_segments(port)  # of a run that was killed
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
            remove_segments(port)


if __name__ == "__main__":
    main(sys.argv[1::2], sys.argv[2::2])
