"""Imports of the emulator, which must include neither the kernels nor their compiler."""

import ast
from pathlib import Path

import pytest

import tests.emulator

ROOT = Path(tests.emulator.__file__).parent
# These packages connect CuTe with the machine; the example runner drives NVIDIA's programs.
SEAM = ("runtime", "examples")
# Commands that run whole programs, and so import those packages.
COMMANDS = ("mutate.py", "timing/calibrate.py", "timing/example.py")
FORBIDDEN = ("cuda", "cutlass", "nvfp4_kernels", "torch", "vllm", "vllm_fp4_plugin")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_run_one_way(path: Path) -> None:
    inside = path.relative_to(ROOT)
    names = imported(path)
    if inside.parts[0] not in SEAM:
        seam = tuple(f"tests.emulator.{part}" for part in SEAM)
        wrong = {n for n in names if n.split(".")[0] in FORBIDDEN or n.startswith(seam)}
        assert not wrong or str(inside) in COMMANDS, wrong
    assert not any(n.split(".")[0] in ("nvfp4_kernels", "vllm_fp4_plugin") for n in names)
