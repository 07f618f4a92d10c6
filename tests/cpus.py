"""CPUs that ``--cpu`` can simulate, in this process and in every child process.

torch's predicates report the features that the CPU lacks as missing, and vLLM chooses its library
by these predicates. ATen, oneDNN and MKL query the machine directly, so an environment variable
limits each. Compiled code is kept apart: the key of torch's cache of graphs leaves out the width of
vectors, so that code written for AVX-512 would be compiled for AVX2, and compute something else.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import startup

DENIED = "DENIED_CPU_CAPABILITIES"
CACHES = Path(__file__).parents[1] / ".cache"


@dataclass(frozen=True)
class Cpu:
    """A CPU with fewer features.

    Attributes:
        name: value of ``--cpu``.
        needs: torch's name of the most advanced feature of the CPU.
        denied: prefixes of torch's names of the missing features.
        variables: environment variables that limit the libraries with queries of their own.
    """

    name: str
    needs: str
    denied: tuple[str, ...]
    variables: Mapping[str, str]


_CPUS = (
    Cpu(
        "avx512",
        "avx512_vnni",
        ("amx", "avx10", "avx512_bf16", "avx512_fp16", "avx_ne_convert", "avx_vnni"),
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        },
    ),
    Cpu(
        "avx2",
        "avx2",
        ("amx", "avx10", "avx512", "avx_ne_convert", "avx_vnni"),
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
    ),
)
CPUS = {cpu.name: cpu for cpu in _CPUS}


def check(cpu: Cpu) -> None:
    """Raise ``pytest.UsageError`` unless this machine has the features of ``cpu``."""
    if not torch.cpu.get_capabilities().get(cpu.needs):
        raise pytest.UsageError(
            f"--cpu: is {cpu.name}, must be a CPU with no more features than this one, which has "
            f"no {cpu.needs}; leave it out"
        )


def environment(cpu: Cpu) -> dict[str, str]:
    """Environment in which Python treats this machine's CPU as ``cpu``."""
    denied = {DENIED: ",".join(cpu.denied), "PYTHONPATH": startup.path()}
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(CACHES / f"inductor-{cpu.name}"),
        "VLLM_CACHE_ROOT": str(CACHES / f"vllm-{cpu.name}"),
    }
    return {**os.environ, **cpu.variables, **denied, **caches}


def is_simulated(cpu: Cpu) -> bool:
    """Whether this process was started in the environment of ``cpu``."""
    return os.environ.get(DENIED) == ",".join(cpu.denied)
