import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def process_settings():
    """Restore the process settings after each test: the demo changes them."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)
