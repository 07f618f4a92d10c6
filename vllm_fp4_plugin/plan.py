"""How a linear layer will run: its kernel, chosen once, when the layer is built."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.devices import device_arch, dtype_name
from nvfp4_kernels.dispatch import Kernel, KernelTable, Mode
from nvfp4_kernels.precompile.model import Layer
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.linear_op import Activation
from vllm_fp4_plugin.warmup import Product


@dataclass(frozen=True)
class LinearPlan:
    """How one layer will run; decided when it is built, before any weight is loaded.

    Attributes:
        kernel: the product's.
        activation: how its input is quantised.
        shard_sizes: output widths of its shards on this rank.
        k: elements of its input on this rank.
        gate_up: gate and up projection run as one op with SiLU-and-mul.
        reason: why it runs so and not as a reader would expect; may be empty.
    """

    kernel: Kernel
    activation: Activation
    shard_sizes: list[int]
    k: int
    gate_up: bool
    reason: str

    @property
    def weight_rows(self) -> list[int]:
        """Rows of each weight that the kernel is given: gate and up projection, or one of all."""
        return self.shard_sizes if self.gate_up else [sum(self.shard_sizes)]


def choose_kernel(table: KernelTable, activation: Activation) -> tuple[Kernel, Activation, str]:
    """Choose a product's kernel for this process's device.

    A device without a kernel for NVFP4 activations multiplies 16-bit ones, which loses nothing.

    Args:
        table: the product's kernels.
        activation: how activations are to be quantised.

    Returns:
        The kernel, how activations are quantised for it, and why not as they were to be.

    Raises:
        NoKernelError: the device has neither kernel.
    """
    device = current_device()
    mode: Mode = "w4a16" if activation == "16-bit" else "w4a4"
    if table.find(device, mode) is None:
        wide = table.find(device, "w4a16")
        if wide is not None:
            arch = device_arch(device)
            return wide, "16-bit", f"{arch} has no W4A4 kernel, activations stay 16-bit"
    return table.select(device, mode), activation, ""


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
        pair=plan.gate_up,
        shards=1 if plan.gate_up else len(plan.shard_sizes),
        bias=added,
    )
    # Layers are built with bfloat16 or float16 alone, which is what a Dtype names.
    return Product(plan.kernel.arch, sizes, dtype_name(dtype), plan.activation)  # type: ignore[arg-type]
