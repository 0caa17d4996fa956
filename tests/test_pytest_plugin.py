"""The plugin: what ``verify`` raises and returns, and what a session leaves in the run store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import newest, run_session
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import embedding

from verifier.calls.result import ERRORS, Crash, NothingVerified, ToolError, VerificationError
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import Phase, VerdictKind
from verifier.events import CaseSkipped, Event, TrialFinished
from verifier.findings.failures import Failure
from verifier.meshes.pool import Pool, PoolSet
from verifier.runs.store import RunStore

MESH = MeshSpec((2,))
WEIGHT = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0], [7.0, 8.0]], dtype=torch.float64)
IDS = torch.tensor([3, 0, 2])
THREE = "3"
"""Three ranks cut four rows 2, 2, 0: on such a table torch 2.13 crashes when it is cut by rows."""


class Log:
    """Keeps what a verifier tells its recorder."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.failures: list[tuple[Failure, bool]] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def failed(self, failure: Failure, *, raised: bool) -> None:
        self.failures.append((failure, raised))


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    pools = PoolSet(Pool)
    yield pools
    pools.close()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def check(pools: PoolSet, log: Log) -> Verifier:
    """Like the fixture ``verify``, on two ranks, with a recorder that can be looked at."""
    return Verifier(pools, MESH, recorder=log)


# -------------------------------------------------------------------------------------------------------------- result
def test_every_combination_is_tried_forward_and_backward(check: Verifier, log: Log) -> None:
    weight = WEIGHT.clone().requires_grad_()
    result = check(torch.ops.aten.embedding.default, weight, IDS, exact=True, cap=None)
    assert result.total == len(result.observations) == 8 * 6
    assert result.counts == {VerdictKind.PASS: 48}
    assert result.case.op == "aten.embedding.default"
    assert result.describe() == "aten.embedding.default on mesh 2: all 48 combinations: 48 PASS"
    assert len({tuple(combination.items()) for combination in result.combinations}) == 48
    assert result.combinations[0] == {"weight": "R", "indices": "R"}
    assert {"R", "MaskP(sum)", "S(0)", "S(1)"} <= set(result.placements())
    assert len(result.placements("weight.grad 2")) == 48
    assert sum(isinstance(event, TrialFinished) for event in log.events) == 48


def test_a_sample_says_what_it_leaves_out(check: Verifier, log: Log) -> None:
    result = check(embedding, IDS, WEIGHT, cap=10)
    assert result.describe().startswith("torch.nn.functional.embedding on mesh 2: sampled 10 of 48 combinations")
    (skipped,) = [event for event in log.events if isinstance(event, CaseSkipped)]
    assert (skipped.what, skipped.count) == ("torch.nn.functional.embedding on mesh 2", 38)
    assert skipped.reason.startswith("combinations beyond this profile's budget")


def test_what_torch_has_no_gradient_of_is_said(check: Verifier, log: Log) -> None:
    numbers = torch.tensor([1.5, 2.5, 4.0, 7.0])
    result = check(torch.floor_divide, numbers.requires_grad_(), torch.tensor([2.0, 1.0, 3.0, 2.0]), cap=None)
    assert result.counts[VerdictKind.PASS] > 3
    assert not any(observation.trial.cotangents for observation in result.observations)
    (skipped,) = [event for event in log.events if isinstance(event, CaseSkipped)]
    assert skipped.count == len(result.observations)
    assert skipped.reason == "no backward pass: derivative for aten::floor_divide is not implemented"


@pytest.mark.parametrize(
    "placements",
    [
        ["R", "S(0)"],
        [Replicate(), Shard(0)],
        [("R",), (Shard(0),)],
        {"weight": "S(0)"},
        {"weight": Shard(0), "input": "R"},
    ],
)
def test_placements_can_be_spelled_in_many_ways(check: Verifier, placements: Any) -> None:
    result = check(embedding, IDS, WEIGHT, placements=placements, exact=True, trace=True)
    assert result.combinations == [{"input": "R", "weight": "S(0)"}]
    assert result.placements() == ["MaskP(sum)"]
    assert result.collectives(Phase.FORWARD) == {}
    assert result.collectives("gather") == result.collectives() == {"all_reduce": 1}
    assert [step.collective for step in result.redistributions("gather")] == ["all_reduce"]


