"""Buffers that a model builds as placeholders, for a checkpoint to fill.

A model computes rotary tables, position ids and masks itself, though the model's loader would also
accept such tensors from a checkpoint. A buffer that is filled with a constant or random values, or
left uninitialised, is a placeholder for a trained value: a layer's scalar, batch-norm statistics, a
router's bias.
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
    """Dispatch mode that records, while a model is built, the tensors without computed values."""

    def __init__(self) -> None:
        super().__init__()
        # The weak reference stops the id of a storage from being reused, without keeping its
        # memory.
        self._marked: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch must disable dynamo around each call: no, as building is never compiled."""
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
        """Record which buffers of a built model are placeholders: uncomputed, or of one element."""
        found = (
            name
            for name, _, buffer in _persistent(model)
            if buffer.numel() == 1 or self._is_marked(buffer)
        )
        _FOUND[model] = frozenset(found)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage; a buffer filled only in part is a mask."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


_FOUND: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def placeholders(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield name, module and tensor of each placeholder of a model.

    Without a record by ``Placeholders.keep``, all persistent buffers are yielded.
    """
    recorded = _FOUND.get(model)
    for name, module, buffer in _persistent(model):
        if recorded is None or name in recorded:
            yield name, module, buffer


def _persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield name, module and tensor of each buffer that a checkpoint may hold.

    Buffers internal to vLLM's layers are excluded.

    Internal names begin with an underscore (scales of a cache, or of attention in a tower) or are
    in ``_OTHERS``.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name.startswith("_") or name in _OTHERS
            if buffer.numel() and not kept and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, module, buffer
