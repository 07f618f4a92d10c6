"""Contenders for a layer of experts: our kernels, vLLM's Humming and vLLM's Marlin."""

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from examples.kernel_bench.contenders import Unavailable
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.formats.fragments import Fragments, to_fragments
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, choose_tile_tokens
from nvfp4_kernels.gemm.sm90.launch_grouped import grouped_gemm, grouped_silu_mul_gemm
from nvfp4_kernels.moe import Ids, moe_combine, moe_dispatch

CONTENDERS = ("ours", "humming", "marlin")
_MOE = "vllm.model_executor.layers.fused_moe"
_UTILS = "vllm.model_executor.layers.quantization.utils"


class ExpertWeights(NamedTuple):
    """NVFP4 weights of one layer's local experts, as a checkpoint has them.

    The layer has ``held`` local experts, hidden size h and intermediate size i.

    Attributes:
        w13: codes ``(held, 2, i, h / 2)`` uint8, gate before up.
        w13_scales: ``(held, 2, i, h / 16)`` E4M3.
        w2: codes ``(held, h, i / 2)`` uint8.
        w2_scales: ``(held, h, i / 16)`` E4M3.
        global_scales: global scale of w13 and of w2, each shared by all experts.
    """

    w13: Tensor
    w13_scales: Tensor
    w2: Tensor
    w2_scales: Tensor
    global_scales: tuple[float, float]


class Choice(NamedTuple):
    """The router's choice: ``ids`` int32 and ``weights`` float32, both ``(M, top_k)``.

    ``expert_map`` gives each expert's local index or -1, int32; None if all experts are local.
    """

    ids: Tensor
    weights: Tensor
    expert_map: Tensor | None


class ExpertContender(Protocol):
    """One implementation of a layer of experts."""

    def operands(self, weights: ExpertWeights) -> Any:
        """The layer's weights in this contender's format; prepared once, at load."""

    def launch(self, operands: Any, choice: Choice, x: Tensor) -> Tensor:
        """Sum of the chosen experts' weighted results for tokens ``x``: bfloat16 ``(M, h)``."""


class _OurOperands(NamedTuple):
    w13: Fragments
    w2: Fragments
    alphas: tuple[Tensor, Tensor]


class Ours:
    """Our grouped kernels for sm_90, launched as in the plugin."""

    def __init__(self, sizes: ExpertSizes) -> None:
        self._sizes = sizes

    def operands(self, weights: ExpertWeights) -> _OurOperands:
        held, scales = self._sizes.held, weights.global_scales
        return _OurOperands(
            to_fragments(weights.w13, weights.w13_scales),
            to_fragments(weights.w2, weights.w2_scales),
            (
                torch.full((held, 2), scales[0], device="cuda"),
                torch.full((held,), scales[1], device="cuda"),
            ),
        )

    def launch(self, operands: _OurOperands, choice: Choice, x: Tensor) -> Tensor:
        h, i, held, total, _ = sizes = self._sizes
        tile_tokens = choose_tile_tokens(x.device, len(x), choice.ids.shape[1], sizes)
        tiles = moe_dispatch(x, Ids(choice.ids, held, tile_tokens, choice.expert_map))
        a, routing = tiles.data, tiles.routing
        w13, w2, alphas = operands
        first = GroupedGemmCall(
            a, None, routing.groups, *w13, alphas[0], None, None, i, SILU, x.dtype,
            global_experts=total,
        )  # fmt: skip
        hidden, _ = grouped_silu_mul_gemm(first)
        second = GroupedGemmCall(
            hidden, None, routing.groups, *w2, alphas[1], None, None, h, None, x.dtype,
            routed_before=True, global_experts=total,
        )  # fmt: skip
        out, _ = grouped_gemm(second)
        return moe_combine(out, routing.rows, choice.weights)


class Marlin:
    """vLLM's Marlin kernels, prepared and called as in vLLM."""

    def __init__(self, sizes: ExpertSizes) -> None:
        """Raise Unavailable if vLLM is missing or lacks these kernels."""
        try:
            self._fp4: Any = import_module(f"{_UTILS}.marlin_utils_fp4")
            self._moe: Any = import_module(f"{_MOE}.experts.marlin_moe")
            scalar_types: Any = import_module("vllm.scalar_type").scalar_types
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise Unavailable(f"vLLM cannot be imported ({error})") from error
        self._sizes, self._type = sizes, scalar_types.float4_e2m1f.id

    def operands(self, weights: ExpertWeights) -> tuple[Tensor, ...]:
        h, i, held, _, _ = self._sizes
        layer = SimpleNamespace(
            num_experts=held,
            hidden_size=h,
            intermediate_size_per_partition=i,
            params_dtype=torch.bfloat16,
        )
        of_w13, of_w2 = (torch.full((held,), s, device="cuda") for s in weights.global_scales)
        w13, w13_scales = weights.w13.flatten(1, 2), weights.w13_scales.flatten(1, 2)
        prepared: tuple[Tensor, ...] = self._fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer, w13, w13_scales, of_w13, weights.w2, weights.w2_scales, of_w2,
            is_act_and_mul=True,
        )  # fmt: skip
        return prepared

    def launch(self, operands: tuple[Tensor, ...], choice: Choice, x: Tensor) -> Tensor:
        w13, w13_scales, of_w13, w2, w2_scales, of_w2 = operands
        result: Tensor = self._moe.fused_marlin_moe(
            x, w13, w2, None, None, w13_scales, w2_scales, choice.weights, choice.ids, self._type,
            global_scale1=of_w13, global_scale2=of_w2, global_num_experts=self._sizes.total,
            expert_map=choice.expert_map,
        )  # fmt: skip
        return result


