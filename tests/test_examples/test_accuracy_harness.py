"""Scores read from the evaluation harness's results, and the errors when there are none."""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.accuracy.harness import HarnessError, TaskScore, score, task_scores, unknown_tasks
from examples.accuracy.harness import _why as why


def results(**changes):
    """Results as the harness writes them: a group of two tasks, and a task with two filters."""
    found = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "sample_len": 20,
                "exact_match,strict-match": 0.5,
                "exact_match_stderr,strict-match": 0.1,
                "exact_match,flexible-extract": 0.75,
                "exact_match_stderr,flexible-extract": 0.2,
            },
            "mmlu": {"acc,none": 0.3, "acc_stderr,none": 0.02, "sample_len": 40},
            "mmlu_law": {"acc,none": 0.2, "acc_stderr,none": 0.03, "sample_len": 30},
            "mmlu_art": {"acc,none": 0.4, "acc_stderr,none": 0.01, "sample_len": 10},
        },
        "group_subtasks": {"mmlu": ["mmlu_law", "mmlu_art"]},
    }
    return found | changes


def test_filters_are_told_apart_and_a_group_stands_for_its_tasks():
    assert list(task_scores(results())) == [
        TaskScore("gsm8k", "exact_match,strict-match", 0.5, 0.1, 20),
        TaskScore("gsm8k", "exact_match,flexible-extract", 0.75, 0.2, 20),
        TaskScore("mmlu", "acc", 0.3, 0.02, 40),
    ]


def test_group_without_a_mean_leaves_its_tasks():
    given = results()
    given["results"]["mmlu"] = {"alias": "mmlu", " ": " "}
    del given["results"]["gsm8k"]
    assert [s.task for s in task_scores(given)] == ["mmlu_law", "mmlu_art"]


def test_missing_error_is_no_number():
    given = results(
        results={"gsm8k": {"bleu,none": 3.5, "bleu_stderr,none": "N/A", "sample_len": 20}}
    )
    [found] = task_scores(given)
    assert (found.metric, found.value, found.samples) == ("bleu", 3.5, 20)
    assert math.isnan(found.stderr)


REFUSAL = (
    "Requesting API:   0%|  | 0/20 [00:00<?, ?it/s]2026-01-01:00:00:00 WARNING  "
    "[models.api_models:521] API request failed! Status code: 400, Response text: "
    '{"error":{"message":"List should have at most 4 items"}}. Retrying...\n'
    "aiohttp.client_exceptions.ClientResponseError: 400, message='Bad Request'\n"
)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (REFUSAL, r'the server answered 400: {"error".*at most 4 items'),
        ("Traceback:\nKeyError: 'no_such_task'\nmore", "^KeyError: 'no_such_task'$"),
        ("one\nKilled", "^Killed$"),
        ("", "^it printed nothing$"),
    ],
    ids=["refusal", "error", "line", "nothing"],
)
def test_reason_is_one_line(log, line):
    assert re.search(line, why(log))
    assert "\n" not in why(log)


class Server(BaseHTTPRequestHandler):
    """Server of the model ``demo`` that refuses every completion."""

    def do_GET(self):
        models = [{"id": "demo", "max_model_len": 1024}, {"id": "other"}]
        self.answer(200, {"data": models})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(400, {"error": "no such luck"})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url, tmp_path, model="demo", tasks=("docstring_match",), **more):
    return score(url, model, tmp_path / "tokenizer", tasks, tmp_path / "out", 4, **more)


def test_no_server_is_said_so(tmp_path):
    with pytest.raises(HarnessError, match=r"http://127.0.0.1:9: does not tell what it serves: "):
        ask("http://127.0.0.1:9", tmp_path, made=tmp_path)


@pytest.mark.parametrize("model", ["other", "missing"])
def test_model_that_is_not_served_is_named(url, tmp_path, model):
    with pytest.raises(HarnessError, match=rf"model: is {model}, must be .*: demo$"):
        ask(url, tmp_path, model, made=tmp_path)


def test_missing_harness_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.accuracy.harness.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"lm_eval: is not installed.*extra `eval`"):
        ask("http://127.0.0.1:9", tmp_path)


def test_tasks_of_a_folder_are_known(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.yaml").write_text("task: mine\n")
    asked = ("next_word", "mine", "foo", str(folder / "mine.yaml"))
    assert unknown_tasks(asked, folder) == ["foo"]
    assert unknown_tasks(["next_word"]) == []


def test_harness_that_cannot_list_its_tasks_is_an_error(monkeypatch):
    monkeypatch.setattr("examples.accuracy.harness.sys.executable", "false")
    with pytest.raises(HarnessError, match="cannot list its tasks: it printed nothing"):
        unknown_tasks(["foo"])


def test_log_outlives_the_folder(url, tmp_path, monkeypatch):
    monkeypatch.setattr("examples.accuracy.harness.sys.executable", "false")
    log = tmp_path / "logs" / "tasks.log"
    with pytest.raises(HarnessError, match=rf"all of its output: {log}\)$"):
        ask(url, tmp_path, made=tmp_path, log=log)
    assert log.is_file()


def test_refusing_server_ends_the_run(url, tmp_path, monkeypatch):
    from examples.accuracy import tasks
    from tests import tiny_llama

    rows = [{"choices": ["one", "two"], "answer": "!", "gold": 0, "path": "a.py"}] * 4
    made = dict.fromkeys(tasks.NAMES, rows)
    monkeypatch.setattr(tasks, "_documents", lambda roots, count: made)
    tiny_llama.tokenizer().save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(HarnessError, match=r"status 1 .*answered 400: .*no such luck") as caught:
        ask(url, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    log = Path(message.rpartition("all of its output: ")[2].rstrip(")"))
    assert "no such luck" in log.read_text()
