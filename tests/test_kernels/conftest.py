from collections.abc import Iterator

import pytest
import torch

from tests import devices


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operands are small: waking threads costs more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """References too have to write all that they return."""
    with devices.poisoned_memory():
        yield
