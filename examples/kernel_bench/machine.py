"""GPU of this machine: its description, and its peak rates for comparison."""

import statistics
from functools import partial
from typing import Any

import torch

from examples.versions import commit, installed, machine
from nvfp4_kernels.tool.timed_graphs import Step, captured, timed

READ_BYTES = 2 << 30
SQUARE = 8192
REPLAYS = 10
DISTRIBUTIONS = (
    "vllm-fp4-plugin",
    "vllm",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
)


class NoGpu(RuntimeError):
    """Error for a machine without a GPU to measure on."""


def cuda_device() -> torch.device:
    """The current CUDA device.

    Raises:
        NoGpu: there is none.
    """
    if not torch.cuda.is_available():
        raise NoGpu(
            f"no CUDA GPU: torch {torch.__version__} finds none, measuring needs an sm_90 or "
            "sm_100 one; run there with the extra `cuda` installed, and show the JSON file here "
            "with `python -m examples.kernel_bench show FILE`"
        )
    return torch.device("cuda", torch.cuda.current_device())


def about(device: torch.device) -> dict[str, Any]:
    """GPU, versions and commit."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": l2_bytes(device),
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "versions": installed(*DISTRIBUTIONS) | {"torch": torch.__version__},
        "machine": machine(),
        "commit": commit(),
    }


def l2_bytes(device: torch.device) -> int:
    """Bytes of the L2 cache; timed launches must not find their weights in this cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def read_rate(device: torch.device) -> float:
    """Bytes per second of memory reads, from a sum over 2 GiB."""
    data = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / _seconds(data.sum)


def matmul_rate(device: torch.device) -> float:
    """FLOP per second of cuBLAS at a square product in bfloat16."""
    a, b = (torch.randn(SQUARE, SQUARE, device=device).bfloat16() for _ in range(2))
    return 2.0 * SQUARE**3 / _seconds(partial(torch.matmul, a, b.mT))


def _seconds(step: Step) -> float:
    graphs = {"": captured([step], 2)}
    timed(graphs, 2)  # clocks rise
    return statistics.median(timed(graphs, REPLAYS)[""]) * 1e-6
