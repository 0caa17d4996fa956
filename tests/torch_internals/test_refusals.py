"""Which exceptions are DTensor's own word that it does not support something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from verifier.torch_internals.groups import leave_world
from verifier.torch_internals.refusals import is_cut_off, is_refusal
from verifier.torch_internals.simulation import start_simulated_world

DTENSOR = f"{torch.__path__[0]}/distributed/tensor/_redistribute.py"
KERNEL = f"{torch.__path__[0]}/_ops.py"


def raised(file: str, error: Exception) -> Exception:
    """Return an exception like ``error`` as it is when a function of ``file`` has raised it."""
    scope: dict[str, Callable[[Exception], None]] = {}
    exec(compile("def fail(error):\n    raise error\n", file, "exec"), {}, scope)  # type: ignore[arg-type]
    try:
        scope["fail"](type(error)(*error.args))
    except Exception as caught:  # noqa: BLE001 - it is what is asked for
        return caught
    raise AssertionError("nothing was raised")


def raised_through(file: str, function: Callable[[object], None]) -> Exception:
    """Return what ``function`` raises if a function of ``file`` calls it."""
    scope: dict[str, Callable[[Callable[[object], None]], None]] = {}
    exec(compile("def call(function):\n    function(None)\n", file, "exec"), {}, scope)  # type: ignore[arg-type]
    try:
        scope["call"](function)
    except Exception as caught:  # noqa: BLE001 - it is what is asked for
        return caught
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("redistribute from S(0) to P(sum) not supported yet"),
        AssertionError("Redistribution from one partial type (P(sum)) to another (P(max)) is unsupported."),
        RuntimeError("in-place operations that require placement changes are not supported. The input has"),
        ValueError("Replicate to Partial(product) conversion is not supported."),
        RuntimeError("Can not redistribute from R to P(sum), only Shard to Partial(sum) redistribution is supported!"),
        RuntimeError("aten.eye.m_out: no valid sharding strategy for the input placements."),
    ],
)
def test_an_exception_of_dtensor_is_a_refusal_and_that_of_a_kernel_is_not(error: Exception) -> None:
    assert is_refusal(raised(DTENSOR, error))
    assert not is_refusal(raised(KERNEL, error)), "a kernel speaks of itself, and the local call has to fail as well"


@pytest.mark.parametrize(
    ("message", "refused"),
    [("partial tensors are not supported, redistribute first", True), ("the state may not be partial", False)],
)
def test_a_rule_of_ones_own_refuses_in_the_words_of_those_of_torch(message: str, refused: bool) -> None:
    def rule(_schema: object) -> None:
        raise RuntimeError(message)

    asked = raised_through(f"{torch.__path__[0]}/distributed/tensor/_sharding_prop.py", rule)
    assert is_refusal(asked) is refused
    assert not is_refusal(raised_through(KERNEL, rule)), "a kernel in the same file speaks of itself"


def test_a_missing_strategy_is_a_refusal_wherever_it_is_raised() -> None:
    assert is_refusal(raised(KERNEL, NotImplementedError("Operator has no sharding strategy registered")))


def test_unbind_along_a_sharded_dim_is_refused_in_the_words_of_every_version() -> None:
    start_simulated_world(2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        with pytest.raises(RuntimeError, match="unbind along the sharded dimension 0") as refused:
            tensor.unbind(0)
    finally:
        leave_world()
    assert is_refusal(refused.value)
    texts = (
        "Please redistribute the input explicitly before unbinding.",
        "which is disallowed by the current operator.",
    )
    assert all(is_refusal(raised(DTENSOR, RuntimeError(f"Attempted to unbind. {text}"))) for text in texts)


@pytest.mark.parametrize(
    "message",
    [
        *("0", "min() arg is an empty sequence", "index 3 is out of range", ""),
        "'>=' not supported between instances of 'torch.dtype' and 'int'",  # _foreach_norm with dtype, from 2.14 on
        "unsupported operand type(s) for +: 'NoneType' and 'int'",
    ],
)
def test_what_says_nothing_is_a_crash(message: str) -> None:
    assert not is_refusal(raised(DTENSOR, RuntimeError(message)))


def test_tensors_that_are_no_dtensors_are_refused_whatever_called_the_op() -> None:
    message = "aten._embedding_bag.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"
    assert is_refusal(raised(f"{torch.__path__[0]}/nn/functional.py", RuntimeError(message)))


def test_a_mean_that_uneven_shards_would_bias_is_refused() -> None:
    text = "The intermediate results of nll_loss cannot be evenly sharded,       resulting in biased mean result."
    assert is_refusal(raised(f"{torch.__path__[0]}/distributed/tensor/parallel/loss.py", RuntimeError(text)))


def test_a_convolution_that_cannot_exchange_its_borders_is_refused() -> None:
    text = "Stride must be 1 when there is padding for tensor parallel convolution."
    assert is_refusal(raised(f"{torch.__path__[0]}/distributed/tensor/_tp_conv.py", RuntimeError(text)))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_reduction_that_the_backend_lacks_is_refused(kind: type[Exception]) -> None:
    assert is_refusal(raised(KERNEL, kind("Cannot use ReduceOp.BAND with NCCL")))


class _Failing(torch.autograd.Function):
    """Raises an exception in its backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:  # type: ignore[override]
        raise ctx.error


def raised_in_backward(error: Exception) -> Exception:
    result: torch.Tensor = _Failing.apply(torch.ones(2, requires_grad=True), error)  # type: ignore[no-untyped-call]
    try:
        result.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as caught:  # noqa: BLE001 - it is what is asked for
        return caught
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "message",
    [
        "aten.where.self got mixed torch.Tensor and DTensor, need to convert all torch.Tensor",
        "Cannot flatten unevenly sharded tensor. Please redistribute the tensor before this operation.",
        "Operator aten.put.default does not have a sharding strategy registered.",
    ],
)
def test_what_only_the_caller_of_an_op_can_change_is_no_refusal_in_a_backward_pass(message: str) -> None:
    kind = NotImplementedError if "strategy" in message else RuntimeError
    assert is_refusal(kind(message))
    assert not is_refusal(raised_in_backward(kind(message)))


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("the kernel is not implemented for 'Half'"),
        RuntimeError("all_reduce: reduce_op product does not support complex tensors"),
    ],
)
def test_a_missing_kernel_or_reduction_is_a_refusal_in_a_backward_pass(error: Exception) -> None:
    assert is_refusal(raised_in_backward(error))


def test_lost_connections_are_told_from_other_errors() -> None:
    assert is_cut_off(RuntimeError("[gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:1"))
    assert is_cut_off(torch.distributed.DistBackendError("NCCL error"))
    assert not is_cut_off(RuntimeError("size mismatch"))
