"""What the check of a whole model refuses before it starts a rank, and what proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from strategies.models.layers import MLP, StackedMLP
from strategies.models.plans import tensor_parallel_mlp
from verifier.calls.result import NothingVerified
from verifier.modules.outcomes import ModuleVerification
from verifier.modules.verify import verify_module

Verify = Callable[..., ModuleVerification]

ROWS = torch.randn(6, 10, generator=torch.Generator().manual_seed(7))


class Gated(MLP):
    """An MLP with inputs by name."""

    def forward(self, values: torch.Tensor, gate: torch.Tensor, power: int = 1) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * gate**power


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 10)))


def local_function() -> Callable[..., object]:
    def plan(model: object, mesh: object) -> None:
        raise AssertionError("never called")

    return plan


@pytest.mark.parametrize(
    ("model", "plan", "options", "message"),
    [
        (MLP, tensor_parallel_mlp, {"mesh": "simulated:2"}, "needs a process for each rank; name it as 2"),
        (
            MLP,
            {"up": ColwiseParallel()},
            {"mesh": "2x2"},
            r"give a function plan\(model, mesh\) that takes mesh",
        ),
        (MLP, tensor_parallel_mlp, {"dim_names": ("a", "b")}, "do not name the 1 dim of mesh 2"),
        (MLP, tensor_parallel_mlp, {"placements": "(S(0), R)"}, "is for 2 mesh dims, mesh 2 has 1"),
        (
            MLP,
            tensor_parallel_mlp,
            {"placements": ["R", "R"]},
            "placements has 2 entries; give one for each",
        ),
        (MLP, tensor_parallel_mlp, {"outputs": "Q"}, "^outputs: "),
        (MLP, local_function(), {}, "put it at the top level of a module that the ranks can import"),
        (parametrized, distribute_module, {}, "ranks cannot be given model Sequential: Serialization of parametrized"),
        (dict, tensor_parallel_mlp, {}, "made a dict, not a torch.nn.Module"),
        (3, tensor_parallel_mlp, {}, "model 3 is neither a torch.nn.Module nor"),
        (MLP, None, {}, "plan None is neither a function"),
        (MLP, "strategies.models.tensor_paralel", {}, "has no attribute 'tensor_paralel'"),
        (MLP, {}, {}, "plan is empty"),
        (MLP, {"up": "colwise"}, {}, "plan has 'colwise' for 'up', which is no ParallelStyle"),
        (MLP, {"dwn": RowwiseParallel()}, {}, "plan names no submodule of MLP by 'dwn'; did you mean 'down'"),
        (StackedMLP, {"layers.*": RowwiseParallel(), "layers.up": ColwiseParallel()}, {}, "by 'layers.up'"),
        (MLP, tensor_parallel_mlp, {"steps": 0}, "steps=0 must be at least 1"),
        (MLP, tensor_parallel_mlp, {"targets": ROWS}, r"targets is one tensor; give a sequence of them, as \[target\]"),
        (MLP, tensor_parallel_mlp, {"placements": "S(2)"}, "'S\\(2\\)' of input 0: it is a tensor of 2 dims"),
        (MLP, tensor_parallel_mlp, {"dtype": torch.int64}, "dtype torch.int64 is not one of floating point"),
        (MLP, tensor_parallel_mlp, {"loss": torch.square}, "the local model, its loss or a step raises RuntimeError"),
        (partial(MLP, 9), tensor_parallel_mlp, {}, "raises RuntimeError: (addmm: )?mat1 and mat2 shapes"),
        (
            Gated,
            tensor_parallel_mlp,
            {"kwargs": {"gaet": ROWS}},
            "kwargs has 'gaet', which the forward of Gated does not take; did you mean 'gate'",
        ),
        (Gated, tensor_parallel_mlp, {"kwargs": {"zzz": 1}}, "does not take; it takes gate, power$"),
        (Gated, tensor_parallel_mlp, {"kwargs": {"values": ROWS}}, "kwargs has 'values', which is input 0 already"),
        (Gated, tensor_parallel_mlp, {}, "raises TypeError: .* missing 1 required positional argument: 'gate'"),
        (MLP, tensor_parallel_mlp, {"kwargs": [ROWS]}, "kwargs is of type list; give a mapping from names"),
        (
            Gated,
            tensor_parallel_mlp,
            {"kwargs": {"gate": ROWS}, "kwargs_placements": {"gaet": "S(0)"}},
            "kwargs_placements has 'gaet', which is none of kwargs; did you mean 'gate'",
        ),
        (
            Gated,
            tensor_parallel_mlp,
            {"kwargs": {"gate": ROWS}, "kwargs_placements": {"gate": "S(2)"}},
            r"kwargs_placements 'S\(2\)' of 'gate': it is a tensor of 2 dims",
        ),
        (
            Gated,
            tensor_parallel_mlp,
            {"kwargs": {"gate": ROWS, "power": 2}, "kwargs_placements": {"power": "R"}},
            "kwargs_placements 'R' of 'power': it is no tensor but of type int",
        ),
        (
            Gated,
            tensor_parallel_mlp,
            {"kwargs": {"gate": ROWS}, "kwargs_placements": "S(0)"},
            r"kwargs_placements is 'S\(0\)'; give a mapping from names",
        ),
        (MLP, tensor_parallel_mlp, {"outputs": "S(7)"}, r"^outputs 'S\(7\)' of output 0: it is a tensor of 2 dims"),
        (MLP, tensor_parallel_mlp, {"outputs": "S(-1)"}, r"^outputs 'S\(-1\)' of output 0: it is a tensor of 2 dims"),
        (MLP, tensor_parallel_mlp, {"outputs": ["R", "R"]}, "outputs has 2 entries; give one for each tensor that"),
        (MLP, tensor_parallel_mlp, {"outputs": [None]}, "outputs: None is no text such as"),
        (
            MLP,
            tensor_parallel_mlp,
            {"outputs": Shard(0)},
            r"outputs: Shard\(dim=0\) is no text such as 'S\(0\)', and no",
        ),
        (MLP, tensor_parallel_mlp, {"placements": [Shard(0)]}, r"placements: Shard\(dim=0\) is no text such as"),
        (MLP, tensor_parallel_mlp, {"loss_placements": "S(0)"}, "a loss has no dim to cut; give P"),
        (
            MLP,
            tensor_parallel_mlp,
            {"mesh": "2x2", "placements": "(P(sum), P(max))"},
            "mixes reductions, which have no defined order",
        ),
    ],
)
def test_mistakes_are_refused(model: Any, plan: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_module(model, plan, [ROWS], **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"values": ROWS}, r"inputs is a mapping; give what the model takes by name as kwargs, and \[\] as inputs"),
        (3, r"inputs is of type int; give a sequence, as \[input\]"),
    ],
)
def test_inputs_are_a_sequence(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_module(MLP, tensor_parallel_mlp, inputs)


def test_description_says_what_proves_nothing() -> None:
    names = tuple(f"gradient of {number}" for number in range(7))
    text = ModuleVerification("call", (1.0,), (1.0,), (), (), 12, names, ("UserWarning: " + "x" * 500,)).describe()
    first, zero, warned = text.splitlines()
    assert first == "call: 12 tensors equal"
    vacuous = f"{', '.join(names[:5])}, and 2 more"
    assert zero == f"  0 or NaN everywhere in the local model, so agreement proves nothing: {vacuous}"
    assert warned == f"  warned by the plan: {('UserWarning: ' + 'x' * 500)[:160]}..."


def test_what_proves_nothing_is_refused() -> None:
    for nothing in (torch.zeros(6, 10), torch.full((6, 10), torch.nan)):
        with pytest.raises(NothingVerified, match="every gradient of the local model is 0 or NaN"):
            verify_module(partial(MLP, bias=False), tensor_parallel_mlp, [nothing])


def leave_alone(_model: nn.Module, _mesh: object) -> None:
    """Shard nothing, as a plan whose names are those of another model."""


def test_a_plan_that_shards_nothing_is_refused(verify_module: Verify) -> None:
    with pytest.raises(NothingVerified, match="nothing is sharded"):
        verify_module(MLP, leave_alone, [ROWS], mesh=2)
