"""Parameters whose loaders a model may replace without bypassing our checks.

vLLM's Mamba mixers replace loaders if the number of groups is not divisible by the tensor-parallel
size, so that every rank holds a copy: ``weight``, ``weight_scale`` and ``input_scale`` of the input
projection get a loader that slices rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from vllm_fp4_plugin.checkpoint.arrivals import Source, source_of

Loader = Callable[..., None]


class RowsLoader:
    """Loader of a layer's matrices: vLLM's, or a replacement set by the model.

    Args:
        inner: loader of vLLM.

    Attributes:
        is_replaced: whether a model has replaced the loader.
        sources: checkpoint tensor loaded last into each shard, by shard id.
    """

    def __init__(self, inner: Loader) -> None:
        self._inner = inner
        self.is_replaced = False
        self.sources: dict[Any, Source] = {}

    def replace(self, inner: Loader) -> None:
        """Load every matrix of the layer with ``inner`` from now on."""
        self._inner = inner
        self.is_replaced = True

    # vLLM binds these parameter names.
    def load(self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Load a tensor into a parameter."""
        source = source_of(loaded_weight)
        if source is not None:  # vLLM may call this late, once all tensors have come
            self.sources[loaded_shard_id] = source
        if loaded_shard_id is None:
            self._inner(param, loaded_weight)
        else:
            self._inner(param, loaded_weight, loaded_shard_id)


class RowsParameter(ModelWeightParameter):
    """Matrix ``(N, …)`` of a layer; a model may set a loader that slices rows.

    Args:
        rows: loader that ``weight_loader`` calls.
        weight_loader: initial loader.
    """

    def __init__(self, *, rows: RowsLoader, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._rows = rows
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Loader that checks a tensor, then loads it."""
        loader: Loader = super().weight_loader
        return loader

    @weight_loader.setter
    def weight_loader(self, value: Loader) -> None:
        if _leads_to(value, self._own):
            self._weight_loader = value  # vLLM's reload wraps the loader, and unwraps it later
        else:
            self._rows.replace(value)


class NumberParameter(PerTensorScaleParameter):
    """Scalars ``(S,)``, one per shard, equal on all ranks.

    Assigning a weight loader that slices rows has no effect.
    """

    def __init__(self, *, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Loader that checks the scalar, then loads it."""
        loader: Loader = super().weight_loader
        return loader

    @weight_loader.setter
    def weight_loader(self, value: Loader) -> None:
        if _leads_to(value, self._own):
            self._weight_loader = value


def _leads_to(loader: Loader, own: Loader) -> bool:
    """Whether a loader is ``own``, or a wrapper of ``own``."""
    return inspect.unwrap(loader) == inspect.unwrap(own)
