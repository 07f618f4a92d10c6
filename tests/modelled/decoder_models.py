"""Models whose whole decoder layers are modelled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.modelled import experts_shape
from tests.modelled.prices import BANDWIDTH, STEP_US, Sizes

if TYPE_CHECKING:
    from examples.kernel_bench.layer import Shape


@dataclass(frozen=True)
class Model:
    """Model as sharded to one GPU.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim: sizes of a layer.
        max_keys: length of the longest sequence that a captured graph supports.
        layers: number of layers of the model.
        ranks: number of GPUs.
        qk_norm: whether queries and keys are normed by head.
        experts: shape of the experts that replace the MLP, or None.
        vocabulary: number of rows of lm_head.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_keys: int
    layers: int
    vocabulary: int
    ranks: int = 1
    qk_norm: bool = False
    experts: experts_shape.Shape | None = None

    def shape(self) -> "Shape":
        """Sizes of the linear layers; imports the kernels."""
        from examples.kernel_bench.layer import Shape

        return Shape(self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim)

    def step_us(self, layer_us: float) -> float:
        """Microseconds of a decoding step: its layers, lm_head in 16 bits, and ``STEP_US``."""
        head = 2.0 * self.vocabulary * self.hidden / BANDWIDTH
        return self.layers * layer_us + head + STEP_US

    def sizes(self, tokens: int, keys: int) -> Sizes:
        """Sizes that prices depend on."""
        return Sizes(
            tokens, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim, keys
        )


MODELS = {
    "llama-8b": Model(4096, 14336, 32, 8, 128, max_keys=131072, layers=32, vocabulary=128256),
    "llama-70b-tp4": Model(
        8192, 7168, 16, 2, 128, max_keys=131072, layers=80, vocabulary=32064, ranks=4
    ),
    "qwen3-30b": Model(
        2048, 768, 32, 4, 128, max_keys=40960, layers=48, vocabulary=151936, qk_norm=True,
        experts=experts_shape.MODELS["qwen3-30b"],
    ),
}  # fmt: skip
