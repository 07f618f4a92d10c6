"""A private ``vllm serve`` process: started, waited for, and always stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.engine_log import refusal

HOST = "127.0.0.1"
MODEL_NAME = "demo"
LOG_TAIL_LINES = 25
STOP_SECONDS = 15
START_SECONDS = 600.0  # for a small model's server, which takes 20 to 30 on a quiet machine
_IMPORTS = 30  # start-up time, at least, as a multiple of an example's import time
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "NO_COLOR": "1",
}


def start_limit(import_seconds: float) -> float:
    """Seconds that a small model's server may take to start, scaled by the machine's current speed.

    Args:
        import_seconds: time that this command took to import torch and its other modules.
    """
    return max(START_SECONDS, _IMPORTS * import_seconds)


class ServerError(RuntimeError):
    """Error for a server that could not be started, died, or answered with an error."""


@dataclass(frozen=True)
class Server:
    """A server that has answered ``/health``.

    Attributes:
        url: root URL, without a final slash.
        log: file of the server's output.
        ready_seconds: time from start to the first healthy answer.
        pid: process id.
    """

    url: str
    log: Path
    ready_seconds: float
    pid: int


def vllm_command(
    model: Path | str, port: int, quantization: str | None, options: Sequence[str] = ()
) -> list[str]:
    """Command line that serves ``model`` as ``MODEL_NAME``, with further ``options``.

    Raises:
        ServerError: this Python's environment has no ``vllm`` command.
    """
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.is_file():
        raise ServerError(
            f"vllm: no such command beside {sys.executable}; install vLLM into this environment"
        )
    command = [str(vllm), "serve", str(model), "--host", HOST, "--port", str(port)]
    command += ["--served-model-name", MODEL_NAME]
    command += ["--max-num-batched-tokens", "2048", "--max-num-seqs", "16"]
    # Compiling costs more than it saves here; the prefix cache would inflate the speeds.
    command += ["--enforce-eager", "--no-enable-prefix-caching"]
    return [*command, *(["--quantization", quantization] if quantization else []), *options]


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    log: Path,
    time_limit: float,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[Server]:
    """Run a server for the time of a ``with`` block, then stop its whole process group.

    Args:
        command: the server's command line.
        port: port to listen on.
        log: file for the output, overwritten.
        time_limit: seconds until the server must answer ``/health``.
        environment: variables added to this process's environment.

    Raises:
        ServerError: the server exits or stays silent, or an HTTP call in the block fails; the
            message ends with the log's last lines.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        url = f"http://{HOST}:{port}"
        yield Server(url, log, _wait_until_healthy(process, url, log, time_limit), process.pid)
    except httpx.HTTPError as error:
        body = f" {error.response.text}" if isinstance(error, httpx.HTTPStatusError) else ""
        raise ServerError(_failure(f"failed while it served: {error}{body}", log)) from error
    finally:
        _stop(process)


def _wait_until_healthy(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    time_limit: float,
) -> float:
    start = time.monotonic()
    while (waited := time.monotonic() - start) < time_limit:
        if (code := process.poll()) is not None:
            raise ServerError(
                _failure(f"exited with code {code} after {waited:.0f} s, before it was ready", log)
            )
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success:
                return time.monotonic() - start
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise ServerError(
        _failure(
            f"not ready after {time_limit:.0f} s; give it longer with --server-time-limit", log
        )
    )


def _failure(what: str, log: Path) -> str:
    if refused := refusal(log.read_text(encoding="utf-8", errors="replace")):
        return f"vllm serve: {refused} ({what}; {log})"
    with log.open(encoding="utf-8", errors="replace") as lines:
        tail = deque((line.rstrip() for line in lines), maxlen=LOG_TAIL_LINES)
    text = "\n".join(f"  | {line}" for line in tail) or "  (it is empty)"
    return f"vllm serve: {what}\nlast lines of {log}:\n{text}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine processes of its process group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_SECONDS)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:  # also when a second Ctrl-C cuts the waiting short
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
