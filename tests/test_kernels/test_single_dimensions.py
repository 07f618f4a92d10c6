"""Strides of dimensions of size 1: torch allows any, a tensor map does not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    attention,
    decode_attention,
    indexer_gather_k,
    paged_attention,
    sparse_attention,
)
from nvfp4_kernels.checks import strides_of
from tests.emulator.tma.tensor_map import TensorMap
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.decode import decode_cases
from tests.test_kernels.attention.sparse_cases import SparseCase
from tests.test_kernels.indexer import indexer_cases
from tests.test_kernels.indexer.indexer_cases import run_logits

# 0 is a stride of expand(); the last is too large for a tensor map.
STRIDES = pytest.mark.parametrize("stride", [0, 7, 1 << 41])
ONE_SCHEDULE = pytest.mark.schedules("random 1")
MAP_ALIGNMENT = 16  # bytes


def with_strides(x: Tensor, stride: int) -> Tensor:
    """The same elements, with ``stride`` in every dimension of size 1 but the last."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride if count == 1 else own for count, own in pairs]
    return x.as_strided(x.shape, (*strides, x.stride(-1)), x.storage_offset())


def one_page(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A cache cut down to its only page in use."""
    page = int(given["block_table"][0, 0])
    cache = given[name][page : page + 1].clone()
    return given | {name: cache, "block_table": given["block_table"][:, :1] * 0}


def all_with_strides(given: dict[str, Any], stride: int) -> dict[str, Any]:
    return {
        name: with_strides(x, stride) if isinstance(x, Tensor) and x.ndim > 1 else x
        for name, x in given.items()
    }


def dense() -> dict[str, Any]:
    return Case((20,), (40,), 2, 1).problem().dense()


def ragged() -> dict[str, Any]:
    return Case((3, 1), (20, 30), 2, 1).problem().ragged()


def paged() -> dict[str, Any]:
    return one_page(Case((1,), (14,), 2, 1).problem().paged(), "kv_cache")


def sparse() -> dict[str, Any]:
    problem = SparseCase((1,), (14,), 2, 1, listed=(9,), width=12).problem()
    return one_page(problem.sparse(), "kv_cache")


def scores() -> dict[str, Any]:
    problem = indexer_cases.Case(((14,),)).problem("nvfp4")
    return one_page(problem.paged(), "cache")


def gather() -> dict[str, Any]:
    given = scores()
    names = "cache", "block_table", "fmt", "block_size"
    starts = torch.tensor([0, 14], dtype=torch.int32)
    chosen = {name: given[name] for name in names}
    return chosen | {"key_start": starts, "total_keys": 14, "head_dim": 64}


def decode() -> dict[str, Any]:
    """Arguments of ``decode_attention``; the token is stored to the only page."""
    problem = decode_cases.case(14, query_heads=2, heads=1).problem()
    given = one_page(decode_cases.arguments(problem, torch.device("cpu")), "kv_cache")
    return given | {"slot_mapping": given["slot_mapping"] % 16}


SM100: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attention, dense": (attention, dense),
    "attention, ragged": (attention, ragged),
    "paged_attention": (paged_attention, paged),
    "sparse_attention": (sparse_attention, sparse),
    "indexer_logits, paged": (run_logits, scores),
    "indexer_gather_k": (indexer_gather_k, gather),
}


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[TensorMap]:
    """Tensor maps requested from the driver."""
    from tests.emulator.runtime import tensor_maps

    asked: list[TensorMap] = []
    encode = tensor_maps.encode

    def remember(tensor_map: TensorMap, capability: int) -> bytes:
        asked.append(tensor_map)
        return encode(tensor_map, capability)

    monkeypatch.setattr(tensor_maps, "encode", remember)
    return asked


def check(
    op: Callable[..., Any], given: dict[str, Any], stride: int, maps: list[TensorMap]
) -> None:
    """Check that the result is that of contiguous tensors, and that maps have positive strides."""
    expected = op(**{n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()})
    maps.clear()
    found = op(**all_with_strides(given, stride))
    results = ([r] if isinstance(r, Tensor) else r for r in (expected, found))
    for right, ours in zip(*results, strict=True):
        assert torch.equal(right.view(torch.uint8), ours.view(torch.uint8))
    for tensor_map in maps:
        row = tensor_map.dims[0] * tensor_map.element_type.bits // 8
        assert all(s >= row and s % MAP_ALIGNMENT == 0 for s in tensor_map.strides), tensor_map


@pytest.mark.arch("sm_100")
@ONE_SCHEDULE
@STRIDES
@pytest.mark.parametrize("name", SM100)
def test_sm100(name: str, stride: int, op_device: torch.device, maps: list[TensorMap]) -> None:
    op, make = SM100[name]
    torch.manual_seed(0)
    check(op, make(), stride, maps)
    assert maps or name == "indexer_gather_k"


@pytest.mark.arch("sm_90")
@ONE_SCHEDULE
@STRIDES
def test_decode_attention(stride: int, op_device: torch.device, maps: list[TensorMap]) -> None:
    torch.manual_seed(0)
    check(decode_attention, decode(), stride, maps)
    assert maps


def test_strides_of() -> None:
    x = torch.zeros(6, 32).as_strided((1, 3, 1, 1, 32), (5, 64, 0, 7, 1))
    assert strides_of(x) == (96, 64, 32, 32, 1)
    assert strides_of(torch.zeros(4, 8).expand(3, 4, 8)) == (0, 8, 1)
    assert strides_of(torch.zeros(2, 1)) == (1, 1)
    assert math.prod(x.shape) == 96
