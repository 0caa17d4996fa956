"""run.json: what is written is read back, and the committed schema describes it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from run_factory import ODD, make_empty_run, make_run

from verifier.records.files import read_record
from verifier.records.schema import FindingRecord, RunHeader, RunRecord
from verifier.report.json import render_json, schema, write_json

DOCS = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("run", [make_run(), make_empty_run(complete=False)], ids=["full", "empty"])
def test_a_run_survives_the_round_trip(run: RunRecord, tmp_path: Path) -> None:
    write_json(run, tmp_path / "run.json")
    assert msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunRecord) == run
    assert read_record(tmp_path / "run.json") == run


def test_run_json_is_indented_text_with_a_version() -> None:
    text = render_json(make_run())
    assert text.startswith('{\n  "header": {\n')
    assert text.endswith("}\n")
    assert json.loads(text)["format_version"] == 8
    assert ODD in json.loads(text)["findings"][0]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 99}', "format_version is 99, this version of the verifier reads 5 to 8"),
        ('{"nodes": []}', "has no format_version"),
        ('{"format_version": 5}', "not a RunRecord of format_version 8: .*header"),
        ("not json", "not JSON"),
        ("[]", "has no format_version"),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)


def test_the_committed_schema_is_up_to_date() -> None:
    assert (DOCS / "run-schema.json").read_text(encoding="utf-8") == schema(), (
        "the types changed; docs/reference/schema.md has the command that writes docs/reference/run-schema.json"
    )


def test_the_schema_defines_everything_that_it_refers_to() -> None:
    document = json.loads(schema())
    names = {part.split('"')[0] for part in schema().split("#/$defs/")[1:]}
    assert names <= set(document["$defs"])
    assert "TensorRecord" in document["$defs"]
    required = document["$defs"]["RunRecord"]["required"]
    assert set(required) <= set(json.loads(render_json(make_run())))


@pytest.mark.parametrize("record", [RunRecord, RunHeader, FindingRecord])
def test_the_prose_names_every_field(record: type) -> None:
    prose = (DOCS / "schema.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(record) if f"`{field.name}`" not in prose] == []
