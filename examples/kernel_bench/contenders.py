"""Contenders for a layer: our kernels, vLLM's Humming and Marlin, cuBLAS in bfloat16 and FP8."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from examples.kernel_bench.layers import BF16_BYTES, NVFP4_BYTES, BenchLayer
from nvfp4_kernels import Static, gemm, quantize, silu_mul_gemm
from nvfp4_kernels.formats.folded import decode_folded, to_folded
from nvfp4_kernels.formats.fp8_rows import FP8_MAX, from_rows, quantize_fp8
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE, Nvfp4Tensor, quantize_activation

Operands = tuple[Tensor, ...]
SiluAndMul = Callable[[Tensor], Tensor]
LARGEST_TOKEN = 6.0  # units of the noise; larger values saturate
TOKEN_SCALE = LARGEST_TOKEN / FP8_MAX


class Unavailable(RuntimeError):
    """Error for a contender that this machine lacks; the message gives the reason."""


class Contender(Protocol):
    """One implementation of a layer.

    Attributes:
        weight_bytes: bytes per element of the weight.
    """

    weight_bytes: float

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        """The layer's weights in this contender's format; prepared once, at load."""

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        """Result of the layer, bfloat16 ``(M, N)``, for bfloat16 tokens ``(M, K)``."""

    def seen(self, x: Tensor) -> Tensor:
        """Values that the contender's GEMM multiplies: ``x``, rounded if it is quantised."""

    def held(self, weights: tuple[Nvfp4Tensor, ...]) -> tuple[Tensor, ...]:
        """Values of the weights that the contender's GEMM multiplies."""


