"""Output folders are checked before anything is written into them."""

import os
from pathlib import Path

import pytest

from examples.paths import check_file, check_folder


def test_folders_that_are_or_can_be_made_pass_and_none_is_made(tmp_path):
    check_folder(tmp_path, "--out")
    check_folder(tmp_path / "a" / "b", "--out")
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=rf"--out: {tmp_path} cannot be written to; name another"):
        check_folder(tmp_path / "a", "--out")


def test_files_that_are_or_can_be_made_pass_and_none_is_made(tmp_path, monkeypatch):
    (tmp_path / "there").touch()
    check_file(tmp_path / "there", "--plot")
    check_file(tmp_path / "new", "--plot")
    monkeypatch.chdir(tmp_path)
    check_file(Path("new"), "--plot")
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


def test_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=rf"--plot: {tmp_path} is a folder, must be a file; name"):
        check_file(tmp_path, "--plot")
    with pytest.raises(ValueError, match=rf"--plot: {tmp_path}/a is no folder; create it first"):
        check_file(tmp_path / "a" / "b.png", "--plot")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=r"--plot: .*b.png cannot be written; name another file"):
        check_file(tmp_path / "b.png", "--plot")
