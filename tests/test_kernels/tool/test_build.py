"""``python -m nvfp4_kernels build``: it writes exactly the kernels that a server looks up."""

import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime import compile
from nvfp4_kernels.runtime.object_file import seal
from nvfp4_kernels.tool import build as compiling
from nvfp4_kernels.tool import toolchain, wanted
from nvfp4_kernels.tool.build import Built, build_one
from tests import devices, limits, terminal
from tests.other_users import NOBODY, needs_root

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
# CuTe DSL compiles for one runtime per process. This process's runtime keeps the PTX, which the
# emulator runs.
EMULATED = """
from tests.emulator import Gpu
from tests.emulator.runtime import shim
shim.install(Gpu())
from nvfp4_kernels.__main__ import app
app()
"""
SERVE = """
import os, sys
import pytest, torch
from nvfp4_kernels import Static, gemm, quantize
from nvfp4_kernels.settings import CACHE_VARIABLE
from tests.devices import emulated_ops
from tests.emulator import EAGER
from tests.test_kernels.gemm.linear_cases import Case, grid_problem

def refuse(*_, **__):
    raise AssertionError("compiled")

with emulated_ops(EAGER):
    import cutlass.cute
    cutlass.cute.compile = refuse
    os.environ[CACHE_VARIABLE] = sys.argv[1]
    problem = grid_problem(Case(5, 64, 64, out_dtype=torch.bfloat16))
    assert torch.equal(problem.run(gemm), torch.from_numpy(problem.expected()).bfloat16())
    quantize(torch.randn(5, 64).bfloat16(), Static(torch.tensor(0.01)))
    with pytest.raises(AssertionError, match="compiled"):
        grid_problem(Case(5, 64, 64, out_dtype=torch.float16)).run(gemm)
"""
HOST_CODE = """
import os, sys
os.environ["CUTE_DSL_ARCH"] = "sm_100a"
from pathlib import Path
from nvfp4_kernels.runtime import compile
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.tool.model import explicit
(spec, *_) = block_scaled_kernels(explicit(["64,64"], []), max_tokens=1)
compile.build(spec.kernel(), Path(sys.argv[1]))
"""
ON_HOPPER = ["--linear", "64,64", "--arch", "sm_90a"]
BUILD = "from nvfp4_kernels.__main__ import app; app()"
# Prints the file that a process on an H200 looks up for one token.
ON_AN_H200 = """
import os, sys
import torch
from nvfp4_kernels.runtime import compile

os.environ[compile.CACHE_VARIABLE] = sys.argv[1]
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda index: (9, 0)
assert compile.arch() == "sm_90a"
"""
A_PRODUCT = """
from nvfp4_kernels.gemm.sm90.choose import Problem, choose_config
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm

print(compile.object_path(WeightOnlyGemm(*choose_config(Problem(1, 64, 128), EpilogueConfig()))))
"""
# One KV head, two query heads, pages of 32 tokens.
A_DECODE = """
from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.decode.sm90.launch import decode_attention
from nvfp4_kernels.devices import standing_in

compile.compiled = lambda kernel, arch: lambda *_: print(compile.object_path(kernel))
q, key = (torch.zeros(1, heads, 64).bfloat16() for heads in (2, 1))
cache, numbers = torch.zeros(1, 1, 32, 128).bfloat16(), torch.ones(1, dtype=torch.int32)
tensors = q, q, key, key, cache, torch.zeros(1, 9, dtype=torch.int32), numbers, numbers.long()
with standing_in("cpu", "sm_90"):
    decode_attention(DecodeCall(*tensors, None, None, None, 1.0, 64, None))
"""
DECODING = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"],
}

