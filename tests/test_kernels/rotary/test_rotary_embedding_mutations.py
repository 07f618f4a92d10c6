"""Mutation tests of the rotary embedding: each mutant is reported, or its results are wrong."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels import rotary_embedding
from nvfp4_kernels.rotary import reference
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.changed_source import edited
from tests.test_kernels.mistakes import NOTHING, WRONG, loaded_ptx, noticed
from tests.test_kernels.rotary import test_rotary_embedding
from tests.test_kernels.rotary.rotary_cases import Case, check_kernel

OP = "nvfp4_kernels.rotary.sm90"
SOURCE = Path(reference.__file__).with_name("sm90.py")
CPU = torch.device("cpu")

# The last CTA of a token has one head less than the others.
FEW = Case(3, 31, 6, 128, 96)
MANY = Case(520, 3, 2, 32, 32)


@dataclass(frozen=True)
class Mistake:
    """Source text that occurs once, its replacement, and the expected finding's class, or WRONG."""

    right: str
    wrong: str
    caught: str = WRONG
    on: Case = FEW


WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
LAUNCH = "ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)"
MISTAKES = {
    "sine negated": Mistake("low * cos - high * sin", "low * cos + high * sin"),
    "sine of the other half negated": Mistake("high * cos + low * sin", "high * cos - low * sin"),
    "cosine and sine exchanged": Mistake("at: Int32, cos: Vector, sin:", "at: Int32, sin, cos:"),
    "rounded before the sum": Mistake(
        "low * cos - high * sin",
        "(low * cos).to(TYPES[self.dtype]).to(Float32) - high * sin",
    ),
    "partner 8 elements off": Mistake(
        "head.source.load(at + half,", "head.source.load(at + half - PIECE,"
    ),
    "partner stored 8 elements off": Mistake(
        "store(rotated_high, at + half,", "store(rotated_high, at + half + PIECE,", "DataRace"
    ),
    "partners D/2 apart": Mistake(
        "half = self.tile.rotary_dim //", "half = self.tile.head_dim //", "DataRace"
    ),
    "sines 8 elements off": Mistake(
        "start + tile.rotary_dim // 2", "start + tile.rotary_dim // 2 - PIECE"
    ),
    "cosines of the first vector for all": Mistake("vector % tile.rotary_threads * PIECE", "0"),
    "position taken for the token": Mistake(
        "position * tile.rotary_dim", "Int64(token) * tile.rotary_dim"
    ),
    "position of the first token for all": Mistake("load(Int64(token))", "load(Int64(0))"),
    "k's rows by q's token stride": Mistake(
        "k=_heads(k, k_out)", "k=_heads(k, k_out)._replace(token_stride=q.stride(1))"
    ),
    "k's heads by q's number": Mistake("inside - queries.num_heads,", "inside,", "OutOfBounds"),
    "k's results as far apart as the rows read": Mistake(
        "Int64(token) * Int64(self.num_heads)",
        "Int64(token) * Int64(self.num_heads + 1)",
        "OutOfBounds",
    ),
    "a head more": Mistake("head < heads)", "head <= heads)", "DataRace"),
    "the last head left out": Mistake("head < heads)", "head < heads - 1)"),
    "tail from 0 on": Mistake(
        "tile.rotary_dim + (vector - tile.rotary_threads)",
        "(vector - tile.rotary_threads)",
        "DataRace",
    ),
    "tail not copied": Mistake(
        "heads[step].target.store(vectors[step], at, alignment=ALIGNMENT)", "pass"
    ),
    "second head of a thread beside the first": Mistake(
        "first + step * tile.slots", "first + step", on=MANY
    ),
    "heads of the first CTA for all": Mistake("group * tile.heads + slot", "slot", "DataRace"),
}


@contextmanager
def mistaken(folder: Path, right: str = "", wrong: str = "") -> Iterator[None]:
    """Context in which the op's kernel comes from a copy of its source with one replacement."""
    text = SOURCE.read_text()
    file = folder / SOURCE.name
    folder.mkdir()
    file.write_text(edited(text, right, wrong, SOURCE.name) if right else text)
    spec = importlib.util.spec_from_file_location(OP, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with devices.other_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, OP, module)
        with devices.emulated_ops(EAGER, "sm_90"):  # imports bind CuTe DSL to the emulator
            spec.loader.exec_module(module)
            yield


def outcome(case: Case) -> str:
    """Return the finding."""
    return noticed(lambda: check_kernel(case, CPU))


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with mistaken(tmp_path / "sm90", mistake.right, mistake.wrong):
        assert outcome(mistake.on) == mistake.caught


@pytest.mark.parametrize("case", [FEW, MANY], ids=["few", "many"])
def test_nothing_to_catch(case: Case, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with mistaken(tmp_path / "sm90"):
        assert outcome(case) == NOTHING


def twice() -> None:
    """Launch two dependent kernels; the second one's inputs are the first one's result."""
    positions, q, k, cache = Case(2).arguments()
    rotary_embedding(positions, *rotary_embedding(positions, q, k, cache), cache)


def test_a_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with mistaken(tmp_path / "right"):
        twice()
    with (
        mistaken(tmp_path / "wrong", WAIT, "pass"),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        twice()


def test_the_next_kernel_starts_before_the_wait(tmp_path: Path) -> None:
    """Attention can then fetch keys before the projection has ended; results cannot show it."""
    devices.cutlass_or_skip()
    late = f"{WAIT}\n        {LAUNCH}"
    for folder, change in (("right", ("", "")), ("wrong", (WAIT, late))):
        with mistaken(tmp_path / folder, *change):
            ptx = loaded_ptx(twice)[-1]
        waits = ptx.index("griddepcontrol.wait")
        launches = ptx.rindex("griddepcontrol.launch_dependents")
        assert (launches < waits) == (folder == "right")


def test_the_kernel_before_must_not_write_the_cache() -> None:
    """Positions, cosines and sines are read before the preceding kernel ends, as documented."""
    devices.cutlass_or_skip()
    positions, q, k, cache = Case(2, 1, 1).arguments()
    with devices.emulated_ops(EAGER, "sm_90"):
        written, _ = rotary_embedding(positions, q, k, cache)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            rotary_embedding(positions.clamp(max=1), q, k, written[:, 0])


rotated = reference.rotate
REFERENCE_MISTAKES: dict[str, Callable[..., Any]] = {
    "sine negated": lambda x, cos, sin: rotated(x, cos, -sin),
    "cosine and sine exchanged": lambda x, cos, sin: rotated(x, sin, cos),
    "neighbours for partners": lambda x, cos, sin: rotated(
        x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin
    ),
    "tail left out": lambda x, cos, sin: torch.cat(
        (rotated(x, cos, sin)[..., : 2 * cos.shape[-1]], 0 * x[..., 2 * cos.shape[-1] :]), -1
    ),
}


@pytest.mark.parametrize("name", REFERENCE_MISTAKES)
def test_caught_in_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tests: tuple[Callable[[], None], ...] = (
        lambda: test_rotary_embedding.test_reference("partial, D = 64"),
        test_rotary_embedding.test_formula_on_integers,
    )
    for test in tests:
        test()
    monkeypatch.setattr(reference, "rotate", REFERENCE_MISTAKES[name])
    for test in tests:
        with pytest.raises(AssertionError):
            test()
