"""``vllm serve --quantization nvfp4-tc`` over HTTP, with sound and damaged checkpoints."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import limits, preloaded, tiny_llama
from tests.engine import run

pytestmark = pytest.mark.slow

VLLM = Path(sys.executable).with_name("vllm")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    model: Path, log: Path, port: int, program: Sequence[str | Path] = (VLLM,)
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *program, "serve", model, "--quantization", "nvfp4-tc",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128",
        "--max-num-seqs", "2", "--enforce-eager", "--served-model-name", "tiny",
    ]  # fmt: skip
    # The server's own processes are part of the test.
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its ranking of tokens, in 15 seconds
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=env, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it may have stopped by itself
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + limits.PROCESS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"not healthy after {limits.PROCESS} s:\n{log.read_text()[-3000:]}")


def complete(port: int, **fields: Any) -> Any:
    body = json.dumps({"model": "tiny"} | fields).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=limits.PROCESS) as response:
        return json.load(response)["choices"][0]


def test_serves_over_http_what_it_says_offline(modelopt: Path, tmp_path: Path) -> None:
    offline = run(str(modelopt))
    port, log = free_port(), tmp_path / "server.log"
    with serving(modelopt, log, port) as process:
        wait_until_healthy(process, port, log)
        scored = complete(
            port, prompt=tiny_llama.TEXT, max_tokens=1, temperature=0, echo=True, logprobs=0
        )
        written = complete(port, prompt=tiny_llama.TEXT, max_tokens=8, temperature=0)
    logprobs = scored["logprobs"]["token_logprobs"][1:-1]
    assert logprobs == pytest.approx(offline.logprobs, abs=1e-4)
    assert written["text"] == tiny_llama.tokenizer().decode(offline.generated)
    lines = log.read_text()
    for line in offline.report:
        assert f"nvfp4-tc: {line}" in lines


def test_damaged_checkpoint_is_not_served(modelopt: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(modelopt, tmp_path / "truncated")
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    port, log = free_port(), tmp_path / "server.log"
    with serving(copy, log, port, preloaded.command("tests.forking_vllm")) as process:
        assert process.wait(limits.PROCESS) != 0
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
    assert f"{file}: is truncated" in log.read_text()
