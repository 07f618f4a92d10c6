"""Mutants of a PTX kernel: single changes of synchronising instructions."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tests.mutants import ANYTHING, Mutant

_STATEMENT = re.compile(r"^\s*(@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)*)\s*([^;]*);\s*$")
_SOURCE = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")


class Altered(NamedTuple):
    """Instruction that a mutant alters.

    Attributes:
        line: 1-based PTX line.
        source: line of the kernel's source, 0 where the PTX does not say.
        instruction: the original instruction.
        how: description of the change.
    """

    line: int
    source: int
    instruction: str
    how: str


@dataclass(frozen=True)
class Statement:
    """An instruction's line, split into its parts."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".strip()

    def line(self, opcode: str = "", **changed: str) -> str:
        """The line with another opcode, or operands replaced by index: ``_1="%r2"``."""
        operands = [changed.get(f"_{n}", old) for n, old in enumerate(self.operands)]
        return f"{self.guard}{opcode or self.opcode} {', '.join(operands)};"

    def with_register(self, kind: str, make: str, number: int) -> str:
        """The line with operand ``number`` computed by ``make``, such as "add.u32 {}, 1"."""
        old = self.operands[number]
        name, rest = make.split(" ", 1)
        return (
            f"{{ .reg .{kind} %altered; {self.guard}{name} %altered, {rest.format(old)}; "
            f"{self.line(**{f'_{number}': '%altered'})} }}"
        )


Change = tuple[str, str]
Rule = Callable[[Statement], list[Change]]


def _split(operands: str) -> tuple[str, ...]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in operands.strip():
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts if part.strip())


def _dropped(statement: Statement) -> list[Change]:
    return [("dropped", "")]


def _init(s: Statement) -> list[Change]:
    return [
        ("dropped", ""),
        ("count + 1", s.with_register("b32", "add.u32 {}, 1", 1)),
        ("count - 1", s.with_register("b32", "sub.u32 {}, 1", 1)),
    ]


def _arrive(s: Statement) -> list[Change]:
    if ".expect_tx" in s.opcode:
        last = len(s.operands) - 1
        plain = s.opcode.replace(".expect_tx", "")
        kept = ", ".join(s.operands[:-1])
        return [
            ("dropped", ""),
            ("expects half the bytes", s.with_register("b32", "shr.u32 {}, 1", last)),
            ("expects twice the bytes", s.with_register("b32", "shl.b32 {}, 1", last)),
            ("expects no bytes", f"{s.guard}{plain} {kept};"),
        ]
    bare = re.sub(r"\.(release|relaxed)|\.(cta|cluster)\b(?!:)", "", s.opcode)
    relaxed = bare.replace("mbarrier.arrive", "mbarrier.arrive.relaxed.cluster")
    changes = [("dropped", ""), ("twice", s.line() + " " + s.line()), *_narrowed(s)]
    return changes if ".relaxed" in s.opcode else [*changes, ("relaxed", s.line(relaxed))]


def _wait(s: Statement) -> list[Change]:
    changes = [("not waited for", f"{s.guard}setp.eq.u32 {s.operands[0]}, 0, 0;")]
    if ".parity" in s.opcode:
        changes.append(("other parity", s.with_register("b32", "xor.b32 {}, 1", 2)))
    if ".acquire" in s.opcode:
        changes.append(("relaxed", s.line(s.opcode.replace(".acquire", ".relaxed"))))
    return changes + _narrowed(s)


def _narrowed(s: Statement) -> list[Change]:
    """Change that narrows a cluster scope to the CTA; empty if there is no such scope."""
    narrow = re.sub(r"\.(acquire|release)\.cluster\b(?!:)", r".\1.cta", s.opcode)
    return [] if narrow == s.opcode else [("for its CTA alone", s.line(narrow))]


def _barrier(s: Statement) -> list[Change]:
    elsewhere = (
        "{ .reg .b32 %altered; mov.u32 %altered, %tid.x; shr.u32 %altered, %altered, 5; "
        f"and.b32 %altered, %altered, 1; add.u32 %altered, %altered, {s.operands[0]}; "
        f"{s.line(_0='%altered')} }}"
    )
    changes = [("dropped", ""), ("odd warps at the next barrier", elsewhere)]
    if len(s.operands) > 1:
        for how, name in (("32 threads more", "add.u32 {}, 32"), ("32 fewer", "sub.u32 {}, 32")):
            changes.append((how, s.with_register("b32", name, 1)))
    else:
        for threads in (32, 1024):
            line = f"{s.guard}{s.opcode} {s.operands[0]}, {threads};"
            changes.append((f"{threads} threads", line))
    return changes


def _cluster_arrive(s: Statement) -> list[Change]:
    changes = [("dropped", "")]
    if ".relaxed" not in s.opcode:
        plain = s.opcode.replace(".release", "")
        relaxed = plain.replace("cluster.arrive", "cluster.arrive.relaxed")
        changes.append(("relaxed", s.line(relaxed)))
    return changes


