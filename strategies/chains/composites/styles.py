"""What a user gives to parallel styles, to local_map, to rules of his own and to other entry points."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from strategies.chains import styles
from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_PROGRAMS = f"{styles.__name__}."


@composite
def _other_layout(b: Building) -> None:
    """Inputs and outputs of modules that are placed otherwise than their style says."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    said, wanted, own = (b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(3))
    style = b.pick(("PrepareModuleInput", "PrepareModuleOutput"))
    b.program(f"{_PROGRAMS}laid_out_otherwise", style, said, b.pick((said, wanted)), own, b.chance(0.7))


@composite
def _called_by_keyword(b: Building) -> None:
    """Layers and modules under parallel styles whose input is given by keyword."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    inputs = {"input_kwarg_layouts": {"input": Replicate()}, "desired_input_kwarg_layouts": {"input": Shard(0)}}
    style, options = b.way(
        ("ColwiseParallel", {"output_layouts": Replicate()}), ("RowwiseParallel", {"input_layouts": Replicate()}),
        ("SequenceParallel", {"sequence_dim": 0}), ("PrepareModuleInput", inputs),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}called_by_keyword", style, options)


@composite
def _distributed_module(b: Building) -> None:
    """Modules that ``distribute_module`` distributes, of which two may share a weight, and that SGD trains."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    b.program(f"{_PROGRAMS}distributed_module", b.pick(("tied", "frozen", "plain")), b.chance(0.5))


@composite
def _outputs_in_lists(b: Building) -> None:
    """Results in a list and in a named tuple, placed by ``PrepareModuleOutput``."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    desired = [b.pick((Replicate(), Shard(0), Shard(1)))] * 2
    outputs = {"output_layouts": [Replicate()] * 2, "desired_output_layouts": desired, "use_local_output": False}
    b.program(f"{_PROGRAMS}called_by_keyword", b.pick(("list", "named")), outputs)


@composite
def _mapped(b: Building) -> None:
    """Products by ``local_map``, whose placements are a list or a tuple, of tensors given by position or keyword."""
    for name in (b.floats(*b.size()), b.floats(*b.size())):
        b.tensors[name].requires_grad_(False)
    placements = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}mapped", b.pick(("list", "tuple", "keyword")), placements)


@composite
def _registered(b: Building) -> None:
    """Rules that ``register_sharding`` takes for ops of torch, of which one has run before."""
    b.tensors[b.positive(*b.size())].requires_grad_(False)
    b.program(f"{_PROGRAMS}registered", b.pick(("first", "later")), 0, 0)


@composite
def _registered_arguments(b: Building) -> None:
    """Rules of the user's that read an argument of each type, and calls whose arguments differ."""
    b.tensors[b.positive(*b.size())].requires_grad_(False)
    kind, *said = b.way(
        ("int[]", [0], [1]), ("bool", False, True), ("float", 0.0, 1.0), ("str", "0", "1"), ("int", 0, 1),
    )  # fmt: skip
    first = b.pick((0, 1))
    b.program(f"{_PROGRAMS}registered", kind, said[first], said[1 - first])


@composite
def _explicit(b: Building) -> None:
    """Functions in a block that allows no redistribution but those that the caller asks for."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    path, *given = b.way(
        ("torch.argmax",), ("torch.argmin",), ("torch.argmax", 0), ("torch.exp",), ("torch.sum", 0), ("torch.max", 0),
        ("torch.softmax", 0),
    )  # fmt: skip
    path, given = ("torch.amax", given) if path == "torch.max" else (path, given)
    b.program(f"{_PROGRAMS}asked_for_explicitly", path, given)
