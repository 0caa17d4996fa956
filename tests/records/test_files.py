"""A file that holds a record says why it cannot be read, and is never half replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from verifier.records.files import RunFormatError, RunStoreError, read_record, write_atomically


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"run\.json: not JSON"),
        (b'"\xff"', r"run\.json: not JSON"),
        (b"[1]", r"run\.json: has no format_version"),
        (b"{}", r"run\.json: has no format_version"),
        (b'{"format_version": 7}', r"run\.json: format_version is 7, this version of the verifier reads 5"),
        (b'{"format_version": 5}', r"run\.json: not a RunRecord of format_version 5: .*missing required field"),
    ],
)
def test_file_that_we_cannot_read_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RunFormatError, match=message):
        read_record(path)


def test_interrupted_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old", "nothing")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunStoreError, match="No space left on device; the old one is kept"):
        write_atomically(path, b"new", "the old one is kept")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
