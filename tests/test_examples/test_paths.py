"""Folders that are checked before anything is written into them."""

import os

import pytest

from examples.paths import check_folder


def test_folders_that_are_or_can_be_made_pass_and_none_is_made(tmp_path):
    check_folder(tmp_path, "--out")
    check_folder(tmp_path / "a" / "b", "--out")
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match=rf"--out: {tmp_path} cannot be written to; name another"):
        check_folder(tmp_path / "a", "--out")
