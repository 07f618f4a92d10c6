"""Plan of a linear layer: its kernels, chosen once, when the layer is built."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.devices import device_arch, dtype_name
from nvfp4_kernels.dispatch import Kernel, KernelTable
from nvfp4_kernels.formats.terms import EXACT_TERMS
from nvfp4_kernels.precompile.model import Layer
from nvfp4_kernels.quantize.kernels import KERNELS as QUANTIZE_KERNELS
from nvfp4_kernels.quantize.kernels import PER_TOKEN_KERNELS
from vllm_fp4_plugin import sources
from vllm_fp4_plugin.activation_terms import GivenTerms
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import KEY, METHOD, Activation, Options
from vllm_fp4_plugin.versions import PLUGIN
from vllm_fp4_plugin.warmup import Product

KERNELS_KEY = f"{KEY}_kernels"  # of additional_config


@dataclass(frozen=True)
class LinearPlan:
    """Plan of how one layer will run; made when it is built, before any weight is loaded.

    Attributes:
        kernel: kernel of the product.
        quantizer: kernel that quantises its input; None where activations stay in 16 bits.
        activation: how its input is quantised.
        terms: how many NVFP4 values add up to each of its input's; 1 of one in 16 bits.
        shard_sizes: output widths of its shards on this rank.
        k: elements of its input on this rank.
        gate_up: gate and up projection run as one op with SiLU-and-mul.
        reason: reason why it runs so and not as a reader would expect; may be empty.
        out_terms: how many NVFP4 values add up to each of its result's, which the layer after it
            takes as its input; 0: the result is in 16 bits.
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
        """Targets of the product's kernel and the input's, as the custom ops take them."""
        return self.kernel.target, None if self.quantizer is None else self.quantizer.target

    @property
    def arithmetic(self) -> str:
        """Bits of weights and activations, and how the latter are scaled, for reports."""
        return arithmetic_of(self.activation, self.terms)

    @property
    def pads_rows(self) -> bool:
        """Whether the kernel wants K padded: references take the weight as it is."""
        return self.kernel.arch != "cpu"

    @property
    def weight_rows(self) -> list[int]:
        """Rows of each weight that the kernel is given: gate and up projection, or one of all."""
        return self.shard_sizes if self.gate_up else [sum(self.shard_sizes)]


class Choice(NamedTuple):
    """Kernels of a layer on this process's device; see ``LinearPlan``."""

    kernel: Kernel
    quantizer: Kernel | None
    activation: Activation
    terms: int
    reason: str


def arithmetic_of(activation: Activation, terms: int) -> str:
    """Bits of a product's operands, e.g. ``W4A16``, ``W4A4 static`` or ``W4A4×3 per-token``."""
    if activation == "16-bit":
        return "W4A16"
    return f"W4A4{f'×{terms}' if terms > 1 else ''} {activation}"


_QUANTIZERS = {"static": QUANTIZE_KERNELS, "per-token": PER_TOKEN_KERNELS}


def choose_kernels(
    table: KernelTable,
    activation: Activation,
    given: GivenTerms | None,
    quantizers: Mapping[str, KernelTable] = _QUANTIZERS,
    *,
    batch_invariant: bool = False,
) -> Choice:
    """Choose the kernels of a layer for this process's device.

    A device without a kernel for NVFP4 activations multiplies 16-bit ones, which loses nothing; one
    without a kernel for 16-bit ones sums of NVFP4 terms, which lose less than rounding to 16 bits.

    Args:
        table: the product's kernels.
        activation: how activations are to be quantised.
        given: number of terms that the user gave the layer.
        quantizers: kernels that quantise its input, by how they do.
        batch_invariant: whether a token's result may depend on no other token; what quantises
            finds maxima and rounds, and has no other kernels for it.

    Raises:
        NoKernelError: the device has neither kernel.
    """
    device = current_device()
    arch = device_arch(device)
    narrow, wide = (table.find(device, mode, batch_invariant) for mode in ("w4a4", "w4a16"))
    if narrow is None and wide is not None:
        wanted = activation != "16-bit" or given is not None
        reason = f"{arch} has no W4A4 kernel, activations stay 16-bit" if wanted else ""
        return Choice(wide, None, "16-bit", 1, reason)
    if activation == "16-bit" and (narrow is None or (wide is not None and given is None)):
        return Choice(table.select(device, "w4a16", batch_invariant), None, activation, 1, "")
    reasons = [] if given is None else [given.reason]
    terms = 1 if given is None else given.count
    if activation == "16-bit":
        activation = "per-token"
        if given is None:
            terms, reasons = EXACT_TERMS, [f"{EXACT_TERMS} terms lose less than bfloat16"]
        if wide is None:
            reasons.insert(0, f"{arch} has no W4A16 kernel")
    kernel = table.select(device, "w4a4", batch_invariant)
    quantizer = quantizers[activation].select(device, "w4a4")
    return Choice(kernel, quantizer, activation, terms, "; ".join(reasons))


def hash_kernels(vllm_config: Any, held: Iterable[str], terms: int, options: Options) -> None:
    """Have vLLM's compile cache depend on a layer's kernels, which compiled graphs hold by name.

    And on its number of terms, on what it hands over, and on the plugin's sources: graphs hold
    calls of its ops, and vLLM looks again at no source but those that it traced. It hashes
    ``additional_config``, and nothing else that a plugin may write to; of an object not the order,
    on which ``activation_terms`` depends.
    """
    given = vllm_config.additional_config
    if isinstance(given, dict):
        names = {f"{METHOD} {PLUGIN} {sources.digest()}", *given.get(KERNELS_KEY, ()), *held}
        if terms > 1:
            names.add(f"{terms} terms")
        if options.terms_patterns:
            names.add(f"patterns of terms: {options.terms_patterns}")
        vllm_config.additional_config = given | {KERNELS_KEY: sorted(names)}


def product_of(layer: Any, plan: LinearPlan, dtype: torch.dtype) -> Product | None:
    """Product whose kernels a layer needs compiled; None if a reference serves it."""
    if plan.kernel.arch == "cpu":
        return None
    added = layer.has_bias and not getattr(layer, "skip_bias_add", False)
    if isinstance(layer, RowParallelLinear):
        added = added and layer.tp_rank == 0  # which adds it for all ranks
    sizes = Layer(
        "",  # layers of a size share kernels
        plan.weight_rows[0],
        plan.k,
        gate_up=plan.gate_up,
        shards=1 if plan.gate_up else len(plan.shard_sizes),
        bias=added,
        out_terms=plan.out_terms,
    )
    # Layers are built with bfloat16 or float16 alone, which is what a Dtype names.
    name: Any = dtype_name(dtype)
    chosen = plan.activation, plan.terms, plan.kernel.batch_invariant
    return Product(plan.kernel.arch, sizes, name, *chosen)
