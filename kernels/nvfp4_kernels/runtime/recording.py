"""Recording of a call: allocations, launches, and whether the call does anything else.

A call that only allocates and launches can be repeated for similar arguments without running its
Python code: see ``nvfp4_kernels.runtime.launch_cache``. Tensors are identified by the operations
that made them, never by addresses: two arguments may share memory in one call and not in the next.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Relation = Literal["one start", "overlapping", "apart"]  # of two tensors' memory

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Source(NamedTuple):
    """Origin of a tensor.

    Attributes:
        tensor: index of an argument, or the number of arguments plus the index of an allocation.
        offset: offset from the tensor's first element, in bytes.
    """

    tensor: int
    offset: int


@dataclass
class Allocation:
    """Allocation of uninitialised memory by the recorded call.

    Attributes:
        tensor: allocated tensor.
        result: returned tensor, i.e. ``tensor`` or a view of all its elements; None: not returned.
    """

    tensor: Tensor
    result: Tensor | None = None


class _State(threading.local):
    active: "Recording | None" = None


_STATE = _State()


def active() -> "Recording | None":
    """Active recording of this thread, or None."""
    return _STATE.active


class Recording(TorchDispatchMode):
    """Context that records one call of a function.

    Args:
        given: the call's arguments.
        compared: pairs of positions of arguments whose ``relation`` is a part of the call's key.

    Attributes:
        arguments: arguments to pass to the function: a view of every tensor, so that duplicate
            arguments are distinguishable.
        allocations: recorded allocations.
        launches: kernel and arguments of each launch.
        obstacle: reason why the call cannot be replayed, e.g. an operation that is neither an
            allocation, a view nor a launch; "" if none.
    """

    def __init__(self, given: tuple[Any, ...], compared: Collection[tuple[int, int]] = ()) -> None:
        super().__init__()
        self.arguments = [x.detach() if isinstance(x, Tensor) else x for x in given]
        self.allocations: list[Allocation] = []
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        self.obstacle = ""
        self._given, self._inputs, self._compared = given, len(given), compared
        self._sources = {
            id(x): Source(n, 0) for n, x in enumerate(self.arguments) if isinstance(x, Tensor)
        }
        self._alive: list[Any] = []  # no two tensors may have one id

    def __enter__(self) -> "Recording":
        assert _STATE.active is None
        super().__enter__()
        _STATE.active = self
        return self

    def __exit__(self, *raised: Any) -> None:
        _STATE.active = None
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive.append((args, result))
        if func._schema.name.removeprefix("aten::") in _ALLOCATIONS:
            self._sources[id(result)] = Source(self._inputs + len(self.allocations), 0)
            self.allocations.append(Allocation(result))
        elif func._schema.is_mutable or not args or self.source(args[0]) is None:
            self.obstacle = str(func)
        else:
            for view in result if isinstance(result, (tuple, list)) else (result,):
                self._add_view(func, args[0], view)
        return result

    def _add_view(self, func: Any, x: Tensor, view: Any) -> None:
        memory = x.untyped_storage().data_ptr()
        if not isinstance(view, Tensor) or view.untyped_storage().data_ptr() != memory:
            self.obstacle = str(func)
        elif view is not x:
            tensor, offset = self._sources[id(x)]
            if not view.numel() and x.numel():
                self.obstacle = f"{func} of no elements"  # an empty tensor's address is 0
            self._sources[id(view)] = Source(tensor, offset + view.data_ptr() - x.data_ptr())

    def source(self, x: Any) -> Source | None:
        """Origin of a tensor; None if unknown."""
        return self._sources.get(id(x))

    def compares(self, x: Tensor, y: Tensor) -> bool:
        """Whether two tensors are arguments whose ``relation`` is a part of the call's key."""
        places = [n for each in (x, y) for n, given in enumerate(self.arguments) if given is each]
        return tuple(places) in self._compared

    def launched(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """Record a launch."""
        self._alive.append(arguments)
        self.launches.append((kernel, arguments))

    def given_back(self, result: Any) -> Any:
        """Result of the call, with the caller's tensors in place of the recording's views."""
        if isinstance(result, Tensor):
            for own, view in zip(self._given, self.arguments, strict=True):
                if result is view:
                    return own
        elif type(result) in (tuple, list):
            return type(result)(self.given_back(each) for each in result)
        return result

    def returned(self, x: Tensor) -> int | None:
        """Index of a returned tensor among arguments and allocations.

        Sets an allocation's ``result``. None if the tensor is unknown or only a part of an argument
        or allocation, or if the allocation has another ``result``.
        """
        source = self.source(x)
        if source is None:
            return None
        if source.tensor < self._inputs:
            return source.tensor if x is self.arguments[source.tensor] else None
        allocation = self.allocations[source.tensor - self._inputs]
        whole = x.numel() == allocation.tensor.numel() and x.dtype == allocation.tensor.dtype
        again = allocation.result is not None and allocation.result is not x
        if source.offset or not whole or again:
            return None
        allocation.result = x
        return source.tensor


def keep_unprepared(reason: str) -> None:
    """Mark the recorded call as dependent on more than its key, e.g. on tensors' contents."""
    if _STATE.active is not None:
        _STATE.active.obstacle = reason


def relation(x: Tensor, y: Tensor) -> Relation:
    """Relation of two tensors' memory ranges, from the first element to the last."""
    first, second = x.data_ptr(), y.data_ptr()
    if first == second:
        return "one start"
    apart = first + _extent(x) <= second or second + _extent(y) <= first
    return "apart" if apart else "overlapping"


def compared(x: Tensor, y: Tensor) -> Relation:
    """``relation`` of two tensors; a recorded call whose key lacks it stays unprepared."""
    if _STATE.active is not None and not _STATE.active.compares(x, y):
        keep_unprepared("addresses are compared")
    return relation(x, y)


def _extent(x: Tensor) -> int:
    if not x.numel():
        return 0
    steps = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * (1 + sum((count - 1) * stride for count, stride in steps))


def is_listened_to() -> bool:
    """Whether torch.compile, or a dispatch mode other than the recording, must see the ops."""
    if torch.compiler.is_compiling():
        return True
    own = _STATE.active is not None
    return torch._C._len_torch_dispatch_stack() > own
