"""Report of every layer's kernel, with the reason."""

from collections import Counter
from dataclasses import dataclass, field, replace

from vllm_fp4_plugin.checkpoint.weight_account import WeightAccount


@dataclass(frozen=True)
class LayerRecord:
    """Record of a layer of the model, or of an op that many layers share, e.g. ``rotary_emb``.

    Attributes:
        name: full name of the layer, e.g. ``model.layers.0.mlp.gate_up_proj``, or name of the op.
        kernel: label of the layer's kernel, e.g. ``nvfp4_gemm/reference (cpu)``.
        arithmetic: bits of weights and activations, and scaling of activations, e.g. ``W4A4
            per-token``; for attention, dtype of the KV cache.
        reason: reason for the kernel, scheme or fusions; may be empty.
        elements: number of weight elements on this rank; 0 for attention, norms and shared ops.
        weight_bytes: bytes of these weights, scales included.
    """

    name: str
    kernel: str
    arithmetic: str
    reason: str
    elements: int
    weight_bytes: int

    @classmethod
    def unquantized(
        cls, name: str, reason: str, elements: int = 0, weight_bytes: int = 0
    ) -> "LayerRecord":
        """Record of a layer that vLLM runs in 16 bits."""
        return cls(name, "unquantized (vLLM)", "16-bit", reason, elements, weight_bytes)

    @classmethod
    def head(cls, name: str, dtype: str, embedding: str = "") -> "LayerRecord":
        """Record of a 16-bit head, whose bytes only the account of weights counts.

        Args:
            name: name of the head.
            dtype: dtype of the head's weights.
            embedding: name of the embedding that the head is; empty: the head is not tied.
        """
        owner = f"{embedding} (tie_word_embeddings)" if embedding else "its own"
        return cls.unquantized(name, f"{dtype} weights of {owner}")

    @property
    def group(self) -> str:
        """Last part of the name, by which layers are grouped in the report."""
        return self.name.rpartition(".")[2]


@dataclass
class Report:
    """Report of a model's layers and their kernels, in the order in which the layers were built.

    Attributes:
        layers: records of the layers.
        notes: further lines for the reader.
        weights: account of all weights of the model on this rank; None if not made.
    """

    layers: list[LayerRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: WeightAccount | None = None

    def add(self, record: LayerRecord) -> None:
        """Add a layer's record; replace an earlier record of the same layer."""
        names = [layer.name for layer in self.layers]
        if record.name in names:
            self.layers[names.index(record.name)] = record
        else:
            self.layers.append(record)

    def amend(self, name: str, reason: str) -> None:
        """Append a reason to a layer's record, if there is a record."""
        for record in [each for each in self.layers if each.name == name]:
            reasons = "; ".join(filter(None, (record.reason, reason)))
            self.add(replace(record, reason=reasons))

    def grouped(self) -> list[tuple[str, int, str, str, str]]:
        """``(layer group, count, kernel, arithmetic, reason)``, one row per distinct record."""
        counts = Counter((r.group, r.kernel, r.arithmetic, r.reason) for r in self.layers)
        return [(g, count, kernel, a, why) for (g, kernel, a, why), count in counts.items()]

    def lines(self) -> list[str]:
        """Lines of the report: one per row of ``grouped``, then ``memory``; none without layers."""
        rows = [
            f"{group} ×{count}: " + ", ".join(filter(None, (kernel, arithmetic, reason)))
            for group, count, kernel, arithmetic, reason in self.grouped()
        ]
        return [*rows, self.memory()] if rows else []

    def memory(self) -> str:
        """Line with the bytes per weight of layers on our NVFP4 kernels, and of all layers."""
        quantised = [r for r in self.layers if r.kernel.startswith("nvfp4")]
        return (
            f"weights: {_bytes_per_weight(quantised)} in layers on our NVFP4 kernels, "
            f"{_bytes_per_weight(self.layers)} in all layers above, on this rank; "
            "norms, 16-bit embeddings and heads come on top"
        )


def _bytes_per_weight(layers: list[LayerRecord]) -> str:
    elements = sum(r.elements for r in layers)
    if not elements:
        return "none"
    total = sum(r.weight_bytes for r in layers)
    return f"{total / elements:.4f} bytes per weight ({total:,} bytes)"
