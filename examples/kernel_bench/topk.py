"""Benchmark of ``indexer_topk`` against ``torch.topk`` and vLLM's kernels on this machine's GPU.

    python -m examples.kernel_bench.topk           decode: 64 rows, k = 2048
    python -m examples.kernel_bench.topk --rows 1 8 --columns 32768 --k 512
    python -m examples.kernel_bench.topk --warm    one input, from L2 if it fits

Each contender's launches are captured in a CUDA graph; graphs replay in turn, and medians are
printed. Inputs rotate, so that L2 is always cold, unless ``--warm``. Before that, our
columns, and the values that the other contenders choose, are compared with a stable sort.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from examples.command_line import refusals
from examples.kernel_bench.machine import cuda_device
from nvfp4_kernels import indexer_topk
from nvfp4_kernels.tool.timed_graphs import captured, timed

COLD_BYTES = 256 << 20  # rotating inputs: several times L2
VLLM_WORKSPACE = 1 << 20
VLLM_ROWS = 64  # per launch of vLLM's cooperative kernel
Contender = Callable[[Tensor], Tensor]  # logits to chosen columns


@dataclass(frozen=True)
class Problem:
    """Problem size: rows and columns of the scores, and k."""

    rows: int
    columns: int
    k: int

    @property
    def nbytes(self) -> int:
        return 4 * self.rows * self.columns


def contenders(problem: Problem) -> dict[str, Contender]:
    """Contenders available on this machine."""
    lens = torch.full((problem.rows,), problem.columns, dtype=torch.int32, device="cuda")
    return {
        "ours": lambda logits: indexer_topk(logits, lens, problem.k)[0],
        "torch.topk": lambda logits: logits.topk(problem.k, sorted=False).indices,
        **vllm_contenders(problem, lens),
    }


def vllm_contenders(problem: Problem, lens: Tensor) -> dict[str, Contender]:
    """Decode kernels of vLLM, called as in vLLM's ``SparseIndexerTopk``; empty without vLLM."""
    try:
        import_module("vllm._custom_ops")  # registers the ops
    except ImportError as missing:
        print(f"vLLM's kernels are left out: {missing}")
        return {}
    rows, columns, k = problem.rows, problem.columns, problem.k
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(VLLM_WORKSPACE, dtype=torch.uint8, device="cuda")

    def with_workspace(op: Callable[..., None]) -> Contender:
        def choose(logits: Tensor) -> Tensor:
            op(logits, lens, out, workspace, k, columns)
            return out

        return choose

    def per_row(logits: Tensor) -> Tensor:
        stride = logits.stride()
        torch.ops._C.top_k_per_row_decode(logits, 1, lens, out, rows, *stride, k)
        return out

    found: dict[str, Contender] = {}
    for name in ("cooperative_topk", "persistent_topk"):
        applies = k in (512, 1024, 2048) and (name[0] == "p" or rows <= VLLM_ROWS)
        if applies and hasattr(torch.ops._C, name):
            found[f"vLLM {name}"] = with_workspace(getattr(torch.ops._C, name))
    if hasattr(torch.ops._C, "top_k_per_row_decode"):
        found["vLLM top_k_per_row_decode"] = per_row
    return found


def check(name: str, chosen: Tensor, logits: Tensor, k: int) -> str:
    """Compare chosen columns with a stable sort; return "exact" or "WRONG".

    Ours must be the first k columns of the sort, in ascending order; others need only choose equal
    values.
    """
    order = logits.sort(dim=1, descending=True, stable=True)
    if name == "ours":
        right = torch.equal(chosen.long(), order.indices[:, :k].sort(dim=1).values)
    else:
        values = logits.gather(1, chosen.long().clamp(min=0)).sort(dim=1, descending=True).values
        right = torch.equal(values, order.values[:, :k])
    return "exact" if right else "WRONG"


def measure(problem: Problem, warm: bool, launches: int, rounds: int) -> None:
    """Check and time the contenders for one problem, and print the table."""
    copies = 1 if warm else max(2, -(-COLD_BYTES // problem.nbytes))
    inputs = [torch.randn(problem.rows, problem.columns, device="cuda") for _ in range(copies)]
    checks, graphs = {}, {}
    for name, choose in contenders(problem).items():
        try:
            checks[name] = check(name, choose(inputs[0]), inputs[0], problem.k)
            steps = [partial(choose, logits) for logits in inputs]
            graphs[name] = captured(steps, launches)
        except RuntimeError as refused:
            print(f"{name} is left out: {str(refused).splitlines()[0]}")
    times = timed(graphs, rounds)
    print(f"\n{problem.rows} rows x {problem.columns} columns, k = {problem.k}, "
          f"{'warm' if warm else 'cold'}: {problem.nbytes / 1e6:.1f} MB")  # fmt: skip
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"  {name:28} {median:9.2f} us  {problem.nbytes / median / 1e6:6.2f} TB/s  "
              f"(least {min(taken):.2f}, most {max(taken):.2f})  {checks[name]}")  # fmt: skip


def main() -> None:
    """Check, time and print all problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--columns", type=int, nargs="+", default=[131_072, 1_048_576])
    parser.add_argument("--k", type=int, nargs="+", default=[2048])
    parser.add_argument("--warm", action="store_true", help="one input for all launches")
    parser.add_argument("--launches", type=int, default=20, help="per graph, at least")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    cuda_device()
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}")
    for rows in given.rows:
        for columns in given.columns:
            for k in given.k:
                measure(Problem(rows, columns, k), given.warm, given.launches, given.rounds)


if __name__ == "__main__":
    with refusals():
        main()
