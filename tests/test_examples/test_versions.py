import subprocess

import pytest

from examples.versions import check_importable, commit


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_tells_of_changes(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == revision
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{revision}+changes"


def test_no_checkout_has_no_commit(tmp_path):
    assert commit(tmp_path) is None


def test_missing_module_is_named_with_its_remedy():
    check_importable("json", "this")
    with pytest.raises(ValueError, match="no_such: is not installed, --x needs it; pip install no"):
        check_importable("no_such", "--x")
