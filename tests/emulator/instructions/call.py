"""call: the device functions built into the driver, vprintf and __assertfail."""

import ctypes
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.emulator.findings import IllegalInstruction, KernelAssertion
from tests.emulator.instructions.load_store import memory_at
from tests.emulator.instructions.mbarrier import pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Instruction, Symbol, Vector
from tests.emulator.windows import LOCAL_WINDOW, WINDOW_SHIFT

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp

# Flags, width, precision, size and conversion (CUDA C++ Programming Guide, Formatted Output).
_FORMAT = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+)?)?(?P<size>hh|h|ll|l|z|j|t)?"
    r"(?P<conversion>[%cdiouxXpeEfFgGaAs])"
)
_WIDE = ("l", "ll", "z", "j", "t")
_LIBRARY = ctypes.CDLL(None)
_LONGEST = 4096  # bytes of a string


@family("call")
def call(e: "Emitter", i: Instruction) -> None:
    found, function, arguments = i.operands
    assert isinstance(found, Vector)
    assert isinstance(function, Symbol)
    assert isinstance(arguments, Vector)
    counts = {"vprintf": (1, 2), "__assertfail": (0, 5)}
    if function.name not in counts or i.opcode not in ("call", "call.uni"):
        raise e.unknown(i, f"function {function.name}; {sorted(counts)} are")
    if (len(found.items), len(arguments.items)) != counts[function.name]:
        raise e.unknown(i, f"{function.name} with these numbers of results and arguments")
    kinds = ("u64", "u64", "u32", "u64", "u64")
    values = ", ".join(e.value(a, k) for a, k in zip(arguments.items, kinds, strict=False))
    line = f"{function.name.strip('_')}(w, {values}, {e.mask}, {i.line})"
    if not found.items:
        e.write(line)
        return
    name = e.temporary()
    e.write(f"{name} = {line}")
    e.assign(found.items[0], name, "u32", uniform=True)


def _read(w: "Warp", lane: int, address: int, nbytes: int, line: int) -> bytes:
    """Bytes at a generic address of one lane."""
    access = w.access(line, "read")
    if address >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT:
        return w.local[lane].read(address, nbytes, access).tobytes()
    memory = memory_at(w, "generic", address, "read")
    if memory.kind == "shared":
        address &= 0xFFFFFFFF
    return memory.read(address, nbytes, access).tobytes()


def _string(w: "Warp", lane: int, address: int, line: int) -> str:
    """A C string at a generic address."""
    found = bytearray()
    while len(found) < _LONGEST:
        byte = _read(w, lane, address + len(found), 1, line)
        if byte == b"\0":
            return found.decode(errors="replace")
        found += byte
    raise IllegalInstruction(f"string at {address:#x} does not end within {_LONGEST} bytes")


@runtime
def vprintf(w: "Warp", text: Any, arguments: Any, mask: "Mask", line: int) -> int:
    """Print lane by lane; returns the number of arguments in the last lane's format."""
    count = 0
    for lane in w.active(mask):
        place = pick(arguments, lane)
        taken = 0

        def take(nbytes: int, lane: int = lane) -> bytes:
            # Arguments are packed in order, each at a multiple of its size.
            nonlocal place, taken
            place += -place % nbytes
            data = _read(w, lane, place, nbytes, line)
            place += nbytes
            taken += 1
            return data

        def string(address: int, lane: int = lane) -> str:
            return _string(w, lane, address, line)

        sys.stdout.write(formatted(string(pick(text, lane)), take, string))
        count = taken
    return count


def formatted(text: str, take: Callable[[int], bytes], string: Callable[[int], str]) -> str:
    """``text`` with its conversions filled in, each by the C library.

    Args:
        text: printf format.
        take: function from a size in bytes to the next argument's bytes.
        string: function from an address to the C string there.

    Raises:
        IllegalInstruction: a conversion that CUDA's printf does not support.
    """
    parts = []
    end = 0
    for start in (m.start() for m in re.finditer("%", text)):
        if start < end:
            continue
        match = _FORMAT.match(text, start)
        if match is None:
            raise IllegalInstruction(f"printf format {text[start:]!r}: not a conversion of printf")
        parts += [text[end:start], _converted(match, take, string)]
        end = match.end()
    return "".join(parts) + text[end:]


def _converted(
    match: re.Match[str], take: Callable[[int], bytes], string: Callable[[int], str]
) -> str:
    conversion = match["conversion"]
    arguments: list[Any] = [
        ctypes.c_int.from_buffer_copy(take(4))
        for name in ("width", "precision")
        if match[name] == "*"
    ]
    if conversion in "aAeEfFgG":
        arguments.append(ctypes.c_double.from_buffer_copy(take(8)))
    elif conversion == "s":
        arguments.append(string(int.from_bytes(take(8), "little")).encode())
    elif conversion == "p" or match["size"] in _WIDE:
        arguments.append(ctypes.c_int64.from_buffer_copy(take(8)))
    elif conversion != "%":
        arguments.append(ctypes.c_int32.from_buffer_copy(take(4)))
    buffer = ctypes.create_string_buffer(_LONGEST)
    _LIBRARY.snprintf(buffer, ctypes.c_size_t(_LONGEST), match[0].encode(), *arguments)
    return buffer.value.decode(errors="replace")


@runtime
def assertfail(
    w: "Warp",
    message: Any,
    file: Any,
    number: Any,
    function: Any,
    size: Any,
    mask: "Mask",
    line: int,
) -> None:
    lane = w.active(mask)[0]
    what, where, who = (_string(w, lane, pick(a, lane), line) for a in (message, file, function))
    raise KernelAssertion(
        f"assertion {what} failed in {who} ({where}:{pick(number, lane)}), lane {lane} of {w.name}"
    )
