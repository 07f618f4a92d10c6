"""Buffers that a model builds without a value of their own, for a checkpoint to fill.

A model computes rotary tables, position ids and masks itself, though its loader would take those
of a checkpoint too. What it fills with one number, with random ones or not at all stands in for
what was trained: a layer's scalar, statistics of a batch norm, a router's bias.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_FILLS = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_),
    *(aten.ones, aten.ones_like, aten.new_ones),
    *(aten.full, aten.full_like, aten.new_full, aten.fill_),
    *(aten.rand, aten.rand_like, aten.randn, aten.randn_like),
    *(aten.normal_, aten.uniform_, aten.bernoulli_),
}
_COPIES = {aten.clone, aten._to_copy, aten.copy_}
_OTHERS = ("k_scale", "v_scale", "num_batches_tracked")


class Placeholders(TorchDispatchMode):
    """Record, while a model is built within, of the tensors that hold no value of their own."""

    def __init__(self) -> None:
        super().__init__()
        # A reference keeps the identity of a storage from being another's, not its memory.
        self._marked: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps every call against being compiled: building a model never is."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
            return result  # a view
        packet = func.overloadpacket
        is_mark = packet in _FILLS
        if packet in _COPIES:
            copied = args[1] if packet is aten.copy_ else args[0]
            is_mark = self._is_marked(copied)
        written = args[:1] if func._schema.is_mutable else ()
        for tensor in (result, *written):
            if isinstance(tensor, Tensor):
                self._mark(tensor, is_mark and _is_whole(tensor))
        return result

    def _mark(self, tensor: Tensor, is_mark: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if is_mark:
            self._marked[reference.cdata] = reference
        else:
            self._marked.pop(reference.cdata, None)

    def _is_marked(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._marked

    def keep(self, model: nn.Module) -> None:
        """Remember which of a model's buffers are placeholders."""
        found = (
            name
            for name, _, buffer in _persistent(model)
            if buffer.numel() == 1 or self._is_marked(buffer)
        )
        _FOUND[model] = frozenset(found)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor takes all of its storage: a fill of a part makes a mask."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


_FOUND: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def placeholders(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Names, modules and tensors of a model's placeholders; all buffers, if nothing is recorded."""
    recorded = _FOUND.get(model)
    for name, module, buffer in _persistent(model):
        if recorded is None or name in recorded:
            yield name, module, buffer


def _persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Buffers that a checkpoint may hold; those that layers of vLLM's keep to themselves are not.

    Such begin with an underscore: scales of a cache, and of attention in a tower.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name.startswith("_") or name in _OTHERS
            if buffer.numel() and not kept and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, module, buffer
