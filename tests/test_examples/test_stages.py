"""The stage cache: whole or absent, reused only for the same inputs."""

import pytest

from examples.atomic_write import write_atomically
from examples.stages import StageCache, hash_files


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "code.py"
    file.write_text("version = 1\n")
    return file


@pytest.fixture
def made():
    """Texts that ``make`` was called for."""
    return []


@pytest.fixture
def stage(tmp_path, code, made):
    def build(text="result", inputs=None, fresh=False, name="model"):
        def make(folder):
            made.append(text)
            (folder / "file.txt").write_text(text)

        cache = StageCache(tmp_path / "cache", fresh)
        return cache.stage(name, inputs or {"size": 1}, [code], make)

    return build


def test_same_inputs_are_made_once(stage, made):
    first, second = stage(), stage()
    assert made == ["result"]
    assert (first.reused, second.reused) == (False, True)
    assert (second.folder, second.content) == (first.folder, first.content)
    assert (second.folder / "file.txt").read_text() == "result"


def test_other_inputs_name_or_code_make_it_anew(stage, made, code):
    folders = {stage().folder, stage(inputs={"size": 2}).folder, stage(name="other").folder}
    code.write_text("version = 2\n")
    folders.add(stage().folder)
    assert len(folders) == 4
    assert len(made) == 4


def test_fresh_replaces_what_is_cached(stage, made):
    old = stage("old")
    new = stage("new", fresh=True)
    assert made == ["old", "new"]
    assert new.folder == old.folder
    assert (stage().folder / "file.txt").read_text() == "new"
    assert new.content != old.content


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_stage_leaves_nothing(tmp_path, error):
    root = tmp_path / "cache"

    def make(folder):
        (folder / "half.txt").write_text("half")
        raise error

    with pytest.raises(error):
        StageCache(root).stage("model", {}, [], make)
    assert list(root.iterdir()) == []


def test_interrupted_fresh_stage_keeps_the_old_one(tmp_path, stage, code):
    old = stage("old")

    def make(folder):
        (folder / "file.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StageCache(tmp_path / "cache", fresh=True).stage("model", {"size": 1}, [code], make)
    assert (old.folder / "file.txt").read_text() == "old"


def test_nothing_is_visible_until_it_is_whole(tmp_path):
    root = tmp_path / "cache"
    visible = []

    def make(folder):
        (folder / "file.txt").write_text("half")
        visible.extend(path.name for path in root.iterdir() if not path.name.startswith("."))

    StageCache(root).stage("model", {}, [], make)
    assert visible == []
    assert [path.name.partition("-")[0] for path in root.iterdir()] == ["model"]


def test_folder_without_record_is_not_trusted(stage, made):
    (stage("old").folder / "stage.json").unlink()
    stage("new")
    assert made == ["old", "new"]


def test_hash_tells_names_contents_and_borders_apart(tmp_path):
    hashes = set()
    for i, files in enumerate([{"a": "12"}, {"b": "12"}, {"a": "21"}, {"a": "1", "b": "2"}]):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "cached.pyc").write_text(str(i))
        hashes.add(hash_files([folder]))
    assert len(hashes) == 4
    (tmp_path / "0" / "cached.pyc").unlink()
    assert hash_files([tmp_path / "0"]) in hashes


def test_file_is_replaced_whole(tmp_path):
    file = tmp_path / "results.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "half \udc80")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
