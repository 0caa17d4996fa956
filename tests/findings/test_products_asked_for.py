"""Rules of the user's for pending products, which torch chooses where it cannot make factors of a replica."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from run_factory import make_finding
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch_versions import needs_torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.findings.torchs_own import mended_beside_rules
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.values import trial_record

pytestmark = [pytest.mark.ranks, needs_torch("<2.14", "a later one makes no factors of a replica")]

RULES = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding

P, R = Partial("product"), Replicate()
"""
FOR_ONE_MESH_DIM = (
    RULES
    + """
register_single_dim_strategy(torch.ops.aten.mul.Tensor)(lambda op, args, kwargs: [[P, P, P], [R, R, R]])
"""
)
FOR_ALL = (
    RULES
    + """
register_sharding(torch.ops.aten.mul.Tensor)(lambda x, y: [([P], [P, P]), ([R], [R, R])])
"""
)
WITHOUT_A_CHOICE = (
    RULES
    + """
register_sharding(torch.ops.aten.mul.Tensor)(lambda x, y: [([P], [P, P])])
"""
)
WRONG = (
    RULES
    + """
register_sharding(torch.ops.aten.mul.Tensor)(lambda x, y: [([R], [P, P]), ([R], [R, R])])
"""
)
PRODUCT = Partial("product")


@pytest.mark.parametrize(
    ("rules", "placed", "mended", "extent"),
    [
        (FOR_ONE_MESH_DIM, (Shard(0), PRODUCT), True, 4),
        (FOR_ONE_MESH_DIM, (Shard(0), PRODUCT), True, 0),
        (FOR_ALL, (Shard(0), PRODUCT), True, 4),
        (WITHOUT_A_CHOICE, (Replicate(), Replicate()), False, 4),
        (WITHOUT_A_CHOICE, (Replicate(), Replicate()), False, 0),
        (WRONG, (PRODUCT, PRODUCT), False, 4),
    ],
    ids=["one mesh dim", "one mesh dim, no elements", "all", "no choice", "no choice, no elements", "wrong"],
)
def test_a_right_rule_is_not_to_blame_where_torch_asks_for_the_factors_of_a_replica(
    tmp_path: Path, rules: str, placed: tuple[Placement, Placement], mended: bool, extent: int
) -> None:
    """The cotangent is a replica, and what it is multiplied by waits for a product."""
    file = tmp_path / "rules.py"
    file.write_text(rules)
    x, y = (torch.arange(first, first + extent).requires_grad_() for first in (1.0, 2.0))
    case = OpCase("aten.mul.Tensor", "torch.ops.aten.mul.Tensor", (x, y), {}, "opinfo")
    trial = Trial(case, MeshSpec((2,)), tuple((one,) for one in placed), (((Replicate(),),),))
    with closing(PoolSet(lambda key: Pool(key, [str(file)]))) as pools:
        kind = judge(pools.run_alone(trial), make_reference(case)).kind
    finding = make_finding("a000", op=case.op, verdict=kind.value, trial=trial_record(trial))
    remedy = {"a000": "replicas-divided-for-products"}
    assert kind is not VerdictKind.PASS
    assert kind is VerdictKind.CRASH or not mended
    assert mended_beside_rules((), [finding], [str(file)]) == (remedy if mended else {})
    assert mended_beside_rules([finding], (), [str(file)]) == (remedy if mended else {})
