import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def process_settings():
    """The demo owns its process; the other tests keep theirs as it was."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)
