"""Costs of one PTX instruction to the issuing warp: pipe, occupancy, latency."""

import re
from typing import NamedTuple

from tests.emulator.ptx.syntax import TYPE_BITS, Immediate, Instruction, Register
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.parameters import Parameters

_EVENT_FAMILIES = frozenset(
    (
        *("mbarrier", "bar", "barrier", "clusterlaunchcontrol", "cp", "prefetch", "prefetchu"),
        *("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "griddepcontrol"),
    )
)
_FREE = frozenset(("cvta", "pragma", "pmevent"))
# One integer instruction, two for 64 bits.
_INTEGERS = frozenset(
    (
        *("add", "addc", "sub", "subc", "neg", "abs", "min", "max", "sad", "set", "setp", "selp"),
        *("slct", "and", "or", "xor", "not", "cnot", "lop3", "shl", "shr", "shf", "prmt", "bfe"),
        *("bfi", "bmsk", "szext", "copysign", "testp", "isspacep", "mapa", "getctarank"),
        "createpolicy",
    )
)
# An issue slot only; the price of a jump is added where it is taken.
_ISSUED = frozenset(
    (
        *("bra", "brx", "ret", "exit", "call", "trap", "brkpt"),
        *("tcgen05", "wgmma", "discard", "applypriority"),
    )
)
_LOADS = frozenset(("ld", "ldu", "atom", "ldmatrix"))
_MUFU = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"))
_FLOATS = frozenset(("add", "sub", "mul", "fma", "mad", "neg", "abs"))
_WIDE = frozenset(("cluster", "gpu", "sys", "gl"))  # scopes beyond the CTA
_SLOW_BITS = frozenset(("popc", "clz", "bfind", "brev", "fns"))
_NARROW = frozenset(
    ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e4m3x4", "e5m2x4", "e2m1x4")
)


class Cost(NamedTuple):
    """Cost of one instruction.

    Attributes:
        issue: issue slots.
        pipe: "fma", "alu", "mufu", "fp64", "shuffle" or "" for none.
        cycles: cycles of that pipe of the warp's scheduler.
        latency: cycles until the result can be used.
        stall: cycles until the warp can issue another instruction.
    """

    issue: float
    pipe: str
    cycles: float
    latency: float
    stall: float = 0.0


def is_event(instruction: Instruction) -> bool:
    """Whether an execution of the instruction leaves an event in a trace."""
    parts = instruction.parts
    if parts[0] in ("ld", "ldu") and "param" in parts[1]:
        return False
    return parts[0] in _EVENT_FAMILIES or (
        parts[0] in ("tcgen05", "wgmma") and not parts[1].startswith("fence")
    )


def is_load(instruction: Instruction) -> bool:
    """Whether the instruction fetches registers from memory asynchronously."""
    return instruction.parts[0] in _LOADS and is_event(instruction)


def is_device_fence(instruction: Instruction) -> bool:
    """Whether the instruction first waits until the thread's writes are visible in the device.

    An arrival with release semantics at cluster scope is assembled to a fence of the whole device,
    as is a release or acq_rel of a write at cluster scope or beyond.
    """
    parts = instruction.parts
    family, wide = parts[0], bool(_WIDE.intersection(parts))
    if family == "membar":
        return wide
    if family == "fence":
        return wide and "proxy" not in parts and parts[1] != "mbarrier_init"
    if family == "mbarrier":
        return parts[1].startswith("arrive") and wide and "relaxed" not in parts
    if parts[:3] == ("barrier", "cluster", "arrive"):
        return "relaxed" not in parts
    if family in ("st", "red", "atom"):
        return wide and bool({"release", "acq_rel"}.intersection(parts))
    return False


class Costs:
    """Costs of instructions by one chip's parameters.

    Each PTX instruction is priced as one machine instruction, except that register moves,
    address-space casts, signs of float32 and 64-bit widening cost nothing and 64-bit integer
    arithmetic costs two.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._known: dict[tuple[str, bool], Cost] = {}

    def of(self, instruction: Instruction) -> Cost:
        if instruction.parts[0] == "nanosleep":
            (time,) = instruction.operands
            asked = time.value if isinstance(time, Immediate) else 0
            return Cost(1, "", 0, 1, asked * self._p.clock)
        special = len(instruction.operands) > 1 and _is_special(instruction)
        key = (instruction.opcode, special)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(instruction, special)
        return found

    def _price(self, instruction: Instruction, special: bool) -> Cost:
        p = self._p
        parts = instruction.parts
        family, kind = parts[0], parts[-1]
        if family == "mov":
            return Cost(1, "alu", p.integer_interval, p.special_latency) if special else NOTHING
        if family in _FREE or is_event(instruction) or family in ("ld", "ldu"):
            # Memory and barriers are priced where their events are replayed.
            stall = p.device_fence_latency if is_device_fence(instruction) else 0.0
            return NOTHING if family in _FREE else Cost(1, "", 0, 1, stall)
        if family in _MUFU:
            if kind == "f64":
                return Cost(8, "fp64", 8 * p.double_interval, 8 * p.double_latency)
            halves = 2 if kind in ("f16x2", "bf16x2") else 1
            return Cost(halves, "mufu", halves * p.mufu_interval, p.mufu_latency)
        if family == "cvt":
            return self._conversion(parts)
        if kind == "f64" and family in (*_FLOATS, "min", "max", "setp", "div"):
            steps = 10 if family == "div" else 1
            return Cost(steps, "fp64", steps * p.double_interval, steps * p.double_latency)
        if family in ("abs", "neg") and kind == "f32":
            return NOTHING  # a modifier of the operand at the use of the result
        if family in _FLOATS and kind in ("f32", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
            if kind == "f32x2":
                return Cost(1, "fma", p.packed_fma_interval, p.arithmetic_latency)
            if kind == "f32":
                return Cost(1, "fma", p.fma_interval, p.arithmetic_latency)
            return Cost(1, "fma", p.half_interval, p.half_latency)
        if family == "div" and kind == "f32":
            return Cost(8, "fma", 8 * p.fma_interval, p.mufu_latency + 6 * p.arithmetic_latency)
        if family in ("div", "rem"):
            wide = 4 if TYPE_BITS.get(kind, 32) == 64 else 1
            return Cost(20 * wide, "alu", 20 * wide * p.integer_interval, 100.0 * wide)
        if family in ("mul", "mad", "madc", "mul24", "mad24", "dp4a", "dp2a"):
            wide = 3 if TYPE_BITS.get(kind, 32) == 64 else 1
            return Cost(wide, "fma", wide * p.multiply_interval, wide * p.arithmetic_latency)
        return self._rest(parts)

    def _conversion(self, parts: tuple[str, ...]) -> Cost:
        p = self._p
        target, source = parts[-2], parts[-1]
        if {target, source} & _NARROW:
            return Cost(1, "alu", p.narrow_interval, p.convert_latency)
        if target[0] in "usb" and source[0] in "usb":
            # Widening reads the register unchanged; narrowing masks the register.
            return NOTHING if TYPE_BITS[target] >= TYPE_BITS[source] else self._integer(1)
        return Cost(1, "alu", p.convert_interval, p.convert_latency)

    def _integer(self, steps: int) -> Cost:
        p = self._p
        return Cost(steps, "alu", steps * p.integer_interval, steps * p.arithmetic_latency)

    def _rest(self, parts: tuple[str, ...]) -> Cost:
        p = self._p
        family, kind = parts[0], parts[-1]
        if family == "shfl":
            return Cost(1, "shuffle", p.shuffle_interval, p.shuffle_latency)
        if family in ("redux", "match"):
            return Cost(1, "shuffle", p.redux_interval, p.redux_latency)
        if family in ("vote", "elect", "activemask"):
            return Cost(1, "alu", p.integer_interval, p.vote_latency)
        if family in _SLOW_BITS:
            return Cost(1, "mufu", p.population_interval, p.mufu_latency)
        if family in ("fence", "membar"):
            return Cost(1, "", 0, 1, self._fence(parts))
        if family == "setmaxnreg":
            return Cost(1, "", 0, 1, p.register_change_latency)
        if family == "tensormap":
            return Cost(1, "", 0, 1, p.map_change_latency)
        if family == "mma":
            return self._warp_multiply(parts)
        if family in _ISSUED:
            return Cost(1, "", 0, 1)
        if family == "shl" and kind == "b32":
            # The assembler uses a multiply, which keeps the busier logic pipe free.
            return Cost(1, "fma", p.multiply_interval, p.arithmetic_latency)
        if family in _INTEGERS:
            return self._integer(2 if TYPE_BITS.get(kind, 32) == 64 else 1)
        raise TimingError(f"{'.'.join(parts)}: has no price; name its family in costs.py")

    def _fence(self, parts: tuple[str, ...]) -> float:
        p = self._p
        if "proxy" in parts:
            if any(part.startswith("tensormap") for part in parts):
                return p.device_fence_latency if "release" in parts else p.map_fence_latency
            return p.proxy_fence_latency
        if any(part in ("gpu", "sys", "cluster", "gl") for part in parts):
            return p.device_fence_latency
        return p.proxy_fence_latency

    def _warp_multiply(self, parts: tuple[str, ...]) -> Cost:
        """mma.sync, executed by the tensor core of the warp's scheduler."""
        shape = next(part for part in parts if part[0] == "m" and part[1].isdigit())
        m, n, k = (int(size) for size in re.findall(r"\d+", shape))
        bits = TYPE_BITS.get(parts[-3], 8)  # bits of an element of A
        cycles = m * n * k * bits / 16 / self._p.warp_multiply_rate
        return Cost(1, "mma.sync", cycles, max(cycles, self._p.warp_multiply_latency))


NOTHING = Cost(0, "", 0, 0)


def _is_special(instruction: Instruction) -> bool:
    """Whether a ``mov`` reads a special register (``%tid.x``): virtual names end in a number."""
    source = instruction.operands[1]
    return isinstance(source, Register) and (
        not source.name[-1].isdigit() or source.name == "%clock64"
    )
