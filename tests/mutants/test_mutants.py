"""Rules that are wrong on purpose are caught, each by the right verdict, and the true rules pass the same check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import embedding_mutants
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from strategies.embedding import FAMILY
from strategies.embedding.inputs import BACKWARD, EMBEDDING, LOOKUP
from verifier.calls.result import Crash, VerificationError, WrongGradient, WrongShape, WrongValue
from verifier.calls.verifier import Verifier
from verifier.campaign.plan import Plan
from verifier.campaign.recorded import campaign_on_ranks
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.events import Event, FindingReported
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.tasks import Task
from verifier.planning.budgets import CAMPAIGN_PROFILES
from verifier.planning.families import DrawContext
from verifier.records.schema import FindingRecord, RunHeader

MESH = MeshSpec((2,))
CI = CAMPAIGN_PROFILES["ci"]
COMBINATIONS = CI.combinations_per_case // 4  # a quarter of the budget is plenty

# Rules of torch itself fail on these, so that the true rules would, too.
DEFECTIVE = frozenset(
    {"scale_grad_by_freq", "sparse", "max_norm", "out-of-range ids", "empty shard", "size-0 table", "one-row table"}
)

MUTANTS: dict[Callable[[], None], tuple[type[VerificationError], ...]] = {
    embedding_mutants.output_shard_on_wrong_dim: (WrongShape,),
    embedding_mutants.partial_where_replicated: (WrongValue,),
    embedding_mutants.replicated_where_partial: (WrongValue,),
    embedding_mutants.missing_mask: (Crash, WrongValue),  # an id beyond the shard crashes, one within reads a wrong row
    embedding_mutants.wrong_offset: (Crash, WrongValue),
    embedding_mutants.gradient_not_reduced: (WrongGradient,),
    embedding_mutants.gradient_shard_on_wrong_dim: (WrongGradient,),
    embedding_mutants.gradient_averaged: (WrongGradient,),
}
SUBJECT = {embedding_mutants.true_rules, embedding_mutants.row_wise, embedding_mutants.masked}


def plain(case: OpCase) -> bool:
    """Leave out what fails under true rules as well, and lookups of nothing, which pass under wrong ones."""
    return case.call == LOOKUP and not case.tags & (DEFECTIVE | {"empty indices"})


LOOKUPS = FAMILY.cases(DrawContext(MESH, (torch.float64,), (EMBEDDING,))).filter(plain)


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    """Ranks that all tests here share, and no others, since they have rules that are wrong for a while."""
    pools = PoolSet(Pool)
    yield pools
    pools.close()


@pytest.fixture
def verify_under(pools: PoolSet) -> Iterator[Callable[[Callable[[], None]], Verifier]]:
    """Return a function that makes a verifier whose ranks have registered a set of rules."""

    def call(task: str, *args: str) -> None:
        outcome = pools.of(MESH).call(Task(f"rules_in_ranks.{task}", args, MESH))
        assert outcome.ok, outcome

    def make(rules: Callable[[], None]) -> Verifier:
        call("register", f"{rules.__module__}.{rules.__name__}")
        return Verifier(pools, MESH)

    yield make
    call("take_back")


def explore(verify: Verifier, max_examples: int = CI.max_examples) -> Counter[VerdictKind]:
    """Verify drawn lookups, as many as a campaign of the profile ci draws; return the number of trials by verdict."""
    counts: Counter[VerdictKind] = Counter()

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=LOOKUPS)
    def check(case: OpCase) -> None:
        counts.update(verify(case, cap=COMBINATIONS, allow_nothing=True).counts)

    check()
    return counts


def test_true_rules_pass(verify_under: Callable[[Callable[[], None]], Verifier]) -> None:
    counts = explore(verify_under(embedding_mutants.true_rules))
    assert set(counts) <= {VerdictKind.PASS, VerdictKind.INCONCLUSIVE}
    assert counts[VerdictKind.PASS] >= 10 * counts[VerdictKind.INCONCLUSIVE]
    assert counts[VerdictKind.PASS] > CI.max_examples


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Callable[[], None], verify_under: Callable[[Callable[[], None]], Verifier]) -> None:
    expected = MUTANTS[mutant]
    with pytest.raises(VerificationError) as caught:
        explore(verify_under(mutant), 3 * CI.max_examples)  # it ends at the first that fails
    assert isinstance(caught.value, expected), caught.value
    assert caught.value.failure.verdict.kind is caught.value.kind


def test_every_mutant_is_tried() -> None:
    functions = {f for name, f in vars(embedding_mutants).items() if callable(f) and name.islower() and name[0] != "_"}
    own = {f for f in functions if getattr(f, "__module__", "") == embedding_mutants.__name__}
    assert own == set(MUTANTS) | SUBJECT


def test_failures_of_different_kinds_shrink_apart(
    verify_under: Callable[[Callable[[], None]], Verifier],
) -> None:
    verify = verify_under(embedding_mutants.missing_mask)

    @settings(
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=LOOKUPS)
    def check(case: OpCase) -> None:
        verify(case, combinations=[{"weight": "S(0)"}], cotangents=None, allow_nothing=True)

    with pytest.raises(BaseExceptionGroup) as caught:
        check()
    smallest = {type(e): e.failure.trial.case for e in caught.value.exceptions if isinstance(e, VerificationError)}
    assert set(smallest) == {Crash, WrongValue}
    for case in smallest.values():
        weight, indices = case.kwargs["weight"], case.kwargs["input"]
        assert isinstance(weight, torch.Tensor)
        assert isinstance(indices, torch.Tensor)
        assert (tuple(weight.shape), indices.numel()) == ((2, 1), 1)  # a row for each rank, and one id


@pytest.mark.ranks
def test_campaign_reports_a_mutant_as_a_finding() -> None:
    mutant = embedding_mutants.gradient_not_reduced
    imports = (f"{mutant.__module__}.{mutant.__name__}",)
    header = RunHeader(
        "run", "", 0, CI.name, [FAMILY.name], [str(MESH)], ["float64"], "cpu", 4, 40.0, list(imports), {}, ""
    )
    plan = Plan(
        header,
        {FAMILY.name: FAMILY},
        {FAMILY.name: (BACKWARD,)},
        (MESH,),
        (torch.float64,),
        seed=0,
        max_examples=4,
        combinations=COMBINATIONS,
        time_limit=400.0,
        imports=imports,
    )
    findings: dict[str, FindingRecord] = {}

    def listen(event: Event) -> None:
        if isinstance(event, FindingReported):
            findings[event.finding.fingerprint] = event.finding

    campaign_on_ranks(plan, listen).run()
    assert findings
    for finding in findings.values():
        assert finding.verdict == VerdictKind.WRONG_VALUE
        assert finding.minimised
        assert finding.script_status == "fails as described"  # it has the mutant; torch's own rule is right
        assert "S(" in " ".join(finding.input_placements.values())
        assert not finding.known
