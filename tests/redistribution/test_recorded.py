"""What a run executed, judged."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from run_factory import make_missing_rule, make_op_rules, make_rules, make_run

from verifier.records.schema import GraphRecord, IssuedRecord, PathRecord
from verifier.redistribution.models import DEFAULT_LINK, AlphaBeta
from verifier.redistribution.recorded import NotJudged, Reader
from verifier.report.html import render_html
from verifier.report.paths.run import (
    JudgedRun,
    diff_text,
    judge_run,
    run_json,
    run_text,
    waste_across_ops,
    waste_without_rules,
)

THERE_AND_BACK = PathRecord(
    "aten.embedding.default",
    "2x4",
    "float32[1024, 8, 1024]",
    "(S(0), S(2))",
    "(R, S(0))",
    [("all_gather", "(S(0), R)"), ("all_gather", "(R, R)"), ("", "(R, S(0))")],
    False,
    3,
    {"forward": 2, "backward": 1},
)
DIRECT = PathRecord("aten.mm.default", "4", "float64[5]", "S(0)", "R", [("all_gather", "R")], True, 2, {"forward": 2})


def with_steps(record: PathRecord, *steps: tuple[str, str], **changes: object) -> PathRecord:
    fields = {**record.__dict__, "steps": [*steps], **changes}
    return PathRecord(**fields)


def judged(*records: PathRecord, op: str = "*") -> JudgedRun:
    return judge_run(make_run(graph=GraphRecord([], [], [*records])), op)


def test_a_path_has_the_bytes_of_its_steps() -> None:
    reader = Reader()
    found = reader.read(THERE_AND_BACK)
    size = 1024 * 8 * 1024 * 4
    assert found.path.bytes == 7 * size
    assert found.bound.total == 7 * size // 4
    assert found.waste == "gathers and shards again"
    best = reader.best(found, AlphaBeta((DEFAULT_LINK,) * 2))
    assert best is not None
    assert best.bytes == found.bound.total


def test_what_needs_no_more_than_the_bound_has_no_excess() -> None:
    found = Reader().read(DIRECT)
    assert (found.path.bytes, found.excess, found.waste) == (8 * (3 + 3 + 4 + 5), 0, "")


def test_a_merged_collective_is_one_step() -> None:
    merged = with_steps(THERE_AND_BACK, ("all_reduce", "(R, R)"), source="(P(sum), P(sum))", target="(R, R)")
    (step,) = Reader().read(merged).path.steps
    assert (step.kind, step.mesh_dims) == ("all_reduce", (0, 1))


@pytest.mark.parametrize("partial", ["MaskP(sum)", "_NormP(2)", "_NormP(0.5)"])
def test_masked_partials_and_norms_send_what_sums_send(partial: str) -> None:
    steps = ("all_reduce", "(R, R)")
    masked, plain = (
        Reader().read(with_steps(THERE_AND_BACK, steps, source=f"({one}, R)", target="(R, R)"))
        for one in (partial, "P(sum)")
    )
    assert (masked.path, masked.bound) == (plain.path, plain.bound)
    assert masked.path.bytes > 0


def test_what_the_verifier_gathers_for_itself_does_not_count() -> None:
    own = with_steps(DIRECT, *DIRECT.steps, phases={"gather": 7}, count=7)
    both = with_steps(THERE_AND_BACK, *THERE_AND_BACK.steps, phases={"forward": 2, "gather gradient": 5}, count=7)
    (found,) = judged(own, both).executed
    assert (found.record.count, found.record.phases) == (2, {"forward": 2})


def test_reductions_in_several_steps_are_named_if_they_round() -> None:
    steps = ("all_reduce", "(R, P(sum))"), ("all_reduce", "(R, R)")
    ends = {"source": "(P(sum), P(sum))", "target": "(R, R)"}
    assert "reduces in 2 steps" in Reader().read(with_steps(THERE_AND_BACK, *steps, **ends)).waste
    assert Reader().read(with_steps(THERE_AND_BACK, *steps, **ends, tensor="int64[8, 8, 8]")).waste == ""


def test_a_strided_shard_is_gathered_on_the_way() -> None:
    """DTensor plans one step and executes a gather and a slice."""
    moved = with_steps(THERE_AND_BACK, ("all_to_all", "(R, S(0))"), source="(R, _S(0, 2))", tensor="float32[8, 8]")
    assert [step.kind for step in Reader().read(moved).path.steps] == ["all_gather", "slice"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (with_steps(THERE_AND_BACK, ("all_reduce", "(R, R)"), source="(X, R)"), "is no placement"),
        (with_steps(THERE_AND_BACK, ("all_reduce", "(R, R)"), source="(P(max), P(sum))"), "mixes reductions"),
        (with_steps(THERE_AND_BACK, ("all_gather", "(R, S(2))")), "end at"),
        (with_steps(THERE_AND_BACK, ("all_reduce", "(R, S(2))"), target="(R, S(2))"), "all_reduce from"),
        (with_steps(THERE_AND_BACK, ("", "(P(sum), S(2))"), target="(P(sum), S(2))"), "refuses"),
    ],
)
def test_what_is_not_modelled_is_not_judged(record: PathRecord, reason: str) -> None:
    with pytest.raises(NotJudged, match=reason):
        Reader().read(record)
    assert judged(record, DIRECT).others.keys() == {str(*judged(record).others)}


def test_the_worst_in_total_is_first() -> None:
    often = with_steps(
        DIRECT, ("all_gather", "R"), ("", "S(1)"), target="S(1)", tensor="float32[4, 4]", count=1_000_000
    )
    assert [one.record for one in judged(DIRECT, THERE_AND_BACK).executed] == [THERE_AND_BACK, DIRECT]
    many = with_steps(often, *often.steps, count=100_000_000, phases={"forward": 100_000_000})
    assert judged(DIRECT, THERE_AND_BACK, many).executed[0].record == many


def test_the_text() -> None:
    text = run_text(judged(THERE_AND_BACK, DIRECT), worst=5, by="op", links=())
    assert "5 redistributions of 2 kinds; all ranks received 672.0 MiB, the lower bound is 168.0 MiB (4x)" in text
    assert "aten.embedding.default on 2x4: float32[1024, 8, 1024] (S(0), S(2)) -> (R, S(0)), implicit" in text
    assert "2 in forward, 1 in backward; 224.0 MiB where 56.0 MiB must be (4x)" in text
    assert text.count("  ran    ") == text.count("  best   ") == text.count("  waste  ") == 1
    by_edge = run_text(judged(THERE_AND_BACK), worst=9, by="edge", links=())
    assert re.search(r"\(S\(0\), R\) -> \(R, R\) all_gather +3 +384.0 MiB\n", by_edge)
    assert "(S(0), S(2)) -> (R, S(0))" in run_text(judged(THERE_AND_BACK), worst=9, by="pair", links=())


def test_what_was_measured_stands_beside_the_path() -> None:
    """On gloo an all-to-all is planned, and an all-gather is issued."""
    issued = [IssuedRecord("all_gather_into_tensor", [0, 1, 2, 3], "float64", 16, 64)]
    one = replace(DIRECT, issued=issued, measured=1, peak_bytes=96, seconds=0.0005, fastest=0.0005)
    text = run_text(judged(THERE_AND_BACK, replace(THERE_AND_BACK, measured=2, peak_bytes=8)), 5, "op", ())
    assert text.count("  issued no collective\n") == text.count("  took   not timed; up to 8 B alive at once") == 1
    longer = replace(one, steps=[*one.steps, ("", "S(0)"), ("all_gather", "R")])
    text = run_text(judged(longer), 5, "op", ())
    assert "  issued all_gather_into_tensor of float64 over ranks 0 1 2 3: 16 B given, 64 B got\n" in text
    assert "  took   500.0 us; up to 96 B alive at once\n" in text
    first, second = json.loads(run_json(judged(one, THERE_AND_BACK)))["redistributions"]
    assert first["measured"] is None
    assert second["measured"]["issued"] == [
        {
            "collective": "all_gather_into_tensor",
            "ranks": [0, 1, 2, 3],
            "dtype": "float64",
            "bytes_sent": 16,
            "bytes_received": 64,
        }
    ]
    assert (second["measured"]["seconds"], second["measured"]["peak_bytes"]) == (0.0005, 96)


def test_ops_are_chosen_by_their_names() -> None:
    for op in ("aten.mm.default", "mm.default", "mm", "m*"):
        assert [one.record for one in judged(THERE_AND_BACK, DIRECT, op=op).executed] == [DIRECT], op


def test_json() -> None:
    document = json.loads(run_json(judged(DIRECT)))
    (found,) = document["redistributions"]
    assert (found["layouts"], found["bytes"], found["bound"]["bytes"]) == (["S(0)", "R"], 120, 120)


def test_paths_that_became_dearer() -> None:
    short = with_steps(THERE_AND_BACK, ("all_to_all", "(S(2), S(0))"), ("all_gather", "(R, S(0))"))
    text, dearer = diff_text(judged(short, DIRECT), judged(THERE_AND_BACK))
    assert dearer
    assert "DEARER: aten.embedding.default 2x4 float32[1024, 8, 1024] (S(0), S(2)) -> (R, S(0))" in text
    assert "1 in both, 1 became dearer; 0 came, 1 went" in text
    text, dearer = diff_text(judged(THERE_AND_BACK), judged(short))
    assert not dearer
    assert "cheaper: " in text
    assert diff_text(judged(DIRECT), judged(DIRECT))[0].splitlines()[1] == "1 in both, 0 became dearer; 0 came, 0 went"


def test_waste_across_ops_in_a_row_is_summed_by_the_ops() -> None:
    again = with_steps(DIRECT, *DIRECT.steps, explicit=False, by="aten.mul.Tensor", repeats="aten.mul.Tensor")
    undone = with_steps(
        DIRECT,
        ("", "S(0)"),
        source="R",
        target="S(0)",
        explicit=False,
        by="aten.sin.default",
        undoes="aten.cumsum.default",
    )
    run = judged(DIRECT, again, undone)
    assert [(one.text, one.count, one.bytes) for one in waste_across_ops(run.executed)] == [
        ("aten.cumsum.default gathers, and aten.sin.default shards again", 2, 2 * 8 * 15),
        ("aten.mul.Tensor redistributes a tensor twice in the same way", 2, 2 * 8 * 15),
    ]
    text = run_text(run, worst=1, by="op", links=())
    assert "waste across ops in a row, by bytes received in vain times count:" in text
    assert "2 times, 240 B; as aten.mm.default on 4: float64[5] R -> S(0)" in text
    assert text.endswith("and 1 more (--worst)\n")
    assert {one["undoes"] for one in json.loads(run_json(run))["redistributions"]} == {None, "aten.cumsum.default"}


def test_waste_is_what_a_missing_rule_would_save_in_calls_that_differ_in_sizes_alone() -> None:
    call = "self=f[n, n], dim=1"
    missing = make_missing_rule(op="aten.mm.default", input_placements=["S(0)", "R"], calls=[call])
    refused = replace(missing, saves=[], input_placements=["S(0)", "S(0)"])
    rules = make_rules(ops={"mm": make_op_rules(missing=[missing, refused])})
    asked = with_steps(DIRECT, *DIRECT.steps, explicit=False, by=DIRECT.op, given="S(0) small; R", call=call)
    others = [
        replace(asked, call="self=f[n, n], dim=0", tensor="float64[6]"),
        replace(asked, given="S(0); S(0)", tensor="float64[7]"),
        replace(asked, given="", tensor="float64[8]"),
        replace(asked, op="aten.bmm.default", tensor="float64[9]"),
    ]
    run = make_run(graph=GraphRecord([], [], [asked, *others]))
    found = judge_run(run, checked=rules)
    (waste,) = waste_without_rules(found.executed, found.missing)
    assert waste.text == "aten.mm.default lacks S(0), R -> P(sum)"
    assert (waste.count, waste.bytes) == (2, 2 * 8 * 15)
    assert "2 times, 240 B; as aten.mm.default on 4: float64[5] S(0) -> R" in run_text(found, 5, "op", ())
    told = {one["tensor"]: one["missing_rule"] for one in json.loads(run_json(found))["redistributions"]}
    assert {tensor for tensor, rule in told.items() if rule} == {"float64[5]"}
    assert "a rule is missing" not in run_text(judge_run(run), 5, "op", ())
    region = render_html(replace(run, rules=rules)).partition('<h2 id="graph">')[2]
    assert "aten.mm.default lacks S(0), R -&gt; P(sum)" in region


def test_a_run_tells_what_a_flattened_submesh_would_save_and_in_which_dtype_it_reduces() -> None:
    steps = ("all_reduce", "(R, P(sum))"), ("all_reduce", "(R, R)")
    twice = with_steps(THERE_AND_BACK, *steps, source="(P(sum), P(sum))", target="(R, R)", tensor="bfloat16[8, 8]")
    text = run_text(judged(twice), worst=5, by="edge", links=())
    assert "\na flattened submesh of mesh dims 0, 1 of mesh 2x4 would save 3 collectives and 2.2 KiB in 3 redis" in text
    assert "(P(sum), P(sum)) -> (R, P(sum)) all_reduce, bfloat16" in text
    flat = with_steps(twice, *steps, mesh="2x4+flat")
    assert "flattened" not in run_text(judged(flat), worst=5, by="op", links=())
    assert "flattened" not in run_text(judged(DIRECT), worst=5, by="op", links=())
