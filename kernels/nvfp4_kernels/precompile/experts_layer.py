"""Parameters of an MoE layer on which its kernels depend."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.precompile.model import Dtype
from nvfp4_kernels.sm100.limits import K_STEP

# NVFP4 with a global scale for all tokens or for each; 16 bits or, in the same way, E4M3 on sm_90.
Inputs = Literal["static", "per-token", "16-bit", "fp8-static", "fp8-per-token"]

# Granularity to which K of a grouped GEMM must be padded, for each family; 1: no padding.
GROUPED_K_STEPS = {"cpu": 1, "sm_90": 1, "sm_100": K_STEP}


class Choice(NamedTuple):
    """Router top-k from logits.

    Attributes:
        router: routing rule.
        dtype: dtype of the logits.
        biased: whether a bias is added for the selection of experts.
    """

    router: Router
    dtype: str
    biased: bool


@dataclass(frozen=True)
class Experts:
    """MoE layer on one GPU: all parameters of its kernels except the number of tokens.

    Attributes:
        sizes: sizes of the experts.
        top_k: number of experts per token.
        activation: activation between gemm1 and gemm2.
        dtype: dtype of tokens and results.
        inputs: format of the GEMMs' inputs; ``"16-bit"`` or E4M3 on sm_90.
        terms: NVFP4 terms of the inputs.
        mapped: length of the expert map from global to local experts; 0: no map.
        bias: whether both GEMMs add a bias.
        weight_on_input: whether routing weights are applied to tokens before gemm1.
        choice: router top-k; None: other code selects the experts.
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

    @property
    def is_fp8(self) -> bool:
        """Whether inputs are E4M3."""
        return self.inputs in ("fp8-static", "fp8-per-token")

    @property
    def is_per_token(self) -> bool:
        """Whether each token has a scale, so that gemm2's inputs are quantised by a launch."""
        return self.inputs in ("per-token", "fp8-per-token")

    def served(self, family: str, inputs: Inputs, terms: int) -> "Experts":
        """Copy of the layer with the input quantisation and the padded sizes of a family's kernels.

        Args:
            family: family of the GPU's architecture.
            inputs: quantisation of the GEMMs' inputs.
            terms: NVFP4 terms of the inputs.
        """
        sizes = self.sizes._replace(i=padded_width(self.sizes.i, family))
        return replace(self, sizes=sizes, inputs=inputs, terms=terms)


def padded_width(i: int, family: str) -> int:
    """Intermediate size ``i``, the K of gemm2, padded as the kernels of ``family`` require."""
    return i + -i % GROUPED_K_STEPS[family]
