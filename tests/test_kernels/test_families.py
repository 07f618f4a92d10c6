"""Architecture families: sm_103 uses sm_100's kernels, compiled for sm_103; sm_120 is refused."""

import importlib
import pkgutil
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import nvfp4_kernels
from nvfp4_kernels import NoKernelError, Static, devices, gemm, quantize
from nvfp4_kernels.devices import (
    FAMILIES,
    GPUS,
    SM_COUNTS,
    UnknownArchitecture,
    device_arch,
    device_facts,
    device_family,
    members,
    parse_arch,
    standing_in,
    target_of,
)
from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.runtime import compile
from tests.emulator import Gpu
from tests.test_kernels.gemm.linear_cases import Case, check_exact

CPU = torch.device("cpu")


def tables() -> list[KernelTable]:
    """Kernel tables of all ops."""
    found: dict[int, KernelTable] = {}
    for each in pkgutil.walk_packages(nvfp4_kernels.__path__, "nvfp4_kernels."):
        if each.name.endswith(".kernels"):
            for value in vars(importlib.import_module(each.name)).values():
                for table in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(table, KernelTable):
                        found[id(table)] = table
    return list(found.values())


TABLES = pytest.mark.parametrize("table", tables(), ids=lambda table: table.op)


def test_every_op_has_a_table() -> None:
    assert len(tables()) > 20


@pytest.mark.schedules("random 1")
@TABLES
@pytest.mark.usefixtures("op_device")
def test_targets_name_functions(table: KernelTable) -> None:
    for family in ("cpu", "sm_90", "sm_100"):
        for mode, batch_invariant in product(table.modes(family), (False, True)):
            with standing_in("cpu", family):
                kernel = table.find(CPU, mode, batch_invariant)
            assert kernel is None or callable(kernel.load())


@TABLES
def test_sm_103_gets_what_sm_100_gets(table: KernelTable) -> None:
    for mode in table.modes("sm_100"):
        with standing_in("cpu", "sm_100"):
            expected = table.select(CPU, mode)
        with standing_in("cpu", "sm_103"):
            assert table.select(CPU, mode) is expected


@TABLES
def test_sm_120_is_refused_by_name(table: KernelTable) -> None:
    mode = next(iter(table.modes("cpu")))
    with (
        standing_in("cpu", "sm_120"),
        pytest.raises(NoKernelError, match=rf"{table.op}: no {mode} kernel for cpu \(sm_120\)"),
    ):
        table.select(CPU, mode)


def test_each_architecture_has_its_own_number_of_sms() -> None:
    assert set(SM_COUNTS) == set(GPUS) == set(FAMILIES)
    with standing_in("cpu", "sm_103"):
        assert device_family(CPU) == "sm_100"
        assert device_facts(CPU).sms == 152
    with standing_in("cpu", "sm_100"):
        assert device_facts(CPU).sms == 148


def test_a_cuda_device_that_says_10_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv(compile.ARCH_VARIABLE, raising=False)
    compile._device_arch.cache_clear()
    try:
        assert device_arch(torch.device("cuda")) == "sm_103"
        assert device_family(torch.device("cuda")) == "sm_100"
        assert compile.arch() == "sm_103a"
    finally:
        compile._device_arch.cache_clear()


def test_members_of_a_family() -> None:
    assert members("sm_100") == ("sm_100", "sm_103")
    assert members("sm_90") == ("sm_90",)


@pytest.mark.parametrize("arch", FAMILIES)
def test_an_architecture_goes_by_its_name_and_by_its_target(arch: str) -> None:
    assert parse_arch("--arch", arch) == parse_arch("--arch", target_of(arch)) == arch


@pytest.mark.parametrize("text", ["90", "sm90", "100a", "B200", "sm_100f", "SM_100", "sm_120", ""])
def test_another_spelling_is_told_all_that_are_accepted(text: str) -> None:
    accepted = (
        "sm_90 or sm_90a (H100, H200), sm_100 or sm_100a (B200, GB200), "
        "sm_103 or sm_103a (B300, GB300)"
    )
    said = re.escape(f"--arch: is {text!r}, must be one of {accepted}; name one, spelt so")
    with pytest.raises(UnknownArchitecture, match=f"^{said}$"):
        parse_arch("--arch", text)


def test_what_a_command_does_not_serve_is_not_among_the_accepted() -> None:
    for text in ("sm_90", "sm_90a", "cpu"):
        with pytest.raises(UnknownArchitecture, match="must be one of sm_100 or sm_100a") as caught:
            parse_arch("--arch", text, members("sm_100"))
        assert "sm_90 or" not in str(caught.value)
    assert parse_arch("--arch", "cpu", ("cpu", "sm_90")) == "cpu"
    with pytest.raises(UnknownArchitecture, match=r"must be one of cpu, sm_90 or sm_90a"):
        parse_arch("--arch", "cpua", ("cpu", "sm_90"))


@pytest.mark.arch("sm_103")
@pytest.mark.schedules("random 1")
def test_kernels_are_compiled_for_sm_103_and_run(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    load = Gpu.load
    monkeypatch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
    check_exact(gemm, Case(5, 200, 192, out_dtype=torch.bfloat16))
    check_exact(gemm, Case(200, 130, 192, out_dtype=torch.bfloat16))
    quantize(
        torch.randn(5, 64, device=op_device).bfloat16(), Static(torch.tensor(1.0, device=op_device))
    )
    assert seen
    assert all(".target sm_103a" in ptx for ptx in seen)


def test_a_gpu_is_asked_for_its_facts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device.index)
        return SimpleNamespace(multi_processor_count=100 + device.index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    devices._gpu_facts.cache_clear()
    try:
        for index in (0, 1, 0):
            gpu = torch.device("cuda", index)
            assert device_facts(gpu) == (gpu, "sm_90", 100 + index)
            monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
            assert device_facts(torch.device("cuda")).sms == 100 + index
        assert asked == [0, 1]
    finally:
        devices._gpu_facts.cache_clear()
