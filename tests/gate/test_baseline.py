"""The baseline reads what it writes, changes only where a finding changed, and names what it cannot read."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from random import Random

import plain_records
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_records import a_header
from torch.distributed.tensor import Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.gate.baseline import VALID_DAYS, Baseline, BaselineError, load_baseline
from verifier.gate.entries import NOT_EXPLAINED, BaselineEntry
from verifier.records.files import RunStoreError
from verifier.records.schema import FindingRecord, RunRecord
from verifier.records.values import trial_record

TODAY = date(2026, 5, 20)
CASE = OpCase("aten.embedding.default", "torch.nn.functional.embedding", (torch.ones(2), "it's"))
TRIAL = trial_record(Trial(CASE, MeshSpec((4,)), ((Shard(0),),)))


def a_finding(fingerprint: str = "a1", **changes: object) -> FindingRecord:
    return plain_records.a_finding(fingerprint, **({"trial": TRIAL} | changes))


def a_run(
    *findings: FindingRecord, known: dict[str, str] | None = None, torch_version: str = "2.13.0+cpu"
) -> RunRecord:
    return plain_records.a_run(*findings, known=known, header=a_header(versions={"torch": torch_version}))


def written(tmp_path: Path, *findings: FindingRecord) -> Path:
    path = tmp_path / "baseline.toml"
    Baseline().updated([a_run(*findings)], TODAY).save(path)
    return path


def names(baseline: Baseline) -> list[str]:
    return [entry.fingerprint for entry in baseline.entries]


# -------------------------------------------------------------------------------------------------------- write, read
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
entries = st.builds(
    BaselineEntry,
    fingerprint=st.text("0123456789abcdef", min_size=1, max_size=6),
    op=st.sampled_from(["aten.embedding.default", "aten.sum.default"]),
    family=text,
    verdict=st.sampled_from(["WRONG_VALUE", "CRASH"]),
    rule=text,
    mesh=st.sampled_from(["4", "2x2"]),
    summary=text,
    reason=text,
    torch=st.lists(text, max_size=3).map(tuple),
    expires=st.dates(),
    replay=st.just(Baseline().updated([a_run(a_finding())], TODAY).entries[0].replay),
    link=text,
)


@settings(deadline=None, max_examples=60)
@given(found=st.lists(entries, max_size=4, unique_by=lambda entry: entry.fingerprint), order=st.randoms())
def test_what_is_read_is_what_was_written_and_order_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, found: list[BaselineEntry], order: Random
) -> None:
    path = tmp_path_factory.mktemp("baseline") / "baseline.toml"
    baseline = Baseline(tuple(found))
    baseline.save(path)
    assert load_baseline(path) == baseline
    order.shuffle(found)
    assert Baseline(tuple(found)).to_toml().encode() == path.read_bytes()


def test_file_reads_as_a_page_for_people(tmp_path: Path) -> None:
    lines = written(tmp_path, a_finding("b2"), a_finding("a1")).read_text().splitlines()
    assert lines[0] == "# What `python -m verifier` knows. The gate fails on every finding that is not in here."
    start = lines.index("[[finding]]")
    assert lines[start - 2 : start + 11] == [
        "format_version = 3",
        "",
        "[[finding]]",
        'fingerprint = "a1"',
        'op = "aten.embedding.default"',
        'family = "embedding"',
        'verdict = "WRONG_GRADIENT"',
        'rule = "S(0), R -> P(sum)"',
        'mesh = "4"',
        'summary = "weight.grad row 3: got 0.0, expected 1.7"',
        f'reason = "{NOT_EXPLAINED}"',
        'torch = ["2.13.0"]',
        "expires = 2026-11-16",
    ]
    assert lines[start + 11].startswith("replay = ")
    assert len(lines) == start + 2 * 13 - 1


def test_entry_can_be_run_again_whatever_quotes_its_values_hold(tmp_path: Path) -> None:
    plain = replace(TRIAL, case=replace(TRIAL.case, args=["plain"]))
    path = written(tmp_path, a_finding("a1"), a_finding("b2", trial=plain))
    quoted, literal = load_baseline(path).entries
    assert (quoted.trial(), literal.trial()) == (TRIAL, plain)
    assert 'replay = \'{"case":' in path.read_text()


def test_an_entry_is_on_a_flattened_mesh_only_if_its_trial_is(tmp_path: Path) -> None:
    trials = [replace(TRIAL, mesh=mesh) for mesh in ("2x2", "2x2+flat")]
    path = written(tmp_path, *(a_finding(name, trial=one) for name, one in zip(("a1", "b2"), trials, strict=True)))
    plain, flattened = load_baseline(path).entries
    square, flat = MeshSpec.parse("simulated:2x2"), MeshSpec.parse("2x2+flat")
    assert [plain.is_on([square]), plain.is_on([flat]), plain.is_on([flat, square])] == [True, False, True]
    assert [flattened.is_on([square]), flattened.is_on([flat])] == [False, True]


def test_one_finding_more_adds_lines_and_changes_none(tmp_path: Path) -> None:
    before = written(tmp_path, a_finding("a1"), a_finding("c3")).read_text().splitlines()
    after = written(tmp_path, a_finding("a1"), a_finding("b2"), a_finding("c3")).read_text().splitlines()
    added = after[len(after) - len(before) :]
    assert len(added) == len(before)
    at = after.index('fingerprint = "b2"') - 2
    assert after[:at] + after[at + len(after) - len(before) :] == before


def test_full_disk_leaves_the_baseline_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, a_finding())
    before = path.read_bytes()

    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunStoreError, match="No space left on device; the baseline is as it was before"):
        Baseline().save(path)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------------------------- update
def test_new_finding_enters_unexplained_and_expires() -> None:
    [entry] = Baseline().updated([a_run(a_finding())], TODAY).entries
    assert (entry.reason, entry.link, entry.torch) == (NOT_EXPLAINED, "", ("2.13.0",))
    assert entry.expires == TODAY + timedelta(days=VALID_DAYS)
    assert entry.summary == "weight.grad row 3: got 0.0, expected 1.7"


def test_update_keeps_what_people_wrote_even_past_its_day() -> None:
    [entry] = Baseline().updated([a_run(a_finding())], TODAY).entries
    written = replace(entry, reason="pytorch#190063", link="https://example.org", expires=date(2020, 1, 1))
    run = a_run(a_finding(message="another message", mesh="2x2"), torch_version="2.14.0")
    [kept] = Baseline((written,)).updated([run], TODAY).entries
    assert kept == replace(written, torch=("2.13.0", "2.14.0"))


def test_update_sorts_versions_as_numbers() -> None:
    [entry] = Baseline().updated([a_run(a_finding(), torch_version="2.13.0")], TODAY).entries
    kept = Baseline((entry,)).updated([a_run(a_finding(), torch_version="2.9.1")], TODAY)
    assert kept.entries[0].torch == ("2.9.1", "2.13.0")


def test_update_explains_that_an_empty_reason_is_none() -> None:
    [entry] = Baseline().updated([a_run(a_finding())], TODAY).entries
    [kept] = Baseline((replace(entry, reason=" "),)).updated([a_run(a_finding())], TODAY).entries
    assert kept.reason == NOT_EXPLAINED


def test_only_what_was_seen_fixed_leaves() -> None:
    baseline = Baseline().updated([a_run(*(a_finding(name) for name in ("a1", "b2", "c3", "d4", "e5")))], TODAY)
    run = a_run(a_finding("e5"), known={"a1": "fixed", "b2": "untested", "c3": "known", "e5": "fixed"})
    # d4 was not mentioned at all; e5 passed when it was replayed, but the campaign met it again.
    assert names(baseline.updated([run], TODAY)) == ["b2", "c3", "d4", "e5"]
    assert names(baseline.updated([run], TODAY, keep_untested=False)) == ["c3", "e5"]


def test_what_another_torch_has_mended_stays_for_those_that_have_not() -> None:
    baseline = Baseline().updated([a_run(a_finding("a1"))], TODAY)
    mended = baseline.updated([a_run(known={"a1": "fixed"}, torch_version="2.15.0+cpu")], TODAY)
    assert [(one.torch, one.mended) for one in mended.entries] == [(("2.13.0",), ("2.15.0",))]
    assert 'mended = ["2.15.0"]' in mended.to_toml()
    back = mended.updated([a_run(a_finding("a1"), torch_version="2.15.0")], TODAY)
    assert [(one.torch, one.mended) for one in back.entries] == [(("2.13.0", "2.15.0"), ())]
    assert names(mended.updated([a_run(known={"a1": "fixed"})], TODAY)) == []


def test_update_is_idempotent_and_deterministic() -> None:
    run = a_run(a_finding("b2"), a_finding("a1"))
    once = Baseline().updated([run], TODAY)
    assert names(once) == ["a1", "b2"]
    assert once.updated([run], TODAY + timedelta(days=30)) == once
    assert Baseline().updated([a_run(a_finding("a1"), a_finding("b2"))], TODAY).to_toml() == once.to_toml()


# ----------------------------------------------------------------------------------------------------- malformed files
def test_missing_file_is_empty_only_if_that_is_allowed(tmp_path: Path) -> None:
    assert load_baseline(tmp_path / "none.toml", missing_ok=True) == Baseline()
    with pytest.raises(BaselineError, match=r"none\.toml: no such baseline file"):
        load_baseline(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format_version = 3", "format_version = 4", r":21: format_version is 4; this version of the verifier reads 3"),
        ("format_version = 3", "", r":1: has no format_version"),
        ('mesh = "4"', 'mesh = "4', r":29: not TOML: .*line 29"),
        ("expires = 2026-11-16", "expires = 2026-13-16", r":33: not TOML: "),
        ("expires = 2026-11-16", 'expires = "2026-11-16"', r":23: finding 1 \(a1\): expires is '2026-11-16', but has"),
        ("expires = 2026-11-16", "expires = 2026-11-16T00:00:00", r"expires is '2026-11-16 00:00:00', but has to be"),
        ("expires = 2026-11-16", "expire = 2026-11-16", r"unknown field 'expire'; did you mean 'expires'\?"),
        ("reason =", "#", r":23: finding 1 \(a1\): has no reason"),
        ('fingerprint = "a1"', "", r":23: finding 1 \(without a fingerprint\): has no fingerprint"),
        ('fingerprint = "a1"', 'fingerprint = ""', r"its fingerprint is empty"),
        ('mesh = "4"', "mesh = 4", r"mesh is 4, but has to be a string"),
        ('["2.13.0"]', '"2.13.0"', r"torch is '2\.13\.0', but has to be a list of versions"),
        ("WRONG_GRADIENT", "WRONG_GRADIANT", r"verdict 'WRONG_GRADIANT' .* did you mean 'WRONG_GRADIENT'\?"),
        ('verdict = "WRONG_GRADIENT"', 'verdict = "PASS"', r"verdict 'PASS' is none of a finding"),
        ("torch.nn", "\\u0000 \\\\", r"replay is no trial that can be run again"),
        ('S(0)\\"', 'S(x)\\"', r"replay is no trial that can be run again: placement 'S\(x\)'"),
        (
            "[[finding]]",
            "[[findings]]",
            r":23: unknown key 'findings'; causes are \[\[cause\]\], findings \[\[finding\]\], budgets",
        ),
        ("[[finding]]", "[finding]", r":23: findings are written as \[\[finding\]\]"),
    ],
)
def test_malformed_file_says_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, a_finding())
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(BaselineError, match=r"baseline\.toml.*" + message):
        load_baseline(path)


def test_repeated_fingerprint_names_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, a_finding("a1"), a_finding("b2"))
    path.write_text(path.read_text().replace('"b2"', '"a1"'))
    with pytest.raises(BaselineError, match=r"baseline\.toml:36: fingerprint a1 stands in line 23 already"):
        load_baseline(path)


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "baseline.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BaselineError, match=r"baseline\.toml: cannot be read"):
        load_baseline(path)
