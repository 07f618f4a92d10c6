"""Linear method of ``nvfp4-tc`` for layers that the checkpoint holds in NVFP4."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from nvfp4_kernels.checks import InvalidArgument
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.formats import CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.linear.method import Nvfp4LinearBase
from vllm_fp4_plugin.linear.stored_weight import StoredWeight
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.startup import Startup


@register_weight_loader_v2_supported_method
class Nvfp4LinearMethod(Nvfp4LinearBase):
    """Method of a linear layer whose checkpoint holds NVFP4 weights.

    Args:
        startup: see the base class.
        options: see the base class.
        prefix: see the base class.
        checkpoint: content of the checkpoint's config.
        weight_only: whether the checkpoint leaves the layer's activations in 16 bits.
        reason: reason for the scheme, for the report; may be empty.
        terms: see the base class.

    Attributes:
        optional_parameters: names of parameters that the checkpoint may omit.
    """

    optional_parameters: tuple[str, ...] = ()

    def __init__(
        self,
        startup: Startup,
        options: Options,
        prefix: str,
        checkpoint: CheckpointConfig,
        *,
        weight_only: bool,
        reason: str,
        terms: RequestedTerms | None = None,
    ) -> None:
        super().__init__(startup, options, prefix, "16-bit" if weight_only else "static", terms)
        self.checkpoint = checkpoint
        self.reason = reason

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
        """Plan the layer, and register the parameters under the checkpoint's names."""
        k, rows = input_size_per_partition, list(output_partition_sizes)
        self.plan = self.make_plan(layer, k, rows, params_dtype)
        self.stored = StoredWeight(
            layer, self.prefix, self.checkpoint, rows, k, extra_weight_attrs["weight_loader"],
            static=self.plan.activation == "static",
        )  # fmt: skip
        self.optional_parameters = self.stored.optional

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the loaded tensors and convert them to the kernel's layout, once per load."""
        if self.stored.is_taken(layer):
            return  # converted already
        self.resolve_fusions(layer)
        stored = self.stored.take(layer)
        try:
            kernel_weight = self.kernel_weight(layer, *stored)
        except InvalidArgument as error:
            raise UnsupportedCheckpoint(f"{self.prefix}: {error}") from error
        self.install(layer, kernel_weight)
        self.startup.loaded(self.prefix, layer.weight.device)
