"""The run as JSON, and its schema."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from verifier.records.files import AS_IT_WAS, write_atomically
from verifier.records.schema import RunRecord, TensorRecord

__all__ = ["render_json", "schema", "write_json"]


def render_json(run: RunRecord) -> str:
    """Return ``run`` as JSON, indented by two spaces, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(run), indent=2).decode() + "\n"


def write_json(run: RunRecord, path: Path | str, kept: str = AS_IT_WAS) -> None:
    """Write the result of :func:`render_json`; raises as :func:`~verifier.records.files.write_atomically` does."""
    write_atomically(Path(path), render_json(run).encode(), kept)


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
