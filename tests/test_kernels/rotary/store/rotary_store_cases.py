"""Problems of ``rotary_store``: slices of one projection, a table of angles, a strided cache."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import rotary_store
from nvfp4_kernels.rotary.store import reference
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from tests.test_kernels.bits import check_equal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
POSITIONS, PAGES = 50, 5
REFERENCE_ARGUMENTS = (
    "q", "k", "v", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "q_norm", "k_norm",
    "k_scale", "v_scale", "neox", "eps",
)  # fmt: skip
Given = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes and variants; ``unstored`` tokens have no slot, ``padding`` rows follow the last token.

    ``norms`` names the normalised tensors, ``q`` and ``k``, or is empty.
    """

    tokens: int
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    dtype: torch.dtype = BF16
    table_dtype: torch.dtype = BF16
    position_dtype: torch.dtype = torch.int64
    page_size: int = 16
    neox: bool = True
    fp8: bool = False
    norms: str = ""
    norm_dtype: torch.dtype = BF16
    unstored: int = 0
    padding: int = 0

    def arguments(self) -> Given:
        """Arguments of the op; q, k and v are slices of a fused projection's result."""
        heads = self.q_heads, self.kv_heads, self.kv_heads
        rows = self.tokens + self.padding
        q, k, v = self.vectors(rows, sum(heads)).split(heads, 1)
        slots = torch.randperm(PAGES * self.page_size)[: self.tokens]
        slots[torch.randperm(self.tokens)[: self.unstored]] = -1
        positions = torch.randint(0, POSITIONS, (rows,)).to(self.position_dtype)
        positions[self.tokens :] = 1 << 30
        given: Given = {
            "q": q,
            "k": k,
            "v": v,
            "positions": positions,
            "cos_sin_cache": self.table(),
            "kv_cache": self.cache(),
            "slot_mapping": slots,
            "neox": self.neox,
        }
        for name in self.norms:
            weight = 1 + torch.randn(self.head_dim) / 4
            given |= {f"{name}_norm": weight.to(self.norm_dtype), "eps": 1e-5}
        if self.fp8:
            given |= {"k_scale": torch.tensor(0.03), "v_scale": torch.tensor(0.004)}
        return given

    def vectors(self, rows: int, heads: int) -> Tensor:
        """Heads with magnitudes octaves apart; padding rows are NaN."""
        sizes = 2.0 ** torch.randint(-6, 4, (rows, heads, 1))
        vectors = (torch.randn(rows, heads, self.head_dim) * sizes).to(self.dtype)
        vectors[self.tokens :] = torch.nan
        return vectors

    def table(self) -> Tensor:
        """Cosines and sines, as vLLM makes them."""
        frequencies = 10000.0 ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = torch.arange(POSITIONS).unsqueeze(1) * frequencies
        return torch.cat((angles.cos(), angles.sin()), -1).to(self.table_dtype)

    def cache(self) -> Tensor:
        """Every other page of a random buffer, as of one of two layers; rows before heads."""
        width = 2 * self.head_dim * (1 if self.fp8 else 2)
        shape = PAGES, 2, self.page_size, self.kv_heads, width
        pages = torch.randint(0, 256, shape, dtype=torch.uint8)
        return pages[:, 1].transpose(1, 2).view(E4M3 if self.fp8 else self.dtype)


def run_reference(given: Given) -> Tensor:
    """Call the reference; return the queries of the tokens, without padding."""
    out = given["q"].new_empty(given["q"].shape)
    arguments: list[Any] = [given.get(name) for name in REFERENCE_ARGUMENTS]
    reference.rotary_store(RotaryStoreCall(out, *arguments))
    return out[: len(given["slot_mapping"])]


def expected(given: Given) -> tuple[Tensor, Tensor]:
    """Return the reference's queries, without padding, and the cache."""
    copy = same_memory(given["kv_cache"])
    return run_reference(given | {"kv_cache": copy}), copy


def same_memory(x: Tensor) -> Tensor:
    """Copy a tensor together with its whole storage."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def memory(x: Tensor) -> Tensor:
    """All bytes of the storage of ``x``."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu()


def on(given: Given, device: torch.device) -> Given:
    """Arguments on a device, with the same strides and a copy of each storage."""
    moved: Given = {}
    for name, x in given.items():
        moved[name] = x
        if isinstance(x, Tensor):
            storage = same_memory(x).untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
            moved[name] = torch.empty(0, dtype=x.dtype, device=device).set_(
                whole.untyped_storage(), x.storage_offset(), x.shape, x.stride()
            )
    return moved


def check_kernel(case: Case, device: torch.device) -> None:
    """Check bit for bit, and that no other byte of the cache's storage changes."""
    torch.manual_seed(0)
    check_given(case.arguments(), device)


def check_given(given: Given, device: torch.device) -> None:
    queries, cache = expected(given)
    moved = on(given, device)
    out = rotary_store(**moved)
    assert out.is_contiguous()
    assert out.shape == given["q"].shape
    check_equal([out[: len(queries)].contiguous()], [queries])
    check_equal([memory(moved["kv_cache"])], [memory(cache)])


def use_many(patch: pytest.MonkeyPatch) -> None:
    """Use the layout for many tokens for any number of tokens."""
    module = import_module("nvfp4_kernels.rotary.store.launch")
    choose = module.choose_config
    patch.setattr(module, "choose_config", lambda tokens, *sizes: choose(1 << 20, *sizes))


LLAMA = Case(3, 32, 8, 128, 128, unstored=1)
CASES = {
    "one token": Case(1),
    "no tokens": Case(0, padding=2),
    "negative slots, padding": Case(17, 3, 1, unstored=5, padding=3),
    "nothing is stored": Case(2, unstored=2),
    "partial": Case(3, 4, 2, 96, 32, FP16, FP16, torch.int32, 12, fp8=True, unstored=1),
    "neighbours": Case(3, 6, 2, 64, 64, neox=False, norms="qk", unstored=1),
    "neighbours, partial, table in float32": Case(
        3, 2, 2, 128, 64, table_dtype=FP32, neox=False, page_size=32, norms="k", norm_dtype=FP32
    ),
    "table in float32": Case(3, 5, 1, 80, 80, FP16, FP32, norms="q", norm_dtype=FP16),
    "one thread a head": Case(3, 4, 4, 16, 16, fp8=True, position_dtype=torch.int32),
    "Llama 3 8B": LLAMA,
    "Llama 3 8B, E4M3": replace(LLAMA, fp8=True),
    "Qwen3": replace(LLAMA, norms="qk"),
    "wide heads, 1 + w": Case(
        3, 4, 2, 256, 256, norms="qk", norm_dtype=FP32, fp8=True, page_size=64, unstored=1
    ),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
