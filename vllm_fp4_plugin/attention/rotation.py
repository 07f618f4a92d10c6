"""Rotary embedding fused into attention or, for long queries, into the op that stores keys.

The embedding is fused where a model's attention module passes its results to attention alone. The
embedding, and the head norms before it, then return queries and keys unchanged; attention
normalises and rotates queries and keys, and stores the rotated keys.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from nvfp4_kernels.attention import HeadRotation
from nvfp4_kernels.precompile.model import Attention
from nvfp4_kernels.rotary import rotary_store


class Unrotated(Module):
    """Stand-in for a rotary embedding that returns queries and keys unchanged.

    Args:
        rotary: the rotary embedding, which stays a submodule of the model: vLLM saves the buffers
            of a model that sleeps, among them the cos/sin table.
    """

    def __init__(self, rotary: Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``query`` and ``key`` unchanged."""
        return query, key


def leave_unnormalised(norm: Module) -> None:
    """Make a head norm return its input; the norm keeps its weight, for loads and reloads."""
    norm.forward = _same


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Rotation:
    """vLLM's rotary embedding and q/k norms, fused into attention.

    Attributes:
        rotary: the rotary embedding, with its cos/sin table and its pairing of elements.
        q_norm, k_norm: per-head RMSNorms, applied before the rotation; both None: no norms.
    """

    rotary: Any
    q_norm: Any
    k_norm: Any

    @property
    def note(self) -> str:
        """Note for reports, e.g. ``queries and keys rotated``."""
        norms = "normalised, " if self.q_norm is not None else ""
        return f"queries and keys {norms}rotated"

    def sizes(self, attention: Attention) -> Attention:
        """Sizes of an attention layer, extended by those of the fused rotation and norms."""
        return replace(
            attention,
            rotary_dim=self.rotary.rotary_dim,
            neox=self.rotary.is_neox_style,
            qk_norm=self.q_norm is not None,
        )

    def of_heads(self, query: Tensor) -> HeadRotation:
        """Rotation in the form that the ops take, with the cos/sin table in ``query``'s dtype."""
        norms = self.q_norm, self.k_norm
        q_norm, k_norm = (None if norm is None else norm.weight.data for norm in norms)
        return HeadRotation(
            self.rotary._match_cos_sin_cache_dtype(query),
            self.rotary.is_neox_style,
            q_norm,
            k_norm,
            None if self.q_norm is None else self.q_norm.variance_epsilon,
        )

    def store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        scales: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Normalise and rotate queries and keys; store keys and values; see ``rotary_store``.

        Args:
            query: 16-bit ``(≥ T, Hq, D)``.
            key: 16-bit ``(≥ T, Hkv, D)``.
            value: as ``key``.
            kv_cache: KV cache of the layer in its values' dtype, ``(pages, Hkv, page_size, 2·D)``.
            slot_mapping: int64 ``(T,)``.
            positions: int64 ``(≥ T,)``.
            scales: scale of the keys and scale of the values in an E4M3 cache; otherwise two None.

        Returns:
            Rotated queries of ``query``'s shape.
        """
        (k_scale, v_scale), how = scales, self.of_heads(query)
        return rotary_store(
            query,
            key,
            value,
            positions,
            how.cos_sin_cache,
            kv_cache,
            slot_mapping,
            neox=how.neox,
            q_norm=how.q_norm,
            k_norm=how.k_norm,
            eps=how.eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )
