"""Report of which kernel every layer got, and why."""

from collections import Counter
from dataclasses import dataclass, field, replace

from vllm_fp4_plugin.checkpoint.weight_account import WeightAccount


@dataclass(frozen=True)
class LayerRecord:
    """One linear, experts' or attention layer of the model.

    Attributes:
        name: full name, e.g. ``model.layers.0.mlp.gate_up_proj``.
        kernel: label of the kernel that runs it, e.g. ``nvfp4_gemm/reference (cpu)``.
        arithmetic: e.g. ``W4A4 per-token``: bits of weights and activations, how the latter are
            scaled; of attention, dtype of its KV cache.
        reason: reason for this kernel and not a better one; may be empty.
        elements: weight elements on this rank; attention has none.
        weight_bytes: bytes they take, scales included.
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

    @property
    def group(self) -> str:
        """Last part of the name: layers that differ in nothing else are reported together."""
        return self.name.rpartition(".")[2]


@dataclass
class Report:
    """Linear and attention layers of a model, in the order they were built.

    Attributes:
        layers: their records.
        notes: lines that a reader should know beside them.
        weights: account of all the model's weights on this rank, where it was made.
    """

    layers: list[LayerRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: WeightAccount | None = None

    def add(self, record: LayerRecord) -> None:
        """Add a layer; of one that is known, replace what was known of it."""
        names = [layer.name for layer in self.layers]
        if record.name in names:
            self.layers[names.index(record.name)] = record
        else:
            self.layers.append(record)

    def amend(self, name: str, reason: str) -> None:
        """Say one reason more of a layer, if it is known."""
        for record in [each for each in self.layers if each.name == name]:
            reasons = "; ".join(filter(None, (record.reason, reason)))
            self.add(replace(record, reason=reasons))

    def grouped(self) -> list[tuple[str, int, str, str, str]]:
        """``(layer group, count, kernel, arithmetic, reason)``, one row for each difference."""
        counts = Counter((r.group, r.kernel, r.arithmetic, r.reason) for r in self.layers)
        return [(g, count, kernel, a, why) for (g, kernel, a, why), count in counts.items()]

    def lines(self) -> list[str]:
        """One line per layer group, then the memory the weights take."""
        rows = [
            f"{group} ×{count}: " + ", ".join(filter(None, (kernel, arithmetic, reason)))
            for group, count, kernel, arithmetic, reason in self.grouped()
        ]
        return [*rows, self.memory()] if rows else []

    def memory(self) -> str:
        """Bytes per weight of the quantised layers, and of all linear layers together."""
        quantised = [r for r in self.layers if r.kernel.startswith("nvfp4")]
        return (
            f"weights: {_bytes_per_weight(quantised)} in NVFP4 layers, "
            f"{_bytes_per_weight(self.layers)} in all linear layers of this rank; "
            "embeddings, norms and a head in 16 bits come on top"
        )


def _bytes_per_weight(layers: list[LayerRecord]) -> str:
    elements = sum(r.elements for r in layers)
    if not elements:
        return "none"
    total = sum(r.weight_bytes for r in layers)
    return f"{total / elements:.4f} bytes per weight ({total:,} bytes)"
