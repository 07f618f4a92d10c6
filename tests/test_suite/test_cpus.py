"""Option ``--cpu``: pytest and its children see the machine as the simulated CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import cpus

ROOT = Path(__file__).parents[2]
SEEN = """
import json, torch
from vllm.platforms import current_platform

current_platform.import_kernels()
files = {word.rpartition("/vllm/")[2] for word in open("/proc/self/maps").read().split()}
seen = torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()
amx, capability = torch.cpu._is_amx_tile_supported(), torch.backends.cpu.get_cpu_capability()
print(json.dumps([*seen, amx, capability, [file for file in files if file.startswith("_C")]]))
"""
COMPILED = """
import torch

given = torch.arange(192.0).view(64, 3)
turned = torch.compile(lambda x: (x.t() / 255 - 1).bfloat16().contiguous(), dynamic=True)
assert torch.equal(turned(given), (given.t() / 255 - 1).bfloat16())
"""
EXPECTED = {
    "avx512": [True, False, False, "AVX512", ["_C_AVX512.abi3.so"]],
    "avx2": [False, False, False, "AVX2", ["_C_AVX2.abi3.so"]],
}


@pytest.fixture(params=EXPECTED)
def cpu(request: pytest.FixtureRequest) -> cpus.Cpu:
    cpu = cpus.CPUS[request.param]
    try:
        cpus.check(cpu)
    except pytest.UsageError as error:
        pytest.skip(str(error))
    return cpu


def test_processes_take_this_machine_for_it(cpu: cpus.Cpu) -> None:
    environment = cpus.environment(cpu)
    command = [sys.executable, "-c", SEEN]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout.splitlines()[-1]) == EXPECTED[cpu.name]


def test_compiled_code_is_that_of_the_cpu() -> None:
    """Torch's cache of graphs takes code for wider vectors for code of the same graph."""
    for name in ("avx512", "avx2"):
        try:
            cpus.check(cpus.CPUS[name])
        except pytest.UsageError as error:
            pytest.skip(str(error))
    for name in ("avx512", "avx2"):
        command = [sys.executable, "-c", COMPILED]
        environment = cpus.environment(cpus.CPUS[name])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


def test_the_suite_skips_what_its_library_lacks() -> None:
    test = "tests/test_kernels/indexer/test_indexer_against_vllm.py::test_top_k"
    command = [sys.executable, "-m", "pytest", "--cpu", "avx2", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM's library for this machine lacks topk_transform_512_cpu" in done.stdout


def test_features_this_machine_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: old)
    with pytest.raises(pytest.UsageError, match=r"--cpu: is avx512, .* has no avx512_vnni"):
        cpus.check(cpus.CPUS["avx512"])
