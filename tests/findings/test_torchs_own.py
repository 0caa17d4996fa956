"""Remedies that are about no rule mend no mistake of a rule."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from run_factory import make_finding
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch_versions import needs_torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.execution.imports import run_file
from verifier.findings.torchs_own import mended_beside_rules
from verifier.gate.baseline import load_baseline
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FindingRecord, TrialRecord
from verifier.records.values import load_trial, trial_record

pytestmark = pytest.mark.ranks

CAUSES = load_baseline(Path(__file__).resolve().parents[2] / "reports" / "baseline.toml").causes
WRONG = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


@register_single_dim_strategy(torch.ops.aten.exp.default)
def exp(op, args, kwargs):
    return [[Partial(), Partial()]]

@register_single_dim_strategy(torch.ops.aten.neg.default)
def neg(op, args, kwargs):
    return [[Partial("product"), Partial("product")]]
"""


LERP = """
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

@register_single_dim_strategy(torch.ops.aten.lerp.Scalar, schema_info=RuntimeSchemaInfo(2))
def lerp(op, args, kwargs):
    return [[Partial(OUTPUT), Partial(), Partial()]]
"""


SIN = """
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import register_op_strategy

def rules(op, args, kwargs):
    return [[Shard(0), Shard(0), Shard(0)]]

def none(schema):
    return OpStrategy([])
"""
FOR_ONE_MESH_DIM = SIN + "register_single_dim_strategy(torch.ops.aten.sin.out)(rules)"
THAT_LISTS_NONE = SIN + "register_op_strategy(torch.ops.aten.sin.out)(none)"


KEYWORD = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

LIBRARY = torch.library.Library("torchs_own", "FRAGMENT")
LIBRARY.define("weighted(Tensor x, *, Tensor w) -> Tensor")
LIBRARY.impl("weighted", lambda x, *, w: (x * w).sum(-1), "CompositeExplicitAutograd")

@register_single_dim_strategy(torch.ops.torchs_own.weighted.default)
def weighted(op, args, kwargs):
    return [[OUTPUT, Shard(1), Shard(0)]]
"""


TRACKED = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

LIBRARY = torch.library.Library("torchs_own", "FRAGMENT")
LIBRARY.define("tracked(Tensor x, Tensor(a!) m) -> Tensor")

def tracked(x, m):
    m.add_(x.sum(1))
    return x * 2

LIBRARY.impl("tracked", tracked, "CompositeExplicitAutograd")

@register_sharding(torch.ops.torchs_own.tracked.default)
def rules(x, m):
    return [([Replicate()], [Replicate(), Replicate()]), ([OUTPUT], [Shard(0), Shard(0)])]
"""


LISTED = """
import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

LIBRARY = torch.library.Library("torchs_own", "FRAGMENT")
LIBRARY.define("listed(Tensor[] xs, Tensor(a!)[] ms) -> Tensor")

def listed(xs, ms):
    ms[0].add_(xs[0].sum(1))
    return xs[1] * 2

LIBRARY.impl("listed", listed, "CompositeExplicitAutograd")

@register_single_dim_strategy(torch.ops.torchs_own.listed.default, schema_info=RuntimeSchemaInfo(needs_pytree=True))
def rules(op, args, kwargs):
    return [[OUTPUT, Shard(0), Shard(0), Shard(0)]]
"""
NOISE = """
import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

@register_single_dim_strategy(torch.ops.aten.rrelu_with_noise.default)
def rules(op, args, kwargs):
    return [[OUTPUT, Shard(0), Shard(0)]]
"""


KEPT = """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

@torch.library.custom_op("torchs_own::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]

@kept.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())

register_sharding(kept._opoverload)(lambda x: [([Replicate()], [Replicate()])])
"""


def known(remedy: str, fingerprint: str) -> FindingRecord:
    (cause,) = (one for one in CAUSES if one.remedy == remedy)
    trial = msgspec.json.decode(cause.replay, type=TrialRecord)
    return make_finding(fingerprint, op=cause.op, verdict=cause.verdict, trial=trial)


def of_import(fingerprint: str, op: str, placement: Placement) -> FindingRecord:
    case = OpCase(f"aten.{op}.default", f"torch.ops.aten.{op}.default", (torch.tensor([1.0, 2.0, 3.0]),), {}, "opinfo")
    trial = Trial(case, MeshSpec((2,)), ((placement,),))
    return make_finding(fingerprint, op=case.op, verdict="WRONG_VALUE", trial=trial_record(trial))


