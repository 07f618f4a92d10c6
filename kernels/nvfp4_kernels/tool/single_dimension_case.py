"""Cases of dimensions of size 1, with arbitrary strides."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import indexer_logits
from nvfp4_kernels.tool.attention_case import AttentionCase
from nvfp4_kernels.tool.forced_product_case import SECTION
from nvfp4_kernels.tool.indexer_case import IndexerCase, keyed
from nvfp4_kernels.tool.sparse_attention_case import SparseAttentionCase
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

STRIDES = (0, 7, 1 << 41)  # none of them is a tensor map's
KEYS = 14  # of the only sequence, in its only page


@dataclass(frozen=True)
class SingleDimensionCase:
    """Test that strides of size-1 dimensions (sequence, page, KV head) do not change the result.

    Attributes:
        op: name of the op: "attention", "sparse attention" or "indexer".
    """

    op: str

    @property
    def section(self) -> str:
        """Section of the report."""
        return SECTION

    @property
    def name(self) -> str:
        """Name in the report."""
        return f"dimensions of size 1, {self.op}"

    def run(self, machine: Machine) -> Figures:
        """Check that any strides of size-1 dimensions give the same bits as contiguous strides.

        Raises:
            Mismatch: the results differ.
        """
        given = {
            name: x.to(machine.device) if isinstance(x, Tensor) else x
            for name, x in self._given().items()
        }
        expected = self._result(given)
        for stride in STRIDES:
            found = self._result({name: _with_stride(x, stride) for name, x in given.items()})
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                raise Mismatch(f"strides of {stride}: the result differs, must be the same")
        return {"values": float(expected.numel() * len(STRIDES))}

    def _given(self) -> dict[str, Any]:
        """Arguments of the op, on the CPU."""
        if self.op == "indexer":
            return IndexerCase("nvfp4", (KEYS,)).tensors()
        return self._attention.tensors()

    @property
    def _attention(self) -> AttentionCase:
        kind = SparseAttentionCase if self.op == "sparse attention" else AttentionCase
        return kind(((1, KEYS),), query_heads=2, kv_heads=1)

    def _result(self, given: dict[str, Any]) -> Tensor:
        if self.op == "indexer":
            return indexer_logits(**keyed(given), fmt="nvfp4")
        return self._attention.actual(given)[0]


def _with_stride(x: Any, stride: int) -> Any:
    """View of ``x`` with ``stride`` in every dimension of size 1 but the last."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        return x
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride if count == 1 else own for count, own in pairs]
    return x.as_strided(x.shape, (*strides, x.stride(-1)), x.storage_offset())
