"""Ledger of a quantised layer's tensors: checks each on arrival, and that none is missing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fp4_plugin.checkpoint.arrivals import Source, source_of
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear.parameters import RowsLoader

_QKV = ("q", "k", "v")


class LoadLedger:
    """Ledger of the tensors that one layer has received.

    vLLM's parameters copy any tensor, converting the dtype and narrowing the shape, and never
    report a missing tensor: this ledger checks tensors before vLLM's loaders run.

    Args:
        layer: the layer.
        prefix: name of the layer.
        num_shards: number of shards of the layer.
        rows_loader: loader of the layer's matrices.
    """

    def __init__(self, layer: Any, prefix: str, num_shards: int, rows_loader: RowsLoader) -> None:
        self.prefix = prefix
        self._rows_loader = rows_loader
        self._rows = full_rows(layer, num_shards)
        self._columns: int = layer.input_size
        self._received: dict[str, dict[Any, Source | None]] = {}

    def loader(
        self, tensor: str, dtype: torch.dtype, columns_per: int | None, inner: Callable[..., None]
    ) -> Callable[..., None]:
        """Make a weight loader that checks a tensor, then calls ``inner`` and records the arrival.

        Args:
            tensor: name on disk.
            dtype: required dtype.
            columns_per: number of weight columns per column of the tensor (2 for packed data, 16
                for block scales), None for a scalar.
            inner: loader that copies the tensor, vLLM's or ``RowsLoader.load``.
        """

        # vLLM binds these parameter names.
        def load(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            self._check(tensor, loaded_weight, dtype, columns_per, loaded_shard_id)
            if loaded_shard_id is None:
                inner(param, loaded_weight)
            else:
                inner(param, loaded_weight, loaded_shard_id)
            shards = self._shards(loaded_shard_id)
            source = source_of(loaded_weight)
            self._received.setdefault(tensor, {}).update(dict.fromkeys(shards, source))

        return load

    def check_complete(self, tensors: list[str]) -> None:
        """Raise unless every shard of every tensor has arrived."""
        for tensor in tensors:
            missing = set(self._rows) - set(self._received.get(tensor, ()))
            if missing:
                which = "" if None in missing else f" of shard {sorted(map(str, missing))}"
                raise UnsupportedCheckpoint(
                    f"{self.prefix}.{tensor}{which}: not in the checkpoint; if the layer is not "
                    "quantised there, its name must be in the config's ignore list, otherwise "
                    "the checkpoint is incomplete"
                )

    def forget(self) -> None:
        """Expect every tensor again, for a reload."""
        self._received.clear()

    def sources(self, tensor: str, count: int) -> list[Source | str]:
        """Checkpoint tensor loaded into each shard; where unknown, the shard's name in the model.

        Args:
            tensor: name on disk.
            count: number of shards of the parameter.
        """
        if len(self._rows) != count:
            return [self._name(tensor, None)] * count
        received = self._received.get(tensor, {})
        return [received.get(shard) or self._name(tensor, shard) for shard in self._rows]

    def _name(self, tensor: str, shard_id: Any) -> str:
        return f"{self.prefix}.{tensor}" + ("" if shard_id is None else f" (shard {shard_id})")

    def _shards(self, shard_id: Any) -> list[Any]:
        """Shards that a loader call fills; ``shard_id`` None: all shards of the layer."""
        if shard_id is None:
            return list(self._rows)
        return list(shard_id) if isinstance(shard_id, tuple) else [shard_id]

    def _check(
        self,
        tensor: str,
        loaded: Tensor,
        dtype: torch.dtype,
        columns_per: int | None,
        shard_id: Any,
    ) -> None:
        where = source_of(loaded) or self._name(tensor, shard_id)
        if loaded.dtype != dtype:
            raise UnsupportedCheckpoint(
                f"{where}: dtype is {_short(loaded.dtype)}, must be {_short(dtype)}; "
                "if the layer is not quantised, its name must be in the config's ignore list"
            )
        if columns_per is None:
            if loaded.numel() != 1:
                raise UnsupportedCheckpoint(
                    f"{where}: shape is {tuple(loaded.shape)}, must be one number; "
                    "quantise the model again with one global scale per tensor"
                )
            return
        rows = [self._rows.get(s) for s in self._shards(shard_id)]
        if any(r is None for r in rows):
            return  # a layer class with a shard layout of its own in vLLM
        columns = self._columns // columns_per
        if self._rows_loader.is_replaced:  # the model's loader picks rows, perhaps fewer
            rows = [len(loaded)]
        expected = (sum(r for r in rows if r is not None), columns)
        if tuple(loaded.shape) != expected:
            raise UnsupportedCheckpoint(
                f"{where}: shape is {tuple(loaded.shape)}, must be {expected}; "
                "the checkpoint does not fit the model's config"
            )


def full_rows(layer: Any, num_shards: int) -> dict[Any, int | None]:
    """Number of rows of each shard before tensor parallelism, by vLLM's shard id.

    The id is None for a layer of a single shard.
    """
    if hasattr(layer, "total_num_kv_heads"):
        kv_heads = layer.total_num_kv_heads
        rows = (
            layer.total_num_heads * layer.head_size,
            kv_heads * layer.head_size,
            kv_heads * layer.v_head_size,
        )
        if num_shards == len(_QKV):
            return dict(zip(_QKV, rows, strict=True))
    output_sizes = getattr(layer, "output_sizes", None)
    if output_sizes is None:
        # A head's output is padded; on disk it has one row per vocabulary entry.
        return {None: getattr(layer, "org_vocab_size", layer.output_size)}
    return dict(enumerate(output_sizes))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
