"""The soak test finds a lost request, a changed answer, and memory that grows."""

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner

from examples.server import free_port
from examples.soak import __main__ as command
from examples.soak import memory
from examples.soak import run as running
from examples.soak.memory import Sample, growth
from examples.soak.results import Kill, Results
from examples.soak.traffic import ERROR, EXPECTED, LOST, WRONG, Outcome, Traffic
from tests.forking_vllm import forking_command
from tests.test_examples import fake_soaked

FAKE = Path(fake_soaked.__file__)


# --- kinds of requests --------------------------------------------------------------------------


@contextmanager
def fake(flaw: str = "") -> Iterator[str]:
    """Fake server in a thread; yields its URL."""
    server = fake_soaked.Fake(free_port(), flaw)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def outcomes(url: str, *kinds: str, time_limit: float = 60) -> list[Outcome]:
    async def ask() -> list[Outcome]:
        http = httpx.AsyncClient(trust_env=False, timeout=None)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            text = list(range(100))
            draw = random.Random(0)
            traffic = Traffic(client, text, fake_soaked.MAX_MODEL_LEN, 16, 8, time_limit, draw)
            return [await traffic.one(kind) for kind in kinds or traffic.kinds]

    return asyncio.run(ask())


def test_every_kind_is_as_expected_of_a_sound_server() -> None:
    with fake() as url:
        found = outcomes(url)
    assert [(o.kind, o.verdict, o.detail) for o in found if o.verdict != EXPECTED] == []
    assert len({o.kind for o in found}) == 7
    assert sum(o.tokens for o in found) > 10


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flaw", "kind", "verdict", "detail"),
    [
        ("loses", "answer", LOST, "no answer and no error in 3 s"),
        ("cuts", "stream", LOST, "the stream ended without a reason"),
        ("shortens", "answer", WRONG, r"has \d tokens of \d in 1 of 1 answers"),
        ("shortens", "sampled, two answers", WRONG, r"has \d+ tokens of \d+ in 2 of 2 answers"),
        ("errs", "answer", ERROR, "InternalServerError: Error code: 500.*no such luck"),
        ("accepts", "over-long prompt", WRONG, "was answered, must be refused"),
    ],
)
def test_each_flaw_is_found(flaw: str, kind: str, verdict: str, detail: str) -> None:
    with fake(flaw) as url:
        found = outcomes(url, *[kind] * fake_soaked.EVERY, time_limit=3)
    assert found[-1].verdict == verdict
    assert re.match(detail, found[-1].detail)
    if flaw != "accepts":
        assert Counter(o.verdict for o in found)[EXPECTED] == fake_soaked.EVERY - 1


def test_a_refused_connection_is_an_error() -> None:
    [outcome] = outcomes(f"http://127.0.0.1:{free_port()}", "stream")
    assert outcome.verdict == ERROR
    assert "ConnectError: All connection attempts failed" in outcome.detail


# --- memory -------------------------------------------------------------------------------------


def samples(*sizes: float) -> list[Sample]:
    return [Sample(second, second, round(size * 1e6)) for second, size in enumerate(sizes)]


def test_growth_is_that_after_the_warm_up() -> None:
    assert growth(samples(*range(10), *[100] * 30)) == 0
    assert growth(samples(*[100] * 40)) == 0
    rising = growth(samples(*range(100)))
    assert rising == pytest.approx(60e6, rel=0.02)
    assert growth(samples(*reversed(range(100)))) == pytest.approx(-60e6, rel=0.02)
    # One sample above all others does not count as growth.
    assert growth(samples(*[100] * 39, 500)) == 0
    assert growth(samples(1, 2, 3)) is None
    assert growth([]) is None


