"""Base class of the methods that run layers of experts on our kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.formats.folded import MAX_ROW_ERROR
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.precompile.experts_layer import Choice, Experts, padded_width
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
from vllm_fp4_plugin.experts.record import own_record
from vllm_fp4_plugin.experts.router import choice_of, padding
from vllm_fp4_plugin.experts.stacks import DOWN, copy_part
from vllm_fp4_plugin.experts.weights import StoredExperts, folded_experts, kernel_experts
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear.folded_weight import folds_no_longer, why_not
from vllm_fp4_plugin.options import METHOD, Activation, Options
from vllm_fp4_plugin.plan import hash_kernels
from vllm_fp4_plugin.startup import Startup, logger
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
    or activations stay in 16 bits. FP8 (E4M3) activations have the same scales.

    Args:
        startup: records the layer's kernels, and when the weights are in place.
        options: options of the user.
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        inputs: requested quantization of the inputs of both GEMMs; ``plan`` has the chosen one.
        terms: number of NVFP4 terms that the user requested for these inputs; None: no request.

    Attributes:
        plan: kernels of the layer.
        reason: reason for the layer's scheme, for the report.
        ledger: account of the loaded tensors.

    Raises:
        UnsupportedCheckpoint: the layer needs a feature that the kernels lack.
        NoKernelError: this device has no such kernels.
    """

    ledger: ExpertLedger
    reason: str = ""
    _is_in_use = False  # whether folded experts have been loaded
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
        self._options, self._inputs, self._terms = options, inputs, terms
        why_not = unsupported_reason(layer)
        if why_not is None and is_on_cpu() and not is_for_no_device():
            why_not = cpu_unsupported_reason(layer)
        if why_not is not None:
            raise UnsupportedCheckpoint(f"{prefix}: {why_not}")
        self._i: int = self.moe.intermediate_size_per_partition
        choice, self._why_vllm_chooses = choice_of(layer)
        self._plan(layer, choice)

    def _plan(self, layer: Any, choice: Choice | None, why_not_fp8: str = "") -> None:
        """Choose the layer's kernels, and record them for warmup and the compile cache.

        Args:
            layer: vLLM's layer of routed experts.
            choice: top-k choice of experts, if our kernels choose.
            why_not_fp8: reason why the layer cannot take FP8 activations; empty if it can.
        """
        plan = make_plan(
            activation_of(layer), gated=self.moe.is_act_and_mul, inputs=self._inputs,
            requested=self._terms, option=self._options.activation, why_not_fp8=why_not_fp8,
            choice=choice,
        )  # fmt: skip
        reason = "; ".join(filter(None, (plan.reason, self._why_vllm_chooses)))
        self.plan: ExpertsPlan = replace(plan, reason=reason)
        self.startup.require_kernels(self.prefix, self._layer(layer))
        kept = filter(None, (*plan.targets, "w4a8" if plan.is_fp8 else "", why_not_fp8))
        hash_kernels(get_current_vllm_config(), kept, plan.terms, self._options)

    def add_record(self) -> None:
        """Add the layer's kernels to the report, in place of an earlier record of the layer."""
        self.startup.report.add(own_record(self.moe, self.prefix, self.plan, self.reason))

    @property
    def _ranks_agree(self) -> bool:
        """Whether ranks convert their experts in one order, and so can decide together."""
        return True

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
        inputs: Any = f"fp8-{plan.inputs}" if plan.is_fp8 else plan.inputs
        experts = Experts(
            sizes, self.moe.experts_per_token, plan.activation, dtype, inputs,
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
        for name, tensor in self._kernel_experts(layer, stored)._asdict().items():
            value = None if tensor is None else Parameter(tensor, requires_grad=False)
            layer.register_parameter(_PARAMETERS[name], value)
        self.startup.loaded(self.prefix, layer.w13_weight.device)

    def _kernel_experts(self, layer: Any, stored: StoredExperts) -> KernelExperts:
        """Convert experts to the layout of the planned kernels.

        If the plan is of FP8 activations, but some expert does not fold well, the layer keeps
        16-bit activations: on all ranks or, unless ``_ranks_agree``, on this rank, which warns.

        Raises:
            UnsupportedCheckpoint: experts that are loaded again do not fold well.
        """
        if not self.plan.is_fp8:
            return kernel_experts(stored, self.plan)
        folded = folded_experts(stored, self.plan)
        reason = self._why_not_folded(folded.errors)
        if not reason:
            self._is_in_use = True
            return folded.experts
        if self._is_in_use:
            raise folds_no_longer(reason)
        del folded
        reason = f"activations stay 16-bit: {reason}"
        if not self._ranks_agree:
            logger.warning("%s: experts of rank %d: %s", METHOD, self.moe.ep_rank, reason)
        self._plan(layer, self.plan.choice, reason)
        self.add_record()
        return kernel_experts(stored, self.plan)

    def _why_not_folded(self, errors: Tensor) -> str:
        """Reason, with the name of the worst projection, not to fold the experts; empty if none.

        ``errors``: see ``FoldedExperts``, of this rank's experts.
        """
        moe, ledger = self.moe, self.ledger
        of_all = errors.new_zeros((moe.num_experts, errors.shape[1]))
        of_all[ledger.local_experts] = errors
        if moe.tp_size * moe.ep_size > 1 and self._ranks_agree and not self._is_in_use:
            # Not at a reload, during which ranks of other engines may be serving.
            group = ranks_of(moe).device_group
            torch.distributed.all_reduce(of_all, torch.distributed.ReduceOp.MAX, group)
        worst = int(of_all.argmax())
        reason = why_not(float(of_all.flatten()[worst]))
        if not reason:
            return ""
        shards = (*ledger.shards, DOWN)
        name = ledger.projection(worst // len(shards), shards[worst % len(shards)])
        more = int((of_all > MAX_ROW_ERROR).sum()) - 1
        return f"{name}{f' and {more} more' if more else ''}: {reason}"

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


def ranks_of(moe: Any) -> Any:
    """Group of the ranks that share a layer of experts, with vLLM's MoE config ``moe``."""
    tp = get_tp_group()
    # Data-parallel ranks, too, divide each expert or the experts.
    return tp if tp.world_size == moe.tp_size * moe.ep_size else get_ep_group()
