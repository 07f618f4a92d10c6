"""Plan of a linear layer: its kernels, selected once, when the layer is built."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.dispatch import Kernel, WeightLayout
from nvfp4_kernels.precompile.model import Layer
from vllm_fp4_plugin import sources
from vllm_fp4_plugin.arithmetic.choice import arithmetic_of
from vllm_fp4_plugin.options import KEY, METHOD, Activation, Options
from vllm_fp4_plugin.versions import PLUGIN
from vllm_fp4_plugin.warmup import Product

KERNELS_KEY = f"{KEY}_kernels"  # key in additional_config


@dataclass(frozen=True)
class LinearPlan:
    """Plan of one layer's kernels; made when the layer is built, before any weight is loaded.

    Attributes:
        kernel: GEMM kernel.
        quantizer: kernel that quantises the input; None if activations stay in 16 bits.
        activation: quantization of the input.
        terms: number of NVFP4 values whose sum represents each input element; 1 for a 16-bit input.
        shard_sizes: output widths of the shards on this rank.
        k: input elements per token on this rank.
        gate_up: whether gate and up projection run as one op with SiLU-and-mul.
        reason: reasons for the scheme, the kernels and the fusions, for the report; may be empty.
        out_terms: number of NVFP4 values whose sum represents each element of the result, quantised
            for the next layer; 1 also if the result is E4M3; 0: the result is in 16 bits.
    """

    kernel: Kernel
    quantizer: Kernel | None
    activation: Activation
    terms: int
    shard_sizes: list[int]
    k: int
    gate_up: bool
    reason: str
    out_terms: int = 0

    @property
    def targets(self) -> tuple[str, str | None]:
        """Targets of the GEMM and quantization kernels, as arguments of the custom ops."""
        return self.kernel.target, None if self.quantizer is None else self.quantizer.target

    @property
    def arithmetic(self) -> str:
        """Bits of weights and activations, and scaling of activations, for reports."""
        return arithmetic_of(self.activation, self.terms, self.kernel.mode)

    @property
    def is_fp8(self) -> bool:
        """Whether the input, if quantised, is E4M3 instead of NVFP4."""
        return self.kernel.mode == "w4a8"

    @property
    def weight_layout(self) -> WeightLayout:
        """Layout of the weight; references, which read every layout, tell FP8 by the layout."""
        return "folded" if self.is_fp8 else self.kernel.weight_layout

    @property
    def pads_rows(self) -> bool:
        """Whether the kernel needs K padded; references take the weight unpadded."""
        return self.kernel.arch != "cpu"

    @property
    def weight_rows(self) -> list[int]:
        """Number of rows of each weight passed to the kernel: gate and up, or the whole weight."""
        return self.shard_sizes if self.gate_up else [sum(self.shard_sizes)]


def hash_kernels(vllm_config: Any, kept: Iterable[str], terms: int, options: Options) -> None:
    """Make vLLM's compile cache depend on a layer's kernels, which compiled graphs call by name.

    The cache key also covers the sources of plugin and kernels: graphs call the plugin's ops, and
    vLLM tracks only the sources that it traced. A plugin can add to the key only through
    ``additional_config``, which vLLM hashes regardless of the order of an object's keys. The
    patterns of ``activation_terms`` have an order, so they are added once more, as a list.

    Args:
        vllm_config: config of the engine; ``additional_config`` is extended.
        kept: targets of the layer's kernels, and notes of the layer's fusions.
        terms: number of NVFP4 terms of the layer's input.
        options: options of the user.
    """
    additional = vllm_config.additional_config
    if isinstance(additional, dict):
        names = {f"{METHOD} {PLUGIN} {sources.digest()}", *additional.get(KERNELS_KEY, ()), *kept}
        if terms > 1:
            names.add(f"{terms} terms")
        if options.terms_patterns:
            names.add(f"patterns of terms: {options.terms_patterns}")
        vllm_config.additional_config = additional | {KERNELS_KEY: sorted(names)}


def product_of(layer: Any, plan: LinearPlan, dtype: torch.dtype) -> Product | None:
    """Key of the kernels to compile for a layer; None if a reference serves the layer.

    Args:
        layer: vLLM's linear layer.
        plan: plan of the layer.
        dtype: dtype of input and result.
    """
    if plan.kernel.arch == "cpu":
        return None
    added = layer.has_bias and not getattr(layer, "skip_bias_add", False)
    if isinstance(layer, RowParallelLinear):
        added = added and layer.tp_rank == 0  # rank 0 adds the bias for all ranks
    sizes = Layer(
        "",  # layers of one size share kernels
        plan.weight_rows[0],
        plan.k,
        gate_up=plan.gate_up,
        shards=1 if plan.gate_up else len(plan.shard_sizes),
        bias=added,
        out_terms=plan.out_terms,
    )
    # Layers are built with bfloat16 or float16 alone, the names of a Dtype.
    name: Any = dtype_name(dtype)
    chosen = plan.activation, plan.terms, plan.kernel.batch_invariant, plan.is_fp8
    return Product(plan.kernel.arch, sizes, name, *chosen)
