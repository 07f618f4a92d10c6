"""Shell commands, ready to paste, that serve and query a model of the demo."""

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from examples.completions import SAMPLING
from examples.server import HOST, MODEL_NAME, free_port

PORT = 8000  # vLLM's own, unless something listens on it
_PROMPT = "class Queue:\n    def __init__(self, maxsize=0):"
# One GiB is plenty; vLLM else takes most of the memory. Neither counts on a GPU.
_ENVIRONMENT = "VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1"


class ServeCommands(NamedTuple):
    """Command lines of a server, and of a request to that server."""

    serve: str
    request: str


def serve_commands(checkpoint: Path, quantization: str, max_tokens: int) -> ServeCommands:
    """Command lines for a checkpoint, usable in any folder.

    Args:
        checkpoint: folder of the checkpoint.
        quantization: vLLM's ``--quantization``.
        max_tokens: number of tokens of the answer.
    """
    port = _free_port()
    vllm = Path(sys.executable).with_name("vllm")
    serve = [vllm, "serve", checkpoint.resolve(), "--quantization", quantization]
    serve += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", port, "--enforce-eager"]
    body = {"model": MODEL_NAME, "prompt": _PROMPT, "max_tokens": max_tokens, **SAMPLING}
    url = f"http://{HOST}:{port}/v1/completions"
    request = ["curl", "-sS", "--noproxy", "*", url, "-H", "Content-Type: application/json"]
    request += ["-d", json.dumps(body)]
    return ServeCommands(f"{_ENVIRONMENT} {shlex.join(map(str, serve))}", shlex.join(request))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, PORT))
        except OSError:
            return free_port()
    return PORT
