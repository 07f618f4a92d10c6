"""Mutants of synchronising instructions are caught: all of small kernels, some of the GEMM."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.devices import cutlass_or_skip
from tests.emulator import STANDARD, Schedule
from tests.emulator.mutants import mutants
from tests.emulator.mutate import MISSED, first_catch, judge, rows
from tests.emulator.ptx.parser import parse
from tests.mutants import Mutant
from tests.test_emulator.assemble import assemble
from tests.test_emulator.kernels.subjects import Written, written_subjects
from tests.test_emulator.test_machine_hazards import EXCHANGE, exchange

ROOT = Path(__file__).parents[2]

# Changes of one instruction.
CHANGES = {
    "mbarrier.init.shared.b64 [%r3], 4;": {"dropped", "count + 1", "count - 1"},
    "@%p1 mbarrier.arrive.shared.b64 _, [%r4];": {"dropped", "twice", "relaxed"},
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;": {
        "dropped",
        "expects half the bytes",
        "expects twice the bytes",
        "expects no bytes",
    },
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p4, [%r3], %r6;": {
        "not waited for",
        "other parity",
        "relaxed",
    },
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];": {
        "dropped",
        "twice",
        "for its CTA alone",
        "relaxed",
    },
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r3], %r6;": {
        "not waited for",
        "other parity",
        "relaxed",
        "for its CTA alone",
    },
    "bar.sync 1, 64;": {
        "dropped",
        "odd warps at the next barrier",
        "32 threads more",
        "32 fewer",
    },
    "barrier.cluster.arrive.aligned;": {"dropped", "relaxed"},
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    "[%rd1], %h1;": {"dropped", "twice", "CTA mask 1", "CTA mask 2", "other CTA group"},
    "cp.async.bulk.wait_group.read 1;": {"dropped", "2 may be pending"},
    "wgmma.wait_group.sync.aligned 0;": {"dropped", "1 may be pending"},
    "wgmma.commit_group.sync.aligned;": {"dropped"},
    "wgmma.fence.sync.aligned;": {"dropped"},
    "elect.sync _|%p3, -1;": {"every lane elected"},
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;": {
        "dropped",
        "half the columns",
        "dependents released before",
        "other CTA group",
    },
    "fence.proxy.async.shared::cta;": {"dropped"},
    "add.u32 %r1, %r2, %r3;": set(),
    "bra DONE;": set(),
}


@pytest.mark.parametrize("instruction", CHANGES)
def test_the_changes_of_an_instruction(instruction: str) -> None:
    text = assemble(f"    {instruction}\nDONE:\n", 0)
    found = list(mutants(text))
    assert {m.on.how for m in found} == CHANGES[instruction]
    assert len({m.change(text) for m in found} | {text}) == len(found) + 1
    for mutant in found:
        changed = mutant.change(text)
        parse(changed)
        assert len(changed.splitlines()) == len(text.splitlines())
        assert text.splitlines()[mutant.on.line - 1].strip() == instruction


@pytest.mark.parametrize("subject", written_subjects(), ids=lambda s: s.name)
def test_every_mutant_of_a_small_kernel_is_caught(subject: Written) -> None:
    found = list(mutants(subject.text))
    assert found
    missed = [m for m in found if first_catch(subject, m) == MISSED and not subject.reason(m)]
    assert not [(m.on.line, m.on.instruction, m.on.how) for m in missed]


def test_the_gemms_mutants_are_caught() -> None:
    cutlass_or_skip()
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_emulator.kernels.mutant_sample", "5"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) > 20
    assert not [what for *what, caught, reason in outcomes if not caught and not reason]
    caught = [outcome for *_, outcome, _ in outcomes if outcome]
    assert len(caught) > 0.8 * len(outcomes)
    assert len(set(caught)) >= 5


@dataclass
class Redundant:
    """Kernel with one redundant barrier."""

    name: str = "redundant"
    text: str = EXCHANGE.replace("bar.sync 0;", "bar.sync 0;\n    bar.sync 0;")

    def run(self, text: str, schedule: Schedule) -> bool:
        exchange(text, schedule)
        return True

    def reason(self, mutant: Mutant) -> str:
        return ""


def test_what_is_missed_is_told() -> None:
    subject = Redundant()
    dropped = [m for m in mutants(subject.text) if m.on.how == "dropped"]
    assert len(dropped) == 2
    for mutant in dropped:
        assert judge(subject, mutant) == {s.name: MISSED for s in STANDARD}
    table = [row for row in rows(subject) if row.cases[0][0].change == "dropped"]
    assert all("| 0/1 |" in str(row) and str(row).endswith("| none | GAP |") for row in table)


def test_a_kernel_that_is_wrong_to_begin_with_is_refused() -> None:
    subject = Redundant(text=EXCHANGE.replace("bar.sync 0;", ""))
    with pytest.raises(ValueError, match="redundant: unchanged, eager gives UninitialisedRead"):
        next(rows(subject))