def test_cotangents_can_be_given(check: Verifier) -> None:
    weight = WEIGHT.clone().requires_grad_()
    result = check(embedding, IDS, weight, placements=["S(0)", "R"], cotangents=["S(0)", Shard(1)])
    assert [len(o.trial.cotangents) for o in result.observations] == [2]
    assert len(result.placements("weight.grad 1")) == 1
    forward = check(embedding, IDS, weight, placements=["S(0)", "R"], cotangents=None)
    with pytest.raises(ValueError, match=r"no trial has a 'weight.grad 0'; there are 'output'"):
        forward.placements("weight.grad 0")


def test_a_mesh_can_be_simulated(check: Verifier) -> None:
    result = check("aten.mm", WEIGHT, WEIGHT.t().contiguous(), mesh="simulated:2x2", cap=12)
    assert str(result.mesh) == "simulated:2x2"
    assert VerdictKind.PASS in result.counts


def test_an_error_must_be_raised_by_both(check: Verifier) -> None:
    beyond = torch.tensor([9])
    with pytest.raises(IndexError):
        check(embedding, beyond, WEIGHT)
    result = check(embedding, beyond, WEIGHT, placements=["R", "S(1)"], raises=True)
    assert result.counts == {VerdictKind.PASS: 1}
    with pytest.raises(VerificationError, match="expected IndexError"):
        check(embedding, beyond, WEIGHT, placements=["R", "S(0)"], raises=True)
    with pytest.raises(ValueError, match="does not raise"):
        check(embedding, IDS, WEIGHT, raises=True)


# ----------------------------------------------------------------------------------------------------------- exceptions
def test_every_bad_verdict_has_an_exception_of_its_own() -> None:
    of_rules = {VerdictKind.STALE_CACHE, VerdictKind.SPECIAL_VALUE}  # the rule check alone gives these verdicts
    assert set(ERRORS) == {kind for kind in VerdictKind if kind.bad} - of_rules
    assert len(set(ERRORS.values())) == len(ERRORS)
    for kind, error in ERRORS.items():
        assert error.__name__ == "".join(word.capitalize() for word in kind.split("_"))
        assert issubclass(error, AssertionError)
    assert not issubclass(ToolError, AssertionError)
    assert not issubclass(NothingVerified, VerificationError)


def test_the_message_leads_with_the_difference(check: Verifier, log: Log) -> None:
    combinations = [["R", "R"], ["R", "S(0)"], ["S(0)", "S(0)"]]
    with pytest.raises(Crash) as caught:
        check(embedding, IDS, WEIGHT, combinations=combinations, mesh=THREE)
    first, call, *_, last = str(caught.value).splitlines()
    assert first.startswith("rank 2 raised RuntimeError: index_select()")
    assert call.startswith("  in torch.nn.functional.embedding(input=i64[3] R, weight=f64[4, 2] S(0)) on mesh (3,)")
    assert last.startswith("  reproduce: python -m verifier replay ")
    assert log.failures[0] == (caught.value.failure, True)
    assert not any(raised for _, raised in log.failures[1:])


def test_what_is_not_recorded_leaves_no_trace(check: Verifier, log: Log) -> None:
    with pytest.raises(Crash) as caught:
        check(embedding, IDS, WEIGHT, placements=["R", "S(0)"], mesh=THREE, record=False)
    assert "reproduce" not in str(caught.value)
    assert log.events == []
    assert log.failures == []


def test_nothing_verified_is_a_failure_unless_allowed(check: Verifier) -> None:
    with pytest.raises(NothingVerified, match="1 UNSUPPORTED; UNSUPPORTED: NotImplementedError"):
        check(embedding, IDS, WEIGHT, max_norm=1.0, placements=["R", "S(1)"])
    with pytest.raises(NothingVerified, match="INCONCLUSIVE: every output is empty"):
        check(embedding, IDS[:0], WEIGHT, placements=["R", "R"])
    allowed = check(embedding, IDS[:0], WEIGHT, placements=["R", "R"], allow_nothing=True)
    assert allowed.counts == {VerdictKind.INCONCLUSIVE: 1}


@pytest.mark.ranks
def test_ranks_that_do_not_start_are_an_error_of_the_tool() -> None:
    pools = PoolSet(lambda key: Pool(key, ["no_such_module_here"]))
    with pytest.raises(ToolError, match="no_such_module_here"):
        Verifier(pools, MESH)(embedding, IDS, WEIGHT, placements=["R", "R"])
    pools.close()


def not_importable(x: torch.Tensor) -> torch.Tensor:
    return x


