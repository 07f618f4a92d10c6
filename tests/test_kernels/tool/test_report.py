"""``python -m nvfp4_kernels report``: figures of compiled kernels, and their bounds."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app
from nvfp4_kernels.activation import Activation
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100 import choose as candidates
from nvfp4_kernels.gemm.sm100.choose import Problem, with_store
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant as ScoreVariant
from nvfp4_kernels.precompile.linear_sm100 import product_spec
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm100.limits import MAX_SHARED_BYTES
from nvfp4_kernels.tool import instructions, toolchain
from nvfp4_kernels.tool import report as reporting
from nvfp4_kernels.tool.binary import FAT_MAGIC, UnreadableBinary, read_cubin, read_fat_binary
from nvfp4_kernels.tool.instructions import NoDisassembler, count, disassemble, find_nvdisasm
from nvfp4_kernels.tool.limits import work_of
from nvfp4_kernels.tool.report import choose, describe, describe_attention, measure_all
from nvfp4_kernels.tool.scoring import ScoreShape, choose_scorer, describe_scorer
from nvfp4_kernels.tool.shapes import CONTEST, TOKENS
from nvfp4_kernels.tool.static import Static, dynamic_shared_bytes
from tests import devices, terminal

pytestmark = pytest.mark.processes

CLEAN = Static(54, 0, 221056, 192, 20352, {"UTCOMMA": 4, "UTCCP": 8})


REGISTERS_PER_SM = 65536


def every_kernel() -> list[KernelSpec]:
    """One kernel per tile that may be chosen, with every feature of an epilogue."""
    swap_ab = candidates.SWAP_AB
    pairs = [*(replace(t, weights=2) for t in swap_ab), *candidates.GATE_UP]
    specs = []
    for tile in [*swap_ab, *candidates.REGULAR, *pairs]:
        output = EpilogueConfig("bfloat16", row_scale=True)
        if tile.weights == 1:
            output = replace(output, shards=3, bias="bfloat16")
        specs.append(product_spec("gemm", tile, with_store(output, tile, 4096)))
    for tile in OF_TERMS:
        output = EpilogueConfig("nvfp4" if tile.weights == 2 else "bfloat16", row_scale=True)
        if tile.weights == 2:
            output = replace(output, terms=tile.terms)
        specs.append(product_spec("gemm", tile, with_store(output, tile, 4096)))
    for tile in GROUPED:
        output = EpilogueConfig("bfloat16", row_scale=True, activation=Activation("relu2"))
        if tile.weights == 2:
            clamped = Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)
            output = replace(output, dtype="nvfp4", activation=clamped)
        specs.append(product_spec("gemm", tile, with_store(output, tile, 4096)))
    return specs


GROUPED = (
    Tile(8, 2, swap_ab=True, split_k=8, grouped=True),
    Tile(64, 2, swap_ab=True, grouped=True),
    Tile(128, 2, swap_ab=True, two_cta=True, cluster_m=2, grouped=True),
    Tile(128, 2, two_cta=True, cluster_m=2, grouped=True),
    Tile(8, swap_ab=True, grouped=True, routed_before=True),
    Tile(256, swap_ab=True, two_cta=True, cluster_m=2, grouped=True),
    Tile(256, two_cta=True, cluster_m=2, grouped=True, routed_before=True),
)
OF_TERMS = (
    Tile(8, swap_ab=True, split_k=4, terms=TermLayout(4, packed=True)),
    Tile(256, two_cta=True, cluster_m=4, terms=TermLayout(3)),
    Tile(32, 2, swap_ab=True, terms=TermLayout(3, packed=True)),
    Tile(64, 2, swap_ab=True, terms=TermLayout(3)),
    Tile(128, 2, two_cta=True, cluster_m=2, terms=TermLayout(3)),
)


@pytest.mark.thorough
def test_every_tile_keeps_within_its_sm() -> None:
    """No registers are spilled, and each CTA fits on an SM."""
    devices.cutlass_or_skip()
    wrong = []
    for spec, static in measure_all(every_kernel(), "sm_100a", None, jobs=2):
        tile, output = spec.fields
        registers = -(-static.registers // 8) * 8 * static.threads
        ring = tile.depth(output.shared_bytes(tile)) * tile.stage_bytes
        if static.spills or registers > REGISTERS_PER_SM:
            wrong.append(f"{describe(tile)}: {registers} registers, {static.local_bytes} B local")
        assert ring <= static.shared_bytes <= MAX_SHARED_BYTES
    assert not wrong


def test_instruction_mix() -> None:
    devices.cutlass_or_skip()
    try:
        nvdisasm = find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(str(error))
    spec = product_spec("gemm", Tile(128), EpilogueConfig("bfloat16", store="tma"))
    ((_, static),) = measure_all([spec], "sm_100a", nvdisasm, jobs=1)
    mix = static.instructions
    assert mix["UTCOMMA"] == 256 // 64  # MMAs of a stage
    assert mix["UTCCP"] == 2 * mix["UTCOMMA"]  # scales of either side
    assert mix["UTMALDG"] == 4  # data and scales of either side
    assert "UTMASTG" in mix
    assert not {"LDL", "STL"} & mix.keys()
    assert sum(mix.values()) == static.code_bytes / 16


# --- functions of the report --------------------------------------------------------------------


def test_instructions_are_counted_without_predicates_and_modifiers() -> None:
    listing = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/            @!UPT UIADD3 URZ, UPT, UPT, URZ, URZ, URZ ;
        /*0030*/                   UTMALDG.3D.2CTA [UR8], [UR6] ;
        /*0040*/                   UTMALDG.4D [UR8], [UR6] ;
"""
    assert count(listing) == {"UTMALDG": 2, "LDC": 1, "BRA": 1, "UIADD3": 1}


