"""Recorded families of cases, one module each."""

from collections.abc import Iterator
from importlib import import_module

from tests.test_emulator.silicon.case import Case

FAMILIES = (
    "integer",
    "floating",
    "half",
    "compare",
    "convert",
    "warp",
    "memory",
    "atomics",
    "mbarrier",
    "special",
    "tensor_load",
    "tensor_store",
    "bulk",
    "cluster",
    "multiply",
    "wgmma",
    "faults",
)


def family(name: str) -> Iterator[Case]:
    """Cases of one of ``FAMILIES``."""
    yield from import_module(f"{__name__}.{name}").cases()
