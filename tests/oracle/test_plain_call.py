"""A failure on a device whose own kernels give other results than those of the CPU says nothing of a rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.oracle.plain_call import other_kernel
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.names import pytree

CPU = torch.device("cpu")
VALUES = torch.arange(1.0, 5.0, dtype=torch.float64)
_on_device = False


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *cotangents: torch.Tensor) -> torch.Tensor:
        if _on_device:
            raise NotImplementedError("no such kernel here")
        return cotangents[0] * 2


def product(x: torch.Tensor) -> torch.Tensor:
    return x * (3 if _on_device else 2)


def refused(x: torch.Tensor) -> torch.Tensor:
    if _on_device:
        raise RuntimeError("'product' not implemented for 'Double'")
    return x * 2


def written(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1 if _on_device else 2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Halved.apply(x)  # type: ignore[no-untyped-call]
    return result


def made_there(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    assert device == x.device
    return x + torch.ones(4, device=device)


@contextmanager
def device() -> Iterator[None]:
    global _on_device
    _on_device = True
    try:
        yield
    finally:
        _on_device = False


def trial(name: str, *others: object, differentiable: bool = False, cotangents: int = 0) -> Trial:
    case = OpCase("lib.op", f"{__name__}.{name}", (VALUES.clone().requires_grad_(differentiable), *others))
    placed = (parse_placements("S(0)"),)
    return Trial(case, MeshSpec((2,)), placed, ((parse_placements("R"),),) * cotangents)


def told(tried: Trial) -> str:
    reference = make_reference(tried.case)
    for backward in range(len(tried.cotangents)):
        reference.gradients(tried.seed + backward)
    with device():
        return other_kernel(tried, reference, CPU)


def test_other_values() -> None:
    assert told(trial("product")) == "output: the kernel of cpu gives 3.0 without DTensor, and that of the CPU 2.0"


def test_an_error_of_one_of_them() -> None:
    assert told(trial("refused")) == "cpu raises RuntimeError, and cpu returns, both without DTensor"


def test_what_is_written_to_an_argument() -> None:
    assert told(trial("written")).startswith("output: the kernel of cpu gives 2.0")


def test_a_backward_pass_that_one_of_them_lacks() -> None:
    tried = trial("doubled", differentiable=True, cotangents=1)
    assert told(tried) == "cpu raises NotImplementedError in the backward pass, and cpu returns, both without DTensor"


@pytest.mark.parametrize("name", ["product", "doubled"])
def test_nothing_where_both_are_the_same(name: str) -> None:
    tried = trial(name, differentiable=True, cotangents=2)
    assert not other_kernel(tried, make_reference(tried.case), CPU)


def test_a_device_among_the_arguments_is_that_of_the_call() -> None:
    made = make_reference(trial("made_there", CPU).case, torch.device("meta"))
    assert made.raised is None
    assert [one.device.type for one in made.outputs] == ["meta"]
    assert pytree.tree_leaves(made.case.args)[1] == CPU


@pytest.mark.parametrize(
    "kernel", ["", "output: the kernel of cuda gives 3.0 without DTensor, and that of the CPU 2.0"]
)
def test_a_failure_counts_unless_the_kernel_is_another(kernel: str) -> None:
    tried = trial("product")
    raised = Raised(Phase.FORWARD, "RuntimeError", "no")
    reports = (
        ProcessReport((0,), Phase.FORWARD, raised, other_kernel=kernel),
        ProcessReport((1,), Phase.FORWARD, raised),
    )
    verdict = judge(Observation(tried, Fate.COMPLETED, reports), make_reference(tried.case))
    assert verdict.kind is (VerdictKind.INCONCLUSIVE if kernel else VerdictKind.CRASH)
    assert not kernel or verdict.message == kernel
