"""Checks what the types of a record's fields leave open, once, when a file is read.

Anybody may have written the file. Its names become paths and anchors, its verdicts become keys, and its trials are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

from verifier.core.case import MeshSpec
from verifier.core.parts import RunPart
from verifier.core.placement_text import split_placements
from verifier.core.verdict import VerdictKind
from verifier.core.wording import did_you_mean
from verifier.records.schema import (
    CONFIRMED,
    NOT_TRIED,
    UNCONFIRMED,
    FindingRecord,
    GraphRecord,
    KnownRecord,
    OpRulesRecord,
    RunHeader,
    RunRecord,
    TrialRecord,
    WrongRuleRecord,
)
from verifier.records.trials import check_trial

__all__ = ["check_name", "check_record"]

_VERDICTS = tuple(kind.value for kind in VerdictKind)
_ACCUSING = tuple(kind.value for kind in VerdictKind if kind.bad)
_CONFIRMATIONS = (CONFIRMED, UNCONFIRMED, NOT_TRIED)
_LARGEST = 1 << 64
"""Counts and bytes are at most this large, so that floats and pages can show them."""


def check_record(record: RunRecord | FindingRecord | RunHeader) -> None:
    """Raise a ValueError with the first field that is wrong, and why."""
    if isinstance(record, RunHeader):
        _check_header(record)
    elif isinstance(record, FindingRecord):
        _check_finding(record, "")
    else:
        _check_run(record)


def _check_run(run: RunRecord) -> None:
    _check_header(run.header)
    _check_numbers(run, "")
    _check_verdicts(run.counts, "counts")
    for overload, counts in run.counts_by_op.items():
        _check_verdicts(counts, f"counts_by_op[{overload!r}]")
    for mesh, counts in run.counts_by_mesh.items():
        _check_verdicts(counts, f"counts_by_mesh[{mesh!r}]")
    for position, finding in enumerate(run.findings):
        _check_finding(finding, f"findings[{position}].")
    for position, known in enumerate(run.baseline):
        _check_known(known, f"baseline[{position}].")
    for position, matrix in enumerate(run.matrices):
        for row, cells in matrix.cells.items():
            for column, counts in cells.items():
                _check_verdicts(counts, f"matrices[{position}].cells[{row!r}][{column!r}]")
    _check_graph(run.graph)
    if run.rules is not None:
        _check_meshes(run.rules.meshes, "rules.meshes")
        for name, op in run.rules.ops.items():
            _check_rules(op, f"rules.ops[{name!r}].")


def _check_header(header: RunHeader) -> None:
    check_name(header.id, "id of the run")
    _check_meshes(header.meshes, "meshes of the run")
    if header.shard:
        RunPart.parse(header.shard)


def _check_finding(finding: FindingRecord, where: str) -> None:
    check_name(finding.fingerprint, f"{where}fingerprint")
    _check_one(finding.verdict, _ACCUSING, f"{where}verdict")
    MeshSpec.parse(finding.mesh)
    _check_one(finding.confirmed.status, _CONFIRMATIONS, f"{where}confirmed.status")
    try:
        check_trial(finding.trial)
    except ValueError as error:
        raise ValueError(f"{where}trial: {error}") from error


def _check_known(known: KnownRecord, where: str) -> None:
    check_name(known.fingerprint, f"{where}fingerprint")
    _check_one(known.status, ("known", "fixed", "untested"), f"{where}status")


def _check_graph(graph: GraphRecord) -> None:
    dims = {node: len(split_placements(node)) for node in graph.nodes}
    for position, edge in enumerate(graph.edges):
        MeshSpec.parse(edge.mesh)
        for end in (edge.source, edge.target):
            if end not in dims or dims[end] != dims.get(edge.source):
                raise ValueError(f"graph.edges[{position}] ends at {end[:99]!r}, which is no node like its other end")
    for position, path in enumerate(graph.paths):
        mesh = MeshSpec.parse(path.mesh)
        where = f"graph.paths[{position}]"
        if not re.fullmatch(r"\w{1,40}\[(\d{1,18}(, \d{1,18})*)?\]", path.tensor):
            raise ValueError(f"{where}.tensor {path.tensor[:99]!r} is no dtype and shape, as float32[8, 4]")
        for placements in (path.source, path.target, *(target for _, target in path.steps)):
            if len(split_placements(placements)) != mesh.ndim:
                raise ValueError(f"{where}: {placements[:99]!r} does not fit mesh {path.mesh[:99]}")
        if not path.steps or path.count < 1:
            raise ValueError(f"{where} has no steps or no count")
        if path.measured > path.count or (path.issued and not path.measured):
            raise ValueError(f"{where} was measured {path.measured} times of {path.count}")
        for issued in path.issued:
            for name in (issued.name, issued.dtype):
                check_name(name, f"{where}.issued")
    for position, call in enumerate(graph.calls):
        mesh = MeshSpec.parse(call.mesh)
        if not call.op or call.count < 1:
            raise ValueError(f"graph.calls[{position}] has no op or no count")
        for placements in filter(None, call.given.split("; ")):
            if len(split_placements(placements.removesuffix(" small"))) != mesh.ndim:
                raise ValueError(f"graph.calls[{position}]: {placements[:99]!r} does not fit mesh {call.mesh[:99]}")


def _check_rules(op: OpRulesRecord, where: str) -> None:
    for name in ("wrong", "unconfirmed", "special"):
        rules: list[WrongRuleRecord] = getattr(op, name)
        for position, rule in enumerate(rules):
            _check_one(rule.verdict, _VERDICTS, f"{where}{name}[{position}].verdict")
            _check_one(rule.confirmed.status, _CONFIRMATIONS, f"{where}{name}[{position}].confirmed.status")
            if rule.fingerprint:
                check_name(rule.fingerprint, f"{where}{name}[{position}].fingerprint")


# ------------------------------------------------------------------------------------------------------ single values
def check_name(name: str, where: str) -> None:
    """Check a name that will stand in paths, in commands that a user copies, and in links of a page."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,99}", name):
        raise ValueError(f"{where} {name[:100]!r} is none; it has letters, digits, and -._:+ within")


def _check_one(name: str, known: Iterable[str], where: str) -> None:
    names = tuple(known)
    if name not in names:
        raise ValueError(f"{where} {name[:100]!r} is none of {', '.join(names)}{did_you_mean(name, names, 0.0)}")


def _check_verdicts(counts: Mapping[str, int], where: str) -> None:
    for name in counts:
        _check_one(name, _VERDICTS, f"{where}: verdict")


def _check_meshes(meshes: Iterable[str], where: str) -> None:
    for mesh in meshes:
        try:
            MeshSpec.parse(mesh)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _check_numbers(value: object, where: str) -> None:
    """Check that numbers can be shown and added up, except those in trials, which :func:`check_trial` checks."""
    if isinstance(value, TrialRecord):
        return
    if isinstance(value, int | float):
        if not (-_LARGEST if where.endswith("seed") else 0) <= value <= _LARGEST:  # False for NaN too
            raise ValueError(f"{where} is no number that a run counts up to")
    elif is_dataclass(value):
        for field in fields(value):
            _check_numbers(getattr(value, field.name), f"{where}.{field.name}" if where else field.name)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, f"{where}.{name}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check_numbers(item, f"{where}[{position}]")
