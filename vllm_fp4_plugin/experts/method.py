"""Method of a layer of NVFP4 experts on CPU: the reference, in torch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from nvfp4_kernels.nvfp4 import BLOCK_SIZE, GLOBAL_RANGE, to_blocked
from vllm_fp4_plugin import weights
from vllm_fp4_plugin.experts.arithmetic import ACTIVATIONS, GATED, Experts
from vllm_fp4_plugin.experts.ledger import ExpertLedger, nvfp4_forms
from vllm_fp4_plugin.experts.op import experts
from vllm_fp4_plugin.formats import CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.startup import Startup


class Nvfp4ExpertsMethod(FusedMoEMethodBase):
    """Method of a layer of experts whose checkpoint holds NVFP4 weights.

    Gate and up keep a global scale each. Inputs are quantised once for all experts of the layer,
    with the largest of their scales, which saturates nothing; what goes into the second product,
    with the expert's own.

    Args:
        startup: told when the weights are in place.
        layer: vLLM's layer of routed experts.
        prefix: its name.
        checkpoint: content of the checkpoint's config.
        weight_only: activations stay in 16 bits.

    Attributes:
        ledger: account of what was loaded.

    Raises:
        UnsupportedCheckpoint: the layer does what the reference does not.
    """

    def __init__(
        self,
        startup: Startup,
        layer: Any,
        prefix: str,
        checkpoint: CheckpointConfig,
        *,
        weight_only: bool,
    ) -> None:
        super().__init__(layer.moe_config)
        self.startup = startup
        self.prefix = prefix
        self.checkpoint = checkpoint
        self.weight_only = weight_only
        self._check_served(layer)
        self.ledger = ExpertLedger(layer, prefix)

    def _check_served(self, layer: Any) -> None:
        config, name = self.moe, self.prefix
        activation = config.activation.value
        if activation not in ACTIVATIONS or (activation in GATED) != config.is_act_and_mul:
            raise UnsupportedCheckpoint(
                f"{name}: its activation is {activation}, must be {', '.join(ACTIVATIONS)} on CPU; "
                "serve the model on a GPU"
            )
        grouped = layer.use_grouped_topk or layer.custom_routing_function is not None
        biased = layer.e_score_correction_bias is not None
        plain = layer.scoring_func == "softmax" and not biased
        if not (grouped or plain or layer.scoring_func == "sqrtsoftplus"):
            raise UnsupportedCheckpoint(
                f"{name}: its router scores experts by {layer.scoring_func}"
                f"{' with a bias' if biased else ''} and without groups, which vLLM's router on "
                "CPU does not, must be softmax without a bias, or in groups; serve the model on a "
                "GPU"
            )
        if config.has_bias:
            raise UnsupportedCheckpoint(
                f"{name}: its experts have biases, which must not be on CPU; serve it on a GPU"
            )
        if config.is_lora_enabled:
            raise UnsupportedCheckpoint(
                f"{name}: LoRA is enabled, must not be for NVFP4 experts; leave out --enable-lora"
            )
        for which, size in (
            ("H", config.hidden_dim),
            ("I on a rank", config.intermediate_size_per_partition),
        ):
            if size % BLOCK_SIZE:
                raise UnsupportedCheckpoint(
                    f"{name}: {which} is {size}, must be a multiple of {BLOCK_SIZE}; use a smaller "
                    "--tensor-parallel-size, or --enable-expert-parallel"
                )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the tensors as vLLM calls the checkpoint's: ``w13_`` or ``w2_``, then its name.

        Input scales of the first product are those of every rank's experts.
        """
        names, e = self.checkpoint.names, num_experts
        h, i, s = hidden_size, intermediate_size_per_partition, len(self.ledger.shards)
        load = self.ledger.loader(self._load)
        for name, form in nvfp4_forms(names).items():
            # A checkpoint may carry input scales that are not used; they are read nevertheless.
            if not (name == names.input_global and self.weight_only):
                self.ledger.expect(name, form)
            columns_per = form.columns_per
            w13: tuple[int, ...] = (e, s)
            w2: tuple[int, ...] = (e,)
            if columns_per is not None:
                w13, w2 = (e, s, i, h // columns_per), (e, h, i // columns_per)
            elif name == names.input_global:
                w13 = (extra_weight_attrs["global_num_experts"], s)
            for part, shape in (("w13", w13), ("w2", w2)):
                data = torch.empty(shape, dtype=form.dtype)
                if columns_per is None:
                    data.fill_(torch.nan)  # so that what was never loaded cannot pass for a scale
                parameter = Parameter(data, requires_grad=False)
                parameter.weight_loader = load  # type: ignore[attr-defined]
                layer.register_parameter(f"{part}_{name}", parameter)
        self._locally = layer._map_global_expert_id_to_local_expert_id

    def _load(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool,
    ) -> bool | None:
        """Take this rank's part of a tensor; see ``RoutedExperts.weight_loader``."""
        row = self._locally(expert_id)
        everywhere = shard_id != "w2" and len(param) == self.moe.num_experts
        if everywhere and weight_name.endswith(self.checkpoint.names.input_global):
            row = expert_id  # quantising is the same on every rank
        if row < 0:
            return False if return_success else None
        place = param.data[row]
        if shard_id != "w2":
            place = place[self.ledger.shards.index(shard_id)]
        if place.ndim == 0:
            loaded_weight = loaded_weight.reshape(())
        else:
            dim = 1 if shard_id == "w2" else 0
            size = place.shape[dim]
            loaded_weight = loaded_weight.narrow(dim, self.moe.tp_rank * size, size)
        place.copy_(loaded_weight)
        return True if return_success else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded, and bring it to the form that the reference takes."""
        names = self.checkpoint.names
        if not hasattr(layer, f"w13_{names.weight_global}"):
            return  # done already
        order = (names.weight, names.block_scale, names.weight_global, names.input_global)
        keys = [f"{part}_{name}" for part in ("w13", "w2") for name in order]
        loaded = {key: getattr(layer, key).data for key in keys}
        if get_current_vllm_config().load_config.load_format == "dummy":
            _fill_dummy(loaded.values())
        else:
            self.ledger.check_complete()
        for key in keys:
            delattr(layer, key)
        tensors: dict[str, Tensor | None] = {"w13_input": None, "w2_input": None}
        for part in ("w13", "w2"):
            data, scales, weight_global, input_global = (loaded[f"{part}_{n}"] for n in order)
            for row, codes in enumerate(data):
                where = f"{self.prefix}, {part} of expert {row} of this rank"
                flat = (scales[row].flatten(0, -2), codes.flatten(0, -2))
                weights.check_block_scales(where, names.block_scale, *flat)
            tensors[f"{part}_weight"] = data
            tensors[f"{part}_weight_scale"] = to_blocked(scales)
            tensors[f"{part}_weight_global"] = self._factors(
                part, names.weight_global, weight_global
            )
            if not self.weight_only:
                factors = self._factors(part, names.input_global, input_global)
                tensors[f"{part}_input"] = factors.max() if part == "w13" else factors
        for name, tensor in tensors.items():
            value = None if tensor is None else Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, value)
        self.startup.loaded(self.prefix, layer.w13_weight.device)

    def _factors(self, part: str, name: str, stored: Tensor) -> Tensor:
        """Global scales as factors, whichever way the checkpoint stores them."""
        for row, values in enumerate(stored):
            weights.check_globals(f"{self.prefix}, {part} of expert {row}", name, values)
        return stored.reciprocal() if self.checkpoint.format.reciprocal else stored

    def held(self, layer: Any) -> Experts:
        """Weights of a layer that has been loaded."""
        return Experts(
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_global,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_global,
            layer.w13_input,
            layer.w2_input,
        )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: that is for vLLM's kernels."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Compute the routed experts' sum; shared experts are vLLM's to run."""
        return experts(
            x, topk_weights, topk_ids, layer.expert_map, *self.held(layer),
            layer.activation.value, layer.swiglu_limit,
            1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha,
            layer.swiglu_beta or 0.0, layer.apply_router_weight_on_input,
        )  # fmt: skip


def _fill_dummy(tensors: Any) -> None:
    """Fill tensors for ``--load-format dummy``, whose own random values are no valid scales."""
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif tensor.dtype == torch.float32:
            tensor.fill_(1.0 / GLOBAL_RANGE)
        else:
            tensor.copy_(torch.ones_like(tensor, dtype=torch.float32))
