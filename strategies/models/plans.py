"""Plans that shard the models of this package: tensor, sequence and embedding parallel, alone or with data parallel."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from strategies.models.layers import MLP, RMSNorm, StackedMLP
from strategies.models.transformer import Transformer

__all__ = [
    "data_parallel",
    "embedding_parallel",
    "sequence_parallel",
    "sequence_parallel_mlp",
    "sequence_parallel_norm",
    "sequence_plan",
    "tensor_parallel",
    "tensor_parallel_mlp",
]


# --------------------------------------------------------------------------------------------------------- perceptrons
def _mlp(mlp: str = "") -> dict[str, ParallelStyle]:
    return {f"{mlp}up": ColwiseParallel(), f"{mlp}down": RowwiseParallel()}


def _sequence_mlp(mlp: str = "") -> dict[str, ParallelStyle]:
    """Return the plan of :func:`_mlp` for inputs and outputs that are sharded on their first dim."""
    return {
        f"{mlp}up": ColwiseParallel(input_layouts=Shard(0)),
        f"{mlp}down": RowwiseParallel(output_layouts=Shard(0)),
    }


def tensor_parallel_mlp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard an :class:`MLP`, or each MLP of a :class:`StackedMLP`, by its hidden features."""
    prefixes = ["layers.*."] if isinstance(model, StackedMLP) else [""]
    return parallelize_module(model, mesh, {name: style for each in prefixes for name, style in _mlp(each).items()})


def sequence_parallel_mlp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As :func:`tensor_parallel_mlp`, with inputs and outputs sharded by rows."""
    prefix = "layers.*." if isinstance(model, StackedMLP) else ""
    return parallelize_module(model, mesh, _sequence_mlp(prefix))


def sequence_parallel_norm(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Run a norm on the positions of each rank: input and output are sharded on dim 1, and the output is plain."""
    assert isinstance(model, RMSNorm | nn.LayerNorm)
    return parallelize_module(model, mesh, SequenceParallel(use_local_output=True))


# --------------------------------------------------------------------------------------------------------- Transformer
def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the heads of attention, the hidden features, and both ends of a :class:`Transformer` by the vocabulary.

    Submodules exchange plain tensors, which are complete on every rank.
    """
    return _sharded_ends(_sharded_blocks(model, mesh), mesh)


def _sharded_blocks(model: nn.Module, mesh: DeviceMesh) -> Transformer:
    assert isinstance(model, Transformer)
    plan: dict[str, ParallelStyle] = {f"layers.*.attention.{name}": ColwiseParallel() for name in _PROJECTIONS}
    plan |= {
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    return model


_PROJECTIONS = ("query", "key", "value")


def _sharded_ends(model: Transformer, mesh: DeviceMesh) -> Transformer:
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    return _tied(model)


def _tied(model: Transformer) -> Transformer:
    """Tie table and output weight again, because parallelize_module gives each submodule its own parameter."""
    if model.size.tied:
        model.output.weight = model.tokens.weight
    return model


def embedding_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard only the embeddings: positions by columns, tokens by rows if tied, else by columns."""
    assert isinstance(model, Transformer)
    tied = model.size.tied
    by_column = ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()) if tied else by_column,
        "positions": ColwiseParallel(output_layouts=Replicate()),
    }
    if tied:  # the same weight needs the same placement
        plan["output"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    return _tied(model)


def sequence_plan() -> dict[str, ParallelStyle]:
    """Return the plan of :func:`sequence_parallel` for ``parallelize_module``."""
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gathered),  # type: ignore[arg-type]
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in _PROJECTIONS},
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(**gathered),  # type: ignore[arg-type]
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As :func:`tensor_parallel`, and shard the positions between attention and feed-forward.

    Submodules exchange DTensors. The logits are plain tensors, complete on every rank.
    """
    assert isinstance(model, Transformer)
    parallelize_module(model, mesh, sequence_plan())
    return _tied(model)


# ------------------------------------------------------------------------------------------------------- data parallel
def data_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None
) -> nn.Module:
    """Shard the model over the mesh dim ``tp`` by ``plan``, and the batch and all parameters over ``dp``.

    The default of ``plan`` is :func:`tensor_parallel`, and :func:`tensor_parallel_mlp` for perceptrons.
    """
    assert isinstance(model, Transformer | MLP | StackedMLP)
    default = tensor_parallel if isinstance(model, Transformer) else tensor_parallel_mlp
    (plan or default)(model, mesh["tp"])
    for part in () if isinstance(model, MLP) else model.layers:
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model
