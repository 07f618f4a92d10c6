"""Local tasks: made of held-out text, reproducible, without hints, and readable by the harness."""

import json
import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from examples.accuracy import tasks
from examples.accuracy.tasks.__main__ import app
from examples.accuracy.tasks.text import ANSWER_BYTES, CONTEXT_BYTES, read_held_out
from examples.accuracy.tasks.words import ONCE_IN, questions
from examples.demo.corpus import is_held_out
from tests import tiny_llama

CHOOSING = ("docstring_match", "docstring_ending")
IN_TRAINING = "Tell what a training file tells."
SAID_AGAIN = "Say what another file says, too."
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def module(index, extra=""):
    """Source of a distinct module: functions, a class, repeated words, and prose."""
    number = f"{NUMBERS[index % 10]}{index}"
    again = " again" * (index % 3)
    functions = "".join(
        f"def {verb}_{number}(count_{number}):\n"
        f'    """{verb.title()} number {index} of the file, and count it{again}.\n\n'
        f"    More is said of {verb} {number}. The end of {verb} {number} is said here, "
        f'at\n    last.\n    """\n'
        f"    if count_{number} and count_{number} is not None:\n"
        f"        return count_{number}\n\n\n"
        for verb in ("send", "fetch")
    )
    kind = f'class Kind{index}:\n    """Kind of {number} things that a file has."""\n\n\n'
    return f'"""Module {number}."""\n\n\n{functions}{kind}{extra}'


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Library of 300 modules; some docstrings occur on both sides of the split."""
    root = tmp_path_factory.mktemp("library")
    for index in range(300):
        path = f"module_{index}.py"
        known = IN_TRAINING if is_held_out(path) else IN_TRAINING.replace(" file", "\n    file")
        extra = f'def known_{index}():\n    """{known}"""\n\n\n' if index % 2 else ""
        extra += f'def alike_{index}():\n    """{SAID_AGAIN}"""\n' * is_held_out(path)
        (root / path).write_text(module(index, extra))
    return root


@pytest.fixture(scope="module")
def made(library, tmp_path_factory):
    """Folder of the tasks, and their documents."""
    folder = tmp_path_factory.mktemp("made")
    counts = tasks.make_tasks(folder, [library], 40)
    documents = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in tasks.NAMES
    }
    assert counts == {name: len(rows) for name, rows in documents.items()}
    assert all(counts[name] >= 16 for name in tasks.NAMES)
    return folder, documents


def groups(rows):
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


def test_same_again(library, made, tmp_path):
    folder, _ = made
    tasks._documents.cache_clear()
    tasks.make_tasks(tmp_path, [library], 40)
    for name in tasks.NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (folder / f"{name}.jsonl").read_bytes()


def test_fewer_documents_are_the_first_ones(library, made, tmp_path):
    _, documents = made
    counts = tasks.make_tasks(tmp_path, [library], 10)
    assert counts == {"docstring_match": 8, "docstring_ending": 8, "next_word": 10}
    for name, rows in documents.items():
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert list(map(json.loads, lines)) == rows[: counts[name]]


@pytest.mark.parametrize("name", tasks.NAMES)
def test_made_of_held_out_files_only(library, made, name):
    for row in made[1][name]:
        assert is_held_out(row["path"])
        text = (library / row["path"]).read_text()
        prompt = row["choices"][row["gold"]] if name in CHOOSING else row["context"]
        assert prompt in text


@pytest.mark.parametrize("name", CHOOSING)
def test_answer_follows_its_prompt_and_no_other(library, made, name):
    for row in made[1][name]:
        words = " ".join((library / row["path"]).read_text().split())
        between = "" if name == "docstring_match" else " "
        whole = " ".join(f"{row['choices'][row['gold']]}{between}{row['answer']}".split())
        assert whole in words
        for place, prompt in enumerate(row["choices"]):
            follows = " ".join(f"{prompt}{between}{row['answer']}".split()) in words
            assert follows == (place == row["gold"])


@pytest.mark.parametrize("name", CHOOSING)
def test_whoever_ignores_the_answer_is_right_once_in_four(made, name):
    for group in groups(made[1][name]):
        assert [row["gold"] for row in group] == [0, 1, 2, 3]
        assert len({json.dumps(row["choices"]) for row in group}) == 1
        assert len({row["answer"] for row in group}) == 4
        assert len({row["path"] for row in group}) == 4
        assert len(set(group[0]["choices"])) == 4


@pytest.mark.parametrize("name", CHOOSING)
def test_nothing_twice_and_nothing_of_training(made, name):
    rows = made[1][name]
    assert len({row["answer"].lower() for row in rows}) == len(rows)
    prompts = [prompt for group in groups(rows) for prompt in group[0]["choices"]]
    assert len(set(prompts)) == len(prompts)
    assert not any(IN_TRAINING in row["answer"] for row in rows)


def test_training_text_is_known_whatever_its_line_breaks(library):
    answers = {IN_TRAINING, f"{IN_TRAINING[:-1]} says.", "No file says this.", "Two words."}
    new = read_held_out([library]).new(answers)
    assert new == {f"{IN_TRAINING[:-1]} says.", "No file says this."}


def test_copy_in_another_root_counts_as_training(library, tmp_path):
    inside = next(d for d in read_held_out([library]).documents)
    path = next(f"a{i}.py" for i in range(99) if not is_held_out(f"a{i}.py"))
    own = next(f"b{i}.py" for i in range(99) if is_held_out(f"b{i}.py"))
    (tmp_path / path).write_text(inside.text)
    (tmp_path / own).write_text("its_own = 1\n" * 40)
    kept = {document.path for document in read_held_out([library, tmp_path]).documents}
    assert inside.path not in kept
    assert own in kept


def test_next_word_was_there_twice_and_comes_next(library, made):
    rows = made[1]["next_word"]
    for row in rows:
        text = (library / row["path"]).read_text()
        assert not row["context"][-1].isspace()
        assert re.search(rf"{re.escape(row['context'])} {row['word']}\b", text)
        assert len(re.findall(rf"\b{row['word']}\b", row["context"])) >= 2
    assert len({(row["path"], row["word"]) for row in rows}) == len(rows)


def test_no_word_comes_often(made):
    rows = made[1]["next_word"]
    for count in range(1, len(rows) + 1):
        [(_, often)] = Counter(row["word"] for row in rows[:count]).most_common(1)
        assert often <= 1 + count // ONCE_IN


def test_every_prompt_fits_a_token_for_each_byte(made):
    tokenizer = tiny_llama.tokenizer()
    for row in made[1]["next_word"]:
        assert len(tokenizer.encode(row["context"])) <= CONTEXT_BYTES
    for name in CHOOSING:
        for row in made[1][name]:
            assert len(tokenizer.encode(row["answer"])) <= ANSWER_BYTES
            assert all(len(tokenizer.encode(c)) <= CONTEXT_BYTES for c in row["choices"])


def test_long_file_is_cut_to_whole_lines(tmp_path):
    path = next(f"long{i}.py" for i in range(99) if is_held_out(f"long{i}.py"))
    lines = (
        f"first_number{i} = {i}\nanother_first_number{i} = first_number{i} + first_number{i}\n"
        for i in range(90)
    )
    (tmp_path / path).write_text("".join(lines))
    (tmp_path / "short.py").write_text("short = 1\n" * 40)
    rows = questions(read_held_out([tmp_path]), 99)
    cut = [row["context"] for row in rows if not row["context"].startswith("first_number0 = ")]
    assert len(cut) > 40
    assert all(
        re.match(r"first_number\d+ = \d+\n|another_first_number\d+ = first", context)
        for context in cut
    )
    assert max(map(len, cut)) <= CONTEXT_BYTES


def test_harness_reads_them(made, tmp_path, monkeypatch):
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    folder, documents = made
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    loaded = manager.load(list(tasks.NAMES))["tasks"]
    for name, rows in documents.items():
        task = loaded[name]
        task.build_all_requests(limit=None, rank=0, world_size=1)
        asked = [instance.args for instance in task.instances]
        if name in CHOOSING:
            space = "" if name == "docstring_match" else " "
            assert asked == [(c, space + row["answer"]) for row in rows for c in row["choices"]]
        else:
            assert [prompt for prompt, _ in asked] == [row["context"] for row in rows]
            assert [task.doc_to_target(row) for row in rows] == [row["word"] for row in rows]


def test_root_without_enough_text_is_refused(tmp_path):
    (tmp_path / "module_0.py").write_text("first = 1\n" * 40)  # held out
    (tmp_path / "module_1.py").write_text("second = 1\n" * 40)
    with pytest.raises(ValueError, match=r"docstring_match: 1 held-out files give no .*--root"):
        tasks.make_tasks(tmp_path / "made", [tmp_path], 40)


def test_command_writes_them_and_says_how_many(library, tmp_path):
    options = ["--out", str(tmp_path / "a"), "--root", str(library), "--documents", "8"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0
    assert "docstring_ending: 8 documents\nnext_word: 8 documents\n" in result.output
    assert (tmp_path / "a" / "next_word.yaml").is_file()


def test_command_refuses_a_folder_without_sources(tmp_path):
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "a"), "--root", str(tmp_path)])
    assert result.exit_code == 1
    assert "gives 0 training and 0 held-out files" in result.output


def test_command_refuses_a_file_to_write_into(library, tmp_path):
    file = tmp_path / "file"
    file.touch()
    options = ["--out", str(file / "a"), "--root", str(library)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1
    assert f"--out: {file / 'a'} cannot be a folder, {file} is a file" in result.output
