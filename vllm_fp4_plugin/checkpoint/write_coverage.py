"""Coverage of tensors by writes: the byte intervals that operators wrote to."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)


class Interval(NamedTuple):
    """Half-open interval of bytes of a storage, from ``start`` to ``end``."""

    start: int
    end: int


class WriteCoverage(TorchDispatchMode):
    """Dispatch mode that records every write to the watched tensors, also on the meta device.

    Writes are seen at PyTorch's dispatcher, including writes to views. A tensor whose storage is
    replaced counts as written.

    Args:
        tensors: tensors to watch.
        before_copy: function called before each copy into a watched tensor; its arguments are the
            destination (a watched tensor or a view of one) and the source.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        before_copy: Callable[[Tensor, Tensor], None] = lambda _to, _from: None,
    ) -> None:
        super().__init__()
        self._before_copy = before_copy
        # Kept alive, so that no other storage reuses the id of a replaced storage.
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._writes: dict[int, set[Interval]] = {s._cdata: set() for s in self._storages}
        self._fills: dict[int, set[Interval]] = {s._cdata: set() for s in self._storages}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch must disable dynamo around each call: no, as a load is never compiled."""
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
        """Byte intervals of a watched tensor that were never written, as offsets from its start.

        A fill of the whole tensor counts as a write only if there is no write other than fills:
        otherwise the fill is initialisation. A fill of a part is padding, and always counts.
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
    """Positions and names of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _intervals(tensor: Tensor) -> list[Interval]:
    """Bytes that a tensor covers in its storage, as the fewest intervals."""
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
    """Yield the parts of ``interval`` that no interval of ``taken``, sorted, covers."""
    at = interval.start
    for start, end in taken:
        if start >= interval.end:
            break
        if start > at:
            yield Interval(at, start)
        at = max(at, end)
    if at < interval.end:
        yield Interval(at, interval.end)
