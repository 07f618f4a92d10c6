"""A layer of experts as its kernels see it."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.precompile.model import Dtype
from nvfp4_kernels.sm100.limits import K_STEP

Inputs = Literal["static", "per-token", "16-bit"]


class Choice(NamedTuple):
    """Choice of experts from logits.

    Attributes:
        router: the rule.
        dtype: of the logits.
        biased: whether there is a bias.
    """

    router: Router
    dtype: str
    biased: bool


@dataclass(frozen=True)
class Experts:
    """A layer of experts on one GPU, all that its kernels depend on but for the tokens.

    Attributes:
        sizes: of the experts.
        top_k: slots of a token.
        activation: between the products.
        dtype: of tokens and results.
        inputs: how the products' inputs are quantised; on sm_90 they are in 16 bits.
        terms: how many NVFP4 values add up to each of them.
        mapped: length of the map from all ranks' experts to this one's; 0: there is none.
        bias: both products add one.
        weight_on_input: tokens are multiplied by their weights before the first product.
        choice: None: experts are chosen elsewhere.
    """

    sizes: ExpertSizes
    top_k: int
    activation: Activation
    dtype: Dtype
    inputs: Inputs
    terms: int = 1
    mapped: int = 0
    bias: bool = False
    weight_on_input: bool = False
    choice: Choice | None = None

    def served(self, family: str, inputs: Inputs, terms: int) -> "Experts":
        """The layer as a family's kernels serve it: inputs quantised so, weights padded.

        Args:
            family: of the GPU's architecture.
            inputs: how the products' inputs are quantised.
            terms: how many NVFP4 values add up to each of them.
        """
        sizes = self.sizes._replace(i=padded_width(self.sizes.i, family))
        return replace(self, sizes=sizes, inputs=inputs, terms=terms)


def padded_width(i: int, family: str) -> int:
    """Width between the products as a family's kernels take it: K of the second one is padded."""
    return i + -i % K_STEP if family == "sm_100" else i
