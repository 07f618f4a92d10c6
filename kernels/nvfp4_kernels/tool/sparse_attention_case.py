"""Correctness cases of sparse attention, where each token has its own list of keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import sparse_attention
from nvfp4_kernels.attention import sparse_reference
from nvfp4_kernels.attention.call import SparseCall
from nvfp4_kernels.tool.attention_case import AttentionCase

TENSORS = (
    *("q", "kv_cache", "indices", "lens", "block_table", "query_start"),
    *("sinks", "k_scale", "v_scale"),
)


@dataclass(frozen=True)
class SparseAttentionCase(AttentionCase):
    """Sparse attention to random lists of 1 to ``width`` keys; ``window`` is ignored."""

    width: int = 100

    @property
    def name(self) -> str:
        return f"sparse {super().name}, lists of {self.width}"

    def expected(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        arguments: list[Any] = [given.get(name) for name in TENSORS]
        call = SparseCall._make((*arguments, None, self.soft_cap, None))
        return sparse_reference.sparse_attention(call)

    def actual(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return sparse_attention(**given, soft_cap=self.soft_cap)

    def tensors(self) -> dict[str, Tensor]:
        given = super().tensors()
        seeded = torch.Generator().manual_seed(1)
        tokens = [keys for queries, keys in self.lengths for _ in range(queries)]
        indices = torch.full((len(tokens), self.width), -1, dtype=torch.int32)
        lens = torch.zeros(len(tokens), dtype=torch.int32)
        for token, keys in enumerate(tokens):
            longest = min(keys, self.width)
            count = int(torch.randint(1, longest + 1, (), generator=seeded))
            indices[token, :count] = torch.randperm(keys, generator=seeded)[:count]
            lens[token] = count
        del given["seq_lens"]
        return given | {"indices": indices, "lens": lens}


def sparse_attention_cases(quick: bool) -> list[SparseAttentionCase]:
    """Cases of head dimensions, query heads per KV head, caches, and short and long lists."""
    mixed = ((1, 300), (7, 200), (20, 20), (1, 1))
    cases = [
        SparseAttentionCase(mixed, head_dim=d, fp8=fp8)
        for d in (64, 128, 256)
        for fp8 in (False, True)
    ]
    cases += [
        SparseAttentionCase(mixed, 128, 1, width=177, sinks=True),
        SparseAttentionCase(mixed, page_size=64, soft_cap=20.0, dtype=torch.float16),
        SparseAttentionCase(((1, 5000),) * 2, 64, 1, width=2048),
    ]
    if not quick:
        cases.append(SparseAttentionCase(((256, 4096), (1, 9000)), 128, 1, width=2048))
    return cases
