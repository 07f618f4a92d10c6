"""The split of the corpus: deterministic, disjoint, without tables and tests."""

import pytest

from examples.demo.corpus import (
    STANDARD_LIBRARY,
    Corpus,
    Document,
    calibration_text,
    installed_roots,
    is_held_out,
    read_corpus,
)


@pytest.fixture
def library(tmp_path):
    """Library of 60 modules with distinct texts, one copy of another, and files to be skipped."""
    root = tmp_path / "lib"
    texts = {
        f"module_{i:02}.py": f'"""Module {i}."""\n' + f"value_{i} = something\n" * 40
        for i in range(60)
    }
    texts["zz_copy.py"] = texts["module_07.py"]
    for path in ("test/test_a.py", "pkg/tests/b.py", "encodings/cp1.py", "_sysconfigdata_x.py"):
        texts[path] = "TABLE = 1\n" * 40 + path
    texts["short.py"] = "x = 1\n"
    texts["notes.txt"] = "not Python " * 40
    topics = {"b": "Second topic.\n" * 20, "a": "First\ttopic.\n" * 20}
    texts["pydoc_data/topics.py"] = f"topics = {topics!r}\n"
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_split_is_the_same_again_and_complete(library):
    corpus = read_corpus([library])
    assert corpus == read_corpus([library])
    paths = [d.path for d in (*corpus.train, *corpus.held_out)]
    kept = [f"module_{i:02}.py" for i in range(60)] + ["pydoc_data/topics.py"]
    assert sorted(paths) == kept


def test_sides_share_no_text(library):
    corpus = read_corpus([library])
    assert corpus.train
    assert corpus.held_out
    assert not {d.text for d in corpus.train} & {d.text for d in corpus.held_out}
    assert all(is_held_out(d.path) for d in corpus.held_out)
    assert not any(is_held_out(d.path) for d in corpus.train)


def test_copy_of_a_file_cannot_cross_sides(tmp_path):
    text = "same = True\n" * 40
    train_only = next(f"a{i}.py" for i in range(99) if not is_held_out(f"a{i}.py"))
    held_out_copy = next(f"b{i}.py" for i in range(99) if is_held_out(f"b{i}.py"))
    held_out_own = next(f"c{i}.py" for i in range(99) if is_held_out(f"c{i}.py"))
    (tmp_path / train_only).write_text(text)
    (tmp_path / held_out_copy).write_text(text)
    (tmp_path / held_out_own).write_text(text + "# own")
    corpus = read_corpus([tmp_path])
    assert [d.path for d in corpus.train] == [train_only]
    assert [d.path for d in corpus.held_out] == [held_out_own]


def test_side_depends_on_the_path_alone(library):
    before = {d.path for d in read_corpus([library]).held_out}
    (library / "another.py").write_text("y = 2\n" * 40)
    after = {d.path for d in read_corpus([library]).held_out}
    assert after - {"another.py"} == before


def test_side_is_the_same_on_every_machine():
    held_out = [path for path in (f"module_{i}.py" for i in range(100)) if is_held_out(path)]
    assert held_out == [
        "module_0.py",
        "module_12.py",
        "module_29.py",
        "module_44.py",
        "module_45.py",
        "module_59.py",
        "module_61.py",
        "module_98.py",
    ]


def test_tables_and_generated_files_are_skipped(library):
    tables = {
        "numbers.py": "\n".join(f"{i}: ({i}, {i * i})," for i in range(99)),
        "repeats.py": "\n".join(f"    {i}: 0,  # LOW\n    'x': POSITIVE," for i in range(999)),
        "made.py": "# This file was automatically generated, do not edit.\n" + "x = 1\n" * 40,
    }
    before = read_corpus([library])
    for path, text in tables.items():
        (library / path).write_text(text)
    assert read_corpus([library]) == before


def test_bound_keeps_whole_documents_of_all_folders(library):
    whole = read_corpus([library])
    size = sum(len(d.text) for d in (*whole.train, *whole.held_out))
    half = read_corpus([library], max_characters=size // 2)
    kept = [d.path for d in (*half.train, *half.held_out)]
    assert 0.4 * size < sum(len(d.text) for d in (*half.train, *half.held_out)) <= size // 2
    assert set(half.train) < set(whole.train)
    assert set(half.held_out) < set(whole.held_out)
    assert max(kept) > "module_40" > min(kept)
    assert list(half.train) == sorted(half.train, key=lambda d: d.path)


def test_copies_across_roots_count_once(library, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "copy.py").write_text((library / "module_03.py").read_text())
    (copies / "new.py").write_text("new = True\n" * 40)
    both = read_corpus([library, copies])
    paths = [d.path for d in (*both.train, *both.held_out)]
    assert {"copy.py", "new.py"} <= set(paths)
    assert "module_03.py" not in paths


def test_installed_roots_are_folders_of_sources():
    roots = installed_roots()
    assert roots[0] == STANDARD_LIBRARY.resolve()
    assert any((root / "torch").is_dir() for root in roots)
    assert len(roots) == len(set(roots))


def test_topics_are_read_as_prose(library):
    corpus = read_corpus([library])
    (topics,) = (d for d in (*corpus.train, *corpus.held_out) if "topics" in d.path)
    assert topics.text.startswith("First\ttopic.\n")
    assert "Second topic.\n" in topics.text


def test_digest_tells_text_path_and_side_apart():
    a, b = Document("a.py", "1"), Document("b.py", "2")
    corpora = [
        Corpus((a,), (b,)),
        Corpus((b,), (a,)),
        Corpus((a, b), ()),
        Corpus((Document("a.py", "1b.py"),), (b,)),
        Corpus((Document("c.py", "1"),), (b,)),
    ]
    assert len({corpus.digest for corpus in corpora}) == len(corpora)


def test_calibration_text_is_of_training_files_only():
    train = tuple(Document(f"t{i}", f"train{i} " * 2000) for i in range(200))
    held_out = tuple(Document(f"h{i}", "held-out " * 2000) for i in range(9))
    text = calibration_text(Corpus(train, held_out))
    assert "held-out" not in text
    assert "train0 " in text
    assert "train198 " in text
    assert 200_000 < len(text) < 300_000


def test_missing_root_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"root: .*absent is not a folder"):
        read_corpus([tmp_path / "absent"])


def test_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gives 0 training and 0 held-out files"):
        read_corpus([tmp_path])
