"""Calls whose kernel takes contiguous memory for granted say nothing of a rule, and are made contiguous."""

from __future__ import annotations

import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.sample import read_by_strides

aten = torch.ops.aten
NUMBERS = torch.arange(1.0, 28.0, dtype=torch.float64).sin().reshape(3, 3, 3)
TURNED = NUMBERS.permute(2, 1, 0)


def test_a_kernel_that_reads_strides_as_if_contiguous_gets_contiguous_tensors() -> None:
    """Autograd calls native_group_norm_backward with contiguous tensors only; the kernel does not look (torch 2.13)."""
    mean, rstd = NUMBERS[:, 0, :1].contiguous(), NUMBERS[:, 1, :1].abs().contiguous()
    rest = (NUMBERS, mean, rstd, None, 3, 3, 3, 1, [True, False, False])
    given = Call(aten.native_group_norm_backward.default, (TURNED, *rest), {})
    taken = read_by_strides(given)
    assert taken is not given
    assert all(tensor.is_contiguous() for tensor in taken.tensors)
    assert torch.equal(taken.tensors[0], TURNED)


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
