"""Plans that are wrong in one way each; the ranks import them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from output_mutants import Answer, Doubled
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

from strategies.models.layers import MLP, StackedMLP
from strategies.models.plans import sequence_plan, tensor_parallel, tensor_parallel_mlp
from strategies.models.transformer import Transformer
from verifier.modules.verify import mean_square


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
    layer.relu.register_forward_hook(lambda _module, _inputs, output: Doubled.apply(output))


def gradient_of_the_input_doubled(model: MLP, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_pre_hook(lambda _module, inputs: (Doubled.apply(inputs[0]),))


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
