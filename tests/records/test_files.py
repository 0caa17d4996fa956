"""A file that holds a record says why it cannot be read, and is never half replaced."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from run_factory import make_finding, make_run

from verifier.records.files import RunFormatError, RunStoreError, encode_record, read_record, write_atomically
from verifier.records.schema import FORMAT_VERSION, GraphRecord, PathRecord, UntestedRecord


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"run\.json: not JSON"),
        (b'"\xff"', r"run\.json: not JSON"),
        (b"[1]", r"run\.json: has no format_version"),
        (b"{}", r"run\.json: has no format_version"),
        (b'{"format_version": 9}', r"run\.json: format_version is 9, this version of the verifier reads 5 to 8"),
        (b'{"format_version": 5}', r"run\.json: not a RunRecord of format_version 8: .*missing required field"),
    ],
)
def test_file_that_we_cannot_read_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(RunFormatError, match=message):
        read_record(path)


@pytest.mark.parametrize("version", [5, 6])
def test_a_record_of_an_earlier_version_is_read_as_one_of_the_present_version(tmp_path: Path, version: int) -> None:
    """What later versions added has defaults: fields of paths, and a field each of findings and of what is untested."""
    path = PathRecord("aten.mm.default", "4", "float64[5]", "S(0)", "R", [("all_gather", "R")], True, 2, {"forward": 2})
    record = make_run(
        graph=GraphRecord([], [], [path]), findings=[make_finding()], untested=[UntestedRecord("a", "b", 1)]
    )
    fields = json.loads(encode_record(record))
    assert fields["format_version"] == FORMAT_VERSION
    added = {"issued", "measured", "peak_bytes", "seconds", "fastest"} if version == 5 else set()
    fields["graph"]["paths"] = [{k: v for k, v in one.items() if k not in added} for one in fields["graph"]["paths"]]
    del fields["findings"][0]["strategy"], fields["untested"][0]["remedy"]
    (tmp_path / "run.json").write_text(json.dumps(fields | {"format_version": version}))
    assert read_record(tmp_path / "run.json") == record


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
