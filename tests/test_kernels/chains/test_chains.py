"""Dependent launches of every op after every other: each wait is needed, and the waits suffice."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.mutants.kernels import compiled_anew
from tests.test_kernels.chains import opcodes
from tests.test_kernels.chains.stage import (
    Chain,
    Stage,
    Value,
    chains,
    dropped_waits,
    loading,
)

ARCHS = opcodes.STAGES
TESTS = Path(__file__).parents[2]


def by_source() -> dict[str, list[Chain]]:
    """Chains, by architecture and source of the second kernel."""
    found = [
        (f"{arch} {chain.second.source}", chain)
        for arch, stages in ARCHS.items()
        for chain in chains(arch, stages.STAGES, stages.GIVEN)
    ]
    found.sort(key=lambda each: each[0])
    return {name: [c for _, c in group] for name, group in groupby(found, lambda each: each[0])}


CHAINS = by_source()


@pytest.fixture(scope="module", autouse=True)
def source_lines() -> Iterator[None]:
    """Make kernels tell the source lines of their waits."""
    with pytest.MonkeyPatch.context() as patch, compiled_anew():
        patch.setattr(devices, "source_lines", True)
        yield


def is_noticed(chain: Chain, original: str, text: str) -> bool:
    """Whether ``text`` in place of ``original`` is reported for a missing dependency wait."""
    try:
        chain.run({original: text})
    except MissingDependencyWait:
        return True
    return False


@pytest.mark.parametrize("name", CHAINS)
def test_each_wait_is_needed_and_enough(name: str) -> None:
    """No chain is reported; without any one of the source's waits, some chain is reported.

    The compiler copies a wait to every path, some of which no shape takes: copies of one source
    line count as one.
    """
    chains_of: dict[int, list[str]] = defaultdict(list)
    noticed: set[int] = set()
    for chain in CHAINS[name]:
        for text in chain.run():
            waits = dropped_waits(text)
            assert waits, f"{chain}: its second kernel does not wait at all"
            for wait in waits:
                assert wait.on.source
                chains_of[wait.on.source].append(str(chain))
                if wait.on.source not in noticed and is_noticed(chain, text, wait.change(text)):
                    noticed.add(wait.on.source)
    for line, tried in chains_of.items():
        assert line in noticed, f"{name}, line {line}: nobody misses this wait: {tried}"


def test_twins_are_one_launch() -> None:
    """Twins have the same kernels and results of the same kinds."""
    for arch, stages in ARCHS.items():
        named = {stage.name: stage for stage in stages.STAGES}
        for stage in stages.STAGES:
            if stage.twin:
                twin = named[stage.twin]
                assert not twin.twin
                assert twin.gives == stage.gives
                ours, theirs = (launched(each, arch, stages.GIVEN) for each in (stage, twin))
                assert ours
                assert ours == theirs, stage.name


def launched(stage: Stage, arch: str, given: Mapping[str, Callable[[], Value]]) -> list[str]:
    """PTX of the kernels that a stage launches."""
    with devices.emulated_ops(EAGER, arch) as gpu, loading(gpu, {}) as loaded:
        stage.run(given[stage.takes]())
    return loaded


def test_every_stage_is_in_a_chain() -> None:
    """Every stage of either architecture is the second of some chain."""
    for arch, stages in ARCHS.items():
        second = {chain.second.name for c in CHAINS.values() for chain in c if chain.arch == arch}
        assert second == {stage.name for stage in stages.STAGES} - LAST[arch]


# Stages with an input that no op of the architecture returns.
def table() -> tuple[set[str], list[tuple[str, str]]]:
    """Opcodes in the first column of the page's tables, and its tests as pairs of file and test."""
    text = opcodes.TABLE.read_text()
    tables = text.partition("## Conventions")[0]
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    tests = re.findall(r"`(\w+)`:\s\*([^*]+)\*", text)
    return {opcode for row in rows for opcode in re.findall(r"`([^`]+)`", row)}, tests


def test_each_instruction_has_a_row() -> None:
    """Every opcode has a row; kernels that differ in sizes alone are compiled once."""
    used: set[str] = set()
    for arch in ARCHS:
        used |= opcodes.used(arch, opcodes.kinds(opcodes.model_kernels(arch))).keys()
    listed, _ = table()
    assert used == listed, f"no row: {sorted(used - listed)}; unused: {sorted(listed - used)}"


def test_the_table_names_tests_that_there_are() -> None:
    _, named = table()
    assert len(named) > 50
    files = {
        stem: [path.read_text() for path in TESTS.rglob(f"{stem}.py")]
        for stem in {stem for stem, _ in named}
    }
    missing = [(s, part) for s, part in named if not any(part in text for text in files[s])]
    assert not missing


LAST = {"sm_90": {"indexer_topk"}, "sm_100": set[str]()}


def test_the_kernel_before_must_not_write_a_bias() -> None:
    """A bias is read before the preceding kernel has ended, as ``gemm`` documents for sm_90."""
    with devices.emulated_ops(EAGER, "sm_90"):
        (bias,) = ARCHS["sm_90"].product(None, torch.ones(8, 256).bfloat16())
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            ARCHS["sm_90"].product(None, torch.ones(8, 256).bfloat16(), bias[0])
