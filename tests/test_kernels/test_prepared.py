"""Launch cache: checks made once, checks made on every call, and calls never cached."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.checks import check_dtype, check_layout, check_same_device, reads_contents
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime import launch_cache
from nvfp4_kernels.runtime.launch_cache import MAX_REPLAYS, Prepared
from nvfp4_kernels.runtime.recording import compared, relation

FLOATS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Kernel:
    """Stand-in for a kernel, chosen by a call's key."""

    dtype: torch.dtype
    columns: int


class Operands(NamedTuple):
    x: Tensor
    y: Tensor | None
    tail: Tensor


class Arguments(NamedTuple):
    operands: Operands
    out: Tensor
    rows: int
    number: Any


class Device:
    """Device that records its launches.

    Attributes:
        launched: kernel, target and words of each launch.
        known: tensors of each launch.
        calls: number of calls of ``function``.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[Any, str, tuple[Any, ...]]] = []
        self.known: list[list[Tensor]] = []
        self.calls = 0

    def compiled(self, kernel: Any, target: str) -> Callable[..., None]:
        return lambda *words: self.launched.append((kernel, target, words))

    def function(self, x: Tensor, y: Tensor | None, number: Any = 0) -> tuple[Tensor, None, Tensor]:
        """Check, allocate and launch, as ops do."""
        self.calls += 1
        for name, each in (("x", x), ("y", y)):
            if each is not None:
                check_dtype(name, each, FLOATS)
                check_layout(name, each)
        check_same_device(x=x, y=y)
        if number == -1:
            raise InvalidArgument("number: is -1, must be another")
        out, scratch = x.new_empty(x.numel()), x.new_empty(x.shape, dtype=torch.float32)
        operands = Operands(x, y, x[..., 1:])
        kernel = Kernel(x.dtype, x.shape[-1])
        compiler.launch(kernel, Arguments(operands, scratch, len(x), number))
        compiler.launch(kernel, Arguments(operands, out, len(x), number))
        return out.view(x.shape), None, x


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setattr(compiler, "compiled", found.compiled)
    monkeypatch.setattr(compiler, "arch", lambda: "sm_100a")
    monkeypatch.setattr(compiler, "watchers", [found.known.append])
    with standing_in("cpu", "sm_100"), launch_cache.suspended(False):
        yield found


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that starts on a multiple of 64 bytes."""
    x = torch.zeros(*shape, dtype=dtype)
    assert x.data_ptr() % launch_cache.ALIGNMENT == 0
    return x


def test_a_second_call_only_launches(device: Device) -> None:
    call = Prepared(device.function)
    results = []
    for _ in range(2):
        x, y = aligned(4, 16), aligned(4, 16)
        out, none, same = call(x, y, 7)
        assert (out.shape, out.dtype, none) == (x.shape, x.dtype, None)
        assert same is x  # a function that writes to an argument may return it
        results.append((x, y, out))
    assert device.calls == 1
    kernel = Kernel(torch.bfloat16, 16)
    assert [launch[:2] for launch in device.launched] == [(kernel, "sm_100a")] * 4
    for n, (x, y, out) in enumerate(results):
        pointers = x.data_ptr(), y.data_ptr(), x.data_ptr() + 2
        first, second = (words for *_, words in device.launched[2 * n : 2 * n + 2])
        assert first[0][0] == second[0][0] == pointers
        assert first[0][2:] == second[0][2:] == (4, 7)
        assert second[0][1] == out.data_ptr() != first[0][1]
        assert second[1] == 0  # stream
        # Watchers of a replay are told the base tensors of views.
        told = {t.untyped_storage().data_ptr() for t in device.known[2 * n + 1]}
        assert told == {x.data_ptr(), y.data_ptr(), out.data_ptr()}
    assert results[0][2].data_ptr() != results[1][2].data_ptr()


def test_tensors_that_are_one_are_told_apart(device: Device) -> None:
    call = Prepared(device.function)
    x, y = aligned(4, 16), aligned(4, 16)
    call(x, x)
    call(x, y)
    assert device.calls == 1
    assert device.launched[-1][2][0][0][:2] == (x.data_ptr(), y.data_ptr())


def wider(x: Tensor) -> Tensor:
    """A tensor of x's shape with twice the row stride."""
    return aligned(len(x), 2 * x.shape[1], dtype=x.dtype)[:, : x.shape[1]]


def shifted(x: Tensor, elements: int) -> Tensor:
    return aligned(2 * x.numel(), dtype=x.dtype)[elements:][: x.numel()].view(x.shape)


