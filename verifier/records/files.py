"""Files of records: JSON with its format version, written atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verifier.core.errors import ReportedError
from verifier.core.wording import one_line
from verifier.records.checks import check_record
from verifier.records.schema import FORMAT_VERSION, READ_VERSIONS, FindingRecord, RunHeader, RunRecord

__all__ = [
    "AS_IT_WAS",
    "DEFAULT_REPORTS",
    "OtherVersionError",
    "RunFormatError",
    "RunStoreError",
    "convert_fields",
    "decode_versioned",
    "encode_record",
    "new_run_id",
    "out_option",
    "read_bytes",
    "read_finding",
    "read_record",
    "refused",
    "version_first",
    "write_all",
    "write_atomically",
]

_Record = TypeVar("_Record", RunRecord, FindingRecord, RunHeader)
DEFAULT_REPORTS = Path("reports")
"""The default folder of reports and runs."""
AS_IT_WAS = "what was there is as it was"
"""The end of a message on a file that cannot be replaced."""


def out_option(folder: Path) -> str:
    """Return the option that a command needs to read from ``folder``; empty for the default.

    >>> out_option(Path("my nights")), out_option(DEFAULT_REPORTS)
    (" --out 'my nights'", '')
    """
    return "" if folder == DEFAULT_REPORTS else f" --out {shlex.quote(str(folder))}"


class RunFormatError(ValueError):
    """A stored file that this version of the verifier cannot read; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class OtherVersionError(RunFormatError):
    """A stored file of another version of the verifier."""


class RunStoreError(ReportedError):
    """The file system refused; the message has the path, the reason and what is kept. ``__cause__`` is the OSError."""


def encode_record(record: RunRecord | FindingRecord) -> bytes:
    """Return the record as JSON with ``format_version`` first, and a newline."""
    return msgspec.json.encode(version_first(record)) + b"\n"


def version_first(record: RunRecord | FindingRecord) -> dict[str, Any]:
    """Return the fields of the record as plain values with ``format_version`` first."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return {"format_version": fields.pop("format_version"), **fields}


def read_record(path: Path) -> RunRecord:
    """Return the run in the file ``path``.

    Raises
    ------
    RunFormatError
        If the file is not JSON, has another ``format_version``, or does not follow the schema.
    FileNotFoundError
        If there is no such file.
    """
    return convert_fields(decode_versioned(read_bytes(path), str(path)), RunRecord, str(path))


def read_finding(path: Path) -> FindingRecord:
    """Return the finding in the file ``path``; raises as :func:`read_record` does."""
    return convert_fields(decode_versioned(read_bytes(path), str(path)), FindingRecord, str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of ``path``; raise FileNotFoundError, or RunFormatError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


def decode_versioned(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``data``, as the present version has it.

    Its version is checked first, because another version explains any error.
    """
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunFormatError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise RunFormatError(f"{where}: not a record: lists and objects are nested too deep in it") from error
    if not isinstance(fields, dict) or "format_version" not in fields:
        raise RunFormatError(f"{where}: has no format_version; was it written by the verifier?")
    if (version := fields["format_version"]) not in READ_VERSIONS:
        readable = f"{READ_VERSIONS[0]} to {READ_VERSIONS[-1]}"
        raise OtherVersionError(
            f"{where}: format_version is {version!r}, this version of the verifier reads {readable}; "
            "read it with the version that wrote it, or run again"
        )
    return fields | {"format_version": FORMAT_VERSION}


def convert_fields(fields: object, schema: type[_Record], where: str) -> _Record:
    """Return the record in plain values; raise :class:`RunFormatError` if they do not follow its schema."""
    try:
        record = msgspec.convert(fields, schema)
        check_record(record)
    except ValueError as error:  # msgspec's among them
        raise RunFormatError(f"{where}: not a {schema.__name__} of format_version {FORMAT_VERSION}: {error}") from error
    return record


def write_atomically(path: Path, data: bytes, kept: str) -> None:
    """Write ``data`` to ``path`` so that a reader finds all old or all new content, even after a crash.

    Parameters
    ----------
    kept
        For the message: what is kept if the write fails.

    Raises
    ------
    RunStoreError
        If the file system refuses, such as a full disk; ``path`` is then as it was before.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # 0o666 less the umask, as for any file; mkstemp would make one that only the owner can read.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise refused("write", path, error, kept) from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; a full disk takes a part of it first, and fails only at the next write."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(path: Path) -> None:
    """Make the entries of a directory survive a power cut, if the platform can."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refused(verb: str, path: Path, error: OSError, kept: str) -> RunStoreError:
    """Return the exception for a file system that refuses to ``verb`` the file ``path``."""
    return RunStoreError(f"cannot {verb} {path}: {error.strerror or error}; {kept}")


def new_run_id() -> str:
    """Return a new id that sorts by time: UTC time to the microsecond, and six random hex digits.

    :meth:`RunStore.open_run` refuses an id that exists.
    """
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S-%f}-{secrets.token_hex(3)}"