def _mask(s: Statement, number: int) -> list[Change]:
    return [
        (f"CTA mask {mask}", s.with_register("b16", f"mov.b16 {mask}", number)) for mask in (1, 2)
    ]


def _commit(s: Statement) -> list[Change]:
    changes = [("dropped", ""), ("twice", s.line() + " " + s.line())]
    if ".multicast" in s.opcode:
        changes += _mask(s, 1)
    return changes + _group(s)


def _load(s: Statement) -> list[Change]:
    changes = [("dropped", "")]
    if ".multicast" in s.opcode:
        changes += _mask(s, 3)
    return changes + (_group(s) if ".cta_group" in s.opcode else [])


def _group(s: Statement) -> list[Change]:
    one, two = "cta_group::1", "cta_group::2"
    other = s.opcode.replace(one, two) if one in s.opcode else s.opcode.replace(two, one)
    return [("other CTA group", s.line(other))] if other != s.opcode else []


def _alloc(s: Statement) -> list[Change]:
    half = s.with_register("b32", "shr.u32 {}, 1", 1)
    released = f"griddepcontrol.launch_dependents; {s.line()}"
    return [
        ("dropped", ""),
        ("half the columns", half),
        ("dependents released before", released),
        *_group(s),
    ]


def _wait_group(s: Statement) -> list[Change]:
    more = str(int(s.operands[0]) + 1)
    return [("dropped", ""), (f"{more} may be pending", s.line(_0=more))]


def _elect(s: Statement) -> list[Change]:
    predicate = s.operands[0].split("|")[1]
    return [("every lane elected", f"{s.guard}setp.eq.u32 {predicate}, 0, 0;")]


def _weaker(s: Statement) -> list[Change]:
    return [("relaxed", s.line(re.sub(r"\.(release|acquire)\b", ".relaxed", s.opcode)))]


def _budget(s: Statement) -> list[Change]:
    return [("dropped", ""), ("not a multiple of 8", s.line(_0=f"{int(s.operands[0]) + 4}"))]


def _rank(s: Statement) -> list[Change]:
    return [("the next CTA", s.with_register("b32", "add.u32 {}, 1", 2))]


# The first pattern that matches an opcode applies.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"mbarrier\.init", _init),
    (r"mbarrier\.(arrive|complete_tx|expect_tx)", _arrive),
    (r"mbarrier\.(try|test)_wait", _wait),
    (r"mbarrier\.inval", _dropped),
    (r"fence\b|membar", _dropped),
    (r"(bar|barrier)(\.cta)?\.(sync|red|arrive)", _barrier),
    (r"bar\.warp\.sync", _dropped),
    (r"barrier\.cluster\.arrive", _cluster_arrive),
    (r"barrier\.cluster\.wait", _dropped),
    (r"tcgen05\.commit", _commit),
    (r"tcgen05\.(wait|fence)", _dropped),
    (r"tcgen05\.alloc", _alloc),
    (r"tcgen05\.(dealloc|relinquish_alloc_permit)", lambda s: _dropped(s) + _group(s)),
    (r"tcgen05\.(mma|cp)", lambda s: _group(s)),
    (r"(cp\.async\.(bulk\.)?|wgmma\.)commit_group", _dropped),
    (r"(cp\.async\.(bulk\.)?|wgmma\.)wait_group", _wait_group),
    (r"wgmma\.fence", _dropped),
    (r"cp\.async\.bulk\.tensor\..*mbarrier", _load),
    (r"cp\.async\.bulk\..*mbarrier", _load),
    (r"elect\.sync", _elect),
    (r"(st|ld|atom|red)\.(release|acquire)", _weaker),
    (r"setmaxnreg", _budget),
    (r"griddepcontrol", _dropped),
    (r"mapa", _rank),
)


def mutants(text: str, only: str = "") -> Iterator[Mutant]:
    """Mutants by every change of every synchronising instruction; line numbers stay the same.

    Args:
        text: PTX.
        only: prefix of the opcodes to change; all opcodes if empty.
    """
    source = 0
    for number, line in enumerate(text.splitlines(), 1):
        if location := _SOURCE.match(line):
            source = int(location[1])
        found = _STATEMENT.match(line)
        if not found or not found[2].startswith(only):
            continue
        statement = Statement(found[1] or "", found[2], _split(found[3]))
        rule = next((rule for name, rule in _RULES if re.match(name, statement.opcode)), None)
        for how, new in rule(statement) if rule else ():
            on = Altered(number, source, str(statement), how)
            yield Mutant(partial(_with_line, number, new), ANYTHING, on)


def _with_line(number: int, new: str, text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[: number - 1], new, *lines[number:]]) + "\n"
