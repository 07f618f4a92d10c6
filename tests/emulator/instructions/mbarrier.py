"""mbarrier.* (PTX ISA, Parallel Synchronization and Communication: mbarrier)."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import BarrierMisuse, MissingProxyFence, ParityAliasing
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.machine.warp import RANK_SHIFT
from tests.emulator.ptx.syntax import Address, Instruction, Operand, Sink
from tests.emulator.sync.mbarrier import MBarrier, Sender

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.warp import Mask, Warp

_MODIFIERS = frozenset(
    [
        "shared",
        "shared::cta",
        "shared::cluster",
        "b64",
        "cta",
        "cluster",
        "release",
        "acquire",
        "relaxed",
        "parity",
        "expect_tx",
        "noComplete",
    ]
)
_STATE_PHASE = 63


@family("mbarrier")
def mbarrier(e: "Emitter", i: Instruction) -> None:
    action = i.parts[1]
    rest = [p for p in i.parts[2:] if p not in _MODIFIERS]
    writer = _WRITERS.get(action)
    if writer is None or rest:
        raise e.unknown(i, f"modifiers {rest}" if rest else "")
    writer(e, i)


def _per_lane(e: "Emitter", operand: Operand, kind: str = "u32") -> str:
    return e.value(operand, kind)


def _init(e: "Emitter", i: Instruction) -> None:
    address, count = i.operands
    e.write(f"mbarrier_init(w, {e.address(address)}, {_per_lane(e, count)}, {e.mask}, {i.line})")


def _inval(e: "Emitter", i: Instruction) -> None:
    e.write(f"mbarrier_inval(w, {e.address(i.operands[0])}, {e.mask}, {i.line})")


def _arrive(e: "Emitter", i: Instruction) -> None:
    operands = list(i.operands)
    target: Operand = Sink()
    if not isinstance(operands[0], Address):
        target = operands.pop(0)
    count = _per_lane(e, operands[1]) if len(operands) > 1 else "1"
    expect = "None"
    if i.has("expect_tx"):
        expect, count = count, "1"
    drop = i.parts[1] == "arrive_drop"
    call = (
        f"mbarrier_arrive(w, {e.address(operands[0])}, {count}, {expect}, {i.has('relaxed')}, "
        f"{i.has('cluster')}, {drop}, {i.has('noComplete')}, {e.mask}, {i.line})"
    )
    if isinstance(target, Sink):
        e.write(call)
    else:
        e.assign(target, call, "u64")
    e.write("if w.jitter: yield")


def _expect(e: "Emitter", i: Instruction) -> None:
    address, nbytes = i.operands
    e.write(f"mbarrier_expect(w, {e.address(address)}, {_per_lane(e, nbytes)}, {e.mask}, {i.line})")


def _complete(e: "Emitter", i: Instruction) -> None:
    address, nbytes = i.operands
    e.write(
        f"mbarrier_complete(w, {e.address(address)}, {_per_lane(e, nbytes)}, {e.mask}, {i.line})"
    )


def _wait(e: "Emitter", i: Instruction) -> None:
    target, address, phase = i.operands[:3]
    parity = i.has("parity")
    block = i.parts[1] == "try_wait"
    relaxed = i.has("relaxed")
    name = e.temporary()
    whole = e.is_uniform(address) and e.is_uniform(phase)
    kind = "u32" if parity else "u64"
    arguments = f"{block}, {relaxed}, {i.has('cluster')}, {parity}, {i.line}"
    if whole:
        e.write(
            f"{name} = yield from mbarrier_wait(w, {e.address(address)}, {e.value(phase, kind)}, "
            f"{arguments})"
        )
        e.assign(target, name, "pred", uniform=True)
    else:
        spread = e.address(address)
        if e.is_uniform(address):
            spread = f"np.full(32, {spread}, np.uint32)"
        e.write(
            f"{name} = yield from mbarrier_wait_lanes(w, {spread}, {e.lanes(phase, kind)}, "
            f"{e.mask}, {arguments})"
        )
        e.assign(target, name, "pred")


def _pending(e: "Emitter", i: Instruction) -> None:
    target, state = i.operands
    uniform = e.is_uniform(state)
    value = e.value(state, "u64")
    form = (
        f"({value} >> 20 & 0xfffff)"
        if uniform
        else f"(({value} >> np.uint64(20)) & np.uint64(0xfffff)).astype(np.uint32)"
    )
    e.assign(target, form, "u32", uniform=uniform)


_WRITERS = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _expect,
    "complete_tx": _complete,
    "test_wait": _wait,
    "try_wait": _wait,
    "pending_count": _pending,
}


# Functions called by generated code


def pick(value: Any, lane: int) -> int:
    """Value of an operand, uniform or of 32 lanes, in one lane."""
    return int(value[lane]) if isinstance(value, np.ndarray) else int(value)


def barrier_at(w: "Warp", address: int) -> tuple["Cta", MBarrier]:
    """CTA and live mbarrier that a shared address names; the CTA is the warp's or a peer."""
    cta = w.cta_at(address & 0xFFFFFFFF)
    return cta, cta.mbarrier(address & 0xFFFFFFFF)


