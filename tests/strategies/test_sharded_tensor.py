"""The legacy kernels for ShardedTensor: where they do as the local op does, where not, and faults that are caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sharded_tensor_calls import COLUMNS, DISCREPANCIES, ROWS, lookup

from strategies.sharded_tensor import FAMILY
from strategies.sharded_tensor.inputs import has_sharded_tensor
from strategies.sharded_tensor.programs import BAG
from strategies.tensors import filled
from verifier.calls.result import Crash, Died, VerificationError, WrongGradient, WrongValue
from verifier.calls.verifier import Verifier
from verifier.campaign import investigation
from verifier.campaign.plan import Plan
from verifier.campaign.recorded import campaign_on_ranks
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.events import Event, FindingReported
from verifier.findings.script.render import render_script, run_script
from verifier.gate.baseline import load_baseline
from verifier.meshes.pool import Pool, PoolSet
from verifier.records.schema import RunHeader
from verifier.records.values import load_trial

BASELINE = Path(__file__).parents[2] / "reports" / "baseline.toml"


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    """Ranks of these tests' own, since some calls end them."""
    pools = PoolSet(lambda key: Pool(key, []))
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def verify_legacy(pools: PoolSet) -> Verifier:
    return Verifier(pools, MeshSpec((2,)))


def verdict_of(verifier: Verifier, case: OpCase) -> VerdictKind:
    tensors = [value for value in (*case.args, *case.kwargs.values()) if isinstance(value, torch.Tensor)]
    try:
        result = verifier(case, placements=["R"] * len(tensors), record=False, allow_nothing=True)
    except VerificationError as error:
        return error.failure.verdict.kind
    (verdict,) = result.verdicts
    return verdict.kind


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("table", [(4, 4), (5, 3), (1, 3), (4, 1)])
@pytest.mark.parametrize("dim", [ROWS, COLUMNS])
def test_lookups_are_those_of_the_local_op(
    verify_legacy: Verifier, dim: int, table: tuple[int, int], order: tuple[int, ...]
) -> None:
    last = table[0] - 1
    case = lookup("embedding", dim, [[0, last], [last, 0]], table=table, order=order, exact=True, padding_idx=last)
    assert verdict_of(verify_legacy, case) is VerdictKind.PASS


@pytest.mark.parametrize(
    "case",
    [
        lookup("embedding_bag", ROWS, [[0, 3], [1, 2]], exact=True, padding_idx=3),
        lookup("embedding_bag", ROWS, [0, 3, 1, 2], exact=True, offsets=[0, 2, 4], include_last_offset=True),
        lookup(
            "embedding_bag", ROWS, [[0, 3], [1, 2]], exact=True, per_sample_weights=filled((2, 2), torch.float64, 3)
        ),
        lookup("embedding_bag", COLUMNS, [[0, 3], [1, 2]], exact=True, mode="max", padding_idx=-1),
        lookup("embedding_bag", COLUMNS, [0, 3, 1, 2], mode="mean", offsets=[0, 0, 2, 2], padding_idx=-1),
        lookup("embedding", ROWS, [0, 3], max_norm=1.0),
        lookup("training", ROWS, [[[0], [1]], [[0], [3]]], exact=True),
        lookup("training", COLUMNS, [[[0], [1]], [[0], [3]]], exact=True, order=(1, 0)),
        lookup("training", ROWS, 3 * [[[0], [3]]], exact=True, padding_idx=3),
        lookup("training", COLUMNS, 3 * [[[0], [3]]], exact=True, padding_idx=-1),
        lookup("training", ROWS, 3 * [[[0], [3]]], max_norm=4.0, norm_type=1.0),
    ],
    ids=lambda case: f"{case.op} {sorted(case.kwargs)}",
)
def test_what_the_kernels_do_as_the_local_op_does(verify_legacy: Verifier, case: OpCase) -> None:
    assert verdict_of(verify_legacy, case) is VerdictKind.PASS


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_discrepancies_of_torch(verify_legacy: Verifier, name: str) -> None:
    case, expected = DISCREPANCIES[name]
    assert verdict_of(verify_legacy, case) is expected


