"""Plan of a linear layer: its kernels, chosen once, when the layer is built."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.devices import device_arch, dtype_name
from nvfp4_kernels.dispatch import Kernel, KernelTable, Mode
from nvfp4_kernels.precompile.model import Layer
from nvfp4_kernels.quantize.kernels import KERNELS as QUANTIZE_KERNELS
from nvfp4_kernels.quantize.kernels import PER_TOKEN_KERNELS
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import KEY, Activation
from vllm_fp4_plugin.warmup import Product

KERNELS_KEY = f"{KEY}_kernels"  # of additional_config


@dataclass(frozen=True)
class LinearPlan:
    """Plan of how one layer will run; made when it is built, before any weight is loaded.

    Attributes:
        kernel: kernel of the product.
        quantizer: kernel that quantises its input; None where activations stay in 16 bits.
        activation: how its input is quantised.
        shard_sizes: output widths of its shards on this rank.
        k: elements of its input on this rank.
        gate_up: gate and up projection run as one op with SiLU-and-mul.
        reason: reason why it runs so and not as a reader would expect; may be empty.
    """

    kernel: Kernel
    quantizer: Kernel | None
    activation: Activation
    shard_sizes: list[int]
    k: int
    gate_up: bool
    reason: str

    @property
    def targets(self) -> tuple[str, str | None]:
        """Targets of the product's kernel and the input's, as the custom ops take them."""
        return self.kernel.target, None if self.quantizer is None else self.quantizer.target

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
    reason: str


_QUANTIZERS = {"static": QUANTIZE_KERNELS, "per-token": PER_TOKEN_KERNELS}


def choose_kernels(table: KernelTable, activation: Activation) -> Choice:
    """Choose the kernels of a layer for this process's device.

    A device without a kernel for NVFP4 activations multiplies 16-bit ones, which loses nothing.

    Args:
        table: the product's kernels.
        activation: how activations are to be quantised.

    Raises:
        NoKernelError: the device has neither kernel.
    """
    device = current_device()
    mode: Mode = "w4a16" if activation == "16-bit" else "w4a4"
    kernel, wide = table.find(device, mode), table.find(device, "w4a16")
    if kernel is None and wide is not None:
        reason = f"{device_arch(device)} has no W4A4 kernel, activations stay 16-bit"
        return Choice(wide, None, "16-bit", reason)
    kernel = table.select(device, mode)
    if activation == "16-bit":
        return Choice(kernel, None, activation, "")
    return Choice(kernel, _QUANTIZERS[activation].select(device, mode), activation, "")


def hash_kernels(vllm_config: Any, plan: LinearPlan) -> None:
    """Have vLLM's compile cache depend on the kernels, which compiled graphs hold by name.

    vLLM hashes ``additional_config``, and nothing else that a plugin may write to.
    """
    given = vllm_config.additional_config
    if isinstance(given, dict):
        names = {*given.get(KERNELS_KEY, ()), *filter(None, plan.targets)}
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
    )
    # Layers are built with bfloat16 or float16 alone, which is what a Dtype names.
    return Product(plan.kernel.arch, sizes, dtype_name(dtype), plan.activation)  # type: ignore[arg-type]