def check_visible(w: "Warp", barrier: MBarrier, cta: "Cta", remote: bool) -> None:
    """Check that the mbarrier's initialisation is visible to the warp.

    ``remote``: whether the cluster and the async proxy must see the initialisation too.
    """
    component, clock = barrier.initialiser
    clocks = w.actor.clocks
    if max(clocks.generic.get(component, 0), clocks.inits.get(component, 0)) < clock:
        w.launch.report(
            BarrierMisuse(
                f"{barrier} of CTA {cta.position} is used, but nothing orders that after its "
                "mbarrier.init"
            )
        )
    if remote and not barrier.fenced:
        w.launch.report(
            MissingProxyFence(
                f"{barrier} of CTA {cta.position}: its initialisation is not published to the "
                "cluster and the async proxy; fence.mbarrier_init or fence.proxy.async is missing"
            )
        )


@runtime
def mbarrier_init(w: "Warp", address: Any, count: Any, mask: "Mask", line: int) -> None:
    for lane in w.active(mask):
        w.cta.new_mbarrier(pick(address, lane) & 0xFFFFFFFF, pick(count, lane), w, line)


@runtime
def mbarrier_inval(w: "Warp", address: Any, mask: "Mask", line: int) -> None:
    lanes = w.active(mask)
    if not isinstance(address, np.ndarray):
        lanes = lanes[:1]
    for lane in lanes:
        w.cta.invalidate_mbarrier(pick(address, lane) & 0xFFFFFFFF, w, line)


@runtime
def mbarrier_arrive(
    w: "Warp",
    address: Any,
    count: Any,
    expect: Any,
    relaxed: bool,
    wide: bool,
    drop: bool,
    incomplete: bool,
    mask: "Mask",
    line: int,
) -> np.ndarray:
    """Arrive by every active lane, at cluster scope if ``wide``; returns the state words.

    ``expect``: bytes to expect before the arrival, or None; ``drop``: whether the instruction is
    arrive_drop; ``incomplete``: whether it has .noComplete.
    """
    state = np.zeros(32, np.uint64)
    clocks = w.actor.relaxed() if relaxed else w.actor.release()
    if not relaxed:
        w.hand_over(mask, clocks)
    over = w.actor.component, w.actor.now + relaxed  # a release from here on implies the arrival
    flipped: set[tuple[object, ...]] = set()
    for lane in w.active(mask):
        cta, barrier = barrier_at(w, pick(address, lane))
        check_visible(w, barrier, cta, cta is not w.cta)
        if barrier.key in flipped:
            w.launch.report(
                BarrierMisuse(
                    f"lane {lane} arrives after arrivals of the same instruction have completed "
                    f"phase {barrier.phase - 1} of {barrier}: its count is too small"
                )
            )
        if expect is not None:
            barrier.expect(pick(expect, lane))
            w.note("expect", line, barrier.key, pick(expect, lane))
        w.note("drop" if drop else "arrive", line, barrier.key, pick(count, lane))
        pending = barrier.pending
        arrive = barrier.drop if drop else barrier.arrive
        phase = arrive(clocks, pick(count, lane), sender(w, barrier, wide, relaxed), over)
        w.phases[barrier.component] = phase
        if barrier.phase != phase:
            flipped.add(barrier.key)
            if incomplete:
                w.launch.report(
                    BarrierMisuse(
                        f"an arrival with .noComplete completes phase {phase} of {barrier}"
                    )
                )
        w.touch(cta, w.actor.now - (not relaxed), "mbarrier.arrive", line)
        state[lane] = ((phase & 1) << _STATE_PHASE) | (pending << 20)
    return state


def near(w: "Warp", barrier: MBarrier) -> bool:
    """Whether the mbarrier belongs to the warp's CTA."""
    return barrier.address >> RANK_SHIFT == w.cta.rank


def sender(w: "Warp", barrier: MBarrier, wide: bool = True, relaxed: bool = False) -> Sender:
    """Sender kind of this warp, as seen by an mbarrier; ``wide``: cluster scope."""
    if relaxed:
        return Sender.RELAXED
    if near(w, barrier):
        return Sender.NEAR
    return Sender.PEER if wide else Sender.PEER_NARROW