@pytest.mark.parametrize("most", [0.01, 1, 60])
@pytest.mark.parametrize("end", [1, 5, 30, 120, 1800])
def test_a_load_of_any_length_has_samples_enough(end: float, most: float) -> None:
    taken, seconds = samples(), 0.0
    while seconds < end:
        taken.append(Sample(seconds, 0, 100))
        seconds += memory.until_next(seconds, most)
    assert growth(taken) == 0
    assert len(taken) <= 101 * max(1, end)


@pytest.mark.processes
def test_the_memory_of_children_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.1)
        both = memory.tree_bytes(memory.psutil.Process().pid)
        alone = memory.psutil.Process().memory_info().rss
        assert both > alone + 1e6
        assert memory.engine_process(memory.psutil.Process().pid).pid == child.pid
        child.communicate(b"\n")
    assert memory.tree_bytes(child.pid) == 0


# --- results ------------------------------------------------------------------------------------


def sound() -> Results:
    results = Results({}, 64e6, samples=samples(*[100] * 40), seconds=40.0)
    results.outcomes = [Outcome("answer", EXPECTED, i / 100, 3) for i in range(100)]
    results.answers = {name: ["a", "b"] for name in ("before", "after the load")}
    ended = [Outcome("stream", EXPECTED, 1.0), Outcome("stream", ERROR, 1.0, detail="gone")]
    results.kill = Kill("EngineCore", ended, 1.0, 10.0)
    return results


def test_a_sound_run_has_no_failure() -> None:
    assert sound().failures() == []
    assert sound().latency("answer", 0.5) == 0.49
    assert sound().latency("answer", 0.99) == 0.98


@pytest.mark.parametrize("verdict", [ERROR, LOST, WRONG])
def test_an_outcome_is_a_failure(verdict: str) -> None:
    results = sound()
    results.outcomes += [Outcome("abort", verdict, 1.0, detail="odd")] * 12
    assert results.failures()[0] == f"under load: abort: {verdict}: odd"
    assert results.failures()[-1] == "under load: 2 more"
    results = sound()
    results.kill.outcomes += [Outcome("stream", verdict, 1.0, detail="odd")]
    expected = [] if verdict == ERROR else [f"when the engine was killed: stream: {verdict}: odd"]
    assert results.failures() == expected


def test_other_failures_are_named() -> None:
    results = sound()
    results.outcomes.clear()
    results.samples = samples(*range(400))
    results.left = {"vllm:num_requests_running": 2.0}
    results.answers["after the load"] = ["a", "c"]
    results.kill = Kill()
    assert results.failures() == [
        "no request was made",
        "after the load: vllm:num_requests_running is 2",
        "memory: grew by 240.0 MB after the warm-up, at most 64 MB are accepted",
        "answers after the load: 1 of 2 differ from those before",
        "when the engine was killed: no request was under way",
        "when the engine was killed: its server went on",
    ]
    results.samples = samples(1, 2)
    too_few = "memory: 2 samples in 40.0 s are too few; raise --requests or --minutes"
    assert too_few in results.failures()


# --- the command, on a fake server --------------------------------------------------------------


