"""Cases of mbarriers: counts, phases, tokens, transactions, and results of waits, step by step."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Case
from tests.test_emulator.silicon.cases.script import Script

_TEST = "mbarrier.test_wait.shared::cta.b64 %p0, [%bar], {};"
_PARITY = "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%bar], {};"
_PENDING = "mbarrier.pending_count.b64 %r0, {};"


def _parities(script: Script, after: str) -> None:
    for parity in (0, 1):
        script.ask(f"parity {parity} {after}", _PARITY.format(parity))


def _init(script: Script, count: int) -> None:
    script.run(f"mbarrier.init.shared::cta.b64 [%bar], {count};")


def _arrive(script: Script, token: str, after: str, suffix: str = "", count: str = "") -> None:
    script.run(f"mbarrier.arrive{suffix}.shared::cta.b64 {token}, [%bar]{count};")
    script.keep(f"pending count {after}", _PENDING.format(token))


def _phases() -> Case:
    """Three phases of a barrier for three arrivals; each token belongs to one phase."""
    script = Script("phases")
    _init(script, 3)
    _parities(script, "at start")
    for phase in range(3):
        for arrival in range(3):
            token = f"%d{phase * 3 + arrival}"
            _arrive(script, token, f"of arrival {arrival} in phase {phase}")
            script.ask(f"token after arrival {arrival} in phase {phase}", _TEST.format(token))
            _parities(script, f"after arrival {arrival} in phase {phase}")
        first = f"%d{phase * 3}"
        script.ask(f"token of phase {phase} at its end", _TEST.format(first))
        _arrive_state = f"mbarrier.try_wait.shared::cta.b64 %p0, [%bar], {first};"
        script.ask(f"try_wait on phase {phase} at its end", _arrive_state)
    return script.case()


def _counts() -> Case:
    """Arrivals with counts, without completion, and drops that lower the next phase's count."""
    script = Script("counts")
    _init(script, 10)
    _arrive(script, "%d0", "before arrive of 4", "", ", 4")
    _arrive(script, "%d1", "before noComplete of 5", ".noComplete", ", 5")
    _parities(script, "one short")
    _arrive(script, "%d2", "before the last arrival")
    _parities(script, "after the last arrival")
    script.run("mbarrier.arrive_drop.shared::cta.b64 %d3, [%bar], 3;")
    script.keep("pending count before drop of 3", _PENDING.format("%d3"))
    script.run("mbarrier.arrive_drop.noComplete.shared::cta.b64 %d4, [%bar], 2;")
    script.keep("pending count before drop.noComplete of 2", _PENDING.format("%d4"))
    _arrive(script, "%d5", "before 5 arrivals", "", ", 5")
    _parities(script, "after phase 1")
    _arrive(script, "%d6", "in a phase of 5")
    _arrive(script, "%d7", "in a phase of 5, again", "", ", 4")
    _parities(script, "after phase 2")
    script.run("mbarrier.inval.shared::cta.b64 [%bar];")
    _init(script, (1 << 20) - 1)
    _arrive(script, "%d8", "of the largest count")
    script.run("mbarrier.inval.shared::cta.b64 [%bar];")
    _init(script, 1)
    _arrive(script, "%d9", "of a count of 1")
    _arrive(script, "%d10", "of a count of 1 in phase 1", ".release.cta")
    _parities(script, "after two phases of 1")
    return script.case()


