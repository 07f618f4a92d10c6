"""Prepared launches: what a call's checks and choices came to, kept for all calls alike.

A call whose arguments have the dtypes, shapes, strides, devices and alignments, and the very
numbers, of one before is checked, and its kernel chosen, by looking that one up. What remains is to
allocate its results and to write addresses into the launch's arguments. Whatever else a function
does, reading contents say, keeps its calls from being prepared: see
``nvfp4_kernels.runtime.recording``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nvfp4_kernels.devices import is_reference_device, stand_in_epoch
from nvfp4_kernels.runtime.recording import Recording, active, relation
from nvfp4_kernels.runtime.replay import Replay

# Bytes that addresses are compared modulo of: a multiple of what any check asks for.
ALIGNMENT = 64
# Calls that a function keeps; a server sees batches of ever other sizes.
MAX_REPLAYS = 256

_PLAIN = frozenset((int, bool, str, type(None), torch.dtype))
_LISTED = frozenset((int, str))
_UNKNOWN: Any = object()
_is_suspended = False

Key = tuple[Any, ...]


@contextmanager
def suspended(wanted: bool = True) -> Iterator[None]:
    """Context in which every call is checked anew; or, where not ``wanted``, none that need not be.

    For those who put other functions in the place of choosers and launches.
    """
    global _is_suspended
    before, _is_suspended = _is_suspended, wanted
    try:
        yield
    finally:
        _is_suspended = before


class Prepared:
    """A function whose calls are prepared.

    Args:
        function: checks its arguments, allocates, launches; takes tensors, of which the first
            argument is one, numbers, strings, dtypes, None, and lists of integers and strings, by
            position.
        multiples: of integers by their places: the function does the same for all positive ones
            that round up to the same multiple of this.
        compared: pairs of tensors, by their places, of which the function may ask how their memory
            lies: see ``recording.compared``.

    Attributes:
        replays: by a call's key; None: such calls do more than allocate and launch.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        multiples: Mapping[int, int] | None = None,
        compared: Collection[tuple[int, int]] = (),
    ) -> None:
        self.function = function
        self.replays: dict[Key, Replay | None] = {}
        self._multiples = tuple((multiples or {}).items())
        self._compared = frozenset(compared)

    def __call__(self, *given: Any) -> Any:
        first = given[0]
        if (
            _is_suspended
            or not isinstance(first, Tensor)
            or is_reference_device(first.device)
            or active() is not None
        ):
            return self.function(*given)
        pointers: list[int] = []
        key = self.key(given, pointers)
        if key is None:
            return self.function(*given)
        replay = self.replays.get(key, _UNKNOWN)  # of several threads one may empty it
        if replay is _UNKNOWN:
            return self._record(key, given)
        return self.function(*given) if replay is None else replay.run(given, pointers)

    def key(self, given: tuple[Any, ...], pointers: list[int]) -> Key | None:
        """All that a call depends on but contents and addresses; None: it cannot be prepared.

        Addresses are added to ``pointers``, one for each argument, 0 for what is no tensor.
        """
        key: list[Any] = [stand_in_epoch()]
        try:
            for x in self._rounded(given) if self._multiples else given:
                kind = type(x)
                if kind is Tensor or kind is Parameter:
                    pointer = x.data_ptr()
                    pointers.append(pointer)
                    key += x.shape, x.stride(), x.dtype, x.device, pointer % ALIGNMENT
                    continue
                pointers.append(0)
                if kind in _PLAIN:
                    key += kind, x
                elif kind is float:
                    key += kind, x.hex()  # which tells zeros apart, and a NaN equals itself
                elif (kind is list or kind is tuple) and _LISTED.issuperset(map(type, x)):
                    key += kind, tuple(x)
                else:
                    return None
            for x, y in ((given[one], given[other]) for one, other in self._compared):
                if isinstance(x, Tensor) and isinstance(y, Tensor):
                    key.append(relation(x, y))
        except RuntimeError:  # a tensor without strides or memory
            return None
        return tuple(key)

    def _rounded(self, given: tuple[Any, ...]) -> list[Any]:
        rounded = list(given)
        for place, multiple in self._multiples:
            n = given[place]
            if type(n) is int and n > 0:
                rounded[place] = -(-n // multiple) * multiple
        return rounded

    def _record(self, key: Key, given: tuple[Any, ...]) -> Any:
        recording = Recording(given, self._compared)
        with recording:
            result = self.function(*recording.arguments)
        if len(self.replays) >= MAX_REPLAYS:
            self.replays.clear()
        self.replays[key] = Replay.of(recording, result)
        return recording.given_back(result)
