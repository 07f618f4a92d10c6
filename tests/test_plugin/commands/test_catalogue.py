"""Table of the catalogue: it agrees with a fresh plan of each family's tiny checkpoint."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from vllm import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from tests import terminal
from tests.catalogue import hub, summary
from tests.catalogue.facts import FAMILIES, named
from tests.catalogue.family import Family
from tests.catalogue.plan import plan
from tests.engine import catalogue_command
from vllm_fp4_plugin.commands import known_checkpoints
from vllm_fp4_plugin.commands.known_checkpoints import Cell
from vllm_fp4_plugin.versions import RELEASES, vllm_release

pytestmark = pytest.mark.slow

ROWS = {row.family: row for row in known_checkpoints.read()}
# Each family is planned for one architecture here; ``python -m tests.catalogue`` plans all.
PLANNED = [
    pytest.param(family, arch, id=f"{family.name}-{arch}")
    for family, arch in zip(FAMILIES, itertools.cycle(known_checkpoints.ARCHS), strict=False)
]


def test_every_family_has_a_row() -> None:
    assert list(ROWS) == [family.name for family in FAMILIES]
    assert len({name for family in FAMILIES for name in family.checkpoints}) == sum(
        len(family.checkpoints) for family in FAMILIES
    )


@pytest.mark.parametrize(("family", "arch"), PLANNED)
def test_rows_are_what_planning_says(family: Family, arch: str, tmp_path: Path) -> None:
    row = plan(family, tmp_path, (arch,))
    recorded = ROWS[family.name]
    recorded_cell = _on_this_cpu(family, arch, recorded.cell(arch, vllm_release()))
    assert row.on[arch] == recorded_cell, "renew the table with python -m tests.catalogue"
    assert replace(row, on={}) == replace(recorded, on={}, changed={})


def _on_this_cpu(family: Family, arch: str, cell: Cell) -> Cell:
    """Recorded cell, or vLLM 0.33's refusal without AVX-512 of an FP8 cache of its attention."""
    is_theirs = arch == "cpu" and family.fp8_kv and "attention vLLM's" in cell.why
    if torch.cpu._is_avx512_supported() or not is_theirs or vllm_release() == RELEASES[0]:
        return cell
    return Cell(
        "refused",
        "vLLM: --kv-cache-dtype fp8_e4m3 is not supported by the CPU attention backend on this "
        "host.",
    )


def test_cells_of_another_release() -> None:
    """Cells that differ from the oldest release's are stored too; equal cells are stored once."""
    row = next(iter(ROWS.values()))
    newest = RELEASES[-1]
    other = {arch: replace(cell, why="another") for arch, cell in row.on.items()}
    changed = row.with_release(newest, row.on | {"cpu": other["cpu"]})
    assert changed.on == row.on
    assert changed.changed[newest] == {"cpu": other["cpu"]}
    assert changed.cell("cpu", newest) == other["cpu"]
    assert changed.cell("cpu", RELEASES[0]) == changed.cell("cpu", "0.1") == row.on["cpu"]
    assert changed.with_release(newest, row.on) == replace(row, changed={})
    assert known_checkpoints.dump([changed]) != known_checkpoints.dump([row])


def test_new_cells_of_the_oldest_release_leave_others() -> None:
    """Cells of a later release stay, whether they were equal to the oldest release's or become so.

    Equal cells are stored once.
    """
    row = replace(next(iter(ROWS.values())), changed={})
    oldest, newest = RELEASES[0], RELEASES[-1]
    new = row.on | {"cpu": replace(row.on["cpu"], why="another")}
    renewed = row.with_release(oldest, new)
    assert renewed.on == new
    assert renewed.changed[newest] == {"cpu": row.on["cpu"]}
    equal = row.with_release(newest, new).with_release(oldest, new)
    assert (equal.on, equal.changed) == (new, {})


def test_the_command_tells_of_a_release() -> None:
    """The command reports the installed release by default, and another release by name."""
    for release in RELEASES:
        assert f"vLLM {release}" in catalogue_command("Llama 3", "--vllm", release).output
    assert f"vLLM {vllm_release()}" in catalogue_command("Llama 3").output
    unknown = catalogue_command("Llama 3", "--vllm", "0.31")
    assert unknown.exit_code == 1
    assert "vllm: is '0.31', must be 0.32 or 0.33; give --vllm 0.33" in unknown.output


