"""Tensor maps of small tensors: drivers up to CUDA 13.1 may set a bit that must be cleared.

The emulator's driver sets the bit in all maps, and its copies check for the bit.
"""

import struct

import pytest
import torch

from nvfp4_kernels import attention, devices, gemm, sparse_attention
from tests.emulator.tma.tensor_map import TensorMap, decode
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.sparse_cases import SparseCase
from tests.test_kernels.gemm import linear_cases
from tests.test_kernels.indexer import indexer_cases
from tests.test_kernels.indexer.indexer_cases import run_logits

pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]
BIT = 1 << 21  # in the second word
SMALL = 128 * 1024  # bytes


class Driver:
    """A driver that sets the bit in every map.

    Attributes:
        copied: bytes of each copied tensor, and whether its map had the bit.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from tests.emulator.instructions import bulk
        from tests.emulator.runtime import tensor_maps

        self.copied: set[tuple[int, bool]] = set()
        self._encode = tensor_maps.encode
        patch.setattr(tensor_maps, "encode", self.encode)
        patch.setattr(bulk, "_decoded", self.decode)

    def encode(self, tensor_map: TensorMap, capability: int) -> bytes:
        """Encode a map with the bit set."""
        words = list(struct.unpack("<16Q", self._encode(tensor_map, capability)))
        words[1] |= BIT
        return struct.pack("<16Q", *words)

    def decode(self, descriptor: bytes) -> TensorMap:
        """Decode a map as a copy reads it, and record the bit."""
        tensor_map = decode(descriptor)
        row = tensor_map.dims[0] * tensor_map.element_type.bits // 8
        pairs = zip(tensor_map.dims[1:], tensor_map.strides, strict=True)
        span = row + sum((count - 1) * stride for count, stride in pairs)
        self.copied.add((span, bool(struct.unpack_from("<2Q", descriptor)[1] & BIT)))
        return tensor_map


def mend_below(nbytes: int, patch: pytest.MonkeyPatch) -> None:
    """Make ops assume a driver whose maps are defective below ``nbytes`` bytes."""
    patch.setattr(devices, "defective_map_bytes", lambda device: nbytes)


def run(name: str) -> None:
    """Run an op on small tensors."""
    torch.manual_seed(0)
    if name == "gemm":
        linear_cases.check_exact(gemm, linear_cases.Case(40, 72, 128))
    elif name == "attention":
        attention(**Case((20,), (40,), 2, 1).problem().dense())
    elif name == "sparse_attention":
        sparse_attention(**SparseCase((1,), (14,), 2, 1, listed=(9,), width=12).problem().sparse())
    else:
        run_logits(**indexer_cases.Case(((14,),)).problem("nvfp4").paged())


OPS = pytest.mark.parametrize("name", ["gemm", "attention", "sparse_attention", "indexer"])


@OPS
@pytest.mark.parametrize("nbytes", [0, SMALL])
def test_small_maps(
    name: str, nbytes: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small maps lose the bit only with a defective driver; otherwise it belongs to the driver."""
    driver = Driver(monkeypatch)
    mend_below(nbytes, monkeypatch)
    run(name)
    assert len(driver.copied) >= (1 if "attention" in name else 2)
    assert all(span < SMALL and has == (nbytes == 0) for span, has in driver.copied)


def test_large_maps(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large maps keep the bit: a weight of 1024 rows of 128 bytes is large, 1023 rows are not."""
    driver = Driver(monkeypatch)
    mend_below(SMALL, monkeypatch)
    for rows in (1023, 1024):
        linear_cases.check_exact(gemm, linear_cases.Case(5, rows, 256))
    assert {has for span, has in driver.copied if span == SMALL - 128} == {False}
    assert {has for span, has in driver.copied if span == SMALL} == {True}


@pytest.mark.parametrize(("version", "nbytes"), [(12080, SMALL), (13010, SMALL), (13020, 0)])
def test_drivers(version: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_version", lambda: version)
    assert devices.defective_map_bytes(torch.device("cuda", 0)) == nbytes
    assert devices.defective_map_bytes(torch.device("cpu")) == 0
