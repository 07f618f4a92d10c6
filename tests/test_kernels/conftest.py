from collections.abc import Iterator

import pytest
import torch

from tests import devices


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: operands are so small that waking threads costs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Poison new tensors: references, too, must write every element that they return."""
    with devices.poisoned_memory():
        yield