KEYS = """
import json, os, torch
from nvfp4_kernels.runtime import compile

class Kernel:
    def __repr__(self):
        return "Kernel()"

def look_up(capability=None, **settings):
    os.environ.update(settings)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda index: capability
    compile._device_arch.cache_clear()
    compile._toolchain.cache_clear()
    name = compile.object_path(Kernel()).name
    for each in settings:
        del os.environ[each]
    return name

def of_another_release(distribution):
    released = compile.version
    compile.version = lambda name: "0" if name == distribution else released(name)
    name = look_up((10, 0))
    compile.version = released
    return name

print(json.dumps({
    "told sm_100a": look_up(CUTE_DSL_ARCH="sm_100a"),
    "told sm_90a": look_up(CUTE_DSL_ARCH="sm_90a"),
    "told sm_103a": look_up(CUTE_DSL_ARCH="sm_103a"),
    "on a B200": look_up((10, 0)),
    "on an H200": look_up((9, 0)),
    "other folders": look_up((10, 0), CUTE_DSL_CACHE_DIR="/a", CUTE_DSL_LIBS="/b.so"),
    "with line numbers": look_up((10, 0), CUTE_DSL_LINEINFO="1"),
    "another CuTe DSL": of_another_release("nvidia-cutlass-dsl"),
    "another TVM FFI": of_another_release("apache-tvm-ffi"),
}))
"""


def python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *before])
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
        env=environment,
    )


