"""Method of a layer of 16-bit experts, quantised at load."""

from itertools import product
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.experts.base import ExpertsMethod, ranks_of
from vllm_fp4_plugin.experts.ledger import ExpertLedger
from vllm_fp4_plugin.experts.stacks import DOWN
from vllm_fp4_plugin.experts.weights import StoredExperts
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear.online import quantize
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.startup import Startup

_WEIGHT = "weight"


class Nvfp4OnlineExpertsMethod(ExpertsMethod):
    """Method of a layer of 16-bit experts, quantised once all of the layer's weights are loaded.

    Weights start on the meta device and exist in 16 bits for one layer at a time. Every matrix has
    its own global scale; inputs of both GEMMs have a scale per token, or stay in 16 bits.

    Args:
        startup: see the base class.
        options: options of the user.
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        terms: see the base class.

    Raises:
        UnsupportedCheckpoint, NoKernelError: see the base class.
    """

    uses_meta_device = True

    def __init__(
        self,
        startup: Startup,
        options: Options,
        layer: Any,
        prefix: str,
        terms: RequestedTerms | None = None,
    ) -> None:
        if layer.moe_config.has_bias:
            # Only gpt-oss has biases; vLLM copies its stacks without calling a loader.
            raise UnsupportedCheckpoint(
                f"{prefix}: its experts have biases, must have none to be quantised at load; "
                "quantise the checkpoint first"
            )
        super().__init__(startup, options, layer, prefix, "per-token", terms)
        self._rule = options.scales
        # vLLM quantises once this rank's experts have arrived, and then loads no more tensors.
        self.ledger = ExpertLedger(layer, prefix, only_held=True)

    @property
    def _ranks_agree(self) -> bool:
        return self.moe.ep_size == 1  # else each rank quantises when its own experts have arrived

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the 16-bit weights on the meta device."""
        e, h, i, s = num_experts, hidden_size, intermediate_size_per_partition, self.ledger.shards
        load = self.ledger.loader(self._load)
        self.ledger.expect(_WEIGHT)
        for part, shape in (("w13", (e, len(s), i, h)), ("w2", (e, h, i))):
            data = torch.empty(shape, dtype=params_dtype, device="meta")
            parameter = Parameter(data, requires_grad=False)
            parameter.weight_loader = load  # type: ignore[attr-defined]
            layer.register_parameter(f"{part}_{_WEIGHT}", parameter)
        self._locally = layer._map_global_expert_id_to_local_expert_id
        if torch.get_default_device().type != "meta":  # on meta, no values to process
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise each matrix with its own global scale, then convert to the kernels' layout."""
        if layer.w13_weight.dtype == torch.uint8:
            return  # converted already
        if get_current_vllm_config().load_config.load_format != "dummy":
            self.ledger.check_complete()
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        del layer.w13_weight, layer.w2_weight
        first, second = self._quantized("w13", w13), self._quantized("w2", w2)
        del w13, w2
        self.install(layer, StoredExperts(*first, *second, None, None))
        for parameter in (layer.w13_weight, layer.w2_weight):
            parameter.weight_loader = _lay_aside

    def _quantized(self, part: str, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise weights of ``part``: for ``"w13"`` ``(E, S, N, K)``, for ``"w2"`` ``(E, N, K)``.

        Returns:
            Data, block scales in linear layout, and global scales as factors, one per matrix.
        """
        matrices = weights.flatten(0, -3)
        amax = torch.stack([matrix.abs().amax() for matrix in matrices]).float()
        if self.moe.tp_size > 1:
            # Every rank holds a part of each matrix; the scale is that of the whole matrix.
            group = ranks_of(self.moe).device_group
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
        shards = self.ledger.shards if part == "w13" else (DOWN,)
        held = product(range(len(weights)), shards)
        each = [
            quantize(
                self.ledger.source(_WEIGHT, *which), matrix, scale, self._rule, self.plan.inputs
            )
            for which, matrix, scale in zip(held, matrices, amax, strict=True)
        ]
        parts = zip(
            *((q.data, q.scales.view(torch.uint8), q.global_scale) for q in each), strict=True
        )
        data, scales, factors = (
            torch.stack(tensors).unflatten(0, weights.shape[:-2]) for tensors in parts
        )
        return data, scales.view(torch.float8_e4m3fn), factors


def _lay_aside(*_args: Any, return_success: bool = False, **_named: Any) -> bool | None:
    """Ignore a weight of another rank's expert that arrives after this rank has quantised."""
    return False if return_success else None
