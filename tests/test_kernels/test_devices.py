"""The format's functions give the same bits on any CUDA GPU as on the CPU."""

import pytest
import torch

from nvfp4_kernels import NoKernelError, gemm
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.formats.fragments import from_fragments, to_fragments
from nvfp4_kernels.formats.nvfp4 import (
    Convention,
    Nvfp4Tensor,
    quantize_activation,
    quantize_weight,
    row_global_scales,
    to_blocked,
)
from nvfp4_kernels.formats.scale_search import SCALE_RULES, ScaleRule, quantize_with_rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(dtype: torch.dtype) -> torch.Tensor:
    """Weight with rows of different magnitudes; the number of rows is not a multiple of 128."""
    return (torch.randn(515, 1024) * torch.rand(515, 1)).to(dtype)


def assert_same_bits(cpu: torch.Tensor, cuda: torch.Tensor) -> None:
    assert cuda.is_cuda
    assert torch.equal(
        cpu.contiguous().view(torch.uint8), cuda.cpu().contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_weights(rule: ScaleRule, convention: Convention, dtype: torch.dtype) -> None:
    x = weight(dtype)
    cpu = quantize_with_rule(x, rule, convention=convention)
    cuda = quantize_with_rule(x.cuda(), rule, convention=convention)
    assert_same_bits(cpu.data, cuda.data)
    assert_same_bits(cpu.scales, cuda.scales)
    assert_same_bits(cpu.global_scale.reshape(1), cuda.global_scale.reshape(1))
    assert_same_bits(cpu.to_blocked().scales, cuda.to_blocked().scales)
    assert_same_bits(cpu.dequantize(), cuda.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(dtype: torch.dtype) -> None:
    x = weight(dtype)
    rows, rows_cuda = row_global_scales(x), row_global_scales(x.cuda())
    assert_same_bits(rows, rows_cuda)
    for cpu, cuda in zip(
        quantize_activation(x, rows), quantize_activation(x.cuda(), rows_cuda), strict=True
    ):
        assert_same_bits(cpu, cuda)


def test_fragments() -> None:
    """Fragments are equal to the CPU's, with all scale codes in the weight."""
    data = torch.randint(0, 256, (515, 512), dtype=torch.uint8)
    scales = torch.arange(515 * 64).to(torch.uint8).view(515, 64).view(torch.float8_e4m3fn)
    cpu, cuda = to_fragments(data, scales), to_fragments(data.cuda(), scales.cuda())
    for ours, theirs in zip(cpu, cuda, strict=True):
        assert_same_bits(ours, theirs)
    for ours, theirs in zip(
        from_fragments(*cpu, 515, 1024), from_fragments(*cuda, 515, 1024), strict=True
    ):
        assert_same_bits(ours, theirs)


def test_gemm_without_a_kernel_says_what_there_is() -> None:
    """sm_90 has no kernel for NVFP4 activations, other families none for 16-bit activations."""
    x = torch.randn(2, 1024, dtype=torch.bfloat16, device="cuda")
    b: Nvfp4Tensor = quantize_weight(weight(torch.bfloat16).cuda()).to_blocked()
    a: tuple[torch.Tensor, torch.Tensor | None] = (x, None)
    mode = "w4a16"
    if device_arch(x.device) == "sm_90":
        mode = "w4a4"
        data, scales = quantize_activation(x, torch.tensor(0.01, device="cuda"))
        a = (data, to_blocked(scales))
    message = rf"gemm: no {mode} kernel for cuda .*reference \(cpu\)"
    with pytest.raises(NoKernelError, match=message):
        gemm(*a, b.data, b.scales, b.global_scale[None], [515])