def test_no_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.Path, "is_file", lambda _: False)
    with pytest.raises(NoDisassembler, match=r"nvdisasm: not on PATH.* install the CUDA toolkit"):
        find_nvdisasm()


def test_a_disassembler_that_fails() -> None:
    with pytest.raises(NoDisassembler, match="ended with 1; the mix of instructions needs one"):
        disassemble(b"", Path("/bin/false"))


def test_binaries_of_another_kind() -> None:
    with pytest.raises(UnreadableBinary, match="fat binary: starts with '504b0304'"):
        read_fat_binary(b"PK\3\4" + bytes(20))
    empty = FAT_MAGIC + (1).to_bytes(2, "little") + (16).to_bytes(2, "little") + bytes(8)
    with pytest.raises(UnreadableBinary, match="has 0 cubins, must have one"):
        read_fat_binary(empty)
    with pytest.raises(UnreadableBinary, match="cubin: starts with '28b52ffd', must be an ELF"):
        read_cubin(b"\x28\xb5\x2f\xfd")


HOST = """
    %8 = llvm.mlir.constant({bytes} : i64) : i64
    %215 = llvm.getelementptr %209[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %8, %215 : i64, !llvm.ptr
"""  # noqa: E501


def test_shared_memory_of_the_launch() -> None:
    assert dynamic_shared_bytes(HOST.format(bytes=228352)) == 228352
    with pytest.raises(UnreadableBinary, match=r"shared memory of \[\] bytes, must be one"):
        dynamic_shared_bytes("")
    with pytest.raises(UnreadableBinary, match=r"shared memory of \[1, 2\] bytes"):
        dynamic_shared_bytes(HOST.format(bytes=1) + HOST.format(bytes=2))


def test_spills_are_seen_either_way() -> None:
    assert not CLEAN.spills
    assert replace(CLEAN, local_bytes=8).spills
    assert replace(CLEAN, instructions={"STL": 1}).spills


@pytest.mark.parametrize("shape", CONTEST, ids=lambda s: f"{s.name} {s.sizes}")
def test_speed_of_light_is_the_published_one(shape) -> None:  # type: ignore[no-untyped-def]
    """The published bound assumes 1.5 GHz instead of 1.85 GHz, and 4 % less bandwidth."""
    ratio = shape.published / (1e6 * choose(shape).work.speed_of_light)
    assert 1.0 <= ratio <= 1.85 / 1.5 * 1.06


def test_what_a_product_moves() -> None:
    work = work_of(Problem(3, 32, 64, 2, 2), "float16")
    assert work.flops == 2 * 2 * 2 * 3 * 32 * 64
    assert work.nbytes == 2 * ((3 + 2 * 32) * (32 + 4) + 3 * 32 * 2)
    shared = work_of(Problem(3, 32, 64, 2), "nvfp4", weight_batch=1)
    assert shared.nbytes == (2 * 3 + 32) * (32 + 4) + 2 * 3 * (16 + 2)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (Tile(256, two_cta=True, cluster_m=4), "256×256 2cta cluster 4×1"),
        (Tile(8, 2, swap_ab=True, split_k=4), "8×128 swap_ab gate_up split-K 4"),
    ],
    ids=["two SMs", "swapped"],
)
def test_tiles_in_words(tile: Tile, text: str) -> None:
    assert describe(tile) == text


