"""Commands run in forks of a process that has vLLM loaded already.

``command("tests.ranks", ...)`` is a command line equivalent to ``python -m tests.ranks ...`` that
saves the nine seconds of importing vLLM. Each worker of a test run has one server process that
forks all commands; the first command starts the server, which ends with the worker.
"""

import array
import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[1]
_STREAMS = 3  # standard input, output and error
# Modules that servers, their engines and their workers import.
_MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "torch._dynamo",
)
_HEADER = 8  # bytes of the number of bytes that follow


def command(module: str, *arguments: Any) -> list[str]:
    """Command line that runs ``module`` as a script in a fork of the process that has vLLM loaded.

    The fork has the streams, environment and folder of the process that runs the command, but
    another pid; variables that vLLM reads at import come from this process. The fork receives
    SIGINT and SIGTERM, and is killed with its children when the process that runs the command dies.
    """
    return [sys.executable, "-P", __file__, _address(), module, *map(str, arguments)]


@functools.cache
def _address() -> str:
    """Path of the socket of this process's fork server; starts the server if necessary."""
    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder, "socket"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(listener.fileno())],
            cwd=_ROOT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,  # which says that this process lives
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    _started.append(process)
    return path


_started: list[subprocess.Popen[bytes]] = []


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each command; return the job in such a process, None in the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that attend are nobody's to wait for
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> dict[str, Any]:
    """Fork a command's process; returns the job in the child, reports the status in the parent."""
    data, streams, _, _ = socket.recv_fds(connection, _HEADER, _STREAMS)
    length = int.from_bytes(data, "little")
    with connection.makefile("rb") as given:
        job: dict[str, Any] = json.loads(given.read(length))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return job
    for stream in streams:
        os.close(stream)
    try:
        ended = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            connection.sendall(pid.to_bytes(_HEADER, "little"))
        ready, _, _ = select.select([ended, connection], [], [])
        if ended not in ready:  # its command has died
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(status.to_bytes(_HEADER, "little", signed=True))
    finally:
        os._exit(0)


def _become(job: dict[str, Any]) -> None:
    """Run a command's module as though this process had been started for the command."""
    import runpy

    import torch
    from vllm import logger

    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    # Settings that were read at import.
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    logger._configure_vllm_root_logger()
    sys.argv[1:] = job["arguments"]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def _run(address: str, module: str, arguments: list[str]) -> NoReturn:
    """Make the server at ``address`` run a command, and exit with the command's status."""
    job = {
        "module": module,
        "arguments": arguments,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
    }
    message = json.dumps(job).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    streams = array.array("i", range(_STREAMS))
    connection.sendmsg(
        [len(message).to_bytes(_HEADER, "little")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)],
    )
    connection.sendall(message)
    told = connection.makefile("rb")
    found = told.read(_HEADER)
    if not found:
        sys.exit("the server of forks has ended")
    pid = int.from_bytes(found, "little")

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    status = told.read(_HEADER)
    code = int.from_bytes(status, "little", signed=True) if status else 1
    sys.exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Serve forks until standard input ends; detached, because tests look for child processes."""
    if os.fork():
        os._exit(0)
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("vllm.plugins").load_general_plugins()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        job = _serve(listener)
    if job is not None:
        _become(job)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main()
    else:
        _run(sys.argv[1], sys.argv[2], sys.argv[3:])