def _transactions() -> Case:
    """Transactions expected and completed in either order, within and across arrivals."""
    script = Script("transactions")
    expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], {};"
    complete = "mbarrier.complete_tx.relaxed.cta.shared::cluster.b64 [%bar], {};"
    _init(script, 1)
    script.run("mbarrier.arrive.expect_tx.shared::cta.b64 %d0, [%bar], 48;")
    script.keep("pending count before arrive.expect_tx", _PENDING.format("%d0"))
    _parities(script, "with 48 bytes due")
    script.run(complete.format(16))
    _parities(script, "with 32 bytes due")
    script.run(complete.format(32))
    _parities(script, "with nothing due")
    script.run(expect.format(64))
    _arrive(script, "%d1", "with 64 bytes due")
    _parities(script, "arrived, 64 bytes due")
    script.run(expect.format(16))
    script.run(complete.format(80))
    _parities(script, "after phase 1")
    # Completion may come before the expectation: the count passes through negative values.
    script.run(complete.format(128))
    _parities(script, "with 128 bytes early")
    script.run("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %d2, [%bar], 128;")
    script.keep("pending count before expecting what came", _PENDING.format("%d2"))
    _parities(script, "after phase 2")
    script.run("mbarrier.inval.shared::cta.b64 [%bar];")
    _init(script, 2)
    script.run("mbarrier.arrive.expect_tx.shared::cta.b64 %d3, [%bar], 1048575;")
    _arrive(script, "%d4", "with the largest transaction due")
    _parities(script, "with the largest transaction due")
    script.run(complete.format(1048575))
    _parities(script, "after the largest transaction")
    script.run("mbarrier.arrive_drop.expect_tx.shared::cta.b64 %d5, [%bar], 32;")
    script.keep("pending count before drop with 32 due", _PENDING.format("%d5"))
    _arrive(script, "%d6", "after the drop")
    _parities(script, "with 32 due after all arrived")
    script.run(complete.format(32))
    _parities(script, "after the drop's phase")
    _arrive(script, "%d7", "in a phase of one")
    _parities(script, "after a phase of one")
    return script.case()


def _threads() -> Case:
    """Arrivals of 64 threads; cp.async arrivals, counted or not."""
    script = Script("threads", 64, {"source": np.arange(4, dtype="u4")})
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar], 64;")
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar+8], 64;")
    script.run("@%main mbarrier.init.shared::cta.b64 [%bar+16], 128;")
    script.run("bar.sync 0; mbarrier.arrive.shared::cta.b64 %d0, [%bar]; bar.sync 0;")
    script.ask("token of 64 arrivals", _TEST.format("%d0"))
    _parities(script, "after 64 arrivals")
    script.run("mad.lo.u32 %r1, %tid_x, 16, %base; add.u32 %r2, %bar, 8;")
    script.run("cp.async.ca.shared.global [%r1], [%source], 16;")
    # .noinc counts among the expected arrivals; the plain form first adds an expected arrival.
    script.run("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar+8];")
    script.run("cp.async.mbarrier.arrive.shared::cta.b64 [%bar+16];")
    script.run("mbarrier.arrive.shared::cta.b64 %d1, [%bar+16], 2;")
    script.run("cp.async.wait_all; bar.sync 0;")
    for name, offset in (("noinc", 8), ("counted", 16)):
        for parity in (0, 1):
            script.ask(
                f"parity {parity} after {name}",
                f"mbarrier.try_wait.parity.shared::cta.b64 %p0, [%bar+{offset}], {parity}, 20;",
            )
    return script.case(1024)


def _orders() -> Case:
    """Forms with an explicit order and scope."""
    script = Script("orders")
    _init(script, 1)
    for phase, suffix in enumerate((".release.cta", ".release.cluster")):
        token = f"%d{phase}"
        _arrive(script, token, f"with {suffix}", suffix)
        for scope in ("cta", "cluster"):
            script.ask(
                f"test_wait.acquire.{scope}",
                f"mbarrier.test_wait.acquire.{scope}.shared::cta.b64 %p0, [%bar], {token};",
            )
            script.ask(
                f"try_wait.parity.acquire.{scope}",
                f"mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64"
                f" %p0, [%bar], {phase}, 100;",
            )
    return script.case()


def cases() -> Iterator[Case]:
    yield _phases()
    yield _counts()
    yield _transactions()
    yield _threads()
    yield _orders()
