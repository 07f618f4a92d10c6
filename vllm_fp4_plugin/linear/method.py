"""Base of the linear methods of ``nvfp4-tc``: the plan of a layer, its fusions and its product."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearMethodBase

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.gemm.arguments import A16_DTYPES
from nvfp4_kernels.gemm.kernels import KERNELS as GEMM_KERNELS
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS as SILU_MUL_GEMM_KERNELS
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin import kernel_weight as weights
from vllm_fp4_plugin.arithmetic.choice import Choice, choose_kernels, not_fp8
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.checkpoint import completeness
from vllm_fp4_plugin.fusion import attention
from vllm_fp4_plugin.fusion import gate_up as fused_mlp
from vllm_fp4_plugin.fusion.match_norm import NormMatch
from vllm_fp4_plugin.linear import fusions, limits
from vllm_fp4_plugin.linear.folded_weight import folded_weight, folds_no_longer, why_not
from vllm_fp4_plugin.ops.linear import linear
from vllm_fp4_plugin.ops.operands import Input, QuantizedInput, Unreduced, operand, shaped
from vllm_fp4_plugin.options import Activation, Options
from vllm_fp4_plugin.plan import LinearPlan, hash_kernels, product_of
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.startup import Startup


class Nvfp4LinearBase(LinearMethodBase):
    """Base of the methods for layers quantised on disk and layers quantised at load.

    Args:
        startup: notified of the layer's plan, and when its weights are in place.
        options: options of the user.
        prefix: name of the layer.
        activation: quantization of the layer's input.
        terms: number of terms that the user requested for the layer's input; None: no request.
    """

    # vLLM makes one method per layer, so decisions about the layer are stored here.
    plan: LinearPlan
    reason: str = ""  # for the layer's scheme
    # Kernels of a gate and up projection that is fused but runs as two GEMMs.
    apart: tuple[str, str | None] | None = None

    def __init__(
        self,
        startup: Startup,
        options: Options,
        prefix: str,
        activation: Activation,
        terms: RequestedTerms | None,
    ) -> None:
        self.startup = startup
        self.options = options
        self.prefix = prefix
        self.activation: Activation = activation
        self.terms = terms
        self._owners: list[Module] = []  # innermost first; until ``resolve_fusions``
        self._is_resolved = False
        self.feeders: list[Any] = []  # layers that quantise their results for this layer
        self._consumer: Any = None  # layer that takes the result quantised
        self._norm: NormMatch | None = None  # norm that quantises for this layer
        self._hands_on_part = False  # the next norm all-reduces the result
        self._unfused: str | None = ""  # as last passed to ``_plan``
        self._why_not_fp8 = not_fp8(prefix)
        self._is_in_use = False  # whether a folded weight has been loaded

    def make_plan(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
    ) -> LinearPlan:
        """Check that the layer can be served, and plan it; ``resolve_fusions`` may change the plan.

        Raises:
            UnsupportedCheckpoint: the load format, or the layer's dtype, sizes or quantization, is
                not supported.
            BatchInvarianceRefused: see ``batch_invariance.check_terms``.
        """
        completeness.check_load_format(get_current_vllm_config().load_config.load_format)
        limits.check_layer(self.prefix, layer, input_size_per_partition, params_dtype)
        unfused = fused_mlp.unsupported_reason(layer, self.prefix, self.options)
        self._owners = fused_mlp.builders(layer)
        return self._plan(
            layer, input_size_per_partition, list(output_partition_sizes), params_dtype, unfused
        )

    def resolve_fusions(self, layer: Any) -> None:
        """Resolve a layer's fusions, once the modules around the layer are fully constructed.

        The fusions are: SiLU-mul fused into the gate and up projection, with the result perhaps
        quantised for the next layer; a norm or attention that quantises its result for this layer;
        and attention in the same module that rotates queries and keys.
        """
        if self._is_resolved:
            return
        self._is_resolved = True
        owners, self._owners = self._owners, []
        if self.plan.gate_up:
            self._resolve_gate_up(owners, layer)
        if self.plan.quantizer is not None:
            self._norm = fusions.fuse_norm(self, layer, owners)
        attention.resolve_fusions(owners, layer, self.plan, self.startup.report, self.options)

    def _resolve_gate_up(self, owners: list[Module], layer: Any) -> None:
        owner = owners[0] if owners else None
        unfused = fused_mlp.owner_unsupported_reason(owner, layer)
        handed_over = ""
        if unfused is None:
            self._consumer, handed_over = fusions.consumer_of(self, layer, owner)
        if self._consumer is not None:
            self._consumer.quant_method.feeders.append(layer)
        if unfused is not None or handed_over:
            self._replan(layer, unfused, handed_over)

    def _replan(self, layer: Any, unfused: str | None, handed_over: str) -> None:
        """Plan the layer again; arguments are as for ``_plan``."""
        k, sizes = self.plan.k, self.plan.shard_sizes
        self.plan = self._plan(layer, k, sizes, layer.params_dtype, unfused, handed_over)

    def keep_16_bits(self, layer: Any, reason: str) -> None:
        """Plan a layer that was to take FP8 for 16-bit activations, and undo fusions for FP8.

        Args:
            layer: the layer, whose fusions are resolved.
            reason: reason for the report.
        """
        self._why_not_fp8 = f"activations stay 16-bit: {self.prefix}: {reason}"
        if self._norm is not None:
            fusions.unfuse_norm(self, self._norm)
            self._norm = None
        name = self.prefix.rpartition(".")[2]
        for feeder in self.feeders:
            feeder.quant_method.keep_result(feeder, f"result in 16 bits: {name} takes 16 bits")
        self.feeders.clear()
        note = fusions.ONLY_FP8_WRITES_FP8 if self._consumer is not None else ""
        self.keep_result(layer, note)
        hash_kernels(get_current_vllm_config(), (self._why_not_fp8,), 1, self.options)

    def keep_result(self, layer: Any, note: str) -> None:
        """Plan a layer whose result, if fused with SiLU-mul, is not quantised for the next layer.

        ``note``: the reason, for the report.
        """
        self._consumer = None
        self._replan(layer, self._unfused, note)

    def choose(self, table: KernelTable) -> Choice:
        """Choose the layer's kernels, with a product of ``table``."""
        return choose_kernels(
            table,
            self.activation,
            self.terms,
            option=self.options.activation,
            why_not_fp8=self._why_not_fp8,
            batch_invariant=batch_invariance.is_wanted(),
        )

    def _plan(
        self,
        layer: Any,
        k: int,
        sizes: list[int],
        dtype: torch.dtype,
        unfused: str | None,
        handed_over: str = "",
    ) -> LinearPlan:
        """Choose and report the layer's kernels, and record them for warmup and the compile cache.

        Args:
            layer: the layer.
            k: input elements per token on this rank.
            sizes: output widths of the shards on this rank.
            dtype: dtype of the input.
            unfused: reason not to fuse SiLU-mul into a gate and up projection, see
                ``fused_mlp.unsupported_reason``; empty for another layer; None: fuse.
            handed_over: note on the format of SiLU-mul's result, for the report.
        """
        self._unfused, gate_up = unfused, unfused is None
        table = SILU_MUL_GEMM_KERNELS if gate_up else GEMM_KERNELS
        kernel, quantizer, activation, terms, why = self.choose(table)
        batch_invariance.check_terms(self.prefix, terms, kernel.arch)
        limits.check_kernel(self.prefix, kernel, activation, k, sizes)
        reason = "; ".join(filter(None, (self.reason, why, unfused, handed_over)))
        taken = 0 if self._consumer is None else self._consumer.quant_method.plan.terms
        plan = LinearPlan(kernel, quantizer, activation, terms, sizes, k, gate_up, reason, taken)
        self.startup.report.add(self._record(plan))
        self.startup.require_kernels(self.prefix, product_of(layer, plan, dtype))
        kept = filter(None, (*plan.targets, handed_over, "w4a8" if plan.is_fp8 else ""))
        hash_kernels(get_current_vllm_config(), kept, plan.terms, self.options)
        return plan

    def _record(self, plan: LinearPlan) -> LayerRecord:
        layout, k, padded = plan.weight_layout, plan.k, plan.pads_rows
        weight_bytes = sum(
            weights.weight_bytes(n, k, layout, padded=padded) for n in plan.weight_rows
        )
        factors = sum(plan.shard_sizes) if plan.is_fp8 else len(plan.shard_sizes)
        global_bytes = 4 * factors + 4 * (plan.activation == "static")
        return LayerRecord(
            self.prefix,
            plan.kernel.label,
            plan.arithmetic,
            plan.reason,
            sum(plan.shard_sizes) * k,
            weight_bytes + global_bytes,
        )

    def kernel_weight(
        self,
        layer: Any,
        data: Tensor,
        scales: Tensor,
        weight_global: Tensor,
        input_global: Tensor | None,
    ) -> weights.KernelWeight:
        """Convert the weight to the layout of the planned kernel; see ``weights.kernel_weight``.

        If the plan is of FP8 activations, but the weight does not fold well, the layer keeps 16-bit
        activations. Ranks that share the layer decide alike.

        Raises:
            UnsupportedCheckpoint: a weight that is loaded again does not fold well.
        """
        given = data, scales, weight_global, input_global
        if self.plan.is_fp8:
            folded = folded_weight(*given, self.plan.shard_sizes, gate_up=self.plan.gate_up)
            if layer.tp_size > 1:
                torch.distributed.all_reduce(
                    folded.error, torch.distributed.ReduceOp.MAX, get_tp_group().device_group
                )
            reason = why_not(float(folded.error))
            if not reason:
                self._is_in_use = True
                return folded.weight
            if self._is_in_use:
                raise folds_no_longer(f"{self.prefix}: {reason}")
            del folded
            self.keep_16_bits(layer, reason)
        return weights.kernel_weight(
            data,
            scales,
            weight_global,
            input_global if self.plan.activation == "static" else None,
            gate_up=self.plan.gate_up,
            layout=self.plan.weight_layout,
            padded=self.plan.pads_rows,
        )

    def hand_on_part(self, layer: Any) -> None:
        """Make ``layer`` return an ``Unreduced`` partial sum, without vLLM's all-reduce."""
        self._hands_on_part = True
        layer.reduce_results = False

    def keep_part(self, layer: Any) -> None:
        """Enable vLLM's all-reduce of the layer's result again."""
        self._hands_on_part = False
        layer.reduce_results = True

    def install(self, layer: Any, weight: weights.KernelWeight) -> None:
        """Register the tensors that the layer, or the norm before the layer, reads when run."""
        norm = None if self._norm is None else self._norm.norm
        is_reduced = norm is not None and norm.feeding.reduction is not None
        scale = weight.input_scale if is_reduced else None
        tensors = {
            "weight": weight.data,
            "weight_scale": weight.scales,
            "alpha": weight.alpha,
            "input_scale": weight.input_scale,
            "input_scale_reciprocal": None if scale is None else scale.reciprocal(),
        }
        for name, tensor in tensors.items():
            if tensor is None:
                setattr(layer, name, None)
            else:
                layer.register_parameter(name, Parameter(tensor, requires_grad=False))

    def apply(
        self, layer: Any, x: Input, bias: Tensor | None = None
    ) -> "Tensor | Unreduced | fused_mlp.GateUp":
        """Run the layer's GEMM.

        Args:
            layer: the layer.
            x: bfloat16 or float16 ``(..., K)``, or a ``QuantizedInput``.
            bias: bias ``(N,)``; None: no bias.

        Returns:
            Result ``(..., N)``; ``Unreduced``, this rank's partial sum, if the next norm
            all-reduces; or, for a fused gate and up projection, a ``GateUp``, whose GEMM has yet to
            run.

        Raises:
            InvalidArgument: ``x`` has another K than the layer, a dtype other than bfloat16 and
                float16, or a quantization other than the planned one.
        """
        plan = self.plan
        if isinstance(x, QuantizedInput):
            came = "E4M3" if x.is_fp8 else f"NVFP4 of {x.terms} terms"
            fits = plan.quantizer is not None and (x.is_fp8, x.terms) == (plan.is_fp8, plan.terms)
        else:
            came, fits = dtype_name(x.dtype), x.dtype in A16_DTYPES
        if x.shape[-1] != plan.k or not fits:
            raise InvalidArgument(
                f"{self.prefix}: its input is {came} {tuple(x.shape)}, must be "
                f"bfloat16 or float16 (..., {plan.k}); convert it, or leave the layer unquantised"
            )
        if plan.gate_up:
            return fused_mlp.GateUp(
                x, layer, plan.shard_sizes[0], *plan.targets, plan.terms, self._consumer,
                plan.out_terms, self.apart,
            )  # fmt: skip
        out = linear(
            *operand(x), layer.weight, layer.weight_scale, layer.alpha, plan.shard_sizes,
            layer.input_scale, bias, *plan.targets, plan.terms, x.dtype,
        )  # fmt: skip
        out = shaped(out, x)
        return Unreduced(out, self.prefix) if self._hands_on_part else out

    def dequantize_weight(self, layer: Any) -> Tensor:
        """Decode the weight: float32 ``(N, K)``."""
        plan = self.plan
        per_row = layer.alpha if layer.input_scale is None else layer.alpha / layer.input_scale
        if not plan.is_fp8:
            sizes = torch.tensor(plan.shard_sizes, device=per_row.device)
            per_row = per_row.repeat_interleave(sizes)
        parts = (layer.weight, layer.weight_scale)
        matrices = zip(*parts, strict=True) if plan.gate_up else [parts]
        values = [
            weights.decode(data, scales, n, plan.k)
            for (data, scales), n in zip(matrices, plan.weight_rows, strict=True)
        ]
        return torch.cat(values).mul_(per_row.view(-1, 1))


def resolve_fusions(model: Module) -> None:
    """Resolve the fusions of all layers of a model whose weights are never loaded."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Nvfp4LinearBase):
            method.resolve_fusions(layer)
