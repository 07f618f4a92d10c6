"""Command line of the fuzzer; see the package."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fuzz.crash import guarded
from tests.fuzz.run import EMULATED, OPS, run_seeds


@dataclass(frozen=True)
class Options:
    """Options of a run, and the command that repeats the run with other seeds."""

    first: int
    seeds: int
    minutes: float | None
    ops: tuple[str, ...]
    emulated: bool
    again: str

    @classmethod
    def of(cls, given: Sequence[str]) -> "Options":
        parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
        parser.add_argument("--seeds", type=int, default=1000, help="how many (%(default)s)")
        parser.add_argument("--first", type=int, default=0, help="the first (%(default)s)")
        parser.add_argument("--minutes", type=float, help="stop after so many")
        parser.add_argument("--op", action="append", choices=OPS, metavar="NAME", help="these only")
        parser.add_argument("--emulated", action="store_true", help="sm_100 kernels, emulated")
        asked = parser.parse_args(given)
        known = EMULATED if asked.emulated else tuple(OPS)
        ops = tuple(name for name in known if not asked.op or name in asked.op)
        if not ops:
            parser.error(f"no sm_100 kernel of {', '.join(asked.op)}; leave --emulated out")
        again = " --emulated" if asked.emulated else ""
        again += "".join(f" --op {name}" for name in ops) if asked.op else ""
        return cls(asked.first, asked.seeds, asked.minutes, ops, asked.emulated, again)


def main(given: Sequence[str], begins: Callable[[int], object] = lambda seed: None) -> int:
    """Run the requested seeds; the status is 1 with findings."""
    asked = Options.of(given)
    table = run_seeds(
        asked.first, asked.seeds, asked.minutes, asked.ops, asked.emulated, asked.again,
        told=lambda line: print(line, flush=True), begins=begins,
    )  # fmt: skip
    print(table, flush=True)
    return 1 if table.findings else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    again = Options.of(arguments).again
    sys.exit(guarded(lambda begins: main(arguments, begins), again))
