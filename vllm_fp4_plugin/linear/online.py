"""Linear method of ``nvfp4-tc`` for 16-bit checkpoints, quantised at load."""

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, global_scale_of
from nvfp4_kernels.formats.scale_search import ScaleRule, quantize_with_rule
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.checkpoint import completeness
from vllm_fp4_plugin.checkpoint.arrivals import Source
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear.load_ledger import full_rows
from vllm_fp4_plugin.linear.method import Nvfp4LinearBase
from vllm_fp4_plugin.linear.parameters import RowsLoader, RowsParameter
from vllm_fp4_plugin.options import Activation, Options
from vllm_fp4_plugin.startup import Startup

_REMEDY = "mend that outlier, or leave the layer unquantised with nvfp4_tc.ignore"


@register_weight_loader_v2_supported_method
class Nvfp4OnlineLinearMethod(Nvfp4LinearBase):
    """Method of a linear layer whose 16-bit weight is quantised once completely loaded.

    The weight starts on the meta device and exists in 16 bits for one layer at a time, so loading
    peaks at the quantised model plus one layer.
    """

    uses_meta_device = True

    def __init__(
        self, startup: Startup, options: Options, prefix: str, terms: RequestedTerms | None = None
    ) -> None:
        super().__init__(startup, options, prefix, "per-token", terms)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Plan the layer, and register the 16-bit weight on the meta device."""
        self.plan = self.make_plan(
            layer, input_size_per_partition, output_partition_sizes, params_dtype
        )
        self.dummy = get_current_vllm_config().load_config.load_format == "dummy"
        shape = (sum(output_partition_sizes), input_size_per_partition)
        self._rows = rows = RowsLoader(extra_weight_attrs["weight_loader"])
        weight = RowsParameter(
            data=torch.empty(shape, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            rows=rows,
            weight_loader=rows.load,
        )
        layer.register_parameter("weight", weight)
        if torch.get_default_device().type != "meta":  # on meta, no values to process
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise each shard with a global scale of its own; convert to the kernel's layout."""
        if layer.weight.dtype == torch.uint8:
            return  # converted already
        self.resolve_fusions(layer)
        self._check_complete(layer)
        shards = layer.weight.data.split(self.plan.shard_sizes)
        names = self._names(layer, len(shards))
        quantised = [self._quantize(layer, *each) for each in zip(shards, names, strict=True)]
        del layer.weight, shards
        data, scales, weight_global = kernel_weight.join_shards(quantised)
        self.install(layer, self.kernel_weight(layer, data, scales, weight_global, None))
        self.startup.loaded(self.prefix, layer.weight.device)

    def _check_complete(self, layer: Any) -> None:
        """Raise if fewer elements were loaded than the weight has.

        vLLM would accept the uninitialised memory. ``completeness`` checks loads from disk, but
        does not see a reload from another source.
        """
        # vLLM counts a bias only after a weight, and any shard has more elements than a bias.
        info, needed = get_layerwise_info(layer), layer.weight.numel()
        if info.can_load() and info.load_numel < needed and not self.dummy:
            raise UnsupportedCheckpoint(
                f"{self.prefix}.weight: {info.load_numel} of its {needed} elements came, must be "
                f"all; {completeness.INCOMPLETE}"
            )

    def _names(self, layer: Any, count: int) -> list[Source | str]:
        """Checkpoint tensor of each shard; where unknown, the shard's name in the model."""
        whole, shards = self._rows.sources.get(None), list(full_rows(layer, count))
        if whole is not None:
            return [whole] * count
        if count == 1 or len(shards) != count:
            shards = [None] * count
        here = f"{self.prefix}.weight"
        names = [f"{here} (shard {n})" if count > 1 else here for n in range(count)]
        return [
            self._rows.sources.get(shard) or name for shard, name in zip(shards, names, strict=True)
        ]

    def _quantize(self, layer: Any, shard: Tensor, name: Source | str) -> Nvfp4Tensor:
        amax = shard.abs().amax().float()
        if layer.tp_size > 1:
            # Every rank holds a part of this shard; the scale is that of the whole shard.
            torch.distributed.all_reduce(
                amax, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group
            )
        return quantize(name, shard, amax, self.options.scales, self.plan.activation)


def quantize(
    name: Source | str, weight: Tensor, amax: Tensor, rule: ScaleRule, activation: Activation
) -> Nvfp4Tensor:
    """Quantise a weight, or this rank's part of a weight.

    Args:
        name: name of the weight, for messages.
        weight: 16-bit ``(N, K)``.
        amax: float32 ``()``, the whole weight's largest magnitude.
        rule: rule for block scales.
        activation: quantization of the layer's input.

    Raises:
        UnsupportedCheckpoint: a value is not finite, most blocks are too small for NVFP4, or the
            layer's sums may overflow; see ``check_loss`` and ``check_row_scaled``.
    """
    global_scale = global_scale_of(amax)
    try:
        quantised = quantize_with_rule(weight, rule, global_scale=global_scale)
    except InvalidArgument as error:  # on this rank or another
        raise UnsupportedCheckpoint(
            f"{name}: holds NaN or infinity as {dtype_name(weight.dtype)}, must be finite; serve "
            "with a --dtype that holds the checkpoint's values, or mend the checkpoint"
        ) from error
    if activation == "per-token":
        kernel_weight.check_row_scaled(name, global_scale, weight.shape[-1])
    kernel_weight.check_loss(name, weight, quantised, _REMEDY)
    return quantised
