"""Our own operators as a source of samples for the rule check; tests/mutants has what the check makes of them."""

from __future__ import annotations

import pytest
import torch

from strategies.embedding_bag.ops import BAG_OPS
from strategies.row_samples import SOURCE
from verifier.rules.samples import SampleOptions, Target, installed_sources
from verifier.torch_internals.registries import replaced_sharded_op

COUNT = next(sharded for sharded in BAG_OPS if "count" in str(sharded.op))


def test_ops_are_named_once_they_have_rules() -> None:
    assert installed_sources()["sharded_rows"] is SOURCE
    assert SOURCE.select(()) == ()
    with pytest.raises(ValueError, match=r"'sharded_rows\.count\.default': .* before --import strategies\.install"):
        SOURCE.select(("sharded_rows.count.default",))
    with replaced_sharded_op(COUNT):
        assert SOURCE.select(()) == SOURCE.select(("sharded_rows.*",)) == SOURCE.select(("sharded_rows.count",))
    with pytest.raises(ValueError, match=r"'sharded_rows\.cont'; did you mean 'sharded_rows\.count\.default'\?"):
        SOURCE.select(("sharded_rows.cont",))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_draw_is_the_same_each_time_and_has_its_own_values(dtype: torch.dtype) -> None:
    for sharded in BAG_OPS:
        for sample in SOURCE.samples(Target(str(sharded.op), SOURCE.name), SampleOptions(dtype, sizes=3)):
            one, again, other = (sample.draw(1, number) for number in (0, 0, 1))
            assert one is not None
            assert again is not None
            assert other is not None
            tensors = [arg for arg in one.args if isinstance(arg, torch.Tensor)]
            assert all(map(torch.equal, tensors, (arg for arg in again.args if isinstance(arg, torch.Tensor))))
            others = [arg for arg in other.args if isinstance(arg, torch.Tensor)]
            assert [tensor.shape for tensor in others] == [tensor.shape for tensor in tensors]
            assert not all(map(torch.equal, tensors, others))
            assert {tensor.dtype for tensor in tensors} <= {dtype, torch.int64}
            assert sample.draw(3, 0) is None
