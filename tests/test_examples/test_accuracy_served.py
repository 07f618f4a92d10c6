"""Scores of ``vllm serve`` through the harness, compared with the tests' own requests."""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from examples.accuracy import tasks
from examples.accuracy.harness import SERVER_ENVIRONMENT, score
from examples.completions import connect, token_logprobs
from examples.server import ENVIRONMENT, MODEL_NAME, Server, free_port, running
from tests import limits, tiny_llama
from tests.forking_vllm import forking_command

pytestmark = pytest.mark.slow

STDLIB = Path(sysconfig.get_path("stdlib"))
LIMIT = 12
# Bound for a sum over at most 160 tokens; 0 was seen. Requests under way together share a step,
# which may change the order of its sums. Without the token that begins a text, most sums change by
# tenths.
SAME_SUM = 1e-3


@pytest.fixture(scope="module")
def model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model, with room for the prompts and a tokenizer that begins every text."""
    cache = pytestconfig.rootpath / ".cache" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    trained = tiny_llama.trained(cache / f"trained-{tiny_llama.version()}")
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("model") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    tokenizer = tiny_llama.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory):
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {**ENVIRONMENT, **SERVER_ENVIRONMENT}
    command = forking_command(model, port, "nvfp4-tc")
    with running(command, port, log, limits.PROCESS, environment) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks made of smaller packages of the standard library."""
    root = tmp_path_factory.mktemp("library")
    for package in ("asyncio", "email", "concurrent", "importlib", "logging", "unittest", "xml"):
        for file in (STDLIB / package).rglob("*.py"):
            copy = root / file.relative_to(STDLIB)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    folder = tmp_path_factory.mktemp("tasks")
    tasks.make_tasks(folder, [root], LIMIT)
    return folder


@pytest.fixture(scope="module")
def scored(server: Server, model: Path, made: Path, tmp_path_factory: pytest.TempPathFactory):
    """Folder of the harness's files, and the scores by task."""
    folder = tmp_path_factory.mktemp("scored")
    found = score(server.url, MODEL_NAME, model, tasks.NAMES, folder, LIMIT, made)
    return folder, {one.task: one for one in found}


def rows(folder: Path, name: str) -> list:
    [file] = folder.glob(name)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("name", "space"), [("docstring_match", ""), ("docstring_ending", " ")])
def test_choices_have_the_likelihoods_that_the_server_tells(
    server: Server, model: Path, made: Path, scored, name: str, space: str
) -> None:
    folder, scores = scored
    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = rows(made, f"{name}.jsonl")
    direct = np.zeros((len(documents), 4))
    with connect(server.url) as client:
        for place, document in enumerate(documents):
            for choice, prompt in enumerate(document["choices"]):
                ids = tokenizer.encode(prompt + space + document["answer"])
                assert ids[0] == tokenizer.bos_token_id
                logprobs = token_logprobs(client, np.array(ids))
                direct[place, choice] = logprobs[len(tokenizer.encode(prompt)) - 1 :].sum()
    samples = sorted(rows(folder, f"samples_{name}_*.jsonl"), key=lambda sample: sample["doc_id"])
    told = np.array([[float(answer[0]) for answer in s["filtered_resps"]] for s in samples])
    np.testing.assert_allclose(told, direct, rtol=0, atol=SAME_SUM)
    right = direct.argmax(axis=1) == [document["gold"] for document in documents]
    found = scores[name]
    assert (found.metric, found.samples) == ("acc", len(documents))
    assert found.value == right.mean()
    assert found.stderr == pytest.approx(right.std(ddof=1) / len(right) ** 0.5)


def test_words_are_those_that_the_server_writes(server: Server, made: Path, scored) -> None:
    folder, scores = scored
    # The task's own stops and two that never match: tasks with five stops are served, too.
    body = {
        "model": MODEL_NAME, "max_tokens": 24, "temperature": 0,
        "stop": ["\n", "(", ".", "\nclass", "\ndef"],
    }  # fmt: skip
    written, right = [], []
    with connect(server.url) as client:
        for document in rows(made, "next_word.jsonl"):
            answer = client.post("/v1/completions", json={**body, "prompt": document["context"]})
            text = answer.raise_for_status().json()["choices"][0]["text"]
            written.append(text)
            word = re.match(r" (\w+)", text)
            right.append(bool(word and word[1] == document["word"]))
    samples = sorted(rows(folder, "samples_next_word_*"), key=lambda sample: sample["doc_id"])
    assert [sample["resps"] for sample in samples] == [[[text]] for text in written]
    found = scores["next_word"]
    assert (found.metric, found.samples) == ("exact_match", LIMIT)
    assert found.value == np.mean(right)
