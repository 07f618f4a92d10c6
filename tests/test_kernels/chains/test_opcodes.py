"""The instructions that every op uses, beside the table of them."""

import re
from pathlib import Path

from tests.test_kernels.chains import opcodes

ARCHS = opcodes.STAGES
TESTS = Path(__file__).parents[2]


def table() -> tuple[set[str], list[tuple[str, str]]]:
    """Opcodes of the table's first columns, and the tests that it names: files and parts."""
    text = opcodes.TABLE.read_text()
    tables = text.partition("## Conventions")[0]
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    tests = re.findall(r"`(\w+)`:\s\*([^*]+)\*", text)
    return {opcode for row in rows for opcode in re.findall(r"`([^`]+)`", row)}, tests


def test_each_instruction_has_a_row() -> None:
    """Kernels that differ in sizes alone are compiled once."""
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
