"""Sample of broken checkpoints: each is refused by name, and none is served silently."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_llama
from tests.engine import Run, run
from tests.faults.faults import CONFIG, Fault, faults, struck
from tests.faults.judge import judge
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.engine import preflight
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

EVERY = 15  # of the config's faults


@pytest.fixture(scope="module", params=["modelopt", "compressed-tensors"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    text = folder / "text"
    text.write_text(tiny_llama.TEXT * 20)
    source = tiny_llama.save(folder / "bf16")
    quantize_checkpoint(source, folder / "sound", format=request.param, calibrate=text, seq_len=64)
    return folder / "sound"


@pytest.fixture(scope="module")
def served(sound: Path) -> Run:
    return run(str(sound))


def some(folder: Path) -> Iterator[Fault]:
    """Yield one fault of each kind for each kind of tensor, and a sample of the config's faults."""
    seen, of_config = set(), 0
    for fault in faults(folder):
        if fault.where.startswith(CONFIG):
            of_config += 1
            if of_config % EVERY == 0:
                yield fault
            continue
        key = fault.kind, ".".join(fault.where.split(".")[-2:])
        if re.search(r"[kvo]_proj|gate_proj|up_proj|post_attention", fault.where) or key in seen:
            continue
        seen.add(key)
        yield fault


def test_nothing_broken_is_served(sound: Path, served: Run, tmp_path: Path) -> None:
    wrong, count = [], 0
    for fault in some(sound):
        verdict = judge(fault, struck(fault, sound, tmp_path / "broken"), served)
        count += 1
        place = fault.where.partition(",")[0].split()[-1]  # file, tensor or field
        place = place.removeprefix("quantization_config.")
        layer, _, part = place.rpartition(".")
        names = {place, part, layer or place, "fit the model"}
        named = any(name in verdict.message for name in names)
        if not verdict.is_right or (verdict.outcome == "refused" and not named):
            wrong.append((fault.name, verdict.outcome, verdict.message))
    print(f"{count} faults")
    assert count > 60
    assert not wrong


def test_a_fault_that_is_served_is_found(
    sound: Path, served: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge finds a fault that is served because the checks of values are switched off."""
    monkeypatch.setattr(checkpoint_values, "check_finite", lambda *_: None)
    monkeypatch.setattr(preflight, "check_complete", lambda *_: None)
    (fault,) = (f for f in faults(sound) if f.name == "NaN: model.norm.weight")
    verdict = judge(fault, struck(fault, sound, tmp_path / "broken"), served)
    assert verdict.outcome == "served otherwise"
    assert not verdict.is_right
