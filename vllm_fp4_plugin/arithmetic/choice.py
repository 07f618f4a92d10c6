"""Choice of a layer's kernels: arithmetic, scaling of activations, and the reason."""

from collections.abc import Mapping
from typing import NamedTuple

from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.dispatch import Kernel, KernelTable, Mode
from nvfp4_kernels.formats.terms import EXACT_TERMS
from nvfp4_kernels.quantize.kernels import KERNELS as QUANTIZE_KERNELS
from nvfp4_kernels.quantize.kernels import PER_TOKEN_KERNELS
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import KEY, Activation, InvalidOption, RequestedActivation


class Choice(NamedTuple):
    """Kernels chosen for a layer on this process's device.

    Attributes:
        kernel: GEMM kernel.
        quantizer: kernel that quantises the input; None if activations stay in 16 bits.
        activation: quantization of the input.
        terms: number of NVFP4 values whose sum represents each input element; else 1.
        reason: reason for an unexpected choice; may be empty.
    """

    kernel: Kernel
    quantizer: Kernel | None
    activation: Activation
    terms: int
    reason: str


def arithmetic_of(activation: Activation, terms: int, mode: Mode) -> str:
    """Bits of a GEMM's operands, e.g. ``W4A16``, ``W4A8 static`` or ``W4A4×3 per-token``.

    Args:
        activation: quantization of the input.
        terms: number of NVFP4 terms of the input.
        mode: mode of the GEMM kernel.
    """
    if activation == "16-bit":
        return "W4A16"
    if mode == "w4a8":
        return f"W4A8 {activation}"
    return f"W4A4{f'×{terms}' if terms > 1 else ''} {activation}"


_QUANTIZERS = {"static": QUANTIZE_KERNELS, "per-token": PER_TOKEN_KERNELS}


def not_fp8(prefix: str) -> str:
    """Reason why a layer, by its name, cannot take FP8 activations; empty if it can."""
    if prefix.endswith(".kv_b_proj"):
        return "activations stay 16-bit: MLA needs the weight alone"
    return ""


def choose_kernels(
    table: KernelTable,
    activation: Activation,
    requested: RequestedTerms | None,
    quantizers: Mapping[str, KernelTable] = _QUANTIZERS,
    *,
    option: RequestedActivation = "per-token",
    why_not_fp8: str = "",
    batch_invariant: bool = False,
) -> Choice:
    """Choose the kernels of a layer for this process's device.

    A device without a kernel for NVFP4 activations multiplies 16-bit activations, without loss, or
    on request FP8 (E4M3) activations. A device without a kernel for 16-bit
    activations multiplies sums of three NVFP4 terms, which lose less than rounding to bfloat16,
    unless the user requests another number of terms.

    Args:
        table: GEMM kernels.
        activation: quantization of activations that the checkpoint declares.
        requested: number of terms that the user requested for the layer.
        quantizers: quantization kernels of the input, by ``activation``.
        option: the user's option ``activation``.
        why_not_fp8: reason why the layer cannot take FP8 activations; empty if it can.
        batch_invariant: whether to select a batch-invariant GEMM kernel; quantization kernels are
            always batch-invariant, as they only take maxima and round.

    Raises:
        InvalidOption: the option is not for a device that multiplies NVFP4 alone.
        NoKernelError: the device has a kernel for neither kind of activations.
    """
    device = current_device()
    arch = device_arch(device)
    narrow, wide = (table.find(device, mode, batch_invariant) for mode in ("w4a4", "w4a16"))
    if narrow is not None and wide is None:
        _check_option(option, activation, arch)
    if option == "fp8":
        return _fp8(table, activation, quantizers, why_not_fp8, batch_invariant)
    reason = ""
    if option == "16-bit":
        reason = "activation is 16-bit" if activation == "static" else ""
        activation = "16-bit"
    if narrow is None and wide is not None:
        wanted = activation != "16-bit" or requested is not None
        reason = f"{arch} has no W4A4 kernel, activations stay 16-bit" if wanted else reason
        return Choice(wide, None, "16-bit", 1, reason)
    if activation == "16-bit" and (narrow is None or (wide is not None and requested is None)):
        return Choice(table.select(device, "w4a16", batch_invariant), None, activation, 1, reason)
    reasons = [] if requested is None else [requested.reason]
    terms = 1 if requested is None else requested.count
    if activation == "16-bit":
        activation = "per-token"
        if requested is None:
            terms, reasons = EXACT_TERMS, [f"{EXACT_TERMS} terms lose less than bfloat16"]
        if wide is None:
            reasons.insert(0, f"{arch} has no W4A16 kernel")
    kernel = table.select(device, "w4a4", batch_invariant)
    quantizer = quantizers[activation].select(device, "w4a4")
    return Choice(kernel, quantizer, activation, terms, "; ".join(reasons))


def _fp8(
    table: KernelTable,
    activation: Activation,
    quantizers: Mapping[str, KernelTable],
    why_not_fp8: str,
    batch_invariant: bool,
) -> Choice:
    """Kernels for FP8 activations, or for 16-bit activations if the layer cannot take FP8.

    Arguments are as for ``choose_kernels``.
    """
    device = current_device()
    if why_not_fp8:
        kernel = table.select(device, "w4a16", batch_invariant)
        return Choice(kernel, None, "16-bit", 1, why_not_fp8)
    scaling: Activation = "static" if activation == "static" else "per-token"
    kernel = table.select(device, "w4a8", batch_invariant)
    quantizer = quantizers[scaling].select(device, "w4a8")
    return Choice(kernel, quantizer, scaling, 1, "activation is fp8")


def _check_option(option: RequestedActivation, activation: Activation, arch: str) -> None:
    """Refuse options that a device with kernels for NVFP4 activations alone cannot heed.

    Raises:
        InvalidOption: FP8 is requested; or 16 bits, of calibrated activations.
    """
    where, remedy = f"on {arch}, which multiplies NVFP4 itself", "leave it out"
    if option == "16-bit" and activation == "static":
        where = f"for calibrated activations {where}"
        remedy = "give activation_terms 3, which lose less than bfloat16 does, or leave both out"
    elif option != "fp8":
        return
    raise InvalidOption(f"{KEY}.activation: is {option!r}, must not be given {where}; {remedy}")
