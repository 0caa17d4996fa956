"""Whole models under true plans do what the local ones do, on one mesh dim and on two; and what the result says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from strategies.models.layers import MLP, RMSNorm, StackedMLP
from strategies.models.losses import next_token_loss, squared_error
from strategies.models.plans import (
    data_parallel,
    embedding_parallel,
    sequence_parallel,
    sequence_parallel_mlp,
    sequence_parallel_norm,
    tensor_parallel,
    tensor_parallel_mlp,
)
from strategies.models.transformer import Attention, Transformer, TransformerSize
from verifier.modules.outcomes import ModuleError, ModuleVerification
from verifier.modules.verify import sum_of_squares

Verify = Callable[..., ModuleVerification]

GENERATOR = torch.Generator().manual_seed(7)
ROWS = torch.randn(6, 10, generator=GENERATOR)
VALUES = torch.randn(2, 5, 10, generator=GENERATOR)
IDS, NEXT = torch.randint(0, 13, (2, 4, 7), generator=GENERATOR)
PARTS = {"loss": sum_of_squares, "loss_placements": "P(sum)"}
BY_ROWS = {"placements": "S(0)", "outputs": "S(0)", **PARTS}
BY_POSITIONS = {"placements": "S(1)", "outputs": "S(1)", **PARTS}


def transformer(**size: Any) -> partial[Transformer]:
    return partial(Transformer, TransformerSize(vocabulary=13, **size))  # uneven over 2 and 4 ranks


PERCEPTRONS: list[tuple[object, object, torch.Tensor, Mapping[str, object]]] = [
    (MLP, tensor_parallel_mlp, ROWS, {}),
    (partial(StackedMLP, bias=False), tensor_parallel_mlp, ROWS, {}),
    (StackedMLP, sequence_parallel_mlp, ROWS, BY_ROWS),
    (partial(RMSNorm, 10), sequence_parallel_norm, VALUES, BY_POSITIONS),
    (partial(nn.LayerNorm, 10), sequence_parallel_norm, VALUES, BY_POSITIONS),
    (MLP, {"up": ColwiseParallel(), "down": RowwiseParallel()}, ROWS, {"as_dtensors": True}),
    (MLP, distribute_module, ROWS, {"as_dtensors": True, "placements": "S(0)"}),
    (
        MLP,
        {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()},
        ROWS,
        {"placements": "S(0)", "outputs": "R"},
    ),
]


@pytest.mark.parametrize(("model", "plan", "values", "options"), PERCEPTRONS)
def test_perceptrons_and_norms(
    verify_module: Verify, model: object, plan: object, values: torch.Tensor, options: Mapping[str, object]
) -> None:
    result = verify_module(model, plan, [values.clone().requires_grad_()], mesh=2, **options)
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)
    assert not result.vacuous


TRANSFORMERS = [
    (tensor_parallel, {}),
    (tensor_parallel, {"tied": False, "dropout": 0.25}),
    (tensor_parallel, {"checkpointed": True, "rms_norm": True}),
    (sequence_parallel, {}),
    (sequence_parallel, {"tied": False, "checkpointed": True}),
    (embedding_parallel, {}),
    (embedding_parallel, {"tied": False, "width": 18, "heads": 3}),
]


@pytest.mark.parametrize(("plan", "size"), TRANSFORMERS)
def test_transformer(verify_module: Verify, plan: object, size: dict[str, Any]) -> None:
    model = transformer(layers=1, **size)
    result = verify_module(model, plan, [IDS], targets=[NEXT], loss=next_token_loss, mesh=2)
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)
    # each submodule's output and its gradient are compared only where something is wrong; parameters always are
    names = {name for name, _ in Transformer(TransformerSize(layers=1)).named_modules()}
    assert {module for module, _ in result.layouts} == names - {"layers"}


@pytest.mark.parametrize(
    ("model", "inputs", "options"),
    [
        (StackedMLP, ROWS, {"targets": [ROWS.flip(0)], "loss": squared_error}),
        (transformer(layers=1, tied=False), IDS, {"targets": [NEXT], "loss": next_token_loss}),
    ],
)
def test_with_data_parallel(
    verify_module: Verify, model: object, inputs: torch.Tensor, options: Mapping[str, object]
) -> None:
    result = verify_module(model, data_parallel, [inputs], mesh="2x2", placements="(S(0), R)", steps=3, **options)
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)
    assert len(set(result.losses)) == 3
    assert result.collectives_of("", "backward")["reduce_scatter_tensor"] > 0


@pytest.mark.parametrize(
    ("plan", "size", "collectives"),
    [
        (tensor_parallel, {}, ["all_reduce", "", "all_reduce"]),
        (sequence_parallel, {"checkpointed": True}, ["reduce_scatter_tensor"] * 3),
        (embedding_parallel, {}, ["all_reduce", "all_gather_into_tensor", ""]),
        (embedding_parallel, {"tied": False}, ["all_gather_into_tensor", "all_gather_into_tensor", ""]),
    ],
)
def test_transformer_with_data_parallel(
    verify_module: Verify, plan: Any, size: dict[str, Any], collectives: list[str]
) -> None:
    """``collectives`` are those of tp in the forward pass, by which the plans differ."""
    result = verify_module(
        transformer(layers=1, **size),
        partial(data_parallel, plan=plan),
        [IDS],
        targets=[NEXT],
        loss=next_token_loss,
        mesh="2x2",
        placements="(S(0), R)",
        steps=3,
    )
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)
    assert result.collectives_of("", "backward")["reduce_scatter_tensor"] > 0
    modules = ["tokens", "positions", "layers.0.attention.out"]
    assert [" ".join(result.collectives_of(module, "forward")) for module in modules] == collectives


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def replicated_and_compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return torch.compile(replicated(model, mesh), backend="eager")  # type: ignore[return-value]


def replicated_in_parts(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, StackedMLP)
    for number, layer in enumerate(model.layers):
        model.layers[number] = replicated(layer, mesh)


def wrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(model, StackedMLP)
    tensor_parallel_mlp(model, mesh)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("plan", "placements"),
    [(replicated, "S(0)"), (replicated_and_compiled, "S(0)"), (replicated_in_parts, "S(0)"), (wrapped, "R")],
)
def test_wrapped_modules_keep_their_names(verify_module: Verify, plan: object, placements: str) -> None:
    result = verify_module(StackedMLP, plan, [ROWS], mesh=2, placements=placements)
    assert {module for module, _ in result.layouts} >= {"layers.0", "layers.1.up"}


class Gated(MLP):
    """An MLP with inputs by name."""

    def forward(self, values: torch.Tensor, gate: torch.Tensor, power: int = 1) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * gate**power


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (tensor_parallel_mlp, {"kwargs_placements": {}}),
        (sequence_parallel_mlp, {"kwargs_placements": {"gate": "S(0)"}, **BY_ROWS}),
        (distribute_module, {"kwargs_placements": {"gate": "S(0)"}, "placements": "S(0)", "as_dtensors": True}),
    ],
)
def test_inputs_by_name(verify_module: Verify, plan: object, options: Mapping[str, object]) -> None:
    gate = torch.randn(6, 10, generator=GENERATOR).requires_grad_()
    kwargs = {"gate": gate, "power": 2}
    by_name = verify_module(Gated, plan, [ROWS], kwargs=kwargs, mesh=2, **options)
    without = verify_module(Gated, plan, [ROWS], kwargs=kwargs | {"gate": gate.detach()}, mesh=2, **options)
    assert by_name.compared == without.compared + 1


def norm(output: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.linalg.vector_norm(output)


def test_norm_of_what_is_cut(verify_module: Verify) -> None:
    """Each rank has the norm of its part; the sum of these is not that of the whole."""
    plan = {"up": ColwiseParallel(), "down": ColwiseParallel(input_layouts=Shard(-1), use_local_output=False)}
    result = verify_module(MLP, plan, [ROWS], mesh=2, loss=norm)
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)


def by_positions_of_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return sequence_parallel_norm(model, mesh["tp"])


def test_losses_of_several_mesh_dims(verify_module: Verify) -> None:
    """A part of the sum that two ranks hold counts once."""
    options = {"loss": sum_of_squares, "loss_placements": "(R, P(sum))", "placements": "(R, S(1))"}
    result = verify_module(partial(RMSNorm, 10), by_positions_of_tp, [VALUES], mesh="2x2", **options)
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)


def test_all_inputs_by_name(verify_module: Verify) -> None:
    """The placements of the output are those of the first of them then."""
    kwargs, where = {"gate": ROWS, "values": ROWS}, {"gate": "S(0)", "values": "S(0)"}
    verify_module(Gated, sequence_parallel_mlp, [], kwargs=kwargs, kwargs_placements=where, mesh=2, **PARTS)


def test_collectives_are_listed_by_submodule_and_phase(verify_module: Verify) -> None:
    result = verify_module(StackedMLP, tensor_parallel_mlp, [ROWS.clone().requires_grad_()], mesh=2)
    listed = [(c.phase, c.module, c.name, c.count) for c in result.collectives]
    assert listed == [
        ("forward", "layers.0.down", "all_reduce", 1),
        ("forward", "layers.1.down", "all_reduce", 1),
        ("backward", "layers.0.up", "all_reduce", 1),
        ("backward", "layers.1.up", "all_reduce", 1),
    ]
    assert result.collectives_of("layers.1") == {"all_reduce": 2}
    assert result.collectives_of("layers.1", "forward") == {"all_reduce": 1}
    assert dict(result.layouts)["layers.0.relu"] == "S(1)"
    assert "  backward layers.1.up: 1 all_reduce" in result.describe()


def test_collectives_of_hooks_belong_to_their_submodule(verify_module: Verify) -> None:
    """Positions are gathered by the hooks of a plan in front of attention, and those of weights in the optimiser."""
    model = transformer(layers=1)
    result = verify_module(model, sequence_parallel, [IDS], targets=[NEXT], loss=next_token_loss, mesh=2)
    own = {(c.phase, c.name): c.count for c in result.collectives if c.module == "layers.0.attention"}
    assert own == {("forward", "all_gather_into_tensor"): 1, ("backward", "reduce_scatter_tensor"): 1}
    # weight and bias of three norms, whose gradients are parts of sums until the optimiser needs them
    assert result.collectives_of("", "step") == {"all_reduce": 6}


def test_model_of_the_caller_stays_as_it_is(verify_module: Verify) -> None:
    model = MLP()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verify_module(model, tensor_parallel_mlp, [ROWS], mesh=2, optimizer=partial(torch.optim.Adam, lr=0.01))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.up.weight.dtype == torch.float32


def test_random_numbers_of_the_caller_stay_as_they_are(verify_module: Verify) -> None:
    before = torch.get_rng_state()
    verify_module(MLP, tensor_parallel_mlp, [ROWS], mesh=2)
    assert torch.equal(torch.get_rng_state(), before)


class KeysWithBias(Attention):
    """Attention whose keys have a bias: its gradient is 0 but for rounding, of which Adam makes a step."""

    def __init__(self) -> None:
        super().__init__(TransformerSize(width=8, heads=2))
        self.key = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))


ADAM = partial(torch.optim.Adam, lr=0.01)


def heads_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {n: ColwiseParallel() for n in ("query", "key", "value")})
    parallelize_module(model, mesh, {"out": RowwiseParallel()})


def heads_parallel_moved(model: KeysWithBias, mesh: DeviceMesh) -> None:
    heads_parallel(model, mesh)
    model.key.bias.register_post_accumulate_grad_hook(_move)


def _move(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(1.0 + 1e-4)


def test_step_that_an_optimiser_makes_of_rounding(verify_module: Verify) -> None:
    values = torch.randn(2, 5, 8, generator=GENERATOR)
    for dtype in (torch.float64, torch.float32):
        verify_module(KeysWithBias, heads_parallel, [values], mesh=2, optimizer=ADAM, steps=2, dtype=dtype)
    with pytest.raises(ModuleError, match=r"^WRONG_VALUE key\.bias "):
        verify_module(KeysWithBias, heads_parallel_moved, [values], mesh=2, optimizer=ADAM)


class SparseTable(nn.Module):
    """A table with sparse gradients, in front of a perceptron; the result is returned as a sparse tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 10, sparse=True)
        self.mlp = MLP()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.mlp(self.table(ids))
        return result, result.detach().to_sparse()


