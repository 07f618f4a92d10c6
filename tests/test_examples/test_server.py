"""Lifetime of the server: readiness, failures with the log's tail, and guaranteed termination."""

import os
import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from examples.completions import connect
from examples.server import ServerError, free_port, running, start_limit, vllm_command
from tests import limits

FAKE = Path(__file__).with_name("fake_vllm.py")
FOR_EVER = "import signal; signal.pause()"  # unless it is ended


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "server.log"


def python(code):
    return [sys.executable, "-c", code]


def is_alive(pid):
    # A zombie whose parent is gone counts as ended.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_server_is_ready_then_gone(log):
    port = free_port()
    with running(
        [sys.executable, str(FAKE), str(port)], port, log, time_limit=limits.PROCESS
    ) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        assert server.ready_seconds > 0
        assert httpx.get(f"{server.url}/health", trust_env=False).is_success
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health", trust_env=False)


def test_exit_at_once_names_the_code_and_shows_the_log(log):
    code = "import sys; [print('line', i) for i in range(90)]; sys.exit('no memory left')"
    with (
        pytest.raises(ServerError) as caught,
        running(python(code), free_port(), log, limits.PROCESS),
    ):
        pytest.fail("the block must not run")
    message = str(caught.value)
    assert re.search(r"vllm serve: exited with code 1 after \d+ s, before it was ready", message)
    assert str(log) in message
    assert "  | line 89\n  | no memory left" in message
    assert "line 50" not in message


def test_refusal_is_the_message(log):
    code = "import sys; print('traceback'); sys.exit('nvfp4-tc: refused: layer: is odd')"
    message = r"^vllm serve: layer: is odd \(exited with code 1 after \d+ s, .*server\.log\)$"
    with (
        pytest.raises(ServerError, match=message),
        running(python(code), free_port(), log, limits.PROCESS),
    ):
        pytest.fail("the block must not run")


@pytest.mark.parametrize(("imports", "limit"), [(5, 600), (20, 600), (60, 1800)])
def test_a_start_may_take_as_long_as_the_machine_is_slow(imports, limit):
    assert start_limit(imports) == limit


def test_silent_server_is_given_up(log):
    with (
        pytest.raises(ServerError, match=r"not ready after 0 s.*--server-time-limit(.|\n)*empty"),
        running(python(FOR_EVER), free_port(), log, 0.3),
    ):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_whole_process_group_ends_with_the_block(log, error):
    port = free_port()
    # A child of the server, like vLLM's engine, must not outlive the server.
    code = f"""
import runpy, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
sys.argv[1:] = ["{port}"]
runpy.run_path({str(FAKE)!r}, run_name="__main__")
"""
    children = []

    def block():
        with running(python(code), port, log, limits.PROCESS):
            children.append(int(re.search(r"child (\d+)", log.read_text())[1]))
            assert is_alive(children[0])
            raise error

    with pytest.raises(error):
        block()
    while is_alive(children[0]):  # as long as a test may take
        time.sleep(0.01)


def test_server_that_ignores_the_request_to_end_is_killed(log, monkeypatch):
    monkeypatch.setattr("examples.server.STOP_SECONDS", 0.2)
    port = free_port()
    code = (
        "import runpy, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"sys.argv[1:] = ['{port}']; runpy.run_path({str(FAKE)!r}, run_name='__main__')"
    )
    with running(python(code), port, log, limits.PROCESS) as server:
        pass
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health", trust_env=False)


def test_failing_request_shows_the_answer_and_the_log(log):
    port = free_port()
    command = [sys.executable, str(FAKE), str(port), "a line of the log"]
    with (
        pytest.raises(ServerError, match=r"400(.|\n)*no such luck(.|\n)*a line of the log"),
        running(command, port, log, limits.PROCESS) as server,
        connect(server.url) as client,
    ):
        client.post("/v1/completions", json={"prompt": "fail"}).raise_for_status()


def test_server_gets_its_environment(log, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code = "import os; print({k: os.environ[k] for k in ('HF_HUB_OFFLINE', 'PATH')})"
    with (
        pytest.raises(ServerError, match=r"'HF_HUB_OFFLINE': '1'") as caught,
        running(python(code), free_port(), log, limits.PROCESS),
    ):
        pytest.fail("the block must not run")
    assert os.environ["PATH"] in str(caught.value)


def test_command_asks_for_the_quantization_only_when_given(tmp_path, monkeypatch):
    vllm = tmp_path / "vllm"
    vllm.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    plain = vllm_command(Path("model"), 8000, None)
    assert plain[:3] == [str(vllm), "serve", "model"]
    assert plain[plain.index("--port") + 1] == "8000"
    quantised = vllm_command(Path("model"), 8000, "nvfp4-tc")
    assert quantised == [*plain, "--quantization", "nvfp4-tc"]


def test_missing_vllm_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerError, match=r"vllm: no such command beside .*; install vLLM"):
        vllm_command(Path("model"), 8000, None)
