"""Kernels that quantise queries and keys, and that write and read the indexer's cache."""

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import indexer_gather_k, indexer_quantize_q, indexer_store_k
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.indexer.call import GatherCall
from nvfp4_kernels.indexer.formats import Format, format_of
from nvfp4_kernels.indexer.vectors.layout import alignment
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.test_kernels.bits import check_equal
from tests.test_kernels.indexer.indexer_oracle import FORMATS, quantize

FMTS = pytest.mark.parametrize("fmt", FORMATS)
EVERY_SCHEDULE = pytest.mark.schedules(*(schedule.name for schedule in STANDARD))
pytestmark = pytest.mark.schedules("random 1")
GLOBAL_SCALE = 0.0123


def scale_of(fmt: str, device: torch.device) -> Tensor | None:
    return torch.tensor(GLOBAL_SCALE, device=device) if fmt == "nvfp4" else None


def spread_out(*shape: int) -> Tensor:
    """Vectors with magnitudes octaves apart, some zero elements and some zero blocks."""
    x = torch.randn(*shape) * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1))
    x[torch.rand(shape) < 0.1] = 0
    blocks = x.unflatten(-1, (-1, 16))
    blocks[torch.rand(blocks.shape[:-1]) < 0.2] = 0
    return x.bfloat16()


def check_quantized(q: Tensor, fmt: str, device: torch.device) -> None:
    expected = quantize(fmt, q.contiguous(), GLOBAL_SCALE)
    data, scales = indexer_quantize_q(on(q, device), fmt, scale_of(fmt, device))
    check_equal([data], [expected.data])
    if expected.scales is not None:
        assert scales is not None
        check_equal([scales], [expected.scales])


def on(x: Tensor, device: torch.device) -> Tensor:
    """Move to a device with the same strides."""
    if x.device == device:
        return x
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    moved.copy_(x)
    return moved


@FMTS
@pytest.mark.parametrize("shape", [(5, 8, 128), (3, 7, 32), (2, 1, 256), (9, 3, 96)], ids=str)
def test_quantize(fmt: str, shape: tuple[int, ...], op_device: torch.device) -> None:
    check_quantized(spread_out(*shape), fmt, op_device)


@FMTS
def test_strides(fmt: str, op_device: torch.device) -> None:
    """Strided views: a part of each row with heads in another order, and rows at odd elements."""
    check_quantized(spread_out(8, 5, 3 * 64)[:, :, 64:128].transpose(0, 1), fmt, op_device)
    wide = torch.nn.functional.pad(spread_out(4, 3, 64), (1, 2))
    check_quantized(wide[:, :, 1:65], fmt, op_device)


