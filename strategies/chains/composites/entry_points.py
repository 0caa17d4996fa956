"""DTensor's entry points that no op reaches: factories, initialisers, submeshes, parallel styles."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.chains import entry_points
from strategies.chains.building import Building
from strategies.chains.composites.table import composite
from verifier.torch_internals.placements import strided_shard

_PROGRAMS = f"{entry_points.__name__}."


@composite
def _factory(b: Building) -> None:
    """Factories with every placement that ``distribute_tensor`` takes, dims counted from either end."""
    b.floats(*b.size())
    kind, *given = b.way(("ones",), ("full", 3.0), ("rand",), ("randn",))
    letters = (Replicate(), Shard(0), Shard(1), Shard(-1))
    b.program(f"{_PROGRAMS}made", kind, [b.pick(letters) for _ in range(b.mesh.ndim)], given)


@composite
def _initialiser(b: Building) -> None:
    """Initialisers whose results differ from element to element and are the same for every generator."""
    name = b.pick(("eye_", "dirac_"))
    b.floats(*b.size(), *([b.pick((1, 2, 3))] if name == "dirac_" else []))
    b.program(f"{_PROGRAMS}initialised", name, [])


@composite
def _drawn(b: Building) -> None:
    """Random ops and initialisers with a generator of the caller's, on replicas."""
    b.tensors[b.positive(*b.size())].requires_grad_(False)
    path, *given = b.way(
        ("torch.Tensor.normal_",), ("torch.Tensor.uniform_",), ("torch.Tensor.bernoulli_", 0.5), ("torch.bernoulli",),
        ("torch.multinomial", 2), ("torch.Tensor.exponential_",), ("torch.Tensor.geometric_", 0.5),
        ("torch.Tensor.log_normal_",), ("torch.Tensor.cauchy_",), ("torch.nn.init.normal_",),
        ("torch.nn.init.uniform_",), ("torch.nn.init.trunc_normal_",), ("torch.nn.init.kaiming_uniform_",),
        ("torch.nn.init.xavier_normal_",),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}drawn", path, given, b.rng.getrandbits(8))


@composite
def _data(b: Building) -> None:
    """A tensor whose data are set to those of another, as loops of training without autograd do."""
    size = b.size()
    b.floats(*size)
    b.floats(*size)
    b.program(f"{_PROGRAMS}exchanged")


@composite
def _taken(b: Building) -> None:
    """The caller's own tensor, once a DTensor has been made of it."""
    b.floats(*b.size())
    placements = [b.pick((Replicate(), Replicate(), Shard(0))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}taken", b.chance(0.5), placements)


@composite
def _beside_numbers(b: Building) -> None:
    """A number and a plain tensor without dims that holds it, one after the other beside the same DTensor."""
    b.floats(*b.size())
    function = b.pick(("torch.add", "torch.sub", "torch.mul", "torch.div"))
    b.program(f"{_PROGRAMS}beside_numbers", function, b.pick((2.5, -0.5, 3, -2)), b.chance(0.5))


@composite
def _written_to_plain(b: Building) -> None:
    """What is accumulated in a plain tensor of one element, as a loop adds up losses, or reduced into one."""
    b.floats(*b.size())
    kind, path = b.way(
        ("in place", "torch.Tensor.add_"), ("in place", "torch.Tensor.mul_"), ("in place", "torch.Tensor.copy_"),
        ("an item", "torch.Tensor.add_"), ("an item", "torch.Tensor.copy_"), ("out", "torch.sum"),
        ("out", "torch.mean"), ("out", "torch.amax"), ("out", "torch.amin"), ("out", "torch.logsumexp"),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}written_to_plain", path, kind)


@composite
def _distributed(b: Building) -> None:
    """A plain tensor's view of any kind that is distributed: strides, an offset, repeated or conjugated elements.

    Some shards are strided, as those of a checkpoint of layers that are cut by tensor parallelism and by
    ``fully_shard``.
    """
    size = b.size()
    name = b.floats(*size)
    b.tensors[name].requires_grad_(False)
    path, *given = b.way(
        ("torch.t",), ("torch.narrow", 0, 1, 1), ("torch.narrow", 1, 1, 1), ("torch.select", 0, 1), ("torch.diagonal",),
        ("torch.broadcast_to", [2, *size]), ("torch.conj",), ("torch.adjoint",), ("torch.real",), ("torch.square",),
    )  # fmt: skip
    if path in ("torch.conj", "torch.adjoint", "torch.real"):
        b.tensors[name] = torch.complex(b.tensors[name], b.tensors[name].flip(0))
    letters: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(-1))
    placements = [b.pick(letters) for _ in range(b.mesh.ndim)]
    if b.chance(0.25):
        placements[b.pick(range(b.mesh.ndim))] = strided_shard(0, b.pick((2, 2, 3)))
    b.program(f"{_PROGRAMS}distributed", path, given, placements)