def test_a_server_compiles_nothing(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    build = ["build", "--linear", "64,64", "--max-tokens", "8", "--activation", "static"]
    build += ["--jobs", "1", "--out", str(tmp_path / "kernels")]
    first = python(EMULATED, *build)
    assert first.returncode == 0, first.stderr
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").iterdir()}
    assert len(files) == 2
    assert all(path.suffix == ".o" for path in files), "nothing half-written"

    served = python(SERVE, tmp_path / "kernels")
    assert served.returncode == 0, served.stderr

    second = python(EMULATED, *build)
    assert "Everything was there already" in second.stdout
    built = {path: path.stat().st_mtime_ns for path in files}
    assert built == files


def test_a_hopper_finds_its_kernel(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    folder = tmp_path / "kernels"
    build = ["build", "--linear", "64,128", "--max-tokens", "8", "--arch", "sm_90a"]
    done = python(BUILD, *build, "--jobs", "1", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = python(ON_AN_H200 + A_PRODUCT, folder)
    assert found.returncode == 0, found.stderr
    assert [Path(found.stdout.strip())] == list(folder.iterdir())
    assert _sm_of(Path(found.stdout.strip()).read_bytes()) == 90


def test_a_hopper_that_decodes_finds_its_kernel(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    (tmp_path / "config.json").write_text(json.dumps(DECODING))
    folder = tmp_path / "kernels"
    build = ["build", tmp_path, "--max-tokens", "1", "--arch", "sm_90a", "--block-size", "32"]
    done = python(BUILD, *build, "--jobs", "1", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode_attention" in done.stdout
    found = python(ON_AN_H200 + A_DECODE, folder)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) in folder.iterdir()
    assert _sm_of(Path(found.stdout.strip()).read_bytes()) == 90


def _sm_of(data: bytes) -> int:
    """Architecture of the GPU's ELF file inside the host's: the low byte of its ``e_flags``."""
    at = data.index(b"\x7fELF", 1)
    (machine,) = struct.unpack_from("<H", data, at + 18)
    assert machine == 190, "EM_CUDA"
    return data[at + 48]


def test_host_code_runs_on_any_processor(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs an x86-64 and objdump")
    place = tmp_path / "kernel.o"
    done = python(HOST_CODE, place)
    assert done.returncode == 0, done.stderr
    listing = subprocess.run(
        ["objdump", "-d", str(place)], capture_output=True, text=True, check=True
    ).stdout
    assert "%xmm" in listing
    assert "%ymm" not in listing
    assert "%zmm" not in listing


# --- the key ----------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_writes_what_a_b200_looks_up(keys: dict[str, str]) -> None:
    assert keys["told sm_100a"] == keys["on a B200"]


def test_a_machine_without_a_gpu_writes_what_an_h200_looks_up(keys: dict[str, str]) -> None:
    assert keys["told sm_90a"] == keys["on an H200"]


def test_where_things_are_does_not_matter(keys: dict[str, str]) -> None:
    assert keys["other folders"] == keys["told sm_100a"]


@pytest.mark.parametrize(
    "other",
    ["told sm_103a", "on an H200", "with line numbers", "another CuTe DSL", "another TVM FFI"],
)
def test_what_is_compiled_matters(keys: dict[str, str], other: str) -> None:
    assert keys[other] != keys["told sm_100a"]


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """Names of the cache files that processes with different settings look up."""
    devices.cutlass_or_skip()
    done = python(KEYS)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


# --- the command ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that compilers are installed; these tests compile nothing in this process."""
    monkeypatch.setattr(toolchain, "find_spec", lambda module: module)


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["build", *map(str, arguments)])
    assert not isinstance(result.exception, Exception), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_a_kernel_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_all(specs: list[KernelSpec], out: Path, arch: str, jobs: int) -> Iterator[Built]:
        assert arch == "sm_100a"
        for spec in specs:
            yield Built(spec, out / "a.o", 0, 1.0, "DSLRuntimeError: [no] such thing")

    monkeypatch.setattr(compiling, "build_all", build_all)
    monkeypatch.setattr(KernelSpec, "kernel", lambda spec: spec.fields)
    status, output = invoke("--linear", "64,64", "--max-tokens", "1", "--out", tmp_path)
    assert status == 1
    assert "DSLRuntimeError: [no] such thing" in output


def test_a_narrow_terminal_and_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of kernels and of layers are never broken; a pipe has no width."""
    monkeypatch.setattr(
        compiling,
        "build_all",
        lambda specs, *_: [Built(spec, tmp_path, 10**6, 1.0) for spec in specs],
    )
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    (tmp_path / "config.json").write_text(json.dumps(DECODING))
    arguments = ["build", str(tmp_path), "--arch", "sm_90", "--out", str(tmp_path)]
    piped, again = (
        CliRunner().invoke(app, arguments, env={"COLUMNS": columns}).stdout
        for columns in ("40", "300")
    )
    assert piped == again
    terminal.narrow(monkeypatch)
    narrow = CliRunner().invoke(app, arguments).stdout
    terminal.check_no_word_is_broken(piped, narrow)
    assert "norm_rotary" in narrow or "rotary_embedding" in narrow, narrow


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setitem(wanted.KERNELS, "sm_100", lambda asked: {})
    status, output = invoke("--linear", "64,64", "--jobs", str(jobs), "--out", tmp_path)
    assert status == 0
    assert "Nothing to build: the library has no kernels for these layers." in output


def test_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    options = ["--gate-up", "64,64", "--max-tokens", "1", "--dtype", "float16", "--out", tmp_path]
    assert invoke(*options)[0] == 0
    assert len(seen) == 4
    assert all("float16" in repr(spec) and "bfloat16" not in repr(spec) for spec in seen)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_an_architecture_is_compiled_for_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    seen: list[tuple[list[KernelSpec], str]] = []
    monkeypatch.setattr(
        compiling, "build_all", lambda specs, out, target, _: seen.append((specs, target)) or []
    )
    for given in (arch, f"{arch}a"):
        status, _ = invoke(
            "--linear", "64,64", "--max-tokens", "8", "--arch", given, "--out", tmp_path
        )
        assert status == 0
    (specs, target), again = seen
    assert specs
    assert target == f"{arch}a"
    assert again == (specs, target)


@pytest.mark.parametrize("terms", [None, 3])
def test_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: int | None) -> None:
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    given = [] if terms is None else ["--terms", str(terms)]
    assert invoke("--linear", "64,64", "--max-tokens", "40", *given, "--out", tmp_path)[0] == 0
    counts = {
        (spec.fields[-1] if spec.op == "quantize" else spec.fields[0].terms).count for spec in seen
    }
    assert counts == {terms or 1}


@pytest.mark.parametrize(
    ("arch", "ops"),
    [
        ("sm_90a", {"gemm", "silu_mul_gemm"}),
        ("sm_100a", {"gemm", "silu_mul_gemm", "paged_attention", "rotary_store"}),
    ],
)
def test_batch_invariance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, ops: set[str]
) -> None:
    """A product splits K equally for any number of tokens: one tile on sm_100, several on sm_90."""
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    (tmp_path / "config.json").write_text(json.dumps(DECODING))
    given = ["--arch", arch, "--batch-invariant", "--out", tmp_path]
    assert invoke(tmp_path, *given)[0] == 0
    assert ops <= {spec.op for spec in seen}
    products = [spec.fields[0] for spec in seen if spec.op == "gemm"]
    assert {tile.split_k * getattr(tile, "parts_in_turn", 1) for tile in products} == {1}
    assert (len(products) > 4) == (arch == "sm_90a")


@pytest.mark.parametrize(("size", "given"), [(16, []), (64, ["--block-size", "64"])])
def test_pages_on_a_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, given: list[str]
) -> None:
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    (tmp_path / "config.json").write_text(json.dumps(DECODING))
    assert invoke(tmp_path, "--arch", "sm_90a", *given, "--out", tmp_path)[0] == 0
    decode = [spec for spec in seen if spec.op == "decode_attention"]
    assert {spec.fields[1].page_size for spec in decode} == {size}


@pytest.mark.parametrize(
    ("given", "fp8"),
    [([], {False}), (["--kv-cache", "fp8"], {True}), (["--kv-cache", "both"], {False, True})],
)
def test_caches_of_a_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], fp8: set[bool]
) -> None:
    """The model's dtype, unless an FP8 cache is asked for, as in the plugin."""
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    (tmp_path / "config.json").write_text(json.dumps(DECODING))
    assert invoke(tmp_path, "--arch", "sm_90a", *given, "--out", tmp_path)[0] == 0
    decode = [spec for spec in seen if spec.op == "decode_attention"]
    assert {spec.fields[0].fp8 for spec in decode} == fp8


def test_a_hopper_without_a_kernel_for_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    (tmp_path / "config.json").write_text(json.dumps(DECODING | {"head_dim": 80}))
    assert invoke(tmp_path, "--arch", "sm_90a", "--out", tmp_path)[0] == 0
    ops = {"add_rms_norm", "gemm", "rotary_embedding", "silu_mul_gemm"}
    assert {spec.op for spec in seen} == ops


@pytest.mark.parametrize(
    ("algorithm", "given", "acts"),
    [
        ("NVFP4", [], {"bfloat16"}),
        ("NVFP4", ["--activation", "16-bit"], {"bfloat16"}),
        ("NVFP4", ["--activation", "fp8"], {"float8_e4m3fn"}),
        ("W4A16_NVFP4", [], {"bfloat16"}),
        ("W4A16_NVFP4", ["--activation", "fp8"], {"float8_e4m3fn"}),
        (None, [], {"bfloat16"}),
    ],
)
def test_arithmetic_on_a_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str | None, given: list[str],
    acts: set[str],
) -> None:  # fmt: skip
    seen: list[KernelSpec] = []
    monkeypatch.setattr(compiling, "build_all", lambda specs, *_: seen.extend(specs) or [])
    config = {"quantization_config": {"quant_algo": algorithm}} if algorithm else {}
    (tmp_path / "config.json").write_text(json.dumps(DECODING | config))
    arguments = ["--arch", "sm_90a", "--max-tokens", "64", *given, "--out", tmp_path]
    assert invoke(tmp_path, *arguments)[0] == 0
    assert {spec.fields[1].act for spec in seen if spec.op == "gemm"} == acts
    per_token = algorithm == "W4A16_NVFP4"
    pairs = [spec.fields[1] for spec in seen if spec.op == "silu_mul_gemm"]
    fp8 = [output for output in pairs if output.act == "float8_e4m3fn"]
    assert bool(fp8) == ("float8_e4m3fn" in acts)
    assert {(each.dtype, each.per_token) for each in fp8} == (
        set() if not fp8 else {("bfloat16", True) if per_token else ("float8_e4m3fn", False)}
    )
    quantisers = {spec.fields[-2] for spec in seen if spec.op.endswith("quantize")}
    assert quantisers == ({per_token} if fp8 else set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL: give a model's config.json, or sizes with --linear N,K and --gate-up N,K"),
        (["x", "--linear", "64,64"], "one of the two"),
        (["/nowhere"], "/nowhere: cannot be read (No such file or directory)"),
        (["--linear", "64"], "--linear: is '64', must be N,K"),
        (["--gate-up", "64,40"], "K is 40, must be a positive multiple of 16"),
        (
            ["--linear", "64,64", "--arch", "sm_80"],
            "--arch: is 'sm_80', must be one of sm_90 or sm_90a (H100, H200), sm_100 or sm_100a",
        ),
        (
            [*ON_HOPPER, "--activation", "static"],
            "--activation: is 'static', must be fp8 or ",
        ),
        (["--linear", "64,64", "--activation", "fp8"], "--activation: is 'fp8', must be static, p"),
        ([*ON_HOPPER, "--terms", "3"], "--terms: is '3', must not be given"),
        ([*ON_HOPPER, "--block-size", "48"], "--block-size: is 48, must be a power of"),
        (["--linear", "64,64", "--block-size", "48"], "--block-size: is 48, must be a power of"),
        (["--linear", "64,64", "--tensor-parallel", "2"], "--tensor-parallel: goes with a model"),
        (
            ["--linear", "64,64", "--batch-invariant", "--terms", "2"],
            "--batch-invariant: goes with inputs of one term, these have 2",
        ),
        (
            ["--linear", "64,65536", "--max-tokens", "1"],
            "K is 65536, must be at most 40960",
        ),
    ],
    ids=[
        "nothing",
        "both",
        "no file",
        "one number",
        "odd K",
        "arch",
        "activation on sm_90",
        "activation on sm_100",
        "terms on sm_90",
        "pages on sm_90",
        "pages",
        "parallel",
        "batch-invariant terms",
        "long rows",
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    status, output = invoke(*arguments, "--out", tmp_path / "kernels")
    assert status == 1
    assert message in output
    assert not (tmp_path / "kernels").exists()


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    size = ("--linear", "64,64", "--max-tokens", "1", "--out")
    for out, why in (("file", "File exists"), ("file/in", "Not a directory")):
        status, output = invoke(*size, tmp_path / out)
        assert status == 1
        assert f"--out: {tmp_path / out} cannot be made a folder ({why}); choose another" in output


@pytest.mark.parametrize(
    ("mode", "who"), [(0o757, "everybody"), (0o775, "gid")], ids=["everybody", "group"]
)
def test_a_folder_that_others_may_write_to(tmp_path: Path, mode: int, who: str) -> None:
    tmp_path.chmod(mode)
    status, output = invoke("--linear", "64,64", "--max-tokens", "1", "--out", tmp_path)
    assert status == 1
    assert f"--out: {tmp_path} holds code that is run, and " in output
    assert who in output
    assert f"may write to {tmp_path}, mode {mode:o}, only its owner may; chmod " in output


def test_folders_that_are_made_are_their_owners_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "build_all", lambda *_: [])
    before = os.umask(0)
    try:
        status, _ = invoke("--linear", "64,64", "--max-tokens", "1", "--out", tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert status == 0
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "a", tmp_path / "a" / "b")} == {0o755}


@pytest.mark.parametrize("what", ["damaged", "another user's"])
def test_what_is_there_already_must_be_fit_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A server would refuse a damaged file or another user's, so ``build`` does as well."""
    file = tmp_path / "kernel.o"
    file.write_bytes(b"code")
    file.chmod(0o644)
    if what == "damaged":
        said = rf"{file} cannot be loaded \(its content has not the digest"
    else:
        needs_root()
        seal(file)
        os.chown(file, NOBODY, NOBODY)
        said = rf"{file} belongs to .*uid {NOBODY}"
    monkeypatch.setattr(KernelSpec, "kernel", lambda spec: spec.fields)
    monkeypatch.setattr(compile, "object_path", lambda kernel: file)
    with pytest.raises(compile.UnusableCache, match=said):
        build_one(KernelSpec("gemm", "module:class", ()))


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)  # as if not root
    status, output = invoke("--linear", "64,64", "--max-tokens", "1", "--out", tmp_path)
    assert status == 1
    assert f"--out: {tmp_path} must not be written to; choose another folder" in output


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda module: None)
    out = tmp_path / "kernels"
    status, output = invoke("--linear", "64,64", "--max-tokens", "1", "--out", out)
    assert status == 1
    assert output == (
        "error: compiling kernels needs nvidia-cutlass-dsl and apache-tvm-ffi, not installed; "
        'pip install "vllm-fp4-plugin[kernels]"'
    )
    assert not out.exists()
