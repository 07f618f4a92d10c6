"""Base class of the methods that run layers of experts on our kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.precompile.experts_layer import Experts, padded_width
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.device import is_for_no_device
from vllm_fp4_plugin.experts.ledger import ExpertLedger
from vllm_fp4_plugin.experts.op import KernelExperts, experts, routed_experts
from vllm_fp4_plugin.experts.plan import (
    ExpertsPlan,
    activation_of,
    cpu_unsupported_reason,
    is_on_cpu,
    make_plan,
    unsupported_reason,
)
from vllm_fp4_plugin.experts.router import choice_of, padding
from vllm_fp4_plugin.experts.stacks import copy_part
from vllm_fp4_plugin.experts.weights import StoredExperts, kernel_experts
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import Activation, Options
from vllm_fp4_plugin.plan import hash_kernels
from vllm_fp4_plugin.startup import Startup
from vllm_fp4_plugin.warmup import ExpertsLayer

_PARAMETERS = {
    "w13": "w13_weight",
    "w13_scale": "w13_weight_scale",
    "w13_alpha": "w13_alpha",
    "w2": "w2_weight",
    "w2_scale": "w2_weight_scale",
    "w2_alpha": "w2_alpha",
    "w13_input": "w13_input",
    "w2_input": "w2_input",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


class ExpertsMethod(FusedMoEMethodBase):
    """Method of a layer of NVFP4 experts.

    Gate and up keep separate global scales. With static scales, inputs of gemm1 are quantised once
    for all experts, by the largest of the experts' input scales, so that no value saturates, and
    inputs of gemm2 by the expert's own scale. Otherwise each token has its own scale in both GEMMs,
    or activations stay in 16 bits.

    Args:
        startup: records the layer's kernels, and when the weights are in place.
        options: options of the user.
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        inputs: requested quantization of the inputs of both GEMMs; ``plan`` has the chosen one.
        terms: number of NVFP4 terms that the user requested for these inputs; None: no request.

    Attributes:
        plan: kernels of the layer.
        ledger: account of the loaded tensors.

    Raises:
        UnsupportedCheckpoint: the layer needs a feature that the kernels lack.
        NoKernelError: this device has no such kernels.
    """

    ledger: ExpertLedger
    _locally: Callable[[int], int]  # row of an expert of this rank

    def __init__(
        self,
        startup: Startup,
        options: Options,
        layer: Any,
        prefix: str,
        inputs: Activation,
        terms: RequestedTerms | None,
    ) -> None:
        super().__init__(layer.moe_config)
        self.startup = startup
        self.prefix = prefix
        why_not = unsupported_reason(layer)
        if why_not is None and is_on_cpu() and not is_for_no_device():
            why_not = cpu_unsupported_reason(layer)
        if why_not is not None:
            raise UnsupportedCheckpoint(f"{prefix}: {why_not}")
        gated = self.moe.is_act_and_mul
        choice, why_not = choice_of(layer)
        plan = make_plan(
            activation_of(layer), gated=gated, inputs=inputs, requested=terms,
            option=options.activation, choice=choice,
        )  # fmt: skip
        reason = "; ".join(filter(None, (plan.reason, why_not)))
        self.plan: ExpertsPlan = replace(plan, reason=reason)
        self._i: int = self.moe.intermediate_size_per_partition
        self.startup.require_kernels(prefix, self._layer(layer))
        targets = filter(None, self.plan.targets)
        hash_kernels(get_current_vllm_config(), targets, self.plan.terms, options)

    @property
    def _sizes(self) -> ExpertSizes:
        moe, width = self.moe, padded_width(self._i, self.plan.first.arch)
        held, total = moe.num_local_experts, moe.num_experts
        return ExpertSizes(moe.hidden_dim, width, held, total, self.plan.gated)

    def _layer(self, layer: Any) -> ExpertsLayer | None:
        """Key of the layer's kernels for warmup; None on CPU, whose kernels are not compiled."""
        plan = self.plan
        if plan.first.arch == "cpu":
            return None
        sizes = self._sizes
        # Layers are built with bfloat16 or float16 alone, the names of a Dtype.
        dtype: Any = dtype_name(self.moe.in_dtype)
        experts = Experts(
            sizes, self.moe.experts_per_token, plan.activation, dtype, plan.inputs,
            plan.terms,
            mapped=sizes.total if sizes.held < sizes.total else 0,  # map of the ranks
            bias=self.moe.has_bias,
            weight_on_input=layer.apply_router_weight_on_input,
            choice=plan.choice,
        )  # fmt: skip
        return ExpertsLayer(plan.first.arch, experts)

    def _load(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool,
    ) -> bool | None:
        """Copy this rank's part of a tensor; see vLLM's ``RoutedExperts.weight_loader``.

        With ``return_success``, return whether the expert is on this rank; otherwise None.
        """
        row = self._row(param, weight_name, shard_id, expert_id)
        if row >= 0:
            copy_part(param.data[row], loaded_weight, shard_id, self.ledger.shards, self.moe)
        return (row >= 0) if return_success else None

    def _row(self, param: Tensor, name: str, shard_id: str, expert_id: int) -> int:
        """Row of ``param`` for an expert's tensor; -1 for experts of other ranks."""
        return self._locally(expert_id)

    def install(self, layer: Any, stored: StoredExperts) -> None:
        """Convert experts for the kernels, and register the tensors that the forward pass reads."""
        for name, tensor in kernel_experts(stored, self.plan)._asdict().items():
            value = None if tensor is None else Parameter(tensor, requires_grad=False)
            layer.register_parameter(_PARAMETERS[name], value)
        self.startup.loaded(self.prefix, layer.w13_weight.device)

    def held(self, layer: Any) -> KernelExperts:
        """Tensors that ``install`` registered in a layer."""
        return KernelExperts(*(getattr(layer, name) for name in _PARAMETERS.values()))

    @property
    def is_monolithic(self) -> bool:
        """Whether our kernels, and not vLLM, choose experts from the router's logits."""
        return self.plan.choice is not None

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Quantization config for vLLM's kernels: none, as this method calls our kernels."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Compute the weighted sum of this rank's routed experts; vLLM runs shared experts."""
        plan = self.plan
        return experts(
            x, topk_weights, topk_ids, layer.expert_map, *self.held(layer), self._sizes[:4],
            plan.targets,
            plan.inputs != "16-bit", plan.terms, *plan.activation,
            layer.apply_router_weight_on_input,
        )  # fmt: skip

    def apply_monolithic(
        self,
        layer: Any,
        x: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Choose each token's experts from the router's logits; then compute as ``apply`` does."""
        plan = self.plan
        assert plan.choice is not None
        return routed_experts(
            x, router_logits, layer.e_score_correction_bias, padding(router_logits),
            layer.expert_map, *self.held(layer), self._sizes[:4], plan.targets,
            plan.inputs != "16-bit", plan.terms, *plan.activation, *plan.choice.router,
        )  # fmt: skip
