"""Quantised embedding: rows stay in NVFP4 and are decoded at lookup."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from vllm_fp4_plugin.formats import CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.kernel_weight import weight_bytes
from vllm_fp4_plugin.linear.lm_head import is_tied
from vllm_fp4_plugin.linear.stored_weight import StoredWeight
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.startup import Startup


class Nvfp4EmbeddingMethod(QuantizeMethodBase):
    """Method of a vocabulary embedding whose checkpoint holds NVFP4 weights.

    Args:
        startup: notified of the layer, and when its weights are in place.
        prefix: name of the layer.
        checkpoint: content of the checkpoint's config.

    Attributes:
        optional_parameters: names of parameters that the checkpoint may omit.

    Raises:
        UnsupportedCheckpoint: the embedding is tied to the head, which needs a GEMM.
    """

    optional_parameters: tuple[str, ...] = ()

    def __init__(self, startup: Startup, prefix: str, checkpoint: CheckpointConfig) -> None:
        if is_tied():
            raise UnsupportedCheckpoint(
                f"{prefix}: is quantised, but the model takes it as the head too "
                "(tie_word_embeddings), must be in 16 bits then; quantise the model with "
                f"{prefix.rpartition('.')[2]} excluded"
            )
        self.startup = startup
        self.prefix = prefix
        self.checkpoint = checkpoint

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
        """Register the parameters under the names of the checkpoint's tensors."""
        k, rows = input_size_per_partition, list(output_partition_sizes)
        self.dtype = params_dtype
        self.stored = StoredWeight(
            layer, self.prefix, self.checkpoint, rows, k, extra_weight_attrs["weight_loader"],
            static=False,
        )  # fmt: skip
        self.optional_parameters = self.stored.optional
        n = sum(rows)
        size = weight_bytes(n, k, "blocked")
        self.startup.report.add(
            LayerRecord(self.prefix, "lookup (torch)", "W4A16", "", n * k, size)
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the loaded tensors and register them; block scales stay in linear layout."""
        if self.stored.is_taken(layer):
            return  # checked already
        taken = self.stored.take(layer)
        tensors = {
            "weight": taken.data,
            "weight_scale": taken.scales,
            "weight_global": taken.weight_global,
        }
        for name, tensor in tensors.items():
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))
        self.startup.loaded(self.prefix, layer.weight.device)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up rows: indices ``(…,)``, result ``(…, K)`` in the model's dtype."""
        rows = Nvfp4Tensor(
            layer.weight[input_], layer.weight_scale[input_], layer.weight_global.squeeze(0)
        )
        return rows.dequantize(self.dtype)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse: an embedding has no matrix product."""
        raise TypeError(f"{self.prefix}: is an embedding, which has no product; look rows up")
