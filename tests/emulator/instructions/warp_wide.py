"""Warp-wide instructions: shfl, vote, match, redux, elect, activemask."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import DivergentExecution
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Immediate, Instruction, Pair, Register, Sink

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp

_LANE = np.arange(32)


def _members(e: "Emitter", i: Instruction, operand: Any) -> None:
    """Emit a check that the member mask names exactly the lanes that execute the instruction."""
    if isinstance(operand, Immediate) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF:
        if e.mask != "None":
            e.write(f"members(w, 0xffffffff, {e.mask}, {i.opcode!r})")
        return
    e.write(f"members(w, {e.value(operand, 'u32')}, {e.mask}, {i.opcode!r})")


@runtime
def members(w: "Warp", wanted: Any, mask: "Mask", what: str) -> None:
    here = w.mask_bits(mask)
    if isinstance(wanted, np.ndarray):
        wanted = int(wanted[w.active(mask)[0]])
    missing = int(wanted) & ~here & w.mask_bits(None)
    if missing:
        w.launch.report(
            DivergentExecution(f"{what} names lanes {missing:#010x} that took another way")
        )


@family("shfl")
def shuffle(e: "Emitter", i: Instruction) -> None:
    mode = i.parts[2]
    target, source, lane, clamp, wanted = i.operands
    _members(e, i, wanted)
    first = target.first if isinstance(target, Pair) else target
    flag = target.second if isinstance(target, Pair) else Sink()
    if any(isinstance(o, Register) and e.storage(o.name).uniform for o in (first, flag)):
        # The value of one lane for all lanes; the source lane is in range for each of the lanes.
        value = e.value(source, "u32")
        if not e.is_uniform(source):
            value = f"int(({value})[{e.value(lane, 'u32')} & 31])"
        if not isinstance(first, Sink):
            e.assign(first, value, "u32", uniform=True)
        if not isinstance(flag, Sink):
            e.assign(flag, "True", "pred", uniform=True)
        return
    values = e.lanes(source, "u32")
    name, valid = e.temporary(), e.temporary()
    e.write(
        f"{name}, {valid} = shuffle_{mode}({values}, {e.lanes(lane, 'u32')}, "
        f"{e.lanes(clamp, 'u32')})"
    )
    if not isinstance(first, Sink):
        e.assign(first, name, "u32")
    if not isinstance(flag, Sink):
        e.assign(flag, valid, "pred")


def _segments(clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segment mask, and the segment's first and last lane, for each lane (PTX ISA, shfl.sync)."""
    clamp = clamp.astype(np.int64)
    segment = clamp >> 8 & 31
    high = (_LANE & segment) | (clamp & 31 & ~segment)
    return segment, _LANE & segment, high


