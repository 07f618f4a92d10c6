"""Prepared launches: results of a call's checks and kernel choice, cached for similar calls.

If a call has the same numbers as an earlier call, and tensors of the same dtypes, shapes, strides,
devices and alignments, a look-up replaces the checks and the choice of a kernel. The call then only
allocates results, writes addresses into the launch arguments, and launches. A call that does
anything else, such as reading contents, is not prepared: see ``nvfp4_kernels.runtime.recording``.
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

# Modulus in bytes for comparing addresses: a multiple of every checked alignment.
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
    """Context that turns prepared launches off or, with ``wanted`` false, on again.

    Needed while kernel choosers or launch functions are replaced.
    """
    global _is_suspended
    before, _is_suspended = _is_suspended, wanted
    try:
        yield
    finally:
        _is_suspended = before


class Prepared:
    """Function with prepared calls.

    Args:
        function: function that checks its arguments, allocates and launches; arguments are
            positional: tensors (at least the first argument), numbers, strings, dtypes, None, lists
            of integers and strings.
        multiples: granularity of integer arguments, by position: the function does the same for all
            positive values that round up to the same multiple of the granularity.
        compared: pairs of positions of tensors whose memory overlap the function may query, see
            ``recording.compared``.

    Attributes:
        replays: replay by call key; None for calls that do more than allocate and launch.
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
        replay = self.replays.get(key, _UNKNOWN)  # another thread may empty it
        if replay is _UNKNOWN:
            return self._record(key, given)
        return self.function(*given) if replay is None else replay.run(given, pointers)

    def key(self, given: tuple[Any, ...], pointers: list[int]) -> Key | None:
        """Key of a call: arguments; for a tensor its layout, dtype, device, and address modulo 64.

        None: the call cannot be prepared. Addresses are appended to ``pointers``, one per argument;
        0 for arguments that are not tensors.
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
                    key += kind, x.hex()  # hex distinguishes 0.0 and -0.0, and a NaN equals itself
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
