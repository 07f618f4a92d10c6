"""Commands in forks of a process with vLLM behave like commands in a separate Python."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests import limits, preloaded
from tests.ranks import free_port

pytestmark = pytest.mark.processes


def run(*command: str, **given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        preloaded.command(*command), capture_output=True, text=True, check=False,
        timeout=limits.PROCESS, **given,
    )  # fmt: skip


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(port: int, *, listening: bool) -> None:
    end = time.monotonic() + limits.PROCESS
    while listens(port) != listening:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_streams_and_status() -> None:
    right = run("json.tool", "--compact", input='{"a": 1}')
    assert (right.returncode, right.stdout, right.stderr) == (0, '{"a":1}\n', "")
    wrong = run("json.tool", input="{")
    assert wrong.returncode == 1
    assert "Expecting property name" in wrong.stderr


def test_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # of compiled files: they hold a hash then
    (tmp_path / "mine.py").write_text("")
    assert run("compileall", "-q", "mine.py").returncode == 0
    [compiled] = (tmp_path / "__pycache__").iterdir()
    assert compiled.read_bytes()[4] & 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_ends_with_its_command(number: signal.Signals) -> None:
    port = free_port()
    command = preloaded.command("http.server", "--bind", "127.0.0.1", str(port))
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(port, listening=True)
    os.killpg(process.pid, number)
    assert process.wait(limits.PROCESS) != 0
    wait_until(port, listening=False)