X = torch.zeros(4, 16, dtype=torch.bfloat16)
# Calls that differ from a call with X, X and 7 in one property only: refused as at first.
REFUSED: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "strides": ("y: strides are", lambda: (X, wider(X), 7)),
    "alignment": ("y: starts 4 bytes", lambda: (X, shifted(X, 2), 7)),
    "dtype": ("y: dtype is float16", lambda: (X, X.half(), 7)),
    "device": ("y: is on meta", lambda: (X, X.to("meta"), 7)),
    "number": ("number: is -1", lambda: (X, X, -1)),
    "no tensor": ("y: is list", lambda: (X, [1], 7)),
}
# Calls that differ likewise: checked again, and accepted.
TAKEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "shape": lambda: (aligned(3, 16), X, 7),
    "another alignment": lambda: (X, shifted(X, 8), 7),
    "another dtype": lambda: (X, X.float(), 7),
    "no tensor": lambda: (X, None, 7),
    "a float": lambda: (X, X, 7.0),
    "a parameter of another shape": lambda: (X, Parameter(aligned(3, 16)), 7),
    "one number less": lambda: (X, X),
}


@pytest.mark.parametrize(("message", "change"), REFUSED.values(), ids=REFUSED)
def test_a_change_is_refused_as_at_first(
    message: str, change: Callable[[], tuple[Any, ...]], device: Device
) -> None:
    call = Prepared(device.function)
    for _ in range(2):
        call(aligned(4, 16), aligned(4, 16), 7)
    for calls in (2, 3):
        with pytest.raises(InvalidArgument, match=message):
            call(*change())
        assert device.calls == calls
    assert len(device.launched) == 4
    call(aligned(4, 16), aligned(4, 16), 7)  # still prepared
    assert (device.calls, len(device.launched)) == (3, 6)


@pytest.mark.parametrize("change", TAKEN.values(), ids=TAKEN)
def test_a_change_is_checked_again(change: Callable[[], tuple[Any, ...]], device: Device) -> None:
    call = Prepared(device.function)
    call(aligned(4, 16), aligned(4, 16), 7)
    given = change()
    for _ in range(2):
        call(*given)
    assert device.calls == 2