def test_only_a_remedy_that_concerns_any_op_mends() -> None:
    findings = [
        known("complex-products-scattered", "a000"),
        known("placements-in-place", "b000"),
        known("products-divided-for-sums", "c000"),
        of_import("d000", "relu", Shard(0)),
    ]
    mended = {"a000": "complex-products-scattered", "c000": "products-divided-for-sums"}
    assert mended_beside_rules(findings, (), ()) == mended


def test_what_looks_as_if_a_rule_had_caused_it_is_mended_by_no_remedy_that_refuses() -> None:
    findings = [known("complex-products-scattered", "a000"), known("products-divided-for-sums", "c000")]
    assert mended_beside_rules((), findings, ()) == {"c000": "products-divided-for-sums"}


def test_wrong_rules_are_not_mended(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(WRONG)
    wrong = [of_import("a000", "exp", Partial()), of_import("b000", "neg", Partial("product"))]
    right = of_import("c000", "exp", Replicate())
    with closing(PoolSet(lambda key: Pool(key, [str(file)]))) as pools:
        trials = [load_trial(one.trial) for one in (*wrong, right)]
        kinds = [judge(pools.run_alone(trial), make_reference(trial.case)).kind for trial in trials]
    assert kinds == [VerdictKind.WRONG_VALUE, VerdictKind.WRONG_VALUE, VerdictKind.PASS]
    assert mended_beside_rules([*wrong, right], (), [str(file)]) == {}
    assert mended_beside_rules((), wrong, [str(file)]) == {}


@pytest.mark.parametrize(("output", "mended"), [("sum", {"a000": "products-divided-for-sums"}), ("avg", {})])
def test_a_redistribution_that_a_right_rule_asks_for_is_mended_and_a_wrong_rule_beside_it_is_not(
    tmp_path: Path, output: str, mended: dict[str, str]
) -> None:
    """From ``(R, P(product))`` to ``(P(sum), R)`` torch divides the factors of the product."""
    file = tmp_path / "rules.py"
    file.write_text(LERP.replace("OUTPUT", repr(output)))
    values = torch.arange(1.0, 6.0), torch.arange(2.0, 7.0)
    case = OpCase("aten.lerp.Scalar", "torch.ops.aten.lerp.Scalar", (*values, 0.5), {}, "opinfo")
    trial = Trial(case, MeshSpec((2, 2)), ((Replicate(), Partial("product")), (Partial(), Replicate())))
    finding = make_finding("a000", op=case.op, verdict="WRONG_VALUE", trial=trial_record(trial))
    assert mended_beside_rules((), [finding], [str(file)]) == mended


@needs_torch("<2.14", "a later one refuses a call for which no rule is left")
@pytest.mark.parametrize(
    ("rules", "mended"), [(FOR_ONE_MESH_DIM, {"a000": "no-rule-left"}), (THAT_LISTS_NONE, {})], ids=["right", "wrong"]
)
def test_no_strategy_is_to_blame_where_torch_keeps_no_rule_but_one_that_lists_none(
    tmp_path: Path, rules: str, mended: dict[str, str]
) -> None:
    """Torch keeps no rule where what is written to is placed otherwise, not even the replicated one."""
    file = tmp_path / "rules.py"
    file.write_text(rules)
    tensors = torch.arange(1.0, 7.0).reshape(2, 3), torch.zeros(2, 3)
    case = OpCase("aten.sin.out", "torch.ops.aten.sin.out", tensors[:1], {"out": tensors[1]}, "opinfo")
    trial = Trial(case, MeshSpec((2,)), ((Shard(1),), (Shard(1),)))
    with closing(PoolSet(lambda key: Pool(key, [str(file)]))) as pools:
        assert judge(pools.run_alone(trial), make_reference(case)).kind is VerdictKind.CRASH
    finding = make_finding("a000", op=case.op, verdict="CRASH", trial=trial_record(trial))
    assert mended_beside_rules((), [finding], [str(file)]) == mended


@pytest.mark.usefixtures("rules_taken_back")
def test_a_strategy_of_an_op_whose_result_has_a_size_of_its_own_is_not_to_blame(tmp_path: Path) -> None:
    """DTensor computes the sizes of results on fake tensors, and raises before it asks for rules."""
    file = tmp_path / "rules.py"
    file.write_text(KEPT)
    run_file(file)
    op = "torchs_own.kept.default"
    case = OpCase(op, f"torch.ops.{op}", (torch.tensor([1.0, 0.0]),), {}, "own")
    trial = Trial(case, MeshSpec((2,)), ((Replicate(),),))
    finding = make_finding("a000", op=op, verdict="CRASH", trial=trial_record(trial))
    assert mended_beside_rules([finding], (), [str(file)]) == {"a000": "masks-without-a-size"}


@pytest.fixture(scope="session")
def weighted() -> torch.library.Library:
    """Define the op of KEYWORD here, once: torch.ops would keep the handle to one that is taken back."""
    library = torch.library.Library("torchs_own", "FRAGMENT")
    library.define("weighted(Tensor x, *, Tensor w) -> Tensor")
    library.impl("weighted", lambda x, *, w: (x * w).sum(-1), "CompositeExplicitAutograd")
    return library


@pytest.mark.usefixtures("weighted")
@pytest.mark.parametrize(
    ("output", "mended"), [("Partial()", {"a000": "keyword-tensors-not-redistributed"}), ("Partial('max')", {})]
)
def test_a_tensor_that_is_given_by_keyword_is_redistributed_and_a_wrong_rule_stays_wrong(
    tmp_path: Path, output: str, mended: dict[str, str]
) -> None:
    file = tmp_path / "weighted.py"
    file.write_text(KEYWORD.replace("OUTPUT", output))
    tensors = torch.arange(8.0).reshape(2, 4), torch.arange(1.0, 5.0)
    op = "torchs_own.weighted.default"
    case = OpCase(op, f"torch.ops.{op}", tensors[:1], {"w": tensors[1]}, "own")
    trial = Trial(case, MeshSpec((2,)), ((Shard(1),), (Replicate(),)))
    with closing(PoolSet(lambda key: Pool(key, [str(file)]))) as pools:
        assert judge(pools.run_alone(trial), make_reference(case)).kind.bad
    finding = make_finding("a000", op=op, verdict="WRONG_VALUE", trial=trial_record(trial))
    assert mended_beside_rules((), [finding], [str(file)]) == mended


@pytest.fixture(scope="session")
def tracked() -> torch.library.Library:
    """Define the ops of TRACKED and LISTED here, once: torch.ops would keep the handle to one that is taken back."""

    def kernel(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        m.add_(x.sum(1))
        return x * 2

    library = torch.library.Library("torchs_own", "FRAGMENT")
    library.define("tracked(Tensor x, Tensor(a!) m) -> Tensor")
    library.impl("tracked", kernel, "CompositeExplicitAutograd")
    library.define("listed(Tensor[] xs, Tensor(a!)[] ms) -> Tensor")
    library.impl("listed", lambda xs, ms: kernel(xs[1], ms[0]), "CompositeExplicitAutograd")
    return library


ROWS = (torch.arange(8.0).reshape(4, 2), torch.arange(4.0))
NEGATIVE = (-torch.ones(4), torch.zeros(4), 0.5, 0.5, True)


@pytest.mark.usefixtures("tracked", "rules_taken_back")
@pytest.mark.parametrize(
    ("rules", "op", "args"),
    [
        (TRACKED, "torchs_own.tracked.default", ROWS),
        (LISTED, "torchs_own.listed.default", ([ROWS[0], ROWS[0]], [ROWS[1]])),
        (NOISE, "aten.rrelu_with_noise.default", NEGATIVE),
    ],
    ids=["op of the user's", "op of the user's on a list", "op of torch's"],
)
@pytest.mark.parametrize(
    ("output", "placed", "mended"),
    [("Shard(0)", Replicate(), {"a000": "writes-to-copies"}), ("Partial()", Shard(0), {})],
)
def test_a_write_under_rules_of_the_user_to_a_redistributed_copy_is_torch_s_and_a_wrong_rule_stays_wrong(
    tmp_path: Path,
    rules: str,
    op: str,
    args: tuple[object, ...],
    output: str,
    placed: Placement,
    mended: dict[str, str],
) -> None:
    file = tmp_path / "writing.py"
    file.write_text(rules.replace("OUTPUT", output))
    case = OpCase(op, f"torch.ops.{op}", args, {}, "own")
    trial = Trial(case, MeshSpec((2,)), (*[(Shard(0),)] * (2 if rules == LISTED else 1), (placed,)))
    with closing(PoolSet(lambda key: Pool(key, [str(file)]))) as pools:
        assert judge(pools.run_alone(trial), make_reference(case)).kind.bad
    finding = make_finding("a000", op=op, verdict="WRONG_VALUE", trial=trial_record(trial))
    assert mended_beside_rules((), [finding], [str(file)]) == mended
