"""Timings of GEMMs, compared with torch's own kernels, and of quantisation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import Static, gemm, quantize, silu_mul_gemm
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, blocked_shape
from nvfp4_kernels.tool.limits import Work, work_of
from nvfp4_kernels.tool.report import choose, describe
from nvfp4_kernels.tool.shapes import Shape
from nvfp4_kernels.tool.task import Figures, Machine

MOST_SETS = 64  # of operands
_FP4 = getattr(torch, "float4_e2m1fn_x2", None)


@dataclass(frozen=True)
class TimedProduct:
    """Timing of a GEMM with our kernel and with torch's NVFP4 and 16-bit kernels."""

    section: str
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.shape.sizes}"

    def run(self, machine: Machine) -> Figures:
        work = work_of(self.shape.problem, self.shape.dtype)
        seen = figures(self._seconds(_ours, machine), work)
        choice = choose(self.shape, machine.sms())
        seen |= {"estimate_us": 1e6 * choice.estimate, "tile": describe(choice.tile)}
        for peer, make in (("torch NVFP4", _torch_nvfp4), ("torch 16-bit", _torch_16_bit)):
            try:
                seen[f"{peer} us"] = 1e6 * self._seconds(make, machine)
            except (NotImplementedError, RuntimeError, ValueError) as error:
                # Some combinations of torch, CUDA and shape fail; this is not an error of the task.
                seen[f"{peer} us"] = f"none: {str(error).splitlines()[0]}"
        return seen

    def _seconds(
        self, make: Callable[[Shape, torch.device], Callable[[], object]], machine: Machine
    ) -> float:
        sets = cold_sets(work_of(self.shape.problem, self.shape.dtype).nbytes, machine.l2_bytes())
        return machine.seconds([make(self.shape, machine.device) for _ in range(sets)])


@dataclass(frozen=True)
class TimedQuantize:
    """Timing of ``quantize`` of ``m`` rows of ``k`` bfloat16 elements."""

    section: str
    m: int
    k: int

    @property
    def name(self) -> str:
        return f"quantize {self.m}×{self.k}"

    def run(self, machine: Machine) -> Figures:
        work = Work(self.m * self.k * (2 + 0.5 + 1 / BLOCK_SIZE), 0.0)
        scale = torch.tensor(0.002, device=machine.device)
        calls: list[Callable[[], object]] = []
        for _ in range(cold_sets(work.nbytes, machine.l2_bytes())):
            x = torch.randn(self.m, self.k, device=machine.device, dtype=torch.bfloat16)
            calls.append(lambda x=x: quantize(x, Static(scale)))  # type: ignore[misc]
        return figures(machine.seconds(calls), work)


def cold_sets(nbytes: float, l2_bytes: int) -> int:
    """Number of operand sets, used in turn, that evict each other from L2; at most 64."""
    return min(MOST_SETS, 1 + math.ceil(2 * l2_bytes / nbytes))


def figures(seconds: float, work: Work) -> Figures:
    """Figures of a call of ``seconds``: time, rates, speed of light, and the share reached."""
    return {
        "us": 1e6 * seconds,
        "tflops": work.flops / seconds / 1e12,
        "tb_per_s": work.nbytes / seconds / 1e12,
        "speed_of_light_us": 1e6 * work.speed_of_light,
        "share": work.speed_of_light / seconds,
    }


def _random_operand(shape: Shape, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = [shape.batch] if shape.batch > 1 else []
    k = shape.layer.k
    data = torch.randint(0, 256, (*batch, rows, k // 2), device=device, dtype=torch.uint8)
    scales = torch.rand((*batch, *blocked_shape(rows, k // BLOCK_SIZE)), device=device)
    return data, scales.to(torch.float8_e4m3fn)


def _ours(shape: Shape, device: torch.device) -> Callable[[], object]:
    layer, out = shape.layer, getattr(torch, shape.dtype)
    a = _random_operand(shape, shape.m, device)
    weights = [_random_operand(shape, layer.n, device) for _ in range(layer.weights)]
    if layer.gate_up:
        alpha = torch.full((2,), 1e-4, device=device)
        return lambda: silu_mul_gemm(*a, *weights[0], *weights[1], alpha, out_dtype=out)
    alpha = torch.full((layer.shards,), 1e-4, device=device)
    sizes = [layer.n // layer.shards] * layer.shards
    sizes[-1] += layer.n - sum(sizes)
    return lambda: gemm(*a, *weights[0], alpha, sizes, out_dtype=out)


def _torch_nvfp4(shape: Shape, device: torch.device) -> Callable[[], object]:
    """Call of torch's NVFP4 GEMM; for gate and up, weights stacked, no SiLU-mul."""
    if _FP4 is None:
        raise NotImplementedError(f"torch {torch.__version__} has no float4_e2m1fn_x2")
    if shape.batch > 1:
        raise NotImplementedError("torch._scaled_mm takes no batch")
    layer, out = shape.layer, getattr(torch, shape.dtype)
    a, a_scales = _random_operand(shape, shape.m, device)
    b, b_scales = _random_operand(shape, layer.weights * layer.n, device)
    mm: Any = torch._scaled_mm  # whose stub is of another torch
    operands = a.view(_FP4), b.view(_FP4).t(), a_scales.flatten(), b_scales.flatten()
    return lambda: mm(*operands, out_dtype=out)


def _torch_16_bit(shape: Shape, device: torch.device) -> Callable[[], object]:
    layer, out = shape.layer, getattr(torch, shape.dtype)
    batch = [shape.batch] if shape.batch > 1 else []
    a = torch.randn(*batch, shape.m, layer.k, device=device, dtype=out)
    b = torch.randn(*batch, layer.weights * layer.n, layer.k, device=device, dtype=out)
    return lambda: torch.matmul(a, b.mT)