def behind_the_table(model: SparseTable, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model.mlp, mesh)


def mean_square_of_the_first(output: tuple[torch.Tensor, ...], *_: object) -> torch.Tensor:
    return output[0].square().mean()


def test_sparse_gradients_and_outputs(verify_module: Verify) -> None:
    verify_module(SparseTable, behind_the_table, [IDS], mesh=2, loss=mean_square_of_the_first)


class Narrowed(nn.Module):
    """A table and a layer, whose loss is made in float32 as that of language models often is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.layer = nn.Linear(10, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.table(ids)).float()
        return result


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def fully_sharded_and_off(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)
    model.layer.register_forward_hook(lambda _module, _inputs, output: output * 1.001)  # type: ignore[union-attr]


def test_values_that_a_model_narrows(verify_module: Verify) -> None:
    """A third of a gradient in float32 is rounded, also where the model is one of float64."""
    ids = torch.arange(12).view(3, 4)
    options = {"targets": [ids + 1], "loss": next_token_loss, "mesh": 3, "placements": "S(0)"}
    verify_module(Narrowed, fully_sharded, [ids], **options)
    with pytest.raises(ModuleError, match=r"^WRONG_VALUE output of layer"):
        verify_module(Narrowed, fully_sharded_and_off, [ids], **options)


def test_dropout_of_parts_is_named(verify_module: Verify) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8))
    with pytest.raises(ModuleError, match="likely: ranks draw other random numbers"):
        verify_module(model, {"0": ColwiseParallel(), "2": RowwiseParallel()}, [torch.ones(4, 8)], mesh=2)


@pytest.mark.parametrize("local", [True, False])
def test_uneven_features(verify_module: Verify, local: bool) -> None:
    """Plain tensors do not say how they were cut, so torch 2.13.0 takes uneven parts for even ones (issue #150336)."""
    plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()}
    model = partial(MLP, 10, 7)
    if not local:
        verify_module(model, plan, [ROWS], mesh=2)
        return
    with pytest.raises(ModuleError, match="a and b must have same reduction dim") as caught:
        verify_module(model, plan, [ROWS], mesh=2)
    assert "\n  raised in the submodule down\n" in str(caught.value)


def test_example_of_the_guide(verify_module: Verify) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "models.md"
    text = page.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python title=test_my_model.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    names["test_perceptron"](verify_module)
    (message,) = re.findall(r"^```text\n(WRONG_VALUE output of 2.*?)^```$", text, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Partial())}
    with pytest.raises(ModuleError) as caught:
        verify_module(model, plan, [torch.ones(4, 8)], mesh=2)
    number = r"-?\d+\.\d+(e-\d+)?"
    assert re.sub(number, "#", str(caught.value)) == re.sub(number, "#", message.strip())