@composite
def _unwrapped(b: Building) -> None:
    """Gradients of local tensors of every placement."""
    b.floats(*b.size())
    b.program(f"{_PROGRAMS}unwrapped")


@composite
def _inference(b: Building) -> None:
    """Functions in inference mode, views and others, of a tensor that was made outside of it."""
    b.floats(*b.size())
    path, *given = b.way(
        ("torch.t",), ("torch.transpose", 0, 1), ("torch.unsqueeze", 0), ("torch.select", 0, 0), ("torch.detach",),
        ("torch.split", 1, 1), ("torch.permute", [1, 0]), ("torch.narrow", 1, 0, 1),
        ("torch.mul", 2), ("torch.sum", 0), ("torch.softmax", -1), ("torch.clone",), ("torch.nn.functional.relu",),
        ("torch.ops.aten.to.dtype_layout",),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}inferred", path, given)


@composite
def _copied(b: Building) -> None:
    """Deep copies of views and of other results, as those of a model and of its optimiser are made."""
    b.floats(*b.size())
    path, *given = b.way(
        ("torch.select", 0, 1), ("torch.narrow", 0, 1, 1), ("torch.narrow", 1, 1, 1), ("torch.narrow", 0, 0, 1),
        ("torch.unbind", 1), ("torch.split", 1, 0), ("torch.t",), ("torch.clone",), ("torch.sum", 0),
        ("torch.nn.Parameter",),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}copied", path, given)


@composite
def _reordered_mesh(b: Building) -> None:
    """A mesh whose ranks do not ascend."""
    b.floats(*b.size())
    order = list(range(b.mesh.world_size))
    b.rng.shuffle(order)
    b.program(f"{_PROGRAMS}reordered", order, [b.pick((Shard(0), Shard(1))) for _ in range(b.mesh.ndim)])


@composite
def _submesh(b: Building) -> None:
    """Functions on the rows of a mesh, each a mesh of its own whose tensors have other values."""
    path = b.pick(("torch.equal", "torch.equal", "torch.mul", "torch.dot", "torch.bucketize"))
    x, y = b.floats(b.rows), b.floats(b.rows)
    b.tensors[x].requires_grad_(False)
    b.tensors[y] = b.tensors[y if b.chance(0.3) else x].detach().clone()
    if path == "torch.bucketize":
        b.tensors[y] = b.tensors[y].sort().values
    b.program(f"{_PROGRAMS}on_submeshes", path, b.mesh.shape[0] if b.mesh.ndim > 1 else 1)


@composite
def _implicit_replication(b: Building) -> None:
    """A plain tensor beside a DTensor, in a block that takes it for a replica."""
    for name in (b.floats(*b.size()), b.floats(*b.pick((b.size(), (b.columns,))))):
        b.tensors[name].requires_grad_(False)
    path = b.pick(("torch.add", "torch.sub", "torch.mul", "torch.maximum", "torch.eq"))
    b.program(f"{_PROGRAMS}implicitly", b.pick(("", "", "nested", "raised")), path, b.chance(0.5))


@composite
def _prepared_output(b: Building) -> None:
    """What a module returns, a tensor or a tuple of any length, placed by ``PrepareModuleOutput``."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    kind, count = b.way(("a tensor", 1), ("a tuple", 1), ("a tuple", 2))
    layouts = [b.pick((Replicate(), Shard(0), Shard(1)))] * count
    desired = [b.pick((Replicate(), Shard(0), Shard(1))) for _ in range(count)]
    options = {"output_layouts": layouts, "desired_output_layouts": desired, "use_local_output": False}
    b.program(f"{_PROGRAMS}prepared", kind, options, count)


@composite
def _parallel_style(b: Building) -> None:
    """Layers under parallel styles, whose sizes need not be multiples of the ranks, frozen ones too."""
    local = b.chance(0.5)
    kept = {"use_local_output": False}
    first = ["ColwiseParallel", {"use_local_output": local}]
    second = ["RowwiseParallel", {**kept, "output_layouts": b.pick((Replicate(), Shard(0), Shard(-1)))}]
    model = b.pick(("perceptron", "frozen", "normed", "nested", "padded", "tied", "parametrized", "adapted"))
    if model in ("normed", "nested"):
        first = ["SequenceParallel", {"sequence_dim": 0}]
        second = ["ColwiseParallel", {**kept, "output_layouts": b.pick((Replicate(), Shard(-1)))}]
    elif model in ("padded", "tied"):
        first = ["RowwiseParallel", {**kept, "input_layouts": Replicate()}]
        second = ["ColwiseParallel", {**kept, "output_layouts": Replicate()}]
    hidden = b.pick((b.pending + 1, b.mesh.shape[-1], 2 * b.mesh.shape[-1], 2 * b.mesh.shape[-1] - 1))
    if model in ("padded", "tied"):
        b.ids(b.rows, below=hidden)
    else:
        b.floats(*b.size())
    b.program(f"{_PROGRAMS}styled", model, {"0": first, "1": second}, [b.columns, hidden])