not_importable.__qualname__ = "somewhere.else"


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((not_importable, WEIGHT), {}, "the ranks cannot import"),
        (("torch.nn.functional.embeding", IDS, WEIGHT), {}, "has no attribute 'embeding'"),
        ((torch.add, 1, 2), {}, "without a tensor"),
        ((torch.mm, WEIGHT, WEIGHT.to_sparse()), {}, "cannot be sharded: sparse"),
        ((embedding, IDS, WEIGHT), {"placements": {"weigth": "R"}}, "did you mean 'weight'"),
        ((embedding, IDS, WEIGHT), {"placements": ["R"]}, r"1 entry for 2 tensors \(input, weight\)"),
        ((embedding, IDS, WEIGHT), {"placements": ["S(1)", "R"]}, r"input: S\(1\) is none of R, S\(0\), P\(sum\)"),
        ((embedding, IDS, WEIGHT), {"placements": ["P(avg)", "R"]}, r"input: P\(avg\) is none of"),
        ((embedding, IDS, WEIGHT), {"placements": ["R", "Q"]}, "placement 'Q' is none of"),
        ((embedding, IDS, WEIGHT), {"placements": ["R", "R"], "mesh": "2x2"}, "1 placement for the 2 mesh dims"),
        ((embedding, IDS, WEIGHT), {"placements": ["R", ("P(sum)", "P(max)")], "mesh": "2x2"}, "1 placement |mixes"),
        ((embedding, IDS, WEIGHT), {"placements": ["R", "R"], "combinations": []}, "not both"),
        ((embedding, IDS, WEIGHT), {"combinations": []}, "nothing to try"),
        ((embedding, IDS, WEIGHT), {"cotangents": ["R"]}, "no argument requires a gradient"),
        ((embedding, IDS, WEIGHT), {"mesh": "2by2"}, "is not a shape"),
        ((OpCase("op", "torch.neg", (WEIGHT,)), WEIGHT), {}, "has its own arguments"),
    ],
)
def test_a_mistake_is_named(check: Verifier, arguments: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(*arguments, **options)


# ------------------------------------------------------------------------------------------------------------ sessions
SESSION = """
    import pytest
    import torch
    from hypothesis import given, strategies as st
    from torch.nn.functional import embedding
    from verifier.calls.result import Crash

    WEIGHT = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)

    @pytest.mark.parametrize("placements", [("R", "R"), ("R", "S(1)"), ("S(0)", "R")])
    def test_good(verify, placements):
        verify(embedding, torch.tensor([3, 0, 2]), WEIGHT, placements=placements)

    @given(rows=st.integers(1, 6), columns=st.integers(1, 3), count=st.integers(1, 5))
    def test_bad(verify, rows, columns, count):
        weight = torch.arange(1.0, rows * columns + 1, dtype=torch.float64).reshape(rows, columns)
        ids = torch.arange(count) % rows
        verify(embedding, ids, weight, placements=["R", "S(0)"], allow_nothing=True)

    def test_wrong_on_purpose(verify):
        with pytest.raises(Crash):
            verify(torch.ops.aten.embedding.default, WEIGHT, torch.tensor([0, 1]), placements=["S(0)", "R"],
                   record=False)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "folder", "told"),
    [((), "reports", ""), (("-n", "2", "--verifier-out=nights"), "nights", " --out nights")],
    ids=["alone", "under xdist, elsewhere"],
)
def test_a_session_is_recorded(pytester: pytest.Pytester, options: tuple[str, ...], folder: str, told: str) -> None:
    pytester.makepyfile(SESSION)
    result = run_session(pytester, "--hypothesis-profile=ci", "--verifier-seed=7", "--verifier-mesh=3", *options)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*Crash: rank 2 raised RuntimeError: index_select()*",
            "*= verifier =*",
            "* trials: *; 1 finding",
            f"recorded as *; to see it: python -m verifier report{told}",
        ]
    )
    run = newest(pytester, folder)
    assert f"  reproduce: python -m verifier replay {run.findings[0].fingerprint}{told}\n" in str(result.stdout) + "\n"
    assert run.complete
    assert (run.header.seed, run.header.profile, run.header.meshes) == (7, "ci", ["3"])
    assert run.header.command.startswith("pytest ")
    assert set(run.counts_by_op) == {"torch.nn.functional.embedding"}  # nothing that was not to be recorded
    assert sum(run.counts.values()) == run.trials
    assert run.counts["PASS"] >= 3
    (finding,) = run.findings
    assert (finding.verdict, finding.mesh, finding.known) == ("CRASH", "3", False)
    assert finding.input_placements == {"input": "R", "weight": "S(0)"}
    assert finding.confirmed.text == "confirmed on gloo, 3 ranks"
    assert finding.minimised
    assert finding.script_status == "fails as described"
    shapes = [argument["tensor"]["shape"] for argument in finding.trial.case.args]
    assert shapes == [[1], [4, 1]]  # one id, and the fewest rows that leave a rank without one
    assert [edge.collective for edge in run.graph.edges]
    assert RunStore(pytester.path / folder).path(run.header.id, "graph.graphml").is_file()


@pytest.mark.processes
def test_a_known_finding_is_recorded_as_known(pytester: pytest.Pytester) -> None:
    from datetime import UTC, datetime

    from verifier.gate.baseline import Baseline

    pytester.makepyfile(SESSION)
    run_session(pytester, "-k", "bad", "--hypothesis-profile=ci", "--verifier-mesh=simulated:3")
    first = newest(pytester)
    baseline = Baseline().updated([first], datetime.now(UTC).date())
    baseline.save(pytester.path / "reports" / "baseline.toml")
    run_session(pytester, "-k", "bad", "--hypothesis-profile=ci", "--verifier-mesh=simulated:3")
    second = newest(pytester)
    assert second.header.id != first.header.id
    assert [finding.known for finding in second.findings] == [True]
    assert [finding.confirmed.text for finding in second.findings] == ["unconfirmed: ranks were simulated"]
    assert [(known.fingerprint, known.status) for known in second.baseline] == [
        (first.findings[0].fingerprint, "known")
    ]


@pytest.mark.processes
def test_other_sessions_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_heavy_is_imported():
            heavy = {"torch", "hypothesis", "networkx", "msgspec", "verifier.core.case"}
            assert heavy & set(sys.modules) == set()
        """
    )
    result = run_session(pytester, forked=False)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*verifier*trials*")
    assert not (pytester.path / "reports").exists()