@pytest.fixture
def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command on fake servers with a flaw; return its result and its results.json."""
    monkeypatch.setattr(running, "_FIRST_TOKEN_SECONDS", 0.3)
    monkeypatch.setattr(running, "_SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(running, "_END_SECONDS", 2.0)

    def run(flaw: str, *more: str):
        monkeypatch.setattr(
            running,
            "vllm_command",
            lambda model, port, *_: [sys.executable, str(FAKE), str(port), flaw],
        )
        options = ["--out", tmp_path, "--requests", 60, "--at-once", 8, "--memory-bound", 16]
        options += ["--sample-seconds", 0.01, "--prompt-tokens", 16]
        options += ["--request-time-limit", 5 if flaw == "hangs" else 60]
        result = CliRunner().invoke(command.app, [str(tmp_path), *map(str, options), *more])
        return result, json.loads((tmp_path / "results.json").read_text())

    return run


@pytest.mark.processes
def test_a_sound_server_passes(soak, tmp_path: Path) -> None:
    result, fields = soak("")
    assert result.exit_code == 0, result.output
    assert fields["failures"] == []
    assert len(fields["outcomes"]) == 60
    assert set(fields["answers"]) == {"before", "after the load", "after the restart"}
    assert [o["verdict"] for o in fields["kill"]["outcomes"]] == [ERROR] * 8
    page = (tmp_path / "soak.md").read_text()
    assert "No failure." in page
    assert "with 8 requests under way: 0 had their answer, 8 an error, 0 neither" in page
    assert re.search(r"the engine was killed; its server ended after \d+\.\d s\n", result.output)


@pytest.mark.processes
def test_a_load_that_ends_before_a_second_sample_is_due(soak) -> None:
    result, fields = soak("", "--sample-seconds", "60", "--minutes", "2", "--requests", "600")
    assert result.exit_code == 0, result.output
    assert fields["failures"] == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flaw", "failure"),
    [
        ("forgets", "answers after the restart: 8 of 8 differ from those before"),
        ("leaks", r"memory: grew by \d+\.\d MB after the warm-up, at most 16 MB are accepted"),
        ("keeps", "after the load: vllm:num_requests_running is 1"),
        (
            "hangs",
            "when the engine was killed: (stream|answer): lost: no answer and no error in 5 s|"
            "when the engine was killed: its server went on",
        ),
    ],
)
def test_a_flawed_server_fails(soak, tmp_path: Path, flaw: str, failure: str) -> None:
    result, fields = soak(flaw, *(("--requests", "320") if flaw == "leaks" else ()))
    assert result.exit_code == 1
    told = fields["failures"]
    assert [line for line in told if not re.fullmatch(failure, line)] == []
    assert len(told) == (9 if flaw == "hangs" else 1)
    assert "## Failures" in (tmp_path / "soak.md").read_text()


@pytest.mark.processes
def test_prompts_that_the_model_cannot_take_are_refused(soak) -> None:
    result, _ = soak("", "--prompt-tokens", "64")
    assert result.exit_code == 1
    assert "error: --prompt-tokens: is 64, must be at most 63 here; lower it" in result.output


def test_a_name_that_is_not_downloaded_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.app, ["org/absent", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "error: org/absent: is no directory, and not all of its files are in" in result.output
    assert not (tmp_path / "out").exists()


def test_a_quote_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    options = ["--server-options", '--dtype "float16', "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(command.app, [str(tmp_path), *options])
    assert result.exit_code == 1
    said = "error: --server-options: is '--dtype \"float16', must be options as a shell takes them "
    assert result.stderr == f"{said}(No closing quotation); quote them in pairs\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_no_server_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import sys; sys.exit('nvfp4-tc: refused: layer: is odd')"
    monkeypatch.setattr(running, "vllm_command", lambda *_: [sys.executable, "-c", said])
    result = CliRunner().invoke(command.app, [str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "error: vllm serve: layer: is odd (exited with code 1" in result.output


# --- the command, on vLLM -----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
def test_vllm_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import tiny_llama
    from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

    text = tmp_path / "text.txt"
    text.write_text(tiny_llama.TEXT * 20)
    source = tiny_llama.save(tmp_path / "bf16")
    quantize_checkpoint(source, tmp_path / "model", calibrate=text, seq_len=64)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # its processes are tested
    monkeypatch.setattr(running, "vllm_command", forking_command)
    options = ["--out", tmp_path / "out", "--requests", 120, "--at-once", 16]
    options += ["--sample-seconds", 0.02, "--memory-bound", 200]
    result = CliRunner().invoke(command.app, [str(tmp_path / "model"), *map(str, options)])
    assert result.exit_code == 0, result.output
    fields = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {o["verdict"] for o in fields["outcomes"]} == {EXPECTED}
    assert ERROR in [o["verdict"] for o in fields["kill"]["outcomes"]]
