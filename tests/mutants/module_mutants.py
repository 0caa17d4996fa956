"""Plans that are wrong in one way each; the ranks import them."""

from __future__ import annotations

import os
import warnings
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from strategies.models import MLP, StackedMLP, Transformer, sequence_plan, tensor_parallel, tensor_parallel_mlp
from verifier.modules import mean_square


# ------------------------------------------------------------------------------------------------------------- forward
def row_wise_without_reduction(model: StackedMLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model.layers[0], mesh)
    up, down = ColwiseParallel(), RowwiseParallel(output_layouts=Partial())
    parallelize_module(model.layers[1], mesh, {"up": up, "down": down})


def bias_on_every_rank(model: StackedMLP, mesh: DeviceMesh) -> None:
    """Cut the features by hand, and add the bias before the reduction."""
    tensor_parallel_mlp(model.layers[1], mesh)
    layer: Any = model.layers[0]
    tensor_parallel_mlp(layer, mesh)
    bias = layer.down.bias.to_local().detach()

    def add_again(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + bias * (mesh.size() - 1)

    layer.down.register_forward_hook(add_again)


def _rows(model: StackedMLP, mesh: DeviceMesh, prepared: tuple[str, ...]) -> None:
    prepare = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    for name in prepared:
        parallelize_module(model, mesh, {name: prepare})
    rest = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, rest)


def rows(model: StackedMLP, mesh: DeviceMesh) -> None:
    """Not wrong: rows are gathered before each perceptron, and each rank gets its own after it."""
    _rows(model, mesh, ("layers.0", "layers.1"))


def input_not_prepared(model: StackedMLP, mesh: DeviceMesh) -> None:
    _rows(model, mesh, ("layers.0",))


def half_the_positions(model: Transformer, mesh: DeviceMesh) -> None:
    """Sequence parallelism in which attention gets this rank's positions as if they were all."""
    plan = sequence_plan()
    del plan["layers.*.attention"]
    plan["layers.*.attention_norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)
    model.output.weight = model.tokens.weight


def on_another_mesh(model: MLP, mesh: DeviceMesh) -> None:
    """Not wrong: a mesh of the same ranks under another name."""
    tensor_parallel_mlp(model, init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("other",)))


def on_a_mesh_of_more_dims(model: MLP, mesh: DeviceMesh) -> None:
    """Not wrong, but its placements are on mesh dims that nobody knows."""
    finer = init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("one", "all"))
    replicated = [Replicate(), Replicate()]
    for module in (model.up, model.down):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), finer, replicated)))
    model.register_forward_pre_hook(lambda _module, inputs: (distribute_tensor(inputs[0], finer, replicated),))


