import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.emulator.examples.recorder import Recorder
from tests.emulator.findings import OutOfBounds
from tests.emulator.memory.spaces import GlobalMemory
from tests.emulator.runtime.allocations import (
    Allocations,
    Range,
    WithLiveStorages,
    live_storages,
)


class WithMemory(Recorder):
    """Recorder that also has global memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = GlobalMemory()


def known(memory: GlobalMemory, tensor: torch.Tensor) -> bool:
    try:
        return memory.at(tensor.data_ptr()).contains(tensor.data_ptr() + tensor.nbytes - 1)
    except OutOfBounds:
        return False


def test_a_view_counts_with_its_whole_storage() -> None:
    base = torch.zeros(1000)
    view = torch.nn.Parameter(base[100:200])
    address, nbytes = base.data_ptr(), base.nbytes
    del base
    found = [r for r in live_storages() if r.address == address]
    assert [(r.nbytes, r.name) for r in found] == [(nbytes, "float32[1000]")]
    assert view.data_ptr() == address + 400


def test_a_tensor_without_memory_does_not_count() -> None:
    """Fake tensors, which torch.compile leaves behind, are ignored."""
    with FakeTensorMode():
        fake = torch.zeros(77)
    assert fake.device.type == "cpu"
    assert not [r for r in live_storages() if r.name == "float32[77]"]


def test_each_launch_sees_what_is_alive() -> None:
    device = WithMemory()
    watched = WithLiveStorages(device)
    module = watched.load(".version 9.0\n.target sm_100a\n.address_size 64\n")
    tensor = torch.zeros(64)
    assert not known(device.memory, tensor)
    watched.launch(module, "none", (1, 1, 1), (1, 1, 1))
    assert known(device.memory, tensor)
    address = tensor.data_ptr()
    del tensor
    watched.launch(module, "none", (1, 1, 1), (1, 1, 1))
    with pytest.raises(OutOfBounds):
        device.memory.at(address)


def test_a_range_that_grew_is_registered_anew() -> None:
    memory = GlobalMemory()
    keep = torch.zeros(64)
    allocations = Allocations(memory)
    allocations.synchronise([Range(keep.data_ptr(), 64)])
    first = memory.at(keep.data_ptr())
    allocations.synchronise([Range(keep.data_ptr(), 64)])
    assert memory.at(keep.data_ptr()) is first
    allocations.synchronise([Range(keep.data_ptr(), 256), Range(16, 0)])
    assert memory.at(keep.data_ptr()).nbytes == 256
