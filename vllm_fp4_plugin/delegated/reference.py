"""Linear method in torch that decodes the weight, for schemes that vLLM lacks on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
)

from vllm_fp4_plugin.checkpoint.arrivals import Source
from vllm_fp4_plugin.delegated.rounding import (
    E8M0_NAN,
    dequantize_weight,
    round_dynamic,
    round_static,
)
from vllm_fp4_plugin.formats import LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, Kind
from vllm_fp4_plugin.linear.load_ledger import full_rows
from vllm_fp4_plugin.linear.parameters import NumberParameter, RowsLoader

_GRANULARITY = {
    Kind.FP8_BLOCK: FP8_BLOCK_SIZE,
    Kind.MXFP8: MX_BLOCK_SIZE,
    Kind.MXFP4: MX_BLOCK_SIZE,
}


@register_weight_loader_v2_supported_method
class ReferenceLinearMethod(LinearMethodBase):
    """Method that decodes the weight, rounds inputs by the scheme, and multiplies in float32.

    Args:
        group: quantization scheme of the layer.
        scale_dims: number of dimensions of the scales on disk, see ``LayerGroup.scale_dims``.
        prefix: the layer's name.
    """

    def __init__(self, group: LayerGroup, scale_dims: int, prefix: str) -> None:
        self.kind = group.kind
        self.inputs = group.inputs
        self.scale = group.scale
        self.scale_dims = scale_dims
        self.prefix = prefix
        self.weight = "weight_packed" if self.kind is Kind.MXFP4 else "weight"
        self.shard_sizes: list[int] = []

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
        """Register the tensors under the checkpoint's names, filled with NaN.

        MXFP4 data, which have no NaN, stay uninitialised.
        """
        n, k = sum(output_partition_sizes), input_size_per_partition
        self.shard_sizes = list(output_partition_sizes)
        self.shards = list(full_rows(layer, len(self.shard_sizes)))
        self._check_sizes(k)
        vllm_loader = extra_weight_attrs["weight_loader"]
        names = self.weight, self.scale, "input_scale"
        self.loaders = {name: RowsLoader(vllm_loader) for name in names}
        packed = self.kind is Kind.MXFP4
        dtype = torch.uint8 if packed else torch.float8_e4m3fn
        data = torch.empty(n, k // 2 if packed else k, dtype=dtype)
        if not packed:
            data.view(torch.uint8).fill_(0x7F)  # E4M3's NaN
        load = self.loaders[self.weight].load
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)
        layer.register_parameter(self.weight, weight)
        scale = self._scale(layer, n, k, self.loaders[self.scale].load)
        layer.register_parameter(self.scale, scale)
        if self.inputs == "static":
            input_scale = self._globals(self.loaders["input_scale"].load)
            layer.register_parameter("input_scale", input_scale)

    def _check_sizes(self, k: int) -> None:
        size = _GRANULARITY.get(self.kind, 1)
        if k % size:
            raise UnsupportedCheckpoint(
                f"{self.prefix}: K is {k} on a rank, must be a multiple of {size} for {self.kind}; "
                "use a smaller --tensor-parallel-size, or leave the layer unquantised"
            )
        if self.kind is Kind.FP8_BLOCK and any(n % size for n in self.shard_sizes[:-1]):
            raise UnsupportedCheckpoint(
                f"{self.prefix}: joins projections of {self.shard_sizes} rows on a rank, all but "
                f"the last must be multiples of {size} for {self.kind}; use a smaller "
                "--tensor-parallel-size, or leave the layer unquantised"
            )

    def _scale(self, layer: Any, n: int, k: int, loader: Any) -> Parameter:
        if self.kind is Kind.FP8:
            return self._globals(loader)
        if self.kind is Kind.FP8_CHANNEL:
            shape = (n, 1)[: self.scale_dims]
            data = torch.full(shape, torch.nan, dtype=torch.float32)
            return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
        if self.kind is Kind.FP8_BLOCK:
            layer.weight_block_size = [FP8_BLOCK_SIZE] * 2  # read by shard loaders
            rows, columns = -(-n // FP8_BLOCK_SIZE), k // FP8_BLOCK_SIZE
            apart = self.scale_dims == 4
            shape = (rows, 1, columns, 1) if apart else (rows, columns)
            return BlockQuantScaleParameter(
                data=torch.full(shape, torch.nan, dtype=torch.float32),
                input_dim=2 if apart else 1,
                output_dim=0,
                weight_loader=loader,
            )
        data = torch.full((n, k // MX_BLOCK_SIZE), E8M0_NAN, dtype=torch.uint8)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)

    def _globals(self, loader: Any) -> NumberParameter:
        data = torch.full((len(self.shard_sizes),), torch.nan, dtype=torch.float32)
        return NumberParameter(data=data, weight_loader=loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that no element is still NaN, its initial value; MXFP4 data are not checked.

        Raises:
            UnsupportedCheckpoint: elements are NaN.
        """
        for name in (self.weight, self.scale, "input_scale"):
            parameter = getattr(layer, name, None)
            if parameter is None:
                continue
            data = parameter.data
            is_float = data.dtype != torch.uint8
            holes = torch.isnan(data.float()) if is_float else data == E8M0_NAN
            if bool(holes.any()) and (is_float or name == self.scale):
                source, holes = self._source(name, holes)
                raise UnsupportedCheckpoint(
                    f"{source}: {int(holes.sum())} of its {holes.numel()} numbers are NaN or not "
                    "in the checkpoint, all must be there; quantise the model again"
                )
            layer.register_parameter(name, Parameter(data, requires_grad=False))

    def _source(self, name: str, holes: Tensor) -> tuple[Source | str, Tensor]:
        """Checkpoint tensor of the first incomplete shard, and the mask of the shard's holes.

        ``holes``: mask of the layer's missing elements.
        """
        sources: dict[Any, Source] = self.loaders[name].sources
        if None in sources or len(self.shards) != len(self.shard_sizes):
            return sources.get(None, f"{self.prefix}.{name}"), holes
        of_blocks = self.kind is Kind.FP8_BLOCK and name != self.weight
        size = _GRANULARITY[self.kind] if of_blocks else 1
        sizes = [-(-rows // size) for rows in self.shard_sizes]
        parts = holes.split(sizes if len(holes) == sum(sizes) else 1)
        number = next(number for number, part in enumerate(parts) if part.any())
        shard = self.shards[number]
        return sources.get(shard, f"{self.prefix}.{name} (shard {shard})"), parts[number]

    def dequantize_weight(self, layer: Any) -> Tensor:
        """Decode the weight: float32 ``(N, K)``."""
        weight = getattr(layer, self.weight)
        return dequantize_weight(self.kind, weight, getattr(layer, self.scale), self.shard_sizes)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer's result ``(..., N)`` in the dtype of ``x``, ``(..., K)``."""
        if self.inputs == "static":
            # Shards share their input: the largest scale saturates no shard's input.
            values = round_static(x, layer.input_scale.max())
        else:
            values = round_dynamic(self.kind, x) if self.inputs == "dynamic" else x.float()
        wide = None if bias is None else bias.float()
        return linear(values, self.dequantize_weight(layer), wide).to(x.dtype)
