"""An import that exchanges DTensor's own code is verified on the ops whose rules run that code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops import _embedding_ops, _math_ops

from verifier.execution import imports
from verifier.execution.imports import own_rules, registered_by, run_imports
from verifier.execution.patches import BETWEEN_OPS
from verifier.torch_internals import registries
from verifier.torch_internals.amending.propagation import is_torchs

aten = torch.ops.aten
CODE = """
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._ops import _embedding_ops

def lookup(op, args_schema, kwargs_schema):
    return [[Shard(1), Shard(1), Replicate()]]

_embedding_ops.embedding_strategy.__code__ = lookup.__code__
"""
HELPER = """
from torch.distributed.tensor._ops import _math_ops
_math_ops._infer_reduction_dims = lambda dims, ndim: None
"""
METHOD = """
from torch.distributed.tensor import Partial
Partial._partition_value = lambda self, tensor, mesh, mesh_dim: tensor
"""
NOTHING = """
import torch.distributed.tensor.debug
from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops import _math_ops
mine = Partial("max"), _math_ops.LINEAR_REDUCTION_OP_MAP
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back, after a test, what its file exchanges, and what is remembered of it."""
    monkeypatch.setattr(registries, "_of_the_user", {})
    monkeypatch.setattr(imports, "_registered", {})
    lookup = _embedding_ops.embedding_strategy
    monkeypatch.setattr(lookup, "__code__", lookup.__code__)
    monkeypatch.setattr(_math_ops, "_infer_reduction_dims", _math_ops._infer_reduction_dims)
    monkeypatch.setattr(Partial, "_partition_value", Partial._partition_value)


@pytest.mark.parametrize(
    ("text", "among", "not_among"),
    [
        (CODE, {"aten.embedding.default"}, {"aten.embedding_dense_backward.default", *BETWEEN_OPS}),
        (HELPER, {"aten.sum.dim_IntList", "aten.logsumexp.default"}, {"aten.mm.default", *BETWEEN_OPS}),
        (METHOD, {*BETWEEN_OPS}, {"aten.sum.dim_IntList"}),
    ],
)
def test_the_ops_are_found_whose_rules_run_what_was_exchanged(
    text: str, among: set[str], not_among: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "patches.py"
    file.write_text(text)
    run_imports([str(file)])
    found = {*registered_by([str(file)])}
    assert among <= found
    assert not found & not_among
    assert among <= {*own_rules()}
    assert is_torchs(aten.embedding.default) == (text != CODE), "a remedy of torch's rule must not hide the user's"


def test_nothing_is_found_where_nothing_was_exchanged(tmp_path: Path) -> None:
    file = tmp_path / "reads.py"
    file.write_text(NOTHING)
    run_imports([str(file)])
    assert registered_by([str(file)]) == ()
