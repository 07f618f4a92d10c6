"""Parameters whose loaders a model may replace without getting round what ours check.

vLLM's Mamba mixers do where tensor parallelism does not divide the groups, which every rank then
holds a copy of: they give ``weight``, ``weight_scale`` and ``input_scale`` of their input
projection a loader that picks rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from vllm_fp4_plugin.checkpoint.arrivals import Source, source_of

Loader = Callable[..., None]


class RowsLoader:
    """Loader of the matrices of a layer: vLLM's, or the one that a model puts in its place.

    Args:
        inner: vLLM's.

    Attributes:
        is_replaced: whether a model has put another in its place.
        sources: tensors of the checkpoint that came last, by the ids of shards.
    """

    def __init__(self, inner: Loader) -> None:
        self._inner = inner
        self.is_replaced = False
        self.sources: dict[Any, Source] = {}

    def replace(self, inner: Loader) -> None:
        """Load every matrix with ``inner`` from now on, whichever of them it was meant for."""
        self._inner = inner
        self.is_replaced = True

    # vLLM binds these parameter names.
    def load(self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Load a tensor into a parameter."""
        source = source_of(loaded_weight)
        if source is not None:  # vLLM may load what it has put off once all have come
            self.sources[loaded_shard_id] = source
        if loaded_shard_id is None:
            self._inner(param, loaded_weight)
        else:
            self._inner(param, loaded_weight, loaded_shard_id)


class RowsParameter(ModelWeightParameter):
    """Matrix ``(N, …)`` of a layer; a loader that a model gives it picks rows for it.

    Args:
        rows: loader that ``weight_loader`` leads to.
        weight_loader: loader to begin with.
    """

    def __init__(self, *, rows: RowsLoader, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._rows = rows
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Loader that checks a tensor, and has it loaded."""
        loader: Loader = super().weight_loader
        return loader

    @weight_loader.setter
    def weight_loader(self, value: Loader) -> None:
        if _leads_to(value, self._own):
            self._weight_loader = value  # vLLM's reload wraps it, and unwraps it again
        else:
            self._rows.replace(value)


class NumberParameter(PerTensorScaleParameter):
    """Numbers ``(S,)``, one per shard, the same on every rank, whoever picks the rows."""

    def __init__(self, *, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Loader that checks a number, and has it loaded."""
        loader: Loader = super().weight_loader
        return loader

    @weight_loader.setter
    def weight_loader(self, value: Loader) -> None:
        if _leads_to(value, self._own):
            self._weight_loader = value


def _leads_to(loader: Loader, own: Loader) -> bool:
    """Whether a loader is ours, or wraps it."""
    return inspect.unwrap(loader) == inspect.unwrap(own)