def test_a_group_of_some_ranks_takes_their_numbers_in_it_for_those_in_the_world(verify_legacy: Verifier) -> None:
    """On mesh 2x1 a group has one rank, and the table of rank 1 is on the rank with number 0 in its group."""
    case = lookup("embedding", COLUMNS, [0, 3])
    with pytest.raises(Crash, match="IndexError: list assignment index out of range"):
        verify_legacy(case, mesh="2x1", placements=["(R, R)", "(R, R)"], record=False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dim", [ROWS, COLUMNS])
def test_torch_refuses_shards_that_start_beyond_the_end(verify_legacy: Verifier, dim: int, size: int) -> None:
    """On 3 ranks the last shard of 1 row would start at 2; of 2 rows it starts at the end, and is only empty."""
    case = lookup("embedding", dim, [0, 0, 0], table=(size, 3) if dim == ROWS else (4, size), order=(0, 1, 2))
    if has_sharded_tensor(size, 3):
        assert verify_legacy(case, mesh=3, placements=["R", "R"], record=False).counts == {VerdictKind.PASS: 1}
    else:
        with pytest.raises(Crash, match="ValueError: Shard offset 2 and length 0 exceeds tensor dim: 1"):
            verify_legacy(case, mesh=3, placements=["R", "R"], record=False)


def test_ranks_with_unequal_batches_die(verify_legacy: Verifier) -> None:
    with pytest.raises(Died, match="SIGABRT"):
        verify_legacy(lookup("unequal_batches", ROWS, [0, 3, 1]), placements=["R", "R"], record=False)


def test_ranks_with_bags_of_unequal_numbers_of_ids_die(verify_legacy: Verifier) -> None:
    case = replace(lookup("unequal_batches", ROWS, [0, 3, 1], offsets=[0, 2]), call=BAG)
    with pytest.raises(Died, match="SIGABRT"):
        verify_legacy(case, placements=["R", "R"], record=False)


@pytest.mark.parametrize("dim", [ROWS, COLUMNS])
def test_ids_out_of_range_raise(verify_legacy: Verifier, dim: int) -> None:
    result = verify_legacy(lookup("embedding", dim, [4, 4]), placements=["R", "R"], allow_nothing=True, record=False)
    (observation,) = result.observations
    raised = {report.raised.type for report in observation.reports if report is not None and report.raised is not None}
    assert raised == {"ValueError"}


@pytest.mark.parametrize(
    ("mutant", "case", "caught"),
    [
        ("rows_in_ascending_order", lookup("embedding", ROWS, [0, 3], order=(1, 0)), WrongValue),
        ("columns_in_ascending_order", lookup("embedding", COLUMNS, [0, 3], table=(4, 4), order=(1, 0)), WrongValue),
        ("own_rows_only", lookup("embedding", ROWS, [3, 0]), WrongValue),
        ("doubled_gradient", lookup("embedding_bag", ROWS, [[0, 3], [1, 2]]), WrongGradient),
        ("forgotten_step", lookup("training", ROWS, [[[0], [1]], [[0], [3]]]), WrongValue),
    ],
)
def test_wrong_kernels_are_caught(
    verify_legacy: Verifier, mutant: str, case: OpCase, caught: type[VerificationError]
) -> None:
    assert verdict_of(verify_legacy, case) is VerdictKind.PASS
    with pytest.raises(caught):
        verify_legacy(replace(case, call=f"sharded_tensor_mutants.{mutant}"), placements=["R", "R"], record=False)


@pytest.mark.ranks
def test_a_campaign_finds_a_discrepancy_and_shrinks_its_table_to_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the baseline has of the gradient under max_norm, which nobody has told this campaign."""
    monkeypatch.setattr(investigation, "MINIMISING_LIMIT", 1e6)  # not by how busy the machine is
    op, mesh = "sharded_tensor.embedding.columns", MeshSpec((2,))
    header = RunHeader("run", "", 0, "dev", [FAMILY.name], [str(mesh)], ["float64"], "cpu", 4, None, [], {}, "")
    plan = Plan(
        header, {FAMILY.name: FAMILY}, {FAMILY.name: (op,)}, (mesh,), (torch.float64,), seed=0, max_examples=4,
        combinations=1, time_limit=None,
    )  # fmt: skip
    events: list[Event] = []
    campaign_on_ranks(plan, events.append).run()

    findings = [event.finding for event in events if isinstance(event, FindingReported)]
    finding = next(one for one in findings if one.verdict == VerdictKind.WRONG_GRADIENT)
    assert not finding.known
    assert load_baseline(BASELINE).get(finding.fingerprint) is not None
    case = load_trial(finding.trial).case
    weight, ids, *_ = case.args
    assert isinstance(weight, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    assert finding.minimised
    assert (weight.shape, ids.tolist(), case.kwargs.keys()) == ((1, 1), [0, 0], {"max_norm"})


def test_a_script_has_the_helpers_of_its_program(verify_legacy: Verifier) -> None:
    case, _ = DISCREPANCIES["bag: mean of padding alone, rows"]
    with pytest.raises(WrongValue) as caught:
        verify_legacy(case, placements=["R", "R"], record=False)
    source = render_script(caught.value.failure.trial, caught.value.failure.verdict)
    assert "def chunk_sharded(" in source
    assert "verifier" not in source
    assert run_script(source)[0] == "fails as described"
