"""The run as JSON: written, read back, and its schema."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from verifier.records.files import AS_IT_WAS, write_atomically
from verifier.records.schema import FORMAT_VERSION, RunRecord, TensorRecord

__all__ = ["read_json", "render_json", "schema", "write_json"]


def render_json(run: RunRecord) -> str:
    """Return ``run`` as JSON, indented by two spaces, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(run), indent=2).decode() + "\n"


def write_json(run: RunRecord, path: Path | str, kept: str = AS_IT_WAS) -> None:
    """Write the result of :func:`render_json`; raises as :func:`~verifier.records.files.write_atomically` does."""
    write_atomically(Path(path), render_json(run).encode(), kept)


def read_json(path: Path | str) -> RunRecord:
    """Return the run that :func:`write_json` wrote.

    Raises
    ------
    ValueError
        If the file is not a run, or has another format version.
    OSError
        If the file cannot be read.
    """
    text = Path(path).read_bytes()
    try:
        version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("format_version")
        if version is None or bytes(version).strip() != str(FORMAT_VERSION).encode():
            found = "no format_version" if version is None else f"format_version {bytes(version).decode()}"
            raise ValueError(f"{path} has {found}, expected {FORMAT_VERSION}; was it written by another version?")
        return msgspec.json.decode(text, type=RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a run of the verifier: {error}") from error


def schema() -> str:
    """Return the JSON Schema of a run as JSON text, the content of ``docs/reference/run-schema.json``.

    The schema of tensors is added by hand, because the types of ``args`` and ``kwargs`` are open.
    """
    _, definitions = msgspec.json.schema_components([RunRecord, TensorRecord], ref_template="#/$defs/{name}")
    for definition in definitions.values():
        if "description" in definition:  # a docstring, whose indentation depends on the version of Python
            definition["description"] = " ".join(inspect.cleandoc(definition["description"]).split())
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of the DTensor sharding strategy verifier (run.json)",
        "$ref": "#/$defs/RunRecord",
        "$defs": dict(sorted(definitions.items())),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
