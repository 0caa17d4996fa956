"""Ordinary records, for tests in which only a few fields matter; a test names these fields."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.records.schema import ConfirmationRecord, FindingRecord, GraphRecord, KnownRecord, RunHeader, RunRecord
from verifier.records.values import trial_record

EMBEDDING = "aten.embedding.default"


def a_header(**changes: object) -> RunHeader:
    header = RunHeader(
        id="20260520T131502-048211-9f3a1c",
        started="2026-05-20T13:15:02Z",
        seed=1,
        profile="ci",
        families=["embedding"],
        meshes=["4"],
        dtypes=["float64"],
        device="cpu",
        max_examples=10,
        time_limit=None,
        imports=[],
        versions={"torch": "2.13.0"},
        command="python -m verifier run",
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def a_finding(fingerprint: str = "a1", **changes: object) -> FindingRecord:
    case = OpCase(EMBEDDING, "torch.nn.functional.embedding", (torch.ones(2),))
    finding = FindingRecord(
        fingerprint=fingerprint,
        op=EMBEDDING,
        family="embedding",
        verdict="WRONG_GRADIENT",
        level=2,
        mesh="4",
        input_placements={"weight": "S(0)", "indices": "R"},
        output_placements=["P(sum)"],
        known=False,
        phase="backward",
        subject="weight.grad",
        dtype="float64",
        rule="S(0), R -> P(sum)",
        message="weight.grad row 3: got 0.0, expected 1.7\n  in aten.embedding on mesh (4,)\n"
        "  likely: padding_idx is used as a local row index",
        confirmed=ConfirmationRecord("confirmed", "gloo", 4),
        minimised=True,
        occurrences=1,
        trial=trial_record(Trial(case, MeshSpec((4,)), ((Shard(0),),))),
        script="",
        script_status="not run",
    )
    return replace(finding, **changes)  # type: ignore[arg-type]


def a_run(*findings: FindingRecord, known: dict[str, str] | None = None, **changes: object) -> RunRecord:
    """Return a finished run; ``known`` has the status of baseline entries by fingerprint."""
    run = RunRecord(
        header=a_header(),
        seconds=1.0,
        complete=True,
        trials=412,
        counts={"PASS": 376, "UNSUPPORTED": 36},
        counts_by_op={EMBEDDING: {"PASS": 376, "UNSUPPORTED": 36}},
        counts_by_mesh={},
        coverage={},
        findings=list(findings),
        baseline=[KnownRecord(fingerprint, status) for fingerprint, status in (known or {}).items()],
        untested=[],
        matrices=[],
        graph=GraphRecord([], []),
        pool_restarts=0,
        seconds_by={},
    )
    return replace(run, **changes)  # type: ignore[arg-type]