@FMTS
def test_every_maximum(fmt: str, op_device: torch.device) -> None:
    """Finite bfloat16 values as the largest of a block: every exponent and its edges."""
    codes = torch.arange(0x7F80)
    kept = codes[(codes % 128 < 2) | (codes % 128 > 126) | (codes % 64 == 63) | (codes % 32 == 0)]
    kept = kept[: len(kept) // 10 * 10]
    q = torch.zeros(len(kept), 32, dtype=torch.bfloat16)
    q[:, 3] = kept.to(torch.int16).view(torch.bfloat16)
    q[:, 20] = -q[:, 3] / 3
    with np.errstate(over="ignore"):
        check_quantized(q.view(-1, 10, 32), fmt, op_device)


@pytest.mark.parametrize("native", [True, False], ids=["native", "in software"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_rounding(
    fmt: str, native: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sixteenths up to 6, and values next to ties, in blocks whose scale is 1."""
    kernel = importlib.import_module("nvfp4_kernels.indexer.vectors.launch")
    if not native or op_device.type == "cpu":
        monkeypatch.setattr(kernel, "_converts_e2m1", lambda x: native)
    elif torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("converts in software")
    x = torch.arange(-96, 97).float() / 16
    x = torch.cat([x, x * (1 + 2.0**-7), x * (1 - 2.0**-7)]).clamp(-6, 6)
    q = torch.full((len(x), 1, 32), 6.0)
    q[:, 0, 4], q[:, 0, 5], q[:, 0, 30] = x, -x, x
    scale = torch.tensor(1.0) if fmt == "nvfp4" else None
    expected, _ = indexer_quantize_q_on_cpu(q.bfloat16(), format_of(fmt), scale)
    data, _ = indexer_quantize_q(
        q.bfloat16().to(op_device), fmt, None if scale is None else scale.to(op_device)
    )
    check_equal([data], [expected])


@pytest.mark.parametrize(("arch", "native"), [("sm_90", False), ("sm_100", True), ("sm_103", True)])
def test_families_that_convert_to_e2m1(arch: str, native: bool) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER), standing_in("cpu", arch):
        kernel = importlib.import_module("nvfp4_kernels.indexer.vectors.launch")
        assert kernel._converts_e2m1(torch.zeros(1)) is native


def indexer_quantize_q_on_cpu(q: Tensor, fmt: Format, scale: Tensor | None) -> list[Tensor]:
    reference = importlib.import_module("nvfp4_kernels.indexer.reference")
    found: list[Tensor] = reference.quantize_q(q, fmt, scale)
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@FMTS
def test_not_finite(fmt: str, value: float, op_device: torch.device) -> None:
    """A non-finite value changes its block's scale as in the reference, and no other."""
    q = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    q[1, 0, 40] = value
    scale = scale_of(fmt, torch.device("cpu"))
    expected = indexer_quantize_q_on_cpu(q, format_of(fmt), scale)
    data, scales = indexer_quantize_q(q.to(op_device), fmt, scale_of(fmt, op_device))
    if scales is None:
        torch.testing.assert_close(data.cpu(), expected[0], equal_nan=True)
        return
    found, wanted = scales.cpu().float(), expected[1].float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    blocks = data.cpu().view(torch.uint8).view(2, *scales.shape[2:] or (1,), -1)
    others = expected[0].view(torch.uint8).view(blocks.shape)
    meant = wanted.view(2, -1).isfinite()
    check_equal([blocks[meant]], [others[meant]])


# --- the cache --------------------------------------------------------------------------------

CACHES = [(128, 64, 0), (128, 1, 0), (32, 16, 0), (64, 7, 0), (96, 16, 3), (256, 3, 64)]


def new_cache(fmt: Format, pages: int, head_dim: int, block_size: int, gap: int) -> Tensor:
    room = torch.randint(0, 256, (pages, fmt.page_bytes(head_dim, block_size) + gap))
    return room.to(torch.uint8)


def pages_of(cache: Tensor, gap: int) -> Tensor:
    return cache[:, : cache.shape[1] - gap]


@FMTS
@pytest.mark.parametrize(("head_dim", "block_size", "gap"), CACHES)
def test_store_and_gather(
    fmt: str, head_dim: int, block_size: int, gap: int, op_device: torch.device
) -> None:
    """Every byte of the cache, and keys gathered from three sequences, one of them empty."""
    known = format_of(fmt)
    lengths, pages = [block_size + 3, 0, 2 * block_size], 12
    table = torch.randperm(pages)[: 3 * 4].view(3, 4).to(torch.int32)
    slots = [
        int(table[b, s // block_size]) * block_size + s % block_size
        for b, length in enumerate(lengths)
        for s in range(min(length, 4 * block_size))
    ]
    k, mapping = spread_out(len(slots), head_dim), torch.tensor(slots)
    mapping[2] = -1
    cache = new_cache(known, pages, head_dim, block_size, gap)
    expected, ours = cache.clone(), cache.to(op_device)
    reference = importlib.import_module("nvfp4_kernels.indexer.reference")
    scale = scale_of(fmt, torch.device("cpu"))
    reference.store_k(k, pages_of(expected, gap), mapping, known, block_size, scale)
    indexer_store_k(
        k.to(op_device), pages_of(ours, gap), mapping.to(op_device), fmt, block_size,
        scale_of(fmt, op_device),
    )  # fmt: skip
    check_equal([ours], [expected])

    kept = [min(length, 4 * block_size) for length in lengths]
    starts = torch.tensor([0, kept[0], kept[0], sum(kept)], dtype=torch.int32)
    call = GatherCall(
        pages_of(expected, gap), table, starts, sum(kept), head_dim, known, block_size
    )
    wanted = reference.gather_k(call)
    data, scales = indexer_gather_k(
        pages_of(ours, gap), table.to(op_device), starts.to(op_device), sum(kept) + 2, head_dim,
        fmt, block_size,
    )  # fmt: skip
    assert len(data) == sum(kept) + 2
    check_equal([data[:-2]], wanted[:1])
    if len(wanted) > 1:
        assert scales is not None
        check_equal([scales[:-2]], wanted[1:])


@EVERY_SCHEDULE
@FMTS
def test_every_schedule(fmt: str, op_device: torch.device) -> None:
    check_quantized(spread_out(3, 20, 128), fmt, op_device)


def test_alignment() -> None:
    assert alignment(32, 4608) == 16
    assert alignment(32, 4616) == 8
    assert alignment(4, 64) == 4
    assert alignment(1, 64) == 1
    assert alignment(0, 0) == 16
