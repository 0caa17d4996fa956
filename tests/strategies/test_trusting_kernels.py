"""Kernels that take something for granted, contiguous memory or sizes that agree, are called as autograd calls them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch_versions import torch_is

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.sample import read_by_strides
from strategies.opinfo.source import SOURCE
from verifier.programs import second_calls
from verifier.rules.samples import SampleOptions, Target
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
NUMBERS = torch.arange(1.0, 28.0, dtype=torch.float64).sin().reshape(3, 3, 3)
TURNED = NUMBERS.permute(2, 1, 0)


def test_a_kernel_that_reads_strides_as_if_contiguous_gets_contiguous_tensors() -> None:
    """Autograd calls native_group_norm_backward with contiguous tensors only; the kernel of 2.13 trusts that."""
    mean, rstd = NUMBERS[:, 0, :1].contiguous(), NUMBERS[:, 1, :1].abs().contiguous()
    rest = (NUMBERS, mean, rstd, None, 3, 3, 3, 1, [True, False, False])
    given = Call(aten.native_group_norm_backward.default, (TURNED, *rest), {})
    taken = read_by_strides(given)
    if torch_is(">=2.14"):  # the kernel reads by strides
        assert taken is given
        return
    assert taken is not given
    assert all(tensor.is_contiguous() for tensor in taken.tensors)
    assert torch.equal(taken.tensors[0], TURNED)


@torch.library.custom_op("trusting_kernels::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """Return half of each element, as a kernel does that walks through memory and leaves out the strides."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride()) / 2


def test_a_kernel_that_leaves_out_strides_gets_contiguous_tensors_under_any_torch() -> None:
    given = Call(torch.ops.trusting_kernels.halves.default, (TURNED,), {})
    (taken,) = read_by_strides(given).tensors
    assert taken.is_contiguous()
    assert torch.equal(taken, TURNED)


def test_a_kernel_that_reads_strides_keeps_them() -> None:
    for op, args in (
        (aten.add.Tensor, (TURNED, NUMBERS)),
        (aten.gt.Scalar, (TURNED, 0)),
        (aten.sum.default, (TURNED,)),
    ):
        call = Call(op, args, {})
        assert read_by_strides(call) is call


def test_a_contiguous_call_stays_as_it_is() -> None:
    call = Call(aten.add.Tensor, (NUMBERS, NUMBERS), {})
    assert read_by_strides(call) is call


@pytest.mark.parametrize("row", ["unfold", "stft"])
def test_windows_are_those_of_the_tensor_that_they_come_from(row: str) -> None:
    """The kernel of unfold_backward reads past the end of windows that do not fit, and says nothing (torch 2.13)."""
    found = 0
    for sample in SOURCE.samples(Target(row, "opinfo"), SampleOptions()):
        if not sample.op.startswith("aten.unfold_backward."):
            continue
        for size in range(3):
            if (case := sample.draw(size, 0)) is not None:
                windows, sizes, *how = case.args
                assert isinstance(windows, torch.Tensor)
                assert windows.shape == torch.empty(sizes).unfold(*how).shape, sample.origin  # type: ignore[arg-type]
                found += 1
    assert found or row != "unfold"


def test_a_size_that_a_kernel_trusts_stays_where_a_rule_branches_on_it() -> None:
    """_fft_c2r writes as many elements as it is told, and ends the process later (torch 2.13)."""
    op = aten._fft_c2r.default
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(1))(
            lambda op, args, kwargs: [[Shard(0), Shard(0)]] if args[3] % 3 else [[Partial("sum"), Partial("sum")]]
        )
        calls = [sample.draw(0, 0) for sample in SOURCE.samples(Target(str(op), "opinfo", str(op)), SampleOptions())]
    cases = [case for case in calls if case is not None]
    assert {case.args[2] for case in cases} <= {0, 1, 2}
    for case in cases:
        x, dims, _, size = case.args
        assert isinstance(x, torch.Tensor)
        assert x.shape[dims[-1]] == size // 2 + 1  # type: ignore[index, operator]


def test_a_code_of_a_choice_is_one_that_a_rule_may_mean() -> None:
    """Kernels take a reduction that is none of the three for one of them."""
    op = aten.mse_loss.default
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(2))(
            lambda op, args, kwargs: (
                [[Shard(0)] * 3] if len(args) > 2 and args[2] == 0 else [[Partial("sum"), Shard(0), Shard(0)]]
            )
        )
        made = SOURCE.samples(Target("aten.mse_loss.default", "opinfo", "aten.mse_loss.default"), SampleOptions())
        cases = [sample.draw(0, 0) for sample in made]
        pairs = [pair for case in cases if case is not None for pair in second_calls(case)]
    given = [case for case in cases if case is not None] + [case for one in pairs for case in (one.first, one.second)]
    assert {case.args[2] for case in given if len(case.args) > 2} == {0, 1, 2}


def test_a_sequence_is_sorted_where_the_sorter_may_be_left_out() -> None:
    op = aten.searchsorted.Tensor
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(2, ["sorter"]))(
            lambda op, args, kwargs: [[Partial("sum"), Shard(0), Replicate()]] if kwargs.get("sorter") is None else []
        )
        made = SOURCE.samples(Target("aten.searchsorted.Tensor", "opinfo", "aten.searchsorted.Tensor"), SampleOptions())
        cases = [sample.draw(size, 0) for sample in made for size in range(3)]
    plain = [case for case in cases if case is not None and case.kwargs.get("sorter") is None]
    assert plain
    for case in plain:
        sequence = case.args[0]
        assert isinstance(sequence, torch.Tensor)
        assert bool((sequence.diff(dim=-1) >= 0).all())


_WRITE = """
import torch
scores, targets = torch.zeros(2, 1), torch.tensor([0, 10**9])
torch.ops.aten.nll_loss_backward(torch.ones(2), scores, targets, None, 0, -100, torch.tensor(2.0))
"""


@pytest.mark.processes
def test_a_kernel_that_writes_outside_of_a_shard_gets_no_shards_that_dtensor_does_not_claim() -> None:
    """nll_loss_backward writes to the class of each target, also if a rank does not have that class (torch 2.13)."""
    assert subprocess.run([sys.executable, "-c", _WRITE], capture_output=True).returncode < 0, "if it looks, it may go"
    samples = [*SOURCE.samples(Target("nn.functional.nll_loss", "opinfo"), SampleOptions(max_samples=2))]
    backward = [sample for sample in samples if sample.op.startswith("aten.nll_loss_backward.")]
    assert backward
    assert all(sample.claims_only for sample in backward)
    assert not any(sample.claims_only for sample in samples if sample.op.startswith("aten.nll_loss_forward."))
