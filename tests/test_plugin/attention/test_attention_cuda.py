"""Parts of the attention backend that any GPU can test: cache writes and refusals."""

from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.backend import PagedAttentionBackend

PAGES, HEADS, PAGE_SIZE = 7, 3, 16


@pytest.mark.parametrize("by_token", [False, True], ids=["by head", "by token"])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vllms_kernel_writes_what_ours_does(
    dtype: torch.dtype, stored: str, head_dim: int, by_token: bool
) -> None:
    """Pages are equal to the last bit, ties and saturation included."""
    torch.manual_seed(0)
    key, value = (100 * torch.randn(2, 40, HEADS, head_dim)).to(dtype)
    slots = torch.randperm(PAGES * PAGE_SIZE)[:37]  # of 40 tokens: the last are padding
    slots[[3, 20]] = -1
    scales = torch.tensor(0.37), torch.tensor(1.9)
    shape = (PAGES, HEADS, PAGE_SIZE, 2 * head_dim)
    empty = torch.zeros(shape, dtype=torch.uint8 if stored == "fp8" else dtype)
    if by_token:
        empty = empty.transpose(1, 2).contiguous().transpose(1, 2)
    ours, theirs = empty.clone(), empty.clone().cuda()
    cache.write(key, value, ours, slots, *(scales if stored == "fp8" else (None, None)))
    layer = SimpleNamespace(_k_scale=scales[0].cuda(), _v_scale=scales[1].cuda())
    cache.write_cuda(key.cuda(), value.cuda(), theirs, slots.cuda(), stored, layer)
    assert theirs.stride() == ours.stride()
    assert torch.equal(theirs.cpu(), ours)
    assert ours.count_nonzero() > 0


def test_a_gpu_without_kernels_is_refused_by_name() -> None:
    major, minor = torch.cuda.get_device_capability()
    if major in (9, 10):
        pytest.skip("this GPU has them")
    reasons = PagedAttentionBackend.validate_configuration(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
    )
    assert any(f"no float kernel for cuda (sm_{major}{minor})" in reason for reason in reasons)
