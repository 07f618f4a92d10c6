"""Prices of launches that are not traced: kernels of other projects.

Microseconds on a B200. A small kernel takes a constant or the time of its bytes, whichever is
longer, and starts ``GAP`` after its predecessor has ended: the published time of vLLM's own
quantisation of 1 to 64 tokens is 2.0 µs (vLLM pull request 49775), of which 0.7 µs are work. A GEMM
of vLLM's takes as long as NVIDIA's ``dense_blockscaled_gemm_persistent`` in this model, which has
no split-K: 4.97, 12.58 and 3.57 µs at K = 4096, 14336 and 2048. FlashInfer's published times for
one token are 1 µs higher.
"""

from dataclasses import dataclass

from tests.modelled.launches import ALL_REDUCE, ALL_REDUCE_NORM, ALL_REDUCE_QUANTIZE, Step

BANDWIDTH = 7.26e6  # bytes in a µs
GAP = 1.5  # between kernels that do not take part in dependent launch
BODIES = {
    "add_rms_norm": 1.25,
    "quantize": 0.7,
    "silu_mul_quantize": 0.7,
    "rotary_embedding": 0.9,
    "qk_norm_rotary_embedding": 1.25,
    "store": 0.9,
    "merge_segments": 0.9,
    "top_k": 1.25,
}
ALL_REDUCE_US = 6.0  # few tokens over four GPUs; assumed, as no figure is published
# All-reduces fused with the norm, or its quantisation too: the exchange hides the extra work.
_ALL_REDUCES = frozenset({ALL_REDUCE, ALL_REDUCE_NORM, ALL_REDUCE_QUANTIZE})
ATTENTION = (3.5, 0.84 * 8e6)  # least µs, and bytes per µs
GEMM_FIXED, GEMM_EACH_K = 2.0, 0.735 / 1024  # fixed µs, and µs per element of K, without split-K
GEMM_START, GEMM_BANDWIDTH = 1.9, 7.0e6
GEMM_RATE = 7.2e9  # FLOP per µs: NVIDIA's kernel reaches 7.0 and 8.1 PFLOP/s with many tokens
STEP_US = 30.0  # per step, besides layers and lm_head: embedding, last norm, sampling
ROUTER_US = 3.0  # 16-bit product of K = 2048; cuBLAS's published time with the launch is 5.1


@dataclass(frozen=True)
class Sizes:
    """Sizes that the bytes and times of a layer depend on."""

    tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    keys: int = 0

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    def moved(self, name: str, width: int) -> float:
        """Bytes that a small kernel reads and writes; ``width``: elements of a quantised row."""
        each = {
            "add_rms_norm": 8 * self.hidden,
            "quantize": 2.5625 * width,
            "silu_mul_quantize": 4.5625 * self.intermediate,
            "rotary_embedding": 4 * (self.q + self.kv),
            "qk_norm_rotary_embedding": 4 * (self.q + self.kv),
            "store": 8 * self.kv,
            "merge_segments": 8 * self.q,
            "top_k": 1024,
        }[name]
        return float(self.tokens * each)

    def product(self, name: str) -> tuple[int, int]:
        """Number of rows, and K, of a product's weights, with gate and up as one matrix."""
        return {
            "qkv_proj": (self.q + 2 * self.kv, self.hidden),
            "o_proj": (self.hidden, self.q),
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[name]


def body(step: Step, sizes: Sizes, width: int = 0) -> float:
    """Microseconds of a launch's own work.

    Args:
        step: launch with a price.
        sizes: sizes of the layer.
        width: elements per token of a launch that only quantises.
    """
    name = step.name
    if name in _ALL_REDUCES:
        return ALL_REDUCE_US
    if name == "router":
        return ROUTER_US
    if name == "paged_attention":
        least, rate = ATTENTION
        return max(least, 4.0 * sizes.tokens * sizes.kv * sizes.keys / rate)
    if name.endswith("_proj"):
        n, k = sizes.product(name)
        nbytes = (n + sizes.tokens) * k * 0.5625 + 2.0 * sizes.tokens * n
        return max(
            GEMM_FIXED + GEMM_EACH_K * k,
            GEMM_START + nbytes / GEMM_BANDWIDTH,
            GEMM_START + 2.0 * sizes.tokens * n * k / GEMM_RATE,
        )
    return max(BODIES[name], sizes.moved(name, width) / BANDWIDTH)
