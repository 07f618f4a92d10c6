"""Weight of a layer as stored in an NVFP4 checkpoint, from registration to conversion."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, GLOBAL_RANGE
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.formats import CheckpointConfig
from vllm_fp4_plugin.linear.load_ledger import LoadLedger
from vllm_fp4_plugin.linear.parameters import NumberParameter, RowsLoader, RowsParameter


class Stored(NamedTuple):
    """Loaded tensors of an NVFP4 weight.

    Attributes:
        data: uint8 ``(N, K/2)``.
        scales: float8_e4m3fn ``(N, K/16)``, linear layout.
        weight_global: float32 ``(S,)``, global scales of the shards, as factors.
        input_global: float32 ``(S,)``, input scales of the shards, as factors; None if unused.
    """

    data: Tensor
    scales: Tensor
    weight_global: Tensor
    input_global: Tensor | None


class StoredWeight:
    """Parameters of a layer under the checkpoint's names, until the load is complete.

    Args:
        layer: owner of the parameters.
        prefix: name of the layer.
        checkpoint: content of the checkpoint's config.
        shards: number of rows of each shard on this rank.
        k: number of elements of a row on this rank.
        vllm_loader: vLLM's loader of a parameter.
        static: whether calibrated input scales are used.
    """

    def __init__(
        self,
        layer: Any,
        prefix: str,
        checkpoint: CheckpointConfig,
        shards: list[int],
        k: int,
        vllm_loader: Callable[..., None],
        *,
        static: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._static = static
        self._shards = shards
        rows = RowsLoader(vllm_loader)
        self._ledger = ledger = LoadLedger(layer, prefix, len(shards), rows)
        self._dummy = get_current_vllm_config().load_config.load_format == "dummy"
        names = checkpoint.names

        def matrix(name: str, dtype: torch.dtype, columns_per: int) -> None:
            data = torch.empty(sum(shards), k // columns_per, dtype=dtype)
            loader = ledger.loader(name, dtype, columns_per, rows.load)
            parameter = RowsParameter(
                data=data, input_dim=1, output_dim=0, rows=rows, weight_loader=loader
            )
            layer.register_parameter(name, parameter)

        def globals_(name: str) -> None:
            loader = ledger.loader(name, torch.float32, None, vllm_loader)
            # NaN, so that an unloaded shard cannot pass for a scale.
            data = torch.full((len(shards),), float("nan"), dtype=torch.float32)
            layer.register_parameter(name, NumberParameter(data=data, weight_loader=loader))

        matrix(names.weight, torch.uint8, 2)
        matrix(names.block_scale, torch.float8_e4m3fn, BLOCK_SIZE)
        globals_(names.weight_global)
        # A checkpoint may contain unused input scales; they are read nevertheless.
        globals_(names.input_global)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of parameters that the checkpoint may omit."""
        return () if self._static else (self._checkpoint.names.input_global,)

    def is_taken(self, layer: Any) -> bool:
        """Whether the parameters have been removed from the layer."""
        return not hasattr(layer, self._checkpoint.names.weight_global)

    def take(self, layer: Any) -> Stored:
        """Check the loaded tensors, and remove the parameters from the layer.

        Raises:
            UnsupportedCheckpoint: a tensor is missing, or a scale is invalid.
        """
        names = self._checkpoint.names
        order = (names.weight, names.block_scale, names.weight_global, names.input_global)
        loaded = {name: getattr(layer, name).data for name in order}
        data, scales, weight_global, input_global = loaded.values()
        if self._dummy:
            _fill_dummy(data, scales, weight_global, input_global)
        else:
            self._ledger.check_complete([name for name in order if name not in self.optional])
            self._check_block_scales(scales, data)
        stored = Stored(
            data,
            scales,
            self._factors(names.weight_global, weight_global),
            self._factors(names.input_global, input_global) if self._static else None,
        )
        for name in loaded:
            delattr(layer, name)
        self._ledger.forget()
        return stored

    def _check_block_scales(self, scales: Tensor, data: Tensor) -> None:
        """Raise for a shard with invalid block scales."""
        if kernel_weight.are_block_scales(scales, data):
            return
        sources = self._ledger.sources(self._checkpoint.names.block_scale, len(self._shards))
        parts = zip(sources, scales.split(self._shards), data.split(self._shards), strict=True)
        for source, *shard in parts:
            kernel_weight.check_block_scales(source, *shard)

    def _factors(self, name: str, stored: Tensor) -> Tensor:
        """Convert global scales to factors, from factors or divisors; raise if out of range."""
        if not kernel_weight.are_globals(stored):
            sources = self._ledger.sources(name, len(stored))
            for source, value in zip(sources, stored, strict=True):
                kernel_weight.check_globals(source, value)
        return stored.reciprocal() if self._checkpoint.format.reciprocal else stored


def _fill_dummy(data: Tensor, scales: Tensor, weight_global: Tensor, input_global: Tensor) -> None:
    """Fill tensors for ``--load-format dummy``, whose random values are not valid scales."""
    data.random_(0, 256)
    scales.copy_(torch.ones_like(scales, dtype=torch.float32))
    weight_global.fill_(1.0 / GLOBAL_RANGE)
    input_global.fill_(1.0 / GLOBAL_RANGE)
