"""Cases and timings of ``rotary_store``; result and cache must equal the reference's exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import rotary_store
from nvfp4_kernels.precompile.model import PAGE_SIZE
from nvfp4_kernels.rotary.store import reference
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from nvfp4_kernels.tool.limits import Work
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.task import Figures, Machine
from nvfp4_kernels.tool.timed import cold_sets, figures

TENSORS = (
    *("q", "k", "v", "positions", "cos_sin_cache", "kv_cache", "slot_mapping"),
    *("q_norm", "k_norm", "k_scale", "v_scale"),
)
MAX_POSITIONS = 4096
EPS = 1e-6


@dataclass(frozen=True)
class RotaryStoreCase:
    """Test of ``rotary_store`` with random positions and slots; every fourth token has no slot.

    Attributes:
        tokens: number of tokens.
        query_heads, kv_heads, head_dim, rotary_dim: sizes.
        dtype: dtype of queries, keys and values.
        neox: whether the elements of a rotated pair are ``rotary_dim / 2`` apart; else neighbours.
        norms: whether queries and keys are normalised.
        fp8: whether the cache is E4M3.
    """

    tokens: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    neox: bool = True
    norms: bool = False
    fp8: bool = False

    @property
    def section(self) -> str:
        return "correctness"

    @property
    def name(self) -> str:
        words = [
            f"rotary_store, {self.tokens} tokens",
            f"heads {self.query_heads}/{self.kv_heads}×{self.head_dim}",
            str(self.dtype).removeprefix("torch."),
        ]
        words += [f"{self.rotary_dim} turned"] * (self.rotary_dim < self.head_dim)
        words += ["neighbours"] * (not self.neox) + ["norms"] * self.norms + ["FP8"] * self.fp8
        return ", ".join(words)

    def run(self, machine: Machine) -> Figures:
        given = self.tensors()
        moved: dict[str, Any] = {name: x.to(machine.device) for name, x in given.items()}
        moved["kv_cache"] = moved["kv_cache"].clone()  # on the CPU, `given`'s is the reference's
        eps = EPS if self.norms else None
        expected = given["q"].new_empty(given["q"].shape)
        arguments: list[Any] = [given.get(name) for name in TENSORS]
        reference.rotary_store(RotaryStoreCall._make((expected, *arguments, self.neox, eps)))
        actual = rotary_store(**moved, neox=self.neox, eps=eps)
        compare_exact(actual.cpu(), expected)
        stored = [x.cpu().view(torch.uint8) for x in (moved["kv_cache"], given["kv_cache"])]
        compare_exact(*stored)
        return {"values": float(expected.numel() + given["kv_cache"].numel())}

    def tensors(self) -> dict[str, Tensor]:
        """Arguments of the op, on the CPU."""
        seeded = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=seeded)

        heads = self.query_heads, self.kv_heads, self.kv_heads
        qkv = random(self.tokens, sum(heads), self.head_dim).to(self.dtype)
        q, k, v = qkv.split(heads, 1)
        pages = self.tokens // PAGE_SIZE + 2
        slots = torch.randperm(pages * PAGE_SIZE, generator=seeded)[: self.tokens]
        slots[::4] = -1
        angles = random(MAX_POSITIONS, self.rotary_dim // 2)
        cache = random(pages, self.kv_heads, PAGE_SIZE, 2 * self.head_dim)
        given = {
            "q": q,
            "k": k,
            "v": v,
            "positions": torch.randint(MAX_POSITIONS, (self.tokens,), generator=seeded),
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), -1).to(self.dtype),
            "kv_cache": cache.to(torch.float8_e4m3fn if self.fp8 else self.dtype),
            "slot_mapping": slots,
        }
        if self.norms:
            weights = 1 + random(2, self.head_dim) / 8
            given |= {f"{x}_norm": weights[n].to(self.dtype) for n, x in enumerate("qk")}
        if self.fp8:
            given |= {"k_scale": torch.tensor(0.03), "v_scale": torch.tensor(0.02)}
        return given


def rotary_store_cases(quick: bool) -> list[RotaryStoreCase]:
    """Cases of head dimensions and dtypes, with few and many tokens."""
    sizes = [(16, 16), (64, 32), (80, 80), (96, 96), (128, 128), (256, 64)]
    cases = [
        RotaryStoreCase(7, 6, 2, d, r, dtype, neox=neox, norms=not neox)
        for (d, r), dtype, neox in product(sizes, (torch.bfloat16, torch.float16), (True, False))
    ]
    cases += [RotaryStoreCase(33, 8, 1, d, d, fp8=True, norms=True) for d in (32, 128, 256)]
    tokens = (1, 600) if quick else (1, 600, 8192)
    cases += [RotaryStoreCase(m, fp8=fp8) for m in tokens for fp8 in (False, True)]
    return [*cases, RotaryStoreCase(600, 7, 1, norms=True)]


@dataclass(frozen=True)
class TimedRotaryStore:
    """Timing of ``rotary_store`` with Llama 3 8B's heads; every token has a cache slot.

    Attributes:
        section: section of the report.
        tokens: number of tokens.
        fp8: whether the cache is E4M3.
    """

    section: str
    tokens: int
    fp8: bool = False

    @property
    def case(self) -> RotaryStoreCase:
        """Case that the tensors are taken from."""
        return RotaryStoreCase(self.tokens, fp8=self.fp8)

    @property
    def name(self) -> str:
        return f"rotary_store of {self.tokens}{', FP8 cache' * self.fp8}"

    @property
    def work(self) -> Work:
        """Work: bytes of heads (read and written), angles, positions and slots."""
        case = self.case
        stored = 2 * case.kv_heads * (1 if self.fp8 else 2)
        read = 2 * (case.query_heads + 2 * case.kv_heads)
        heads = (read + 2 * case.query_heads + stored) * case.head_dim
        return Work(self.tokens * (heads + 2 * case.rotary_dim + 16), 0.0)

    def run(self, machine: Machine) -> Figures:
        sets = cold_sets(self.work.nbytes, machine.l2_bytes())
        return figures(
            machine.seconds([self._ours(machine.device) for _ in range(sets)]), self.work
        )

    def _ours(self, device: torch.device) -> Callable[[], object]:
        given: dict[str, Any] = {n: x.to(device) for n, x in self.case.tensors().items()}
        given["slot_mapping"] = torch.randperm(self.tokens).to(device)
        return lambda: rotary_store(**given)


def rotary_store_timings(section: str, quick: bool) -> list[TimedRotaryStore]:
    """Timings of decode and, unless ``quick``, of prefill."""
    tokens = (1, 64) if quick else (1, 64, 512, 8192)
    return [TimedRotaryStore(section, m, fp8) for m in tokens for fp8 in (False, True)]