def _shuffled(
    values: np.ndarray, source: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return values[np.where(valid, source, _LANE) & 31], valid


@runtime
def shuffle_up(values: np.ndarray, lane: np.ndarray, clamp: np.ndarray) -> Any:
    _, _, high = _segments(clamp)
    source = _LANE - (lane.astype(np.int64) & 31)
    return _shuffled(values, source, source >= high)


@runtime
def shuffle_down(values: np.ndarray, lane: np.ndarray, clamp: np.ndarray) -> Any:
    _, _, high = _segments(clamp)
    source = _LANE + (lane.astype(np.int64) & 31)
    return _shuffled(values, source, source <= high)


@runtime
def shuffle_bfly(values: np.ndarray, lane: np.ndarray, clamp: np.ndarray) -> Any:
    _, _, high = _segments(clamp)
    source = _LANE ^ (lane.astype(np.int64) & 31)
    return _shuffled(values, source, source <= high)


@runtime
def shuffle_idx(values: np.ndarray, lane: np.ndarray, clamp: np.ndarray) -> Any:
    segment, low, high = _segments(clamp)
    source = low | (lane.astype(np.int64) & 31 & ~segment)
    return _shuffled(values, source, source <= high)


@family("vote")
def vote(e: "Emitter", i: Instruction) -> None:
    mode = i.parts[2] if i.parts[1] == "sync" else i.parts[1]
    target, predicate, wanted = i.operands
    _members(e, i, wanted)
    value = e.lanes(predicate, "pred")
    lanes = e.mask if e.mask != "None" else "w.live"
    forms = {
        "all": f"bool(({value})[{lanes}].all())",
        "any": f"bool(({value})[{lanes}].any())",
        "uni": f"(len(set(({value})[{lanes}].tolist())) == 1)",
        "ballot": f"w.mask_bits(({value}) & {lanes})",
    }
    e.assign(target, forms[mode], "u32" if mode == "ballot" else "pred", uniform=True)


@family("activemask")
def active_mask(e: "Emitter", i: Instruction) -> None:
    e.assign(i.operands[0], f"w.mask_bits({e.mask})", "u32", uniform=True)


@family("elect")
def elect(e: "Emitter", i: Instruction) -> None:
    """Elect the lowest lane of the mask; PTX promises only a deterministic leader."""
    target = i.operands[0]
    first = target.first if isinstance(target, Pair) else target
    flag = target.second if isinstance(target, Pair) else Sink()
    _members(e, i, i.operands[1])
    name = e.temporary()
    e.write(f"{name} = elected(w, {e.value(i.operands[1], 'u32')}, {e.mask})")
    if not isinstance(first, Sink):
        e.assign(first, f"int({name}.argmax())", "u32", uniform=True)
    if not isinstance(flag, Sink):
        e.assign(flag, name, "pred")


@runtime
def elected(w: "Warp", wanted: Any, mask: "Mask") -> np.ndarray:
    lanes = w.live if mask is None else mask
    here = w.mask_bits(lanes)
    if isinstance(wanted, np.ndarray):
        wanted = int(wanted[int(lanes.argmax())])
    candidates = here & int(wanted)
    result = np.zeros(32, bool)
    if candidates:
        result[(candidates & -candidates).bit_length() - 1] = True
    return result


@family("redux")
def redux(e: "Emitter", i: Instruction) -> None:
    """Emit ``redux.sync.op{.abs}{.NaN}.type d, a, mask``."""
    target, source, wanted = i.operands
    kind = i.parts[-1]
    _members(e, i, wanted)
    value = e.lanes(source, kind)
    lanes = e.mask if e.mask != "None" else "w.live"
    modifiers = i.parts[2:-1]
    e.assign(target, f"reduced(({value})[{lanes}], {modifiers!r})", f"u{32}", uniform=True)


@runtime
def reduced(values: np.ndarray, modifiers: tuple[str, ...]) -> int:
    operation = modifiers[0]
    if values.dtype == np.float32:
        if "abs" in modifiers:
            values = np.abs(values)
        quiet, loud = (np.fmin, np.minimum) if operation == "min" else (np.fmax, np.maximum)
        found = (loud if "NaN" in modifiers else quiet).reduce(values)
        if np.isnan(found):
            return 0x7FFFFFFF
        return int(np.float32(found).view(np.uint32))
    functions = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    found = functions[operation].reduce(values, dtype=values.dtype)
    return int(found) & 0xFFFFFFFF


@family("match")
def match(e: "Emitter", i: Instruction) -> None:
    target, source, wanted = i.operands
    first = target.first if isinstance(target, Pair) else target
    flag = target.second if isinstance(target, Pair) else Sink()
    _members(e, i, wanted)
    kind = i.parts[-1].replace("b", "u")
    lanes = e.mask if e.mask != "None" else "w.live"
    name, same = e.temporary(), e.temporary()
    e.write(f"{name}, {same} = matched({e.lanes(source, kind)}, {lanes}, {i.parts[1]!r})")
    e.assign(first, name, "u32")
    if not isinstance(flag, Sink):
        e.assign(flag, same, "pred")


@runtime
def matched(values: np.ndarray, lanes: np.ndarray, mode: str) -> Any:
    equal = (values[:, None] == values[None, :]) & lanes[None, :]
    weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
    masks = (equal * weights).sum(1, dtype=np.uint32)
    if mode == "any":
        return masks, np.ones(32, bool)
    same = bool(equal[np.ix_(lanes, lanes)].all())
    whole = (lanes * weights).sum(dtype=np.uint32)
    return np.full(32, whole if same else 0, np.uint32), np.full(32, same)