@pytest.mark.parametrize(
    "numbers",
    [
        (0, False),
        (1, True, 1.0),
        (0.0, -0.0),
        (1, 2),
        ("a", "b"),
        ((1,), [1], (1, 1)),
        (["a"], ("a",), ["b"], [1]),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_are_told_apart(numbers: tuple[Any, ...], device: Device) -> None:
    call = Prepared(device.function)
    for _ in range(2):
        for number in numbers:
            call(X, None, number)
    assert device.calls == len(numbers)
    assert [words[0][3] for *_, words in device.launched[::2]] == [*numbers] * 2


def test_a_nan_is_itself(device: Device) -> None:
    call = Prepared(device.function)
    for _ in range(2):
        call(X, None, float("nan"))
    assert device.calls == 1


def test_the_device_that_is_stood_in_for_may_change(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Prepared(device.function)
    for _ in range(2):
        call(X, None)
    with standing_in("cpu", "sm_90"):
        call(X, None)
    assert device.calls == 2
    monkeypatch.setattr(compiler, "arch", lambda: "sm_103a")
    call(X, None)
    call(X, None)
    assert device.calls == 3
    monkeypatch.setattr(compiler, "arch", lambda: "sm_100a")  # an environment variable's, say
    call(X, None)
    assert device.calls == 3
    targets = [target for _, target, _ in device.launched[::2]]
    assert targets == ["sm_100a"] * 3 + ["sm_103a"] * 2 + ["sm_100a"]


def test_references_are_not_prepared(device: Device) -> None:
    call = Prepared(lambda x: x + 1)
    assert call(X) is not call(X)
    assert [*call.replays.values()] == [None]


def reading(device: Device) -> Callable[..., Any]:
    def run(x: Tensor, y: Tensor | None = None) -> Any:
        if reads_contents(x) and x.tolist()[0][0] > 0:
            raise InvalidArgument("x: is positive")
        return device.function(x, y)

    return run


def filling(device: Device) -> Callable[..., Any]:
    return lambda x: (device.function(x, None), x.new_zeros(3))


def copying(device: Device) -> Callable[..., Any]:
    return lambda x: device.function(x.t().contiguous(), None)


def adding(device: Device) -> Callable[..., Any]:
    return lambda x: (device.function(x, None), x.add_(1))


def closing_over(device: Device) -> Callable[..., Any]:
    return lambda x: device.function(x, X)


def idle(device: Device) -> Callable[..., Any]:
    def run(x: Tensor) -> Tensor:
        device.calls += 1
        return x.new_empty(3)

    return run


@pytest.mark.parametrize("make", [reading, filling, copying, adding, closing_over, idle])
def test_what_does_more_is_not_prepared(
    make: Callable[[Device], Callable[..., Any]], device: Device
) -> None:
    call = Prepared(make(device))
    for n in range(3):
        x = aligned(4, 16)
        call(x)
        assert device.calls == n + 1
    assert [*call.replays.values()] == [None]


def test_contents_are_checked_every_time(device: Device) -> None:
    call = Prepared(reading(device))
    call(aligned(4, 16))
    with pytest.raises(InvalidArgument, match="x: is positive"):
        call(aligned(4, 16) + 1)


def test_as_many_calls_are_kept_as_may_be(device: Device) -> None:
    call = Prepared(device.function)
    for number in range(MAX_REPLAYS + 1):
        call(X, None, number)
    assert len(call.replays) == 1
    call(X, None, 0)
    assert device.calls == MAX_REPLAYS + 2


def test_multiples(device: Device) -> None:
    call = Prepared(device.function, {2: 128})
    for numbers in ((1, 128, 100), (129, 256), (0,), (-2,), (-3,)):
        for number in numbers:
            call(X, None, number)
    assert device.calls == 5
    with pytest.raises(InvalidArgument, match="number: is -1"):
        call(X, None, -1)


def apart(device: Device) -> Callable[..., Any]:
    """Function that refuses overlapping tensors."""

    def run(x: Tensor, y: Tensor | None) -> Any:
        if isinstance(y, Tensor) and compared(x, y) == "overlapping":
            device.calls += 1
            raise InvalidArgument("y: overlaps x")
        return device.function(x, y)

    return run


def test_how_memory_lies(device: Device) -> None:
    """Prepared calls are keyed by how tensors overlap; y starts 4 rows, 128 bytes, after x."""
    call = Prepared(apart(device), compared=[(0, 1)])
    memory = aligned(16, 16)
    others = {"the same": memory[:8], "after it": memory[8:], "elsewhere": aligned(8, 16)}
    for _ in range(2):
        for y in others.values():
            call(memory[:8], y)
            assert device.launched[-1][2][0][0][:2] == (memory.data_ptr(), y.data_ptr())
        call(memory[8:], memory[:8])  # y before x
        call(memory[:8], None)
    assert device.calls == 3  # the same, apart, none
    for calls in (4, 5):
        with pytest.raises(InvalidArgument, match="y: overlaps x"):
            call(memory[:8], memory[4:12])
        assert device.calls == calls
    with pytest.raises(InvalidArgument, match="y: overlaps x"):
        call(memory[4:12], memory[:8])


def test_relation_of_rows_apart() -> None:
    """A strided tensor counts as occupying all memory to its last element, gaps included."""
    memory = aligned(16, 16)
    x = memory[:8:2]
    assert relation(x, memory[7:]) == relation(memory[7:], x) == "apart"
    assert relation(x, memory[6:]) == relation(memory[5:6], x) == "overlapping"
    assert relation(x, memory[:1]) == "one start"
    assert relation(x, memory[3:3]) == "apart"


def test_how_memory_lies_is_a_part_of_no_other_call(device: Device) -> None:
    call = Prepared(apart(device))
    swapped = Prepared(lambda x, y: apart(device)(y, x), compared=[(0, 1)])
    own = Prepared(lambda x, y: apart(device)(x, x.new_empty(8)), compared=[(0, 1)])
    for each in (call, swapped, own):
        for _ in range(2):
            each(aligned(4, 16), aligned(4, 16))
        assert [*each.replays.values()] == [None]


def test_one_call_within_another(device: Device) -> None:
    inner = Prepared(device.function)
    outer = Prepared(lambda x: inner(x, None))
    for _ in range(2):
        outer(X)
    assert device.calls == 1
    assert not inner.replays


def test_suspended(device: Device) -> None:
    call = Prepared(device.function)
    for _ in range(2):
        call(X, None)
        with launch_cache.suspended():
            call(X, None)
    assert device.calls == 3


def test_no_tensor_is_kept(device: Device) -> None:
    call = Prepared(device.function)
    call(aligned(4, 16), aligned(4, 16))
    held = [weakref.ref(x) for tensors in device.known for x in tensors]
    assert len(held) == 8
    device.known.clear()
    assert not any(x() is not None for x in held)
    assert len(call.replays) == 1
