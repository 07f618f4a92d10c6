"""Selection of the kernel that runs an op."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_kernels import InvalidArgument, NoKernelError
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.dispatch import KernelTable, Mode, called
from nvfp4_kernels.gemm.kernels import KERNELS as GEMM
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS as SILU_MUL_GEMM
from nvfp4_kernels.quantize.kernels import KERNELS as QUANTIZE
from nvfp4_kernels.quantize.kernels import PER_TOKEN_KERNELS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("table", "modes"),
    [
        (GEMM, ["w4a4", "w4a16"]),
        (SILU_MUL_GEMM, ["w4a4", "w4a16"]),
        (QUANTIZE, ["w4a4", "w4a8"]),
        (PER_TOKEN_KERNELS, ["w4a4", "w4a8"]),
    ],
    ids=lambda value: value.op if isinstance(value, KernelTable) else None,
)
def test_every_op_has_a_reference_on_cpu(table: KernelTable, modes: list[Mode]) -> None:
    for mode in modes:
        kernel = table.select(CPU, mode)
        assert (kernel.op, kernel.arch, kernel.variant) == (table.op, "cpu", "reference")
        assert callable(kernel.load())


def test_labels() -> None:
    assert GEMM.select(CPU, "w4a4").label == "nvfp4_gemm/reference (cpu)"
    assert GEMM.select(CPU, "w4a16").label == "nvfp4_gemm_w4a16/reference (cpu)"


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm_100"), ((9, 0), "sm_90")])
def test_selects_by_architecture(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    table = KernelTable(
        "gemm",
        {
            ("cpu", "w4a4"): ("reference", "math:fsum"),
            ("sm_90", "w4a4"): ("persistent", "math:hypot"),
            ("sm_100", "w4a4"): ("two-CTA", "math:dist"),
        },
    )
    assert device_arch(CUDA) == arch
    kernel = table.select(CUDA, "w4a4")
    assert kernel.arch == arch
    assert kernel.load().__name__ == {"sm_90": "hypot", "sm_100": "dist"}[arch]


def test_no_kernel_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    message = (
        r"gemm: no w4a16 kernel for cuda \(sm_75\); there is nvfp4_gemm/reference \(cpu\), "
        r"nvfp4_gemm_w4a16/reference \(cpu\), nvfp4_gemm_w4a8/reference \(cpu\), "
        r"nvfp4_gemm_w4a16/wgmma \(sm_90\), nvfp4_gemm_w4a8/fp8_wgmma \(sm_90\), "
        r"nvfp4_gemm/block_scaled \(sm_100\); "
        "run on one of those devices"
    )
    with pytest.raises(NoKernelError, match=message):
        GEMM.select(CUDA, "w4a16")
    with pytest.raises(NoKernelError, match="there is nothing"):
        KernelTable("gemm", {}).select(CPU, "w4a4")


@torch.library.custom_op("nvfp4_tests::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


@fill.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_ops_are_called_past_the_dispatcher_where_nobody_listens() -> None:
    x = torch.zeros(2)
    assert called(fill, x) is not fill
    called(fill, x)(x)
    assert x.tolist() == [1.0, 1.0]
    with TorchDispatchMode():
        assert called(fill, x) is fill
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert called(fill, fake) is fill


@torch.library.custom_op("nvfp4_tests::numbers", mutates_args=())
def numbers(x: torch.Tensor, n: int, y: float, flag: bool, more: int | None) -> torch.Tensor:
    return x + n + y


RIGHT = (torch.zeros(2), 1, 2, True, None)
WRONG = {
    "x: is NoneType, must be Tensor": (None, 1, 2.0, True, None),
    "n: is float, must be int": (torch.zeros(2), 1.0, 2.0, True, None),
    "n: is bool, must be int": (torch.zeros(2), True, 2.0, True, None),
    "y: is str, must be float": (torch.zeros(2), 1, "2", True, None),
    "flag: is int, must be bool": (torch.zeros(2), 1, 2.0, 1, None),
    "more: is str, must be int or None": (torch.zeros(2), 1, 2.0, True, "3"),
}


def test_numbers_of_either_kind_are_taken() -> None:
    assert called(numbers, RIGHT[0])(*RIGHT).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("message", "given"), WRONG.items(), ids=WRONG)
def test_what_the_dispatcher_would_refuse_is_refused(message: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match=message):
        called(numbers, torch.zeros(2))(*given)


def test_ops_that_a_graph_holds_are_ops() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    x = torch.zeros(2)
    torch.compile(lambda y: called(fill, y)(y), backend=keep, fullgraph=True)(x)
    assert "nvfp4_tests.fill" in graphs[0].code
    assert x.tolist() == [1.0, 1.0]