class _ExactWeights:
    """Part of a contender whose GEMM multiplies the weights' exact values."""

    def held(self, weights: tuple[Nvfp4Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(w.dequantize() for w in weights)


class OursW4A16(_ExactWeights):
    """Our kernels for GPUs without FP4 tensor cores: weights decoded to bfloat16 in registers."""

    weight_bytes = NVFP4_BYTES

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        laid_out = [part for w in weights for part in to_fragments(w.data, w.scales)]
        return (*laid_out, _alpha(layer, weights, 1.0))

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        op: Any = silu_mul_gemm if layer.gate_up else gemm
        sizes = {"n": layer.n} if layer.gate_up else {"shard_sizes": layer.shard_sizes}
        return op(x, None, *operands, **sizes)

    def seen(self, x: Tensor) -> Tensor:
        return x


class OursW4A4(_ExactWeights):
    """Our kernels for FP4 tensor cores; the tokens' quantisation is timed with the product."""

    weight_bytes = NVFP4_BYTES

    def __init__(self, device: torch.device) -> None:
        self._input_scale = torch.tensor(LARGEST_TOKEN / GLOBAL_RANGE, device=device)

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        blocked = [w.to_blocked() for w in weights]
        laid_out = [part for w in blocked for part in (w.data, w.scales)]
        return (*laid_out, _alpha(layer, weights, float(self._input_scale)))

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        op: Any = silu_mul_gemm if layer.gate_up else gemm
        sizes = {} if layer.gate_up else {"shard_sizes": layer.shard_sizes}
        return op(*quantize(x, Static(self._input_scale)), *operands, **sizes)

    def seen(self, x: Tensor) -> Tensor:
        data, scales = quantize_activation(x, self._input_scale)
        return Nvfp4Tensor(data, scales, self._input_scale).dequantize()


class Marlin(_ExactWeights):
    """vLLM's kernel for NVFP4 weights and bfloat16 tokens, prepared and called as in vLLM."""

    weight_bytes = NVFP4_BYTES

    def __init__(self, device: torch.device, silu_and_mul: SiluAndMul) -> None:
        """Raise Unavailable if vLLM is missing or lacks this kernel."""
        package = "vllm.model_executor.layers.quantization.utils"
        try:
            self._fp4: Any = import_module(f"{package}.marlin_utils_fp4")
            marlin: Any = import_module(f"{package}.marlin_utils")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise Unavailable(f"vLLM cannot be imported ({_first_line(error)})") from error
        if not hasattr(torch.ops._C, "marlin_gemm"):
            raise Unavailable("this vLLM has no CUDA op marlin_gemm")
        self._silu_and_mul = silu_and_mul
        # As in an engine, whose workspace outlives a launch: otherwise each launch clears a new
        # workspace.
        self._workspace = marlin.marlin_make_workspace_new(device, marlin.MARLIN_MAX_BLOCKS_PER_SM)

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        prepared = SimpleNamespace(
            output_size_per_partition=layer.weights * layer.n,
            input_size_per_partition=layer.k,
            params_dtype=torch.bfloat16,
            weight=torch.cat([w.data for w in weights]),
            weight_scale=torch.cat([w.scales for w in weights]),
            weight_global_scale=weights[0].global_scale,
        )
        self._fp4.prepare_fp4_layer_for_marlin(prepared)
        parts = (prepared.weight, prepared.weight_scale, prepared.weight_global_scale)
        return tuple(part.data for part in parts)

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        weight, scales, global_scale = operands
        out = self._fp4.apply_fp4_marlin_linear(
            input=x,
            weight=weight,
            weight_scale=scales,
            weight_global_scale=global_scale,
            workspace=self._workspace,
            size_n=layer.weights * layer.n,
            size_k=layer.k,
        )
        return self._silu_and_mul(out) if layer.gate_up else out

    def seen(self, x: Tensor) -> Tensor:
        return x


class Humming(_ExactWeights):
    """Humming's kernel, which vLLM prefers to Marlin on a Hopper, prepared and called by vLLM."""

    weight_bytes = NVFP4_BYTES

    def __init__(self, silu_and_mul: SiluAndMul) -> None:
        """Raise Unavailable if vLLM or Humming is missing."""
        try:
            chosen = import_module("vllm.model_executor.kernels.linear.nvfp4.humming")
            self._utils: Any = import_module(
                "vllm.model_executor.layers.quantization.utils.humming"
            )
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise Unavailable(f"vLLM cannot be imported ({_first_line(error)})") from error
        self._kernel_class: Any = chosen.HummingNvFp4LinearKernel
        supported, why = self._kernel_class.is_supported()
        if not supported:
            raise Unavailable(f"{why}; pip install 'humming-kernels[cu13]'")
        self._silu_and_mul = silu_and_mul
        self._prepared: dict[str, tuple[Any, Any, list[str]]] = {}

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        prepared: Any = torch.nn.Module()
        prepared.input_size_per_partition = layer.k
        prepared.output_partition_sizes = [layer.weights * layer.n]
        prepared.params_dtype = torch.bfloat16
        prepared.has_bias = False
        parts = {
            "weight": torch.cat([w.data for w in weights]),
            "weight_scale": torch.cat([w.scales for w in weights]),
            "weight_global_scale": weights[0].global_scale.reshape(1),
        }
        for name, part in parts.items():
            setattr(prepared, name, torch.nn.Parameter(part, requires_grad=False))
        kernel = self._kernel_class(None)
        kernel.process_weights_after_loading(prepared)
        names = [name for name, _ in prepared.named_parameters(recurse=False)]
        self._prepared[layer.name] = kernel, prepared.weight_schema, names
        return tuple(getattr(prepared, name).data for name in names)

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        kernel, schema, names = self._prepared[layer.name]
        parts = dict(zip(names, operands, strict=True))
        out: Tensor = self._utils.apply_humming_linear(
            SimpleNamespace(weight_schema=schema, **parts),
            x,
            skip_bias_add=True,
            layer_config=kernel.layer_config,
            compute_config=kernel.compute_config,
            locks=kernel.locks,
        )
        return self._silu_and_mul(out) if layer.gate_up else out

    def seen(self, x: Tensor) -> Tensor:
        return x


class OursW4A8:
    """Our kernels for E4M3 tokens; tokens are quantised before, as by the norm of a model."""

    weight_bytes = NVFP4_BYTES

    def __init__(self) -> None:
        self._tokens = _Fp8Tokens()

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        folded = [to_folded(w.data, w.scales) for w in weights]
        scale = float(TOKEN_SCALE)
        alphas = [
            f.row_scale * w.global_scale * scale for f, w in zip(folded, weights, strict=True)
        ]
        alpha = torch.stack(alphas) if layer.gate_up else alphas[0]
        return (*(part for f in folded for part in f[:2]), alpha)

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        op: Any = silu_mul_gemm if layer.gate_up else gemm
        sizes = {"n": layer.n} if layer.gate_up else {"shard_sizes": layer.shard_sizes}
        return op(self._tokens.rows(x), None, *operands, **sizes)

    def seen(self, x: Tensor) -> Tensor:
        return from_rows(_in_fp8(x), x.shape[1]).float() * TOKEN_SCALE

    def held(self, weights: tuple[Nvfp4Tensor, ...]) -> tuple[Tensor, ...]:
        folded = [(to_folded(w.data, w.scales), w) for w in weights]
        return tuple(
            decode_folded(f.data, f.scales, len(f.row_scale), 2 * w.data.shape[1])
            * (f.row_scale * w.global_scale).unsqueeze(1)
            for f, w in folded
        )


class TorchFp8:
    """``torch._scaled_mm`` with weight and tokens in E4M3, a scale per row and per token.

    Tokens are quantised before, as for ``OursW4A8``.
    """

    weight_bytes = 1.0

    def __init__(self, silu_and_mul: SiluAndMul) -> None:
        self._silu_and_mul = silu_and_mul
        self._tokens = _Fp8Tokens()

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        return _per_row_fp8(torch.cat([w.dequantize() for w in weights]))

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        weight, scales = operands
        out = torch._scaled_mm(
            self._tokens.values(x),
            weight.mT,
            scale_a=self._tokens.scales,
            scale_b=scales.mT,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return self._silu_and_mul(out) if layer.gate_up else out

    def seen(self, x: Tensor) -> Tensor:
        return from_rows(_in_fp8(x), x.shape[1]).float() * TOKEN_SCALE

    def held(self, weights: tuple[Nvfp4Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            values.float() * scales
            for values, scales in (_per_row_fp8(w.dequantize()) for w in weights)
        )


class _Fp8Tokens:
    """E4M3 of the last tokens asked for, so that a captured graph does not quantise them."""

    scales: Tensor

    def __init__(self) -> None:
        self._of: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Tokens in the order of our kernels."""
        self._quantise(x)
        return self._rows

    def values(self, x: Tensor) -> Tensor:
        """Tokens in the order of ``x``; ``scales`` are theirs."""
        self._quantise(x)
        return self._values

    def _quantise(self, x: Tensor) -> None:
        if self._of is not x:
            self._of, self._rows = x, _in_fp8(x)
            self._values = from_rows(self._rows, x.shape[1])
            self.scales = x.new_full((len(x), 1), TOKEN_SCALE, dtype=torch.float32)


def _in_fp8(x: Tensor) -> Tensor:
    return quantize_fp8(x, torch.tensor(TOKEN_SCALE, device=x.device))


def _per_row_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values, and scales ``(N, 1)``, of a weight."""
    scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
    return (weight / scales).to(torch.float8_e4m3fn), scales


class CublasBf16(_ExactWeights):
    """``torch.matmul`` with the weight in bfloat16."""

    weight_bytes = float(BF16_BYTES)

    def __init__(self, silu_and_mul: SiluAndMul) -> None:
        self._silu_and_mul = silu_and_mul

    def operands(self, layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...]) -> Operands:
        return (torch.cat([w.dequantize(torch.bfloat16) for w in weights]),)

    def launch(self, layer: BenchLayer, x: Tensor, operands: Operands) -> Tensor:
        out = torch.matmul(x, operands[0].mT)
        return self._silu_and_mul(out) if layer.gate_up else out

    def seen(self, x: Tensor) -> Tensor:
        return x


def make_contender(name: str, device: torch.device, silu_and_mul: SiluAndMul) -> Contender:
    """Make the contender ``name``; all but ours apply ``silu_and_mul`` to gate and up.

    Raises:
        Unavailable: this machine lacks the contender.
    """
    if name == "marlin":
        return Marlin(device, silu_and_mul)
    if name == "humming":
        return Humming(silu_and_mul)
    if name == "bf16":
        return CublasBf16(silu_and_mul)
    if name == "fp8":
        return TorchFp8(silu_and_mul)
    capability = torch.cuda.get_device_capability(device)
    if name == "w4a8":
        if capability == (9, 0):
            return OursW4A8()
        raise Unavailable("kernels for FP8 tokens are for sm_90")
    if capability == (9, 0):
        return OursW4A16()
    if capability == (10, 0):
        return OursW4A4(device)
    raise Unavailable(
        f"there are kernels for sm_90 and sm_100, this GPU is sm_{capability[0]}{capability[1]}"
    )


def vllm_silu_and_mul() -> SiluAndMul:
    """SiLU-and-multiply by vLLM's CUDA op, over a row's two halves.

    Raises:
        Unavailable: vLLM is missing or lacks the op.
    """
    try:
        import_module("vllm._custom_ops")  # registers the op
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise Unavailable(f"vLLM cannot be imported ({_first_line(error)})") from error
    if not hasattr(torch.ops._C, "silu_and_mul"):
        raise Unavailable("this vLLM has no op silu_and_mul")

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return out

    return silu_and_mul


def torch_silu_and_mul(gate_up: Tensor) -> Tensor:
    """SiLU-and-multiply by torch, in two launches."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _alpha(layer: BenchLayer, weights: tuple[Nvfp4Tensor, ...], input_scale: float) -> Tensor:
    """Factors of the product, weight's global scale · ``input_scale``; float32.

    There is one factor per shard; for gate and up, one for each of the two.
    """
    factors = 2 if layer.gate_up else len(layer.shard_sizes)
    return (weights[0].global_scale * input_scale).repeat(factors)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