class Humming:
    """Humming's kernels, which vLLM prefers to Marlin on a Hopper, prepared and called by vLLM."""

    def __init__(self, sizes: ExpertSizes, top_k: int) -> None:
        """Raise Unavailable if vLLM or Humming is missing."""
        try:
            self._utils: Any = import_module(f"{_UTILS}.humming.moe")
            self._activation: Any = import_module(f"{_MOE}.activation").MoEActivation.SILU
            config: Any = import_module(f"{_MOE}.config")
            keys: Any = import_module(f"{_UTILS}.quant_utils")
            self._vllm: Any = import_module("vllm.config")
            self._context: Any = import_module("vllm.forward_context").set_forward_context
            workspace: Any = import_module("vllm.v1.worker.workspace")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise Unavailable(f"vLLM cannot be imported ({error})") from error
        if not self._utils.has_humming():
            raise Unavailable("there is no Humming; pip install 'humming-kernels[cu13]'")
        workspace.init_workspace_manager(torch.device("cuda"))
        h, i, held, total, _ = sizes
        parallel = config.FusedMoEParallelConfig.make_no_parallel()
        if held < total:
            parallel = dataclasses.replace(parallel, ep_size=total // held, use_ep=True)
        self._total, self._engine = total, self._vllm.VllmConfig()
        with self._vllm.set_current_vllm_config(self._engine):
            self._config = config.FusedMoEConfig(
                num_experts=total,
                experts_per_token=top_k,
                hidden_dim=h,
                intermediate_size=i,
                num_local_experts=held,
                num_logical_experts=total,
                activation=self._activation,
                device="cuda",
                routing_method=config.RoutingMethodType.Renormalize,
                moe_parallel_config=parallel,
                in_dtype=torch.bfloat16,
            )
            self._class = self._utils.select_humming_moe_experts(
                self._config, keys.kNvfp4Static, keys.kNvfp4Dynamic
            )
        if self._class is None:
            raise Unavailable(f"vLLM has no kernels of Humming for {sizes}")

    def operands(self, weights: ExpertWeights) -> tuple[Any, Any]:
        layer: Any = torch.nn.Module()
        layer.moe_config = self._config
        layer.params_dtype = torch.bfloat16
        layer.layer_name = "experts"
        held = self._config.num_local_experts
        parts = {
            "w13_weight": weights.w13.flatten(1, 2),
            "w13_weight_scale": weights.w13_scales.flatten(1, 2),
            "w13_weight_scale_2": torch.full((held, 2), weights.global_scales[0], device="cuda"),
            "w2_weight": weights.w2,
            "w2_weight_scale": weights.w2_scales,
            "w2_weight_scale_2": torch.full((held,), weights.global_scales[1], device="cuda"),
        }
        for name, part in parts.items():
            setattr(layer, name, torch.nn.Parameter(part, requires_grad=False))
        with self._vllm.set_current_vllm_config(self._engine):
            self._utils.convert_to_humming_moe_kernel_format(
                layer, quant_config={"quant_method": "modelopt", "quant_algo": "nvfp4"}
            )
            quantization = self._utils.get_humming_moe_quant_config(layer)
            kernel = self._utils.make_humming_moe_kernel(quantization, self._config, self._class)
        return layer, kernel

    def launch(self, operands: tuple[Any, Any], choice: Choice, x: Tensor) -> Tensor:
        layer, kernel = operands
        with self._context(None, self._engine):
            result: Tensor = kernel.apply(
                x,
                layer.w13_weight,
                layer.w2_weight,
                choice.weights,
                choice.ids,
                self._activation,
                self._total,
                choice.expert_map,
                False,
            )
        return result


def make_contenders(
    names: Sequence[str], sizes: ExpertSizes, top_k: int
) -> dict[str, ExpertContender]:
    """Contenders ``names`` that this machine has; prints each missing contender with the reason."""
    made: dict[str, ExpertContender] = {}
    for name in names:
        try:
            made[name] = _make(name, sizes, top_k)
        except Unavailable as missing:
            print(f"{name} is left out: {missing}")
    return made


def _make(name: str, sizes: ExpertSizes, top_k: int) -> ExpertContender:
    if name == "humming":
        return Humming(sizes, top_k)
    return Marlin(sizes) if name == "marlin" else Ours(sizes)