@pytest.mark.parametrize("release", RELEASES)
def test_json_tells_what_the_text_tells(release: str) -> None:
    text = catalogue_command("", "--vllm", release).stdout
    done = catalogue_command("", "--vllm", release, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert text.startswith(f"NVFP4 checkpoints, vLLM {found['vllm']}\n")
    drawn = text.split("\n├")  # a line is drawn between families
    assert len(drawn) == len(found["families"]) == len(ROWS)
    counts = {arch: Counter[str]() for arch in known_checkpoints.ARCHS}
    for family, rows in zip(found["families"], drawn, strict=True):
        lines = [line.split("│")[1:-1] for line in rows.splitlines() if line.startswith("│")]
        cells = [
            [cell.strip() for cell in column if cell.strip()] for column in zip(*lines, strict=True)
        ]
        assumed = [f"assumed: {family['assumed']}"] if family["assumed"] else []
        assert cells[0] == [family["family"], family["architecture"], *assumed]
        assert cells[1] == family["checkpoints"]
        for (arch, on), shown in zip(family["on"].items(), cells[2:], strict=False):
            mark, why = "*" * on["by_headers"], f": {on['why']}" if on["why"] else ""
            assert shown == [f"{on['verdict']}{mark}{why}"]
            counts[arch][on["verdict"]] += len(cells[1])
        assert cells[-1] == ["yes"] * family["run"]
    assert found["checkpoints"] == counts
    for arch, count in counts.items():
        each = ", ".join(f"{n} {verdict}" for verdict, n in found["checkpoints"][arch].items())
        assert f"\n{arch}: of {count.total()} checkpoints {each}\n" in text


def test_a_refusal_leaves_no_document() -> None:
    done = catalogue_command("gpt-2", "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no family or checkpoint has 'gpt-2'" in done.stderr


def test_a_narrow_terminal_and_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of families and checkpoints stay whole; a pipe has no width."""
    monkeypatch.setenv("COLUMNS", "40")
    piped = catalogue_command("").stdout
    monkeypatch.setenv("COLUMNS", "300")
    assert catalogue_command("").stdout == piped
    terminal.narrow(monkeypatch)
    narrow = catalogue_command("").stdout
    terminal.check_no_word_is_broken(piped, narrow)
    for row in ROWS.values():
        assert all(name in narrow for name in (*row.checkpoints, row.architecture))


def test_a_terminal_is_shown_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is a real terminal of 80 columns, not the tests' stand-in."""
    terminal.narrow(monkeypatch)
    narrow = catalogue_command("Qwen").stdout
    assert terminal.shown_by_a_terminal("vllm_fp4_plugin", "catalogue", "Qwen") == narrow


def test_architectures_are_those_that_the_checkpoints_name() -> None:
    """Published architectures decide, not the checkpoints' names."""
    for family, row in ROWS.items():
        for checkpoint in row.checkpoints:
            assert hub.ARCHITECTURES[checkpoint] == row.architecture, (family, checkpoint)
    assert hub.ARCHITECTURES.keys() == {c for row in ROWS.values() for c in row.checkpoints}


def test_vllm_has_every_architecture_and_config() -> None:
    """Drafts are included; a family with its own code includes a config class."""
    with_code = {family.name for family in FAMILIES if family.surround}
    for family, row in ROWS.items():
        model = row.architecture.removesuffix("Model")
        names = {row.architecture, f"{model}ForCausalLM"}  # as vLLM takes a bare model for
        assert names & set(ModelRegistry.get_supported_archs()), family
        known = row.model_type in CONFIG_MAPPING or row.model_type in _CONFIG_REGISTRY
        assert known or family in with_code, family


def test_another_architecture_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: Qwen3.8-Flash-Next gets the architecture that its name suggests."""
    [row] = [row for row in ROWS.values() if "nvidia/Qwen3.8-Flash-Next-NVFP4" in row.checkpoints]
    other = replace(row, architecture="Qwen3_5MoeForConditionalGeneration")
    monkeypatch.setitem(ROWS, row.family, other)
    with pytest.raises(AssertionError, match="Flash-Next-NVFP4"):
        test_architectures_are_those_that_the_checkpoints_name()


def test_experts_are_ours_on_gpus() -> None:
    for name, row in ROWS.items():
        if "experts" in name:
            for arch in ("sm_90", "sm_100"):
                cell = row.on[arch]
                assert cell.verdict == "refused" or "experts ours" in cell.why, name


def test_no_dense_family_is_refused() -> None:
    """Quark's exports are the exception: the plugin does not read their format."""
    for name, row in ROWS.items():
        if "experts" not in f"{name} {row.on['sm_90'].why}" and "Quark" not in name:
            for arch in known_checkpoints.ARCHS:
                assert row.on[arch].verdict != "refused", (name, arch)


def test_the_readme_has_its_summary() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    for line in summary.lines(list(ROWS.values())):
        assert line in readme, f"put {line!r} into README.md"


def test_named_tests_are_there() -> None:
    for family in FAMILIES:
        if family.ran:
            file, _, test = family.ran.partition("::")
            [path] = Path(__file__).parents[1].rglob(file)
            source = path.read_text(encoding="utf-8")
            assert f"def {test}(" in source, family.name
            if family.name in source or test != "test_log_probabilities":
                continue
            raise AssertionError(f"{family.ran} has no case of {family.name}")


def test_dense_families_are_run() -> None:
    """Families are run if a CPU serves them and transformers' config agrees with the hub's."""
    for family in FAMILIES:
        row = ROWS[family.name]
        if "experts" not in f"{family.name} {row.on['sm_90'].why}" and not family.by_headers:
            assert family.ran or row.on["cpu"].verdict == "refused", family.name


def test_command() -> None:
    done = catalogue_command("qwen3.8-27b")
    assert done.exit_code == 0, done.output
    assert "Inferact/Qwen3.8-27B-NVFP4" in done.output.replace("\n", "")
    assert "cpu: of" in done.output
    assert "Llama" not in done.output
    unknown = catalogue_command("gpt-2")
    assert unknown.exit_code == 1
    assert "no family or checkpoint has 'gpt-2'" in unknown.output


def test_a_family_that_can_be_built_is_not_planned_by_headers(tmp_path: Path) -> None:
    llama = named("Llama 3")
    claims = Family(
        "as if", llama.checkpoints, llama.config, llama.kinds, by_headers="no such thing"
    )
    with pytest.raises(AssertionError, match="needs no plan by headers"):
        plan(claims, tmp_path, ("cpu",))