def one_rank_raises(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    if mesh.get_rank() == 1:
        model.relu.register_forward_hook(_raise)


def _raise(*_: object) -> None:
    raise ZeroDivisionError("only here")


def one_rank_waits(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    if mesh.get_rank() == 1:
        model.relu.register_forward_hook(lambda *_: dist.barrier())


def one_rank_dies(model: MLP, mesh: DeviceMesh) -> None:
    if mesh.get_rank() == 1:
        os._exit(3)
    tensor_parallel_mlp(model, mesh)


def ranks_hold_different_kinds(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    replicated = [Replicate()]

    def wrap(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(output, mesh, replicated) if mesh.get_rank() else output

    model.register_forward_hook(wrap)


def loss_beside_the_output(output: torch.Tensor, *_: object) -> torch.Tensor:
    """Return a loss that differs between ranks and the local model, while its gradient does not."""
    return mean_square(output) + (1.0 if dist.is_initialized() else 0.0)


@dataclass(frozen=True)
class Answer:
    text: str
    values: torch.Tensor


class AnsweringMLP(MLP):
    """An MLP that returns a dataclass."""

    def forward(self, values: torch.Tensor) -> Answer:  # type: ignore[override]
        return Answer("result", super().forward(values))


def answer_and_more(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, output: (output, output.values.clone()))


def answer_moved(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, output: Answer(output.text, output.values + 1.0))


class Reporting(MLP):
    """An MLP that returns tensors and other things in a dict."""

    def forward(self, values: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        output = super().forward(values)
        return {
            "values": output, "size": 0.5 * output.abs().mean().item(), "rows": len(values),
            "about": ("sums", None, {}), "by": self,
        }  # fmt: skip


def loss_of_the_report(report: Any, *_: object) -> torch.Tensor:
    """Return a loss that sees the tensor only."""
    return mean_square((report if isinstance(report, dict) else report[0])["values"])


def _report_with(**changes: object) -> Any:
    def plan(model: nn.Module, mesh: DeviceMesh) -> None:
        tensor_parallel_mlp(model, mesh)
        model.register_forward_hook(lambda _module, _inputs, report: {**report, **changes})

    return plan


def report_unchanged(model: nn.Module, mesh: DeviceMesh) -> None:
    """Not wrong: in another order, a named tuple for a tuple, and an object that is another one in every process."""
    tensor_parallel_mlp(model, mesh)
    about = namedtuple("about", ["what", "why", "more"])
    model.register_forward_hook(
        lambda _module, _inputs, report: {
            "by": object(), **{name: report[name] for name in ("size", "values")},
            "rows": torch.tensor(report["rows"]).numpy()[()], "about": about(*report["about"]),
        }
    )  # fmt: skip


def report_of_another_size(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)

    def change(_module: nn.Module, _inputs: object, report: dict[str, Any]) -> dict[str, Any]:
        return report | {"size": report["size"] * (1 + 1e-4 * mesh.get_rank())}

    model.register_forward_hook(change)


def report_of_one_row_more(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(rows=7)(model, mesh)


def report_of_something_else(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("means", None, {}))(model, mesh)


def report_of_zero(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("sums", 0, {}))(model, mesh)


def report_with_more(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("sums", None, {"more": 1}))(model, mesh)


def report_as_a_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(rows=torch.tensor(6))(model, mesh)


def report_in_a_tuple(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, report: (report,))


class RowsAndTotal(MLP):
    """An MLP that returns what it makes of each row, and a tensor without dims."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        output = super().forward(values)
        return output, output.new_tensor(2.0)


class NormAtTheEnd(nn.Module):
    """What it returns sums to 0 but for rounding, and it does not see what is added to a row."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.norm = nn.LayerNorm(10)

    def forward(self, values: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        output = self.mlp(values)
        result: torch.Tensor = self.norm(output if added is None else output + added)
        return result


def mlp_parallel(model: NormAtTheEnd, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model.mlp, mesh)


class MaskedScores(MLP):
    """Scores of classes, some of which are out of the question."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scores = super().forward(values)
        return scores.masked_fill(torch.eye(*scores.shape, dtype=torch.bool), torch.finfo(scores.dtype).min)


def all_scores_moved(model: MaskedScores, mesh: DeviceMesh) -> None:
    """What cross entropy does not see."""
    tensor_parallel_mlp(model, mesh)
    model.down.register_forward_hook(lambda _module, _inputs, output: output + 1.0)


def last_class(scores: torch.Tensor, *_: object) -> torch.Tensor:
    """Return the mean cross entropy of ``scores`` against the last class."""
    return cross_entropy(scores, torch.full(scores.shape[:1], scores.shape[1] - 1))


def sum_of_all(output: torch.Tensor, *_: object) -> torch.Tensor:
    return output.sum()


def sum_and_a_little(output: torch.Tensor, *_: object) -> torch.Tensor:
    """Return a loss that differs between ranks and the local model by far more than rounding."""
    return output.sum() + (1e-9 if dist.is_initialized() else 0.0)


def sum_of_the_rows(output: Any, *_: object) -> torch.Tensor:
    """Return a loss of what is made of each row."""
    rows: torch.Tensor = output["values"] if isinstance(output, dict) else output[0]
    return rows.square().sum()


class Rotated(MLP):
    """An MLP that turns pairs of features by angles, as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, values: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        pairs = torch.view_as_complex(super().forward(values).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * (self.turns if turns is None else turns)).flatten(-2)


def not_turned(model: Rotated, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.turns = model.turns.real.to(model.turns.dtype)  # type: ignore[union-attr,operator]


class Gated(MLP):
    """An MLP with inputs by name."""

    def forward(self, values: torch.Tensor, *, gate: torch.Tensor, power: int = 1) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * gate**power


def gradient_of_the_gate_doubled(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)

    def double(_module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        return inputs, kwargs | {"gate": _Doubled.apply(kwargs["gate"])}

    model.register_forward_pre_hook(double, with_kwargs=True)


# ------------------------------------------------------------------------------------------------------------ warnings
def one_name_is_wrong(model: MLP, mesh: DeviceMesh) -> None:
    """Not wrong but for a name that does nothing, of which torch warns."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "dwn": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    if mesh.get_rank() == 1:
        warnings.warn("only\nhere", RuntimeWarning, stacklevel=1)
    warnings.warn("nobody is shown these", DeprecationWarning, stacklevel=1)


def the_name_that_counts_is_wrong(model: MLP, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "dwn": RowwiseParallel()})


def one_name_is_wrong_and_the_output_moved(model: MLP, mesh: DeviceMesh) -> None:
    one_name_is_wrong(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, output: output + 1.0)


def every_name_is_wrong(model: MLP, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"upp": ColwiseParallel()})


def loss_of_the_deviation(output: object, *_: object) -> torch.Tensor:
    """Return a loss that does not see what is added to the output."""
    answer = output[0] if isinstance(output, tuple) else output
    assert isinstance(answer, Answer)
    return mean_square(answer.values - answer.values.mean())


# ------------------------------------------------------------------------------------------------------------ backward
class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ZeroDivisionError("on the way back")


def _raising_behind(model: StackedMLP, mesh: DeviceMesh, name: str) -> None:
    tensor_parallel_mlp(model, mesh)
    layer: Any = model.layers[1]
    getattr(layer, name).register_forward_hook(lambda _module, _inputs, output: _Raising.apply(output))


def raises_in_the_backward_of_relu(model: StackedMLP, mesh: DeviceMesh) -> None:
    _raising_behind(model, mesh, "relu")


def raises_in_the_backward_of_down(model: StackedMLP, mesh: DeviceMesh) -> None:
    """What ``down`` returns is what its layer and the model return, too."""
    _raising_behind(model, mesh, "down")


def loss_that_raises_in_backward(output: torch.Tensor, *_: object) -> torch.Tensor:
    return mean_square(_Raising.apply(output) if dist.is_initialized() else output)


def gradient_doubled_in_a_hook(model: StackedMLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    layer: Any = model.layers[1]
    layer.relu.register_forward_hook(lambda _module, _inputs, output: _Doubled.apply(output))


def gradient_of_the_input_doubled(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_pre_hook(lambda _module, inputs: (_Doubled.apply(inputs[0]),))


def gradient_not_reduced(model: nn.Module, mesh: DeviceMesh) -> None:
    """A norm on the positions of each rank, whose weight is a plain replica: its gradient is this rank's part."""
    del model, mesh


def weights_untied(model: Transformer, mesh: DeviceMesh) -> None:
    tensor_parallel(model, mesh)
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())


def one_parameter_frozen(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.up.bias.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------- step
class SharedMask(StackedMLP):
    """Two layers with one mask."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(10) % 3 != 0
        for layer in self.layers:
            layer.register_buffer("mask", mask)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values) * layer.mask
        return values


def with_masks_of_their_own(model: SharedMask, mesh: DeviceMesh) -> None:
    """Not wrong: as many buffers as submodules have."""
    tensor_parallel_mlp(model, mesh)
    for layer in model.layers:
        layer.mask = layer.mask.clone()  # type: ignore[operator,union-attr]


class MaskedMLP(MLP):
    """With a buffer as masks of attention are: the size of it must not be that of errors."""

    def __init__(self, masked: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), masked).triu(1))


class Quantized(MLP):
    """With a parameter of integers, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(3), requires_grad=False)


def weight_moved_after_its_gradient(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.down.bias.register_post_accumulate_grad_hook(_move)


def _move(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def with_another_buffer(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_buffer("seen", torch.zeros(()))


def _on_rank_1() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


def decay_skipped_on_one_rank(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0 if _on_rank_1() else 0.01)


def other_beta_on_one_rank(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8 if _on_rank_1() else 0.9, 0.999))


def unused_rows_move(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Move rows of a table, less than Adam would: on rank 1 the last four, which nobody looks up."""
    optimizer = torch.optim.Adam(parameters, lr=0.01)

    def move(*_: object) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].to_local()[-4:] += 1e-3

    if _on_rank_1():
        optimizer.register_step_post_hook(move)
    return optimizer
