"""Parameters whose loaders a model may replace without bypassing our checks.

vLLM's ``MambaMixer2`` replaces loaders of the input projection if tensor parallelism cannot divide
the groups, so that every rank holds a copy of the only group: ``weight``, ``weight_scale`` and
``input_scale`` get a loader that slices rows.
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
        """Load a tensor into a shard of a parameter; shard id None: into all of it."""
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
        rows: loader of the layer's matrices, which ``weight_loader`` calls.
        weight_loader: loader that calls ``rows.load``, perhaps after checks. A loader that the
            model assigns later replaces the loader in ``rows``, so that the checks stay.
    """

    def __init__(self, *, rows: RowsLoader, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._rows = rows
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Initial loader, or vLLM's wrapper of it during a reload."""
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

    A loader that the model assigns, which slices rows, is ignored.
    """

    def __init__(self, *, weight_loader: Loader, **others: Any) -> None:
        super().__init__(weight_loader=weight_loader, **others)
        self._own = weight_loader

    @property
    def weight_loader(self) -> Loader:
        """Initial loader, which checks the scalar, or vLLM's wrapper of it during a reload."""
        loader: Loader = super().weight_loader
        return loader

    @weight_loader.setter
    def weight_loader(self, value: Loader) -> None:
        if _leads_to(value, self._own):
            self._weight_loader = value


def _leads_to(loader: Loader, own: Loader) -> bool:
    """Whether a loader is ``own``, or a wrapper of ``own``."""
    return inspect.unwrap(loader) == inspect.unwrap(own)
