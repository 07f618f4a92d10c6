"""Combinations of versions with which the plugin was tried, and the tests run with each.

``docs/versions.md`` holds the table: ``python -m vllm_fp4_plugin.commands.tried`` prints it.
"""

import platform
from dataclasses import astuple, dataclass, fields

from vllm_fp4_plugin.versions import installed, vllm_version


@dataclass(frozen=True)
class Combination:
    """Versions installed together, and the tests run with them.

    Attributes:
        vllm: release of vLLM.
        torch: release of torch.
        cuda: version of CUDA that torch is built for; ``"CPU"`` for a build without CUDA.
        cute_dsl: release of nvidia-cutlass-dsl.
        python: minor versions, comma-separated.
        tried: tests that were run.
    """

    vllm: str
    torch: str
    cuda: str
    cute_dsl: str
    python: str
    tried: str


RESOLVED = "pip resolves it"  # nothing was run
COMBINATIONS = (
    Combination("0.32.0", "2.13.0", "CPU", "4.8.0", "3.11", "all tests"),
    Combination("0.32.0", "2.11.0", "13.0", "4.8.0", "3.12", "GPU tests, H100 and H200"),
    Combination(
        "0.32.0", "2.13.0", "CPU", "4.8.1", "3.11",
        "kernels compiled for sm_90a and sm_100a: PTX equal to 4.8.0's; not run on a GPU",
    ),
    Combination(
        "0.33.0", "2.13.0", "CPU", "4.8.0", "3.11",
        "tests of plugin, quantizer, examples, package; vLLM's Python on compiled code of 0.32.0",
    ),
    Combination("0.33.0", "2.11.0", "13.0", "4.8.0", "3.12", "GPU tests, one and two H100s"),
    Combination("0.33.0", "2.14.0", "13.0", "4.8.0", "3.11", RESOLVED),
)  # fmt: skip
HEADINGS = {"cute_dsl": "CuTe DSL", "vllm": "vLLM", "cuda": "CUDA", "python": "Python"}


def here() -> Combination:
    """Combination of the installed versions; ``"not installed"`` for a missing package."""
    import torch

    absent = "not installed"
    return Combination(
        _release(vllm_version()) or absent,
        _release(installed("torch")) or absent,
        torch.version.cuda or "CPU",
        installed("nvidia-cutlass-dsl") or absent,
        ".".join(platform.python_version_tuple()[:2]),
        "",
    )


def verdict(found: Combination) -> str:
    """Line about the tests that were run with a combination or, if none, with the nearest one."""
    alike = [each for each in COMBINATIONS if differences(found, each) == []]
    if alike:
        return f"these versions together: {'; '.join(each.tried for each in alike)}"
    nearest = min(COMBINATIONS, key=lambda each: len(differences(found, each)))
    return (
        f"these versions together: not tried; nearest tried ({nearest.tried}): "
        f"{', '.join(differences(found, nearest))}"
    )


def differences(found: Combination, other: Combination) -> list[str]:
    """Fields in which ``other`` differs, each with ``other``'s value, e.g. ``"torch 2.14.0"``."""
    return [
        f"{_heading(field.name)} {getattr(other, field.name)}"
        for field in fields(Combination)
        if field.name != "tried"
        and getattr(found, field.name) not in getattr(other, field.name).split(", ")
    ]


def table() -> str:
    """Combinations as a table in Markdown."""
    names = [_heading(field.name) for field in fields(Combination)]
    rows = [names, ["---"] * len(names), *(astuple(each) for each in COMBINATIONS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _heading(name: str) -> str:
    return HEADINGS.get(name, name)


def _release(version: str) -> str:
    """Release part of a version, e.g. ``"0.33.0"`` of ``"0.33.0+cpu"``."""
    return version.partition("+")[0]


if __name__ == "__main__":
    print(table())