@pytest.mark.processes
def test_profiles_are_there_by_name_and_the_users_own_win(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import settings

        def test_profile():
            assert settings.get_current_profile_name() == "nightly"
            assert settings.default.max_examples == 2000
            assert settings.default.deadline is None
        """
    )
    run_session(pytester, "--hypothesis-profile=nightly").assert_outcomes(passed=1)
    pytester.makeconftest(
        "from hypothesis import settings\nsettings.register_profile('nightly', max_examples=2000, deadline=None)\n"
        "OWN = settings.get_profile('nightly')\n"
    )
    pytester.makepyfile(
        """
        from conftest import OWN
        from hypothesis import settings

        def test_profile():
            assert settings.default == OWN
        """
    )
    run_session(pytester, "--hypothesis-profile=nightly").assert_outcomes(passed=1)


@pytest.mark.processes
def test_meshes_of_the_command_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_all(mesh):
            assert str(mesh) in ("simulated:4", "simulated:2x2")

        @pytest.mark.parametrize("mesh", ["gloo:3", "2x2"], indirect=True)
        def test_named(mesh):
            assert mesh.shape in ((3,), (2, 2))

        def test_default(verify):
            assert str(verify.default_mesh) == "simulated:4"
        """
    )
    meshes = ("--verifier-mesh=4", "--verifier-mesh=2x2")
    run_session(pytester, *meshes, "--verifier-backend=simulated").assert_outcomes(passed=5)
    assert not (pytester.path / "reports").exists()  # the fixture was used, but never called
    result = run_session(pytester, "--verifier-mesh=2by2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--verifier-mesh: mesh '2by2' is not a shape*"])


def test_a_run_of_a_lost_worker_is_incomplete(tmp_path: Path, check: Verifier) -> None:
    from verifier.calls.session import SessionRecord, store_session

    assert SessionRecord("pytest").record(complete=True) is None
    record = SessionRecord("pytest")
    Verifier(check.pools, MESH, recorder=record)(embedding, IDS, WEIGHT, placements=["R", "S(1)"])
    run = record.record(complete=True)
    assert run is not None
    assert run.complete
    store = RunStore(tmp_path)
    stored = store_session([run, replace(run)], store, complete=False)
    assert not stored.complete
    assert stored.trials == 2
    assert store.newest() == stored