# --- the command ------------------------------------------------------------------------------


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert not isinstance(result.exception, Exception), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def document(*arguments: str | Path) -> dict[str, Any]:
    """Parse the output of ``--json``, which is all of standard output."""
    result = CliRunner().invoke(app, ["report", "--json", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Static]:
    """List whose first item replaces the figures of every kernel."""
    statics = [CLEAN]

    def measure(
        specs: list[KernelSpec], arch: str, nvdisasm: Path | None, jobs: int
    ) -> Iterator[tuple[KernelSpec, Static]]:
        assert arch == "sm_100a"
        for spec in specs:
            yield spec, statics[0]

    monkeypatch.setattr(reporting, "measure_all", measure)
    monkeypatch.setattr(toolchain, "find_spec", lambda module: module)
    return statics


def test_report(measured: list[Static]) -> None:
    status, output = invoke("--shape", "128,7168,2048")
    assert status == 0
    assert "linear 128×7168×2048" in output
    assert "0 B 216 KB" in output
    report = document("--shape", "128,7168,2048")
    (row,), (kernel,) = report["products"], report["kernels"]
    assert row["kernel"] == 1
    assert kernel.items() >= {
        "registers": 54, "local_bytes": 0, "shared_bytes": 221056, "threads": 192,
        "code_bytes": 20352, "instructions": {"UTCOMMA": 4, "UTCCP": 8}, "spills": False,
    }.items()  # fmt: skip
    assert row["flops"] == 2 * 128 * 7168 * 2048


@pytest.mark.parametrize("options", [[], ["--indexer"]], ids=["contest", "indexer"])
def test_a_narrow_terminal_and_a_pipe(
    measured: list[Static], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of kernels are never broken; a pipe has no width, whatever ``COLUMNS`` is."""
    piped, again = (
        CliRunner().invoke(app, ["report", *options], env={"COLUMNS": columns}).stdout
        for columns in ("40", "300")
    )
    assert piped == again
    terminal.narrow(monkeypatch)
    narrow = CliRunner().invoke(app, ["report", *options]).stdout
    terminal.check_no_word_is_broken(piped, narrow)


def test_json_tells_what_the_text_tells(measured: list[Static]) -> None:
    text = CliRunner().invoke(app, ["report", "--indexer"]).stdout
    drawn = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in drawn]
    found = document("--indexer")
    products, scores = len(found["products"]), len(found["scores"])
    for row, each in zip(rows[:products], found["products"], strict=True):
        light, estimate = each["speed_of_light_us"], each["estimate_us"]
        published = each["published_us"]
        assert row[0] == each["name"]
        assert row[1].split("×")[:3] == [str(each[size]) for size in "mnk"]
        assert row[2] == str(each["kernel"])
        assert row[4:6] == [f"{each['bytes'] / 1e6:.2f}", f"{each['flops'] / 1e9:.2f}"]
        assert row[6:8] == [f"{light:.2f}", f"{published:.2f}" if published else "–"]
        assert row[8:] == [f"{estimate:.2f}", f"{light / estimate:.0%}"]
    for row, each in zip(rows[products : products + scores], found["scores"], strict=True):
        assert row[:2] == [each["name"], each["fmt"]]
        assert row[4:6] == [str(each["kernel"]), str(each["splits"])]
        assert row[6] == f"{each['bytes'] / 1e6:.2f}"
        assert row[8:11] == [
            f"{each[f'{key}_us']:.2f}" for key in ("speed_of_light", "relu", "estimate")
        ]
    for row, each in zip(rows[products + scores :], found["kernels"], strict=True):
        assert row[1:3] == [each["op"], each["description"]]
        assert row[3:5] == [str(each["stages"] or "–"), str(each["tensor_columns"] or "–")]
        assert row[5:7] == [str(each["registers"]), f"{each['local_bytes']} B"]
    limits = found["limits"]
    said = f"{limits['bytes_per_second'] / 1e12:.0f} TB/s, {limits['flops_per_second'] / 1e15:.2f}"
    assert f"SOL, speed of light: {said} PFLOP/s" in text


def test_sms_bound_the_relu(measured: list[Static]) -> None:
    whole, half = (document("--indexer", "--sms", sms)["scores"] for sms in ("148", "74"))
    for one, other in zip(whole, half, strict=True):
        assert other["relu_us"] == pytest.approx(2 * one["relu_us"])


def test_dtype_of_a_given_shape(measured: list[Static]) -> None:
    (row,) = document("--shape", "1,64,64", "--dtype", "float16")["products"]
    assert row["output"]["dtype"] == "float16"


def test_contest_shapes_by_default(measured: list[Static]) -> None:
    assert len(document()["products"]) == len(CONTEST)


def test_layers_of_a_model(measured: list[Static], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    report = document("--model", tmp_path, "--tensor-parallel", "2", "--dtype", "float16")
    rows = report["products"]
    assert {kernel["op"] for kernel in report["kernels"]} == {
        "gemm", "silu_mul_gemm", "quantize", "paged_attention", "merge_segments"
    }  # fmt: skip
    assert {row["name"]: (row["n"], row["k"]) for row in rows} == {
        "qkv_proj": (96, 64), "o_proj": (64, 32), "gate_up_proj": (64, 64), "down_proj": (64, 64)
    }  # fmt: skip
    assert {row["output"]["dtype"] for row in rows} == {"float16"}
    assert {row["m"] for row in rows} == set(TOKENS)


def test_attention_of_a_model(measured: list[Static], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    status, output = invoke("--model", tmp_path)
    assert status == 0
    assert "D 16, float32 to bfloat16, 16 ahead" in output
    assert "1×32 rows, D 16" in output
    report = document("--model", tmp_path)
    assert "paged_attention" in {kernel["op"] for kernel in report["kernels"]}


def test_attention_in_words() -> None:
    variant = Variant(layout="varlen", soft_cap=True, sinks=True)
    assert describe_attention(AttentionTile(64, 2), variant) == (
        "2×128 rows, D 64, bfloat16, varlen, soft cap, sinks"
    )
    indexed = Variant(layout="indexed", page_size=16, split=True)
    assert describe_attention(AttentionTile(64), indexed) == (
        "1×128 rows, D 64, bfloat16, pages of 16, lists, split"
    )


def test_scores_of_the_indexer(measured: list[Static]) -> None:
    status, output = invoke("--shape", "1,64,64", "--indexer")
    assert status == 0
    assert "Scores of the indexer" in output
    written = document("--shape", "1,64,64", "--indexer")
    assert [each["fmt"] for each in written["scores"][::4]] == ["nvfp4", "mxfp4", "fp8", "bf16"]
    for each in written["scores"]:
        kernel = written["kernels"][each["kernel"] - 1]
        assert kernel["op"].startswith("indexer_logits")
        assert f"fmt='{each['fmt']}'" in kernel["configuration"]
        assert each["estimate_us"] > max(each["speed_of_light_us"], each["relu_us"])


def test_scores_in_words() -> None:
    tile = ScoreTile("nvfp4", 128, 64, groups=3)
    assert describe_scorer(tile, ScoreVariant(64)) == (
        "nvfp4, 64 heads, D 128, 3×1 queries, pages of 64"
    )
    tile = ScoreTile("fp8", 64, 8, group_queries=4, pingpong=2)
    assert describe_scorer(tile, ScoreVariant()) == (
        "fp8, 8 heads, D 64, 1×4 queries, 2 ping-pong sets, contiguous"
    )


def test_scorers_keep_within_their_sm() -> None:
    """No registers are spilled, with the most columns, the most heads, and the most queries."""
    devices.cutlass_or_skip()
    specs = []
    for fmt, (heads, head_dim, queries) in product(
        ("nvfp4", "fp8"), ((64, 128, 1), (64, 128, 3), (128, 256, 1), (16, 64, 12))
    ):
        shape = ScoreShape("", fmt, 1, queries, 8192, True, heads, head_dim)  # type: ignore[arg-type]
        specs.append(choose_scorer(shape).spec)
    for spec, static in measure_all(specs, "sm_100a", None, jobs=2):
        tile, variant = spec.fields
        words = describe_scorer(tile, variant)
        assert not static.spills, f"{words}: {static.local_bytes} bytes are spilled"
        assert 32 * tile.epilogue_warps < static.threads == tile.threads
        assert static.shared_bytes <= MAX_SHARED_BYTES


def test_spills_are_an_error(measured: list[Static]) -> None:
    measured[0] = replace(CLEAN, local_bytes=16)
    status, output = invoke("--shape", "1,64,64")
    assert status == 1
    assert "Registers are spilled by kernel 1." in output


def test_without_a_disassembler(measured: list[Static], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.Path, "is_file", lambda _: False)
    status, output = invoke("--shape", "1,64,64")
    assert status == 0
    assert "nvdisasm: not on PATH" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "--shape: is '1,2', must be M,N,K[,L]"),
        (["--gate-up"], "--gate-up: goes with --shape"),
        (["--model", "/nowhere"], "/nowhere: cannot be read"),
        (["--shape", "1,64,64", "--tensor-parallel", "2"], "--tensor-parallel: goes with --model"),
        (["--dtype", "float16"], "--dtype: is 'float16', goes with --shape or --model"),
    ],
    ids=[
        "form",
        "gate_up of what",
        "no model",
        "parallel",
        "dtype of what",
    ],
)
def test_what_is_refused(measured: list[Static], arguments: list[str], message: str) -> None:
    measured.clear()  # nothing is compiled
    status, output = invoke(*arguments)
    assert status == 1
    assert message in output


def test_without_a_compiler(measured: list[Static], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None if name == "cutlass" else name)
    status, output = invoke("--shape", "1,64,64")
    assert status == 1
    assert output.startswith("error: compiling kernels needs nvidia-cutlass-dsl, not installed; ")