@runtime
def mbarrier_expect(w: "Warp", address: Any, nbytes: Any, mask: "Mask", line: int) -> None:
    for lane in w.active(mask):
        cta, barrier = barrier_at(w, pick(address, lane))
        check_visible(w, barrier, cta, cta is not w.cta)
        barrier.expect(pick(nbytes, lane))
        w.note("expect", line, barrier.key, pick(nbytes, lane))


@runtime
def mbarrier_complete(w: "Warp", address: Any, nbytes: Any, mask: "Mask", line: int) -> None:
    for lane in w.active(mask):
        _, barrier = barrier_at(w, pick(address, lane))
        w.note("complete", line, barrier.key, pick(nbytes, lane))
        barrier.complete(pick(nbytes, lane), w.actor.release(), near(w, barrier))


def _done(barrier: MBarrier, phase: int, parity: bool) -> bool:
    if parity:
        if phase > 1:
            raise BarrierMisuse(f"phase parity {phase} of {barrier}: must be 0 or 1")
        return barrier.done(phase)
    return barrier.phase & 1 != phase >> _STATE_PHASE


@runtime
def mbarrier_wait(
    w: "Warp",
    address: int,
    phase: int,
    block: bool,
    relaxed: bool,
    wide: bool,
    parity: bool,
    line: int,
) -> Generator[None, None, bool]:
    """test_wait, or try_wait if ``block``: a second try in a row sleeps until the phase completes.

    ``phase`` is a parity if ``parity``, else a state word; ``wide``: cluster scope.
    """
    cta, barrier = barrier_at(w, address)
    if cta is not w.cta:
        raise BarrierMisuse(f"wait on an mbarrier of another CTA: {barrier} of CTA {cta.position}")
    check_visible(w, barrier, cta, False)
    # The phase that must have completed: the current phase if its parity is the awaited parity.
    wanted = barrier.phase - _done(barrier, phase, parity)
    if parity:
        _check_parity(w, barrier, wanted)
    if not block:
        yield
    if block and not _done(barrier, phase, parity):
        w.launch.counters.waits["mbarrier"] += 1
        attempt = (line, barrier.key, phase)
        if w.gave_up != attempt:
            # A first failed try_wait only polls; a repeated try_wait sleeps.
            w.gave_up = attempt
            w.note("wait", line, barrier.key, wanted, False)
            if w.jitter:
                yield
            return False
        start = barrier.phase
        while barrier.phase == start:
            w.blocked(barrier.waiters, lambda: _wanted(barrier, phase, parity), limited=True)
            yield
            if w.timed_out:
                w.note("wait", line, barrier.key, wanted, False)
                return False
        done = True
    else:
        done = _done(barrier, phase, parity)
    w.note("wait", line, barrier.key, wanted, done)
    if done:
        w.gave_up = None
        w.phases[barrier.component] = wanted + 1
        barrier.waited(w.actor.component, w.actor.now, lambda: w.where(line))
        handed = barrier.handed_to(wide)
        if relaxed:
            w.actor.observe(handed)
        else:
            w.actor.acquire(handed)
            w.take_over(handed)
    return done


def _check_parity(w: "Warp", barrier: MBarrier, wanted: int) -> None:
    """Report a parity wait unless the warp knows that the preceding phase is complete."""
    known = max(w.phases.get(barrier.component, 0), w.actor.seen(barrier.component))
    if known < wanted and not barrier.known_complete(wanted - 1, w.actor):
        w.launch.report(
            ParityAliasing(
                f"wait for phase {wanted} of {barrier}, where this warp knows of {known} that are "
                f"complete: early, it meets the parity of phase {wanted - 2}; wait for every phase,"
                " or for something that comes after the one before"
            )
        )


def _wanted(barrier: MBarrier, phase: int, parity: bool) -> str:
    return f"the completion of parity {phase if parity else phase >> _STATE_PHASE} of {barrier}"


@runtime
def mbarrier_wait_lanes(
    w: "Warp",
    addresses: np.ndarray,
    phases: np.ndarray,
    mask: "Mask",
    block: bool,
    relaxed: bool,
    wide: bool,
    parity: bool,
    line: int,
) -> Generator[None, None, np.ndarray]:
    """Wait lane by lane, see ``mbarrier_wait``; lanes of one mbarrier and phase share a wait."""
    result = np.zeros(32, bool)
    seen: dict[tuple[int, int], bool] = {}
    for lane in w.active(mask):
        key = (int(addresses[lane]), int(phases[lane]))
        if key not in seen:
            seen[key] = yield from mbarrier_wait(w, *key, block, relaxed, wide, parity, line)
        result[lane] = seen[key]
    return result
