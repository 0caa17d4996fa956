"""Synthetic runs for the tests of the writers: several ops and meshes, new and known findings, odd characters."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec

from verifier.records.schema import (
    CaseRecord,
    ConfirmationRecord,
    EdgeRecord,
    FindingRecord,
    GraphRecord,
    KnownRecord,
    MatrixRecord,
    MissingRuleRecord,
    OpRulesRecord,
    PathRecord,
    RulesRecord,
    RunHeader,
    RunRecord,
    TensorRecord,
    TransferRecord,
    TrialRecord,
    UntestedRecord,
    WrongRuleRecord,
)

ODD = "<script>alert('odd & \"quoted\"')</script>"
"""Characters that every writer must show as text and never as markup."""

MARKUP = "[bold]not markup[/bold] :warning:"
"""The same for terminals."""

EMBEDDING = "aten.embedding.default"
BACKWARD = "aten.embedding_dense_backward.default"
RENORM = "aten.embedding_renorm_.default"


def make_header(**changes: object) -> RunHeader:
    header = RunHeader(
        id="2025-01-31T12-30-05-a1b2",
        started="2025-01-31T12:30:05+00:00",
        seed=20250131,
        profile="ci",
        families=["embedding"],
        meshes=["4", "2x2"],
        dtypes=["float64"],
        device="cpu",
        max_examples=50,
        time_limit=120.0,
        imports=[],
        versions={"torch": "2.13.0+cpu", "hypothesis": "6.152.1", "python": "3.11.9", "verifier": "0.1.0"},
        command="python -m verifier run embedding --mesh 4 --mesh 2x2 --seed 20250131",
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def make_finding(
    fingerprint: str = "a1b2c3d4e5",
    op: str = EMBEDDING,
    verdict: str = "WRONG_GRADIENT",
    mesh: str = "4",
    weight: str = "S(0)",
    indices: str = "R",
    **changes: object,
) -> FindingRecord:
    weight_values = TensorRecord(
        "float64", [5, 2], [1.0, -2.0, 3.0, 4.0, 0.0, 12.5, "nan", 7.0, "-inf", 2.0], requires_grad=True, parameter=True
    )
    index_values = TensorRecord("int64", [3], [3, 0, 3])
    case = CaseRecord(
        op=op,
        call="torch.nn.functional.embedding",
        args=[{"tensor": msgspec.to_builtins(index_values)}, {"tensor": msgspec.to_builtins(weight_values)}],
        kwargs={"padding_idx": 3, "scale_grad_by_freq": False},
        family="embedding",
        tags=["uneven shards"],
    )
    message = (
        f"weight.grad row 3: got 0.0, expected 1.7 in {ODD} {MARKUP}\n"
        f"  in {op}(indices=i64[3] {indices}, weight=f64[5, 2] {weight}) on mesh {mesh}, backend gloo\n"
        f"  likely: padding_idx is used as a local row index"
    )
    finding = FindingRecord(
        fingerprint=fingerprint,
        op=op,
        family="embedding",
        verdict=verdict,
        level=2,
        mesh=mesh,
        input_placements={"indices": indices, "weight": weight},
        output_placements=["P(sum)"],
        known=False,
        phase="backward",
        subject="weight.grad",
        dtype="float64",
        rule=f"indices={indices}, weight={weight} -> P(sum)",
        message=message,
        confirmed=ConfirmationRecord("confirmed", "gloo", 4),
        minimised=True,
        occurrences=17,
        trial=TrialRecord(case, mesh, "cpu", [indices, weight], [["R"]], 7),
        script=f'import torch\n\nassert 1 < 2 and "{fingerprint}"  # {ODD}\n',
        script_status="fails as described",
        also=["mesh 2x2, weight=(S(0), R)", "mesh 8, weight=S(0)"],
        cotangent="S(0)",
    )
    return replace(finding, **changes)  # type: ignore[arg-type]


def _placements(mesh_dims: int, tensor_dims: int) -> list[str]:
    one = ["R", *(f"S({dim})" for dim in range(tensor_dims)), "P(sum)", "P(max)"]
    return one if mesh_dims == 1 else [f"({', '.join(pair)})" for pair in itertools.product(one, repeat=mesh_dims)]


def make_matrix(op: str, mesh: str, untried: int = 7) -> MatrixRecord:
    """Return a matrix in which most cells pass, Partial indices are refused, and each ``untried``-th was not tried."""
    mesh_dims = mesh.count("x") + 1
    cells: dict[str, dict[str, dict[str, int]]] = {}
    position = 0
    for row in _placements(mesh_dims, 1):
        for column in _placements(mesh_dims, 2):
            position += 1
            counts = {"PASS": 10 + position % 5}
            if "P(" in row:
                counts = {"UNSUPPORTED": 12}
            elif "P(max)" in column:
                counts = {"PASS": 9, "INCONCLUSIVE": 2}
            elif column.startswith(("S(0)", "(S(0)")) and op == EMBEDDING and "S(0)" not in row:
                counts = {"PASS": 8, "WRONG_GRADIENT": 4}
            if position % untried:
                cells.setdefault(row, {})[column] = counts
    return MatrixRecord(op, mesh, "indices", "weight", cells)


def make_graph() -> GraphRecord:
    edges = [
        EdgeRecord("S(0)", "R", "4", 0, "all_gather", 960_000, 120, {"forward": 100, "gather": 20}),
        EdgeRecord("S(1)", "R", "4", 0, "all_gather", 48_000, 31, {"gather": 31}),
        EdgeRecord("P(sum)", "R", "4", 0, "all_reduce", 7_340_032, 64, {"gather": 64}),
        EdgeRecord("P(sum)", "S(0)", "4", 0, "reduce_scatter", 2_048, 9, {"backward": 9}),
        EdgeRecord("S(0)", "S(1)", "4", 0, "all_to_all", 4_096, 12, {"forward": 12}),
        EdgeRecord("R", "S(0)", "4", 0, "none (local)", 512, 40, {"backward": 40}),
        EdgeRecord("R", "P(sum)", "4", 0, "none (local)", 0, 3, {"backward": 3}),
        EdgeRecord("P(max)", "R", "4", 0, "all_reduce", 128, 5, {"gather": 5}),
    ]
    nodes = {node for edge in edges for node in (edge.source, edge.target)}
    moves = [("S(0)", "R", "all_gather", 30), ("P(sum)", "R", "all_reduce", 14), ("R", "S(0)", "none (local)", 4)]
    for source, target, collective, count in moves:
        for other in ("R", "S(0)", "S(1)", "P(sum)"):
            weight = count + len(other)
            edges.append(
                EdgeRecord(
                    f"({source}, {other})", f"({target}, {other})", "2x2", 0, collective, 64 * weight, weight, {}
                )
            )
            edges.append(
                EdgeRecord(f"({other}, {source})", f"({other}, {target})", "2x2", 1, collective, 32 * weight, count, {})
            )
    nodes |= {node for edge in edges for node in (edge.source, edge.target)}
    back = [("all_gather", "(S(0), R)"), ("all_gather", "(R, R)"), ("", "(R, S(0))")]
    asked = (False, 2, {"forward": 2}, "(S(0), S(1)); R", EMBEDDING)
    paths = [
        PathRecord(EMBEDDING, "2x2", "float64[8, 4]", "(S(0), S(1))", "(R, S(0))", back, *asked),
        PathRecord(BACKWARD, "2x2", "float64[8, 4]", "(S(0), R)", "(R, R)", back[1:2], *asked),
    ]
    return GraphRecord(sorted(nodes), edges, paths)


def make_run(**changes: object) -> RunRecord:
    """Return a finished run with one new finding that is confirmed, one that is not, and one known finding."""
    by_op = {
        EMBEDDING: {"PASS": 301, "WRONG_GRADIENT": 17, "UNSUPPORTED": 40, "INCONCLUSIVE": 6},
        BACKWARD: {"PASS": 120, "WRONG_VALUE": 3, "CRASH": 2},
        RENORM: {"UNSUPPORTED": 64},
    }
    by_mesh = {
        "4": {"PASS": 221, "WRONG_GRADIENT": 12, "UNSUPPORTED": 60, "INCONCLUSIVE": 6, "CRASH": 2},
        "2x2": {"PASS": 200, "WRONG_GRADIENT": 5, "WRONG_VALUE": 3, "UNSUPPORTED": 44},
    }
    counts: dict[str, int] = {}
    for table in by_op.values():
        for verdict, count in table.items():
            counts[verdict] = counts.get(verdict, 0) + count
    findings = [
        make_finding("0f1e2d3c4b", BACKWARD, "CRASH", known=True, reason="pytorch#190063: grad_output S(1) is refused"),
        make_finding(),
        make_finding(
            "beef00cafe",
            BACKWARD,
            "WRONG_VALUE",
            mesh="2x2",
            weight="(S(0), S(0))",
            indices="(R, P(sum))",
            confirmed=ConfirmationRecord("unconfirmed"),
            script_status="not run",
            minimised=False,
            also=[],
        ),
    ]
    run = RunRecord(
        header=make_header(),
        seconds=93.4,
        complete=True,
        trials=sum(counts.values()),
        counts=counts,
        counts_by_op=by_op,
        counts_by_mesh=by_mesh,
        coverage={"uneven shards": 210, "empty shard": 88, "0-d indices": 12, "coincident shapes": 0},
        findings=findings,
        baseline=[
            KnownRecord("0f1e2d3c4b", "known", "still fails"),
            KnownRecord("77aa77aa77", "fixed", "12 trials, none failed"),
            KnownRecord("99bb99bb99", "untested", "no trial in the same class"),
        ],
        untested=[
            UntestedRecord("aten.embedding.default on mesh 2x2x2", "the time limit of 120 s was reached", 128),
            UntestedRecord("aten.embedding_bag.default", f"no family draws it {ODD}", 1),
        ],
        matrices=[make_matrix(op, mesh) for op in (EMBEDDING, BACKWARD) for mesh in ("4", "2x2")],
        graph=make_graph(),
        pool_restarts=2,
        seconds_by={"dispatch": 120.5, "reference": 40.2, "collectives": 88.0, "compare": 31.9, "start of ranks": 9.1},
        inconclusive={"the reference is all zeros": 6},
        unsupported={"DTensor has no strategy for aten.embedding_renorm_": 64, "indices P(sum) <integer>": 40},
    )
    return replace(run, **changes)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- level 1
SUM = "aten.sum.dim_IntList"
RENORMED = "aten.renorm.default"
BY_LEVEL_1 = ConfirmationRecord("confirmed", "gloo", 2)


def make_wrong_rule(fingerprint: str = "5eed5eed01", op: str = RENORMED, **changes: object) -> WrongRuleRecord:
    rule = WrongRuleRecord(
        op=op,
        input_placements=["S(0)"],
        output_placements=["S(0)"],
        mesh="2",
        shapes=[[5, 4]],
        arguments="2.0, -2, 1.0",
        origin=f"renorm, sample 1, dim=-2 for dim=0 {MARKUP}",
        verdict="WRONG_VALUE",
        message=f"output [0, 1]: got 0.5, expected 0.25 {ODD}",
        confirmed=BY_LEVEL_1,
        fingerprint=fingerprint,
        known=False,
        draws=12,
    )
    return replace(rule, **changes)  # type: ignore[arg-type]


def make_missing_rule(number: int = 0, op: str = SUM, **changes: object) -> MissingRuleRecord:
    """Return a missing rule; a higher number saves more."""
    rule = MissingRuleRecord(
        op=op,
        input_placements=[f"S({number})"],
        output_placements=["P(sum)"],
        shapes=[[6, 4]],
        arguments="[0], True",
        origin=f"sum, sample 2 {ODD}",
        draws=24,
        sizes=3,
        world_sizes=[2, 3],
        saves=[TransferRecord(0, "S(0)", "R", "all_gather", 480 + number)],
        collectives_saved=1,
        bytes_saved=480 + number,
    )
    return replace(rule, **changes)  # type: ignore[arg-type]


def make_op_rules(**changes: object) -> OpRulesRecord:
    """Return an op whose tried rules are all confirmed."""
    op = OpRulesRecord(
        overloads=[SUM],
        samples=8,
        combinations=1480,
        runs=2220,
        confirmed=[f"{SUM}: S({dim}) -> S({dim})" for dim in range(3)],
        wrong=[],
        unconfirmed=[],
        missing=[],
        special=[],
        inconclusive=[],
        untested={},
        not_testable={},
        died=[],
        seconds=0.84,
    )
    return replace(op, **changes)  # type: ignore[arg-type]


def make_rules(**changes: object) -> RulesRecord:
    """Return the rule check of five ops: wrong, missing, untested, not testable, and one without findings."""
    unsure = make_wrong_rule("", confirmed=ConfirmationRecord("unconfirmed", why="gloo cannot run it"), op=SUM)
    refused = make_missing_rule(1, saves=[], collectives_saved=0, bytes_saved=0)
    ops = {
        "renorm": make_op_rules(
            overloads=[RENORMED],
            confirmed=[f"{RENORMED}: R -> R"],
            wrong=[make_wrong_rule(), make_wrong_rule("5eed5eed02", known=True, mesh="2x2")],
            untested={"the local call raises": 12, "DIED: it ended the process": 1},
            died=["renorm, sample 3: SIGSEGV: double free or corruption"],
        ),
        "sum": make_op_rules(
            unconfirmed=[unsure],
            missing=[make_missing_rule(), refused],
            special=[make_wrong_rule("", SUM, confirmed=ConfirmationRecord("not tried", why="special values"))],
            inconclusive=[f"{SUM}: P(max) -> P(max)"],
        ),
        "mean": make_op_rules(overloads=["aten.mean.dim"], missing=[make_missing_rule(2, "aten.mean.dim", samples=3)]),
        "bernoulli": make_op_rules(
            overloads=["aten.bernoulli.default"],
            combinations=0,
            confirmed=[],
            untested={"it draws random numbers": 4},
            not_testable={"aten.bernoulli.default": "it draws random numbers"},
        ),
        "neg": make_op_rules(overloads=["aten.neg.default"], confirmed=["aten.neg.default: S(0) -> S(0)"]),
    }
    rules = RulesRecord(
        combinations=sum(op.combinations for op in ops.values()),
        seconds=4.0,
        seconds_starting=1.5,
        seconds_confirming=2.5,
        jobs=2,
        meshes=["2", "3", "2x2"],
        dtype="float64",
        sizes=3,
        claims_only=False,
        ops=ops,
    )
    return replace(rules, **changes)  # type: ignore[arg-type]


def make_rules_finding(fingerprint: str = "5eed5eed01", **changes: object) -> FindingRecord:
    values = {"mesh": "2", "family": "opinfo", "level": 1, "confirmed": BY_LEVEL_1, **changes}
    return make_finding(fingerprint, RENORMED, "WRONG_VALUE", **values)  # type: ignore[arg-type]


def make_rules_run(rules: RulesRecord | None = None, **changes: object) -> RunRecord:
    """Return a run of level 1 with one new and one known finding."""
    checked = rules if rules is not None else make_rules()
    values: dict[str, object] = {
        "header": make_header(
            id="2025-02-01T08-00-00-c3d4",
            started="2025-02-01T08:00:00+00:00",
            profile="rules",
            families=["opinfo"],
            meshes=checked.meshes,
            time_limit=None,
            command="python -m verifier rules",
        ),
        "seconds": 8.5,
        "trials": 9,
        "counts": {"PASS": 6, "WRONG_VALUE": 2, "INCONCLUSIVE": 1},
        "counts_by_op": {
            SUM: {"PASS": 3, "INCONCLUSIVE": 1},
            RENORMED: {"PASS": 1, "WRONG_VALUE": 2},
            "aten.mean.dim": {"PASS": 1},
            "aten.neg.default": {"PASS": 1},
        },
        "findings": [
            make_rules_finding(),
            make_rules_finding("5eed5eed02", known=True, reason="pytorch#1", mesh="2x2"),
        ],
        "untested": [UntestedRecord("combinations at level 1", "the local call raises", 12)],
        "rules": checked,
    }
    return make_empty_run(**(values | changes))


def make_empty_run(**changes: object) -> RunRecord:
    """Return a run in which nothing was tried."""
    empty: dict[str, object] = {
        "trials": 0,
        "counts": {},
        "counts_by_op": {},
        "counts_by_mesh": {},
        "coverage": {},
        "findings": [],
        "baseline": [],
        "untested": [],
        "matrices": [],
        "graph": GraphRecord([], []),
        "pool_restarts": 0,
        "seconds_by": {},
        "inconclusive": {},
        "unsupported": {},
        "seconds": 0.4,
    }
    return make_run(**(empty | changes))


def make_long_run(findings: int = 120) -> RunRecord:
    """Return a run with many new findings."""
    return make_run(findings=[make_finding(f"{number:010x}") for number in range(findings)])
