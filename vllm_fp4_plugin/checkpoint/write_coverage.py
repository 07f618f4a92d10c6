"""Coverage of tensors by writes: which of their elements anything was written to."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)


class Interval(NamedTuple):
    """Interval of bytes of a storage, from ``start`` up to ``end``."""

    start: int
    end: int


class WriteCoverage(TorchDispatchMode):
    """Record, while it is entered, of every write to some tensors; on the meta device too.

    It sees what PyTorch dispatches, views of the tensors included, and not a tensor whose
    storage is exchanged for another: that one counts as written.

    Args:
        tensors: tensors to watch.
        before_copy: called with a watched tensor, or a view of it, and what is going to be copied
            into it.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        before_copy: Callable[[Tensor, Tensor], None] = lambda _to, _from: None,
    ) -> None:
        super().__init__()
        self._before_copy = before_copy
        # Kept, so that no other storage takes over the identity of one that is exchanged.
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._writes: dict[int, set[Interval]] = {s._cdata: set() for s in self._storages}
        self._fills: dict[int, set[Interval]] = {s._cdata: set() for s in self._storages}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps every call against being compiled: a load never is, and it costs."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.copy_ and self._is_watched(args[0]):
            self._before_copy(args[0], args[1])
        result = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return result
        record = self._fills if func.overloadpacket in _FILLS else self._writes
        for tensor in _written(func, args, kwargs):
            intervals = record.get(tensor.untyped_storage()._cdata)
            if intervals is not None:
                intervals.update(_intervals(tensor))
        return result

    def _is_watched(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._writes

    def holes(self, tensor: Tensor) -> list[Interval]:
        """Bytes of a watched tensor that nothing was written to, counted from its start.

        A fill of all that is watched there prepares it for what follows, and says nothing of it
        unless nothing follows; any other fill is of padding.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self._writes:
            return []
        begin = int(tensor.storage_offset()) * tensor.element_size()
        writes, fills = self._writes[key], self._fills[key]
        if writes:
            fills = fills - set(_intervals(tensor))
        return [
            Interval(start - begin, end - begin)
            for interval in _intervals(tensor)
            for start, end in _without(interval, sorted(writes | fills))
        ]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, name in _targets(func):
        given = args[position] if position < len(args) else kwargs.get(name)
        for tensor in given if isinstance(given, list | tuple) else [given]:
            if isinstance(tensor, Tensor):
                yield tensor


@cache
def _targets(func: Any) -> list[tuple[int, str]]:
    """Positions and names of an operator's arguments that it writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _intervals(tensor: Tensor) -> list[Interval]:
    """Bytes of its storage that a tensor takes, as few intervals as there are."""
    if not tensor.numel():
        return []
    length = 1
    outer: list[list[int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride == length and not outer:
            length *= size
        elif size > 1:
            outer.append([i * stride for i in range(size)])
    item, offset = tensor.element_size(), int(tensor.storage_offset())
    starts = (offset + sum(steps) for steps in product(*outer))
    return [Interval(start * item, (start + length) * item) for start in starts]


def _without(interval: Interval, taken: Iterable[Interval]) -> Iterator[Interval]:
    """Parts of an interval that are in none of a sorted list."""
    at = interval.start
    for start, end in taken:
        if start >= interval.end:
            break
        if start > at:
            yield Interval(at, start)
        at = max(at, end)
    if at < interval.end:
        yield Interval(at, interval.end)
