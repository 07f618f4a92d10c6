"""Extension of vLLM's worker, called through ``/collective_rpc``.

``vllm serve --worker-extension-cls examples.accuracy.extension.Extension`` adds the extension.
The extension's methods can be called only if the server is in development mode.
"""

from typing import Any

import httpx

from examples.accuracy.activations import ActivationRounder
from examples.accuracy.recorder import LogitsRecorder

EXTENSION = f"{__name__}.Extension"


class Extension(LogitsRecorder, ActivationRounder):
    """All worker methods that the measurement needs."""


def call(client: httpx.Client, method: str, *args: Any) -> Any:
    """Call a method in every worker; returns the result of each.

    Raises:
        httpx.HTTPError: the call failed.
    """
    answer = client.post("/collective_rpc", json={"method": method, "args": args})
    return answer.raise_for_status().json()["results"]
