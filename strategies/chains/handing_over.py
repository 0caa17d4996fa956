"""Programs that take a DTensor out of DTensor's hands: into a file, another process, a number or another mesh.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.planning.boundary import declares

__all__ = ["checkpointed", "handed_over", "loaded", "restored", "stored", "to_another_mesh"]


def stored(way: str, path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what comes back of a function's result on ``x`` that was stored.

    Parameters
    ----------
    way
        ``deepcopy``; ``pickle``, as to another process; ``save``, as a checkpoint; ``weights``, as one that is loaded
        with ``weights_only``.
    path
        The function, or ``redistribute`` for a redistribution to ``given`` that need not have come to its end, or
        ``embedding`` for rows of ``x`` whose numbers are ``given``.
    """
    import copy
    import io
    import pickle
    import time

    function: Any = torch
    if path == "redistribute":
        found: Any = x.detach().clone()
        if isinstance(x, DTensor):
            time.sleep(0.05 if x.device_mesh.get_rank() else 0)  # so that the first rank waits for data
            found = found.redistribute(placements=given, async_op=True)
    elif path == "embedding":
        ids: Any = torch.tensor(given)
        if isinstance(x, DTensor):
            everywhere = [Replicate()] * x.device_mesh.ndim
            ids = DTensor.from_local(ids, x.device_mesh, everywhere, run_check=False)
        found = torch.nn.functional.embedding(ids, x.detach())
    else:
        for part in path.split(".")[1:]:
            function = getattr(function, part)
        found = function(x.detach(), *given)
    if way == "deepcopy":
        return [copy.deepcopy(found) * 2]
    if way == "pickle":
        return [pickle.loads(pickle.dumps(found)) * 2]
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return [torch.load(file, weights_only=way == "weights") * 2]


def checkpointed(path: str, given: list[Any], placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what a distributed checkpoint of a function's result on ``x`` gives back, loaded over NaN.

    Parameters
    ----------
    placements
        Those of the tensor that is loaded to; without any they are those of the result that was saved.

    Raises
    ------
    Exception
        What a rank has raised.
    """
    import shutil
    import tempfile

    from torch.distributed import checkpoint
    from torch.distributed.tensor import distribute_tensor

    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    found = function(x.detach(), *given)
    if not isinstance(x, DTensor):
        return [found * 2]
    found = found.redistribute(placements=[Replicate() if one.is_partial() else one for one in found.placements])
    module: Any = checkpoint
    first = torch.distributed.get_rank() == 0
    named: list[Any] = [tempfile.mkdtemp() if first else None]
    torch.distributed.broadcast_object_list(named)
    try:
        module.save({"x": found}, checkpoint_id=named[0])
        lost = torch.full_like(found, torch.nan)
        if placements:
            nothing = torch.full(tuple(found.shape), torch.nan, dtype=found.dtype)
            lost = distribute_tensor(nothing, x.device_mesh, placements, src_data_rank=None)
        module.load({"x": lost}, checkpoint_id=named[0])
        torch.distributed.barrier()
        return [lost * 2]
    except module.CheckpointException as error:  # no Exception, so that it would end the process
        raise next(iter(error.failures.values()))[0] from error
    finally:
        if first:
            shutil.rmtree(named[0], ignore_errors=True)


def loaded(whole: bool, placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice the weight of a layer, loaded from a state dict of whole tensors that the first rank has.

    Parameters
    ----------
    whole
        Whether all ranks have the state dict.
    placements
        Those of the weight.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 2]
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.tensor import distribute_tensor

    given: Any = x.detach()
    given = given.full_tensor()
    layer: Any = torch.nn.Linear(given.shape[1], given.shape[0], bias=False)
    lost = distribute_tensor(torch.full_like(given, torch.nan), x.device_mesh, placements, src_data_rank=None)
    layer.weight = torch.nn.Parameter(lost)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not whole)
    first = torch.distributed.get_rank() == 0
    set_model_state_dict(layer, {"weight": given.clone()} if whole or first else {}, options=options)
    return [layer.weight.detach() * 2]


def handed_over(way: str, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what is made of ``x``, or of its sum and its maximum, outside of DTensor.

    Parameters
    ----------
    way
        ``share_memory_``, ``apply_`` and ``from_dlpack`` take ``x``. ``tensor`` makes one tensor of both scalars,
        ``format`` writes the sum with two digits, ``float`` and ``full`` take it for a number.
    """
    held: Any = x.detach()
    total: Any = held.sum()
    made: Any
    if way == "share_memory_":
        made = held.clone().share_memory_()
    elif way == "apply_":
        made = held.clone().apply_(lambda one: one + 1)
    elif way == "from_dlpack":
        made = torch.utils.dlpack.from_dlpack(held.clone())
    elif way == "tensor":
        made = torch.tensor([total, held.amax()], dtype=x.dtype)
    elif way == "full":
        made = torch.full((2,), total, dtype=x.dtype)
    else:
        made = torch.tensor(float(f"{total:.2f}" if way == "format" else total), dtype=x.dtype)
    if isinstance(x, DTensor) and not isinstance(made, DTensor):
        made = DTensor.from_local(made, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return [made * 2]


def to_another_mesh(placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice ``x``, redistributed to the mesh of the same ranks in reverse order.

    Raises
    ------
    AssertionError
        If the result is not on that mesh.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 2]
    mesh: Any = x.device_mesh
    if "reversed" not in vars(mesh):  # kept with the mesh, because groups stay for ever
        ranks = mesh.mesh.flatten().flip(0).view(mesh.mesh.shape)
        mesh.reversed = torch.distributed.device_mesh.DeviceMesh(mesh.device_type, ranks)
    held: Any = x.detach()
    moved = held.redistribute(placements=placements).redistribute(mesh.reversed, placements)
    if moved.device_mesh != mesh.reversed:  # pytest would give an assert names that scripts lack
        raise AssertionError("redistribute has left the tensor on its mesh")
    whole = (moved * 2).full_tensor().contiguous()
    return [DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)]


def restored(
    saved: dict[str, Any],
    first: bool,
    placements: list[Any],
    both: bool = False,
    momentum: float = 0.5,
    /,
    *,
    x: torch.Tensor,
) -> list[Any]:
    """Return a weight after two steps of training, between which it and the optimiser's state were saved and restored.

    Parameters
    ----------
    saved
        Options of the state dicts.
    first
        Whether the first rank alone keeps them, and gives them to the others.
    placements
        Those of the weight.
    both
        Whether one call restores both. A rank whose call leaves the weight out keeps the others company afterwards,
        because they would wait for it for ever, and has no weight then.
    momentum
        That of the optimiser, which keeps no tensors without one. What is restored replaces another learning rate.
    """

    def layer_of(weight: torch.Tensor, rate: float = 0.5) -> tuple[Any, torch.optim.Optimizer]:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(weight)
        return layer, torch.optim.SGD(layer.parameters(), lr=rate, momentum=momentum)

    def step(layer: Any, optimiser: torch.optim.Optimizer) -> None:
        layer.weight.grad = layer.weight.detach() * 3
        optimiser.step()

    if not isinstance(x, DTensor):
        layer, optimiser = layer_of(x.detach().clone())
        step(layer, optimiser)
        step(layer, optimiser)
        return [layer.weight.detach()]
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.tensor import distribute_tensor

    held: Any = x.detach()
    given, mesh = held.full_tensor(), x.device_mesh
    layer, optimiser = layer_of(distribute_tensor(given.clone(), mesh, placements, src_data_rank=None))
    step(layer, optimiser)
    model_state, state = states.get_state_dict(layer, optimiser, options=states.StateDictOptions(**saved))
    if first and torch.distributed.get_rank():
        model_state, state = {}, {}
    lost = torch.full_like(given, torch.nan)
    layer, optimiser = layer_of(distribute_tensor(lost, mesh, placements, src_data_rank=None), 4.0)
    options = states.StateDictOptions(**saved, broadcast_from_rank0=first)
    if both:
        loads: list[object] = []
        layer.register_load_state_dict_pre_hook(lambda *given: loads.append(given))
        states.set_state_dict(layer, optimiser, model_state_dict=model_state, optim_state_dict=state, options=options)
        if not loads:
            other, _ = layer_of(distribute_tensor(lost, mesh, placements, src_data_rank=None))
            states.set_model_state_dict(other, model_state, options=options)
    else:
        states.set_model_state_dict(layer, model_state, options=options)
        states.set_optimizer_state_dict(layer, optimiser, state, options=options)
    step(layer, optimiser)
    return [layer.weight.detach()]


for _program in (checkpointed, handed_over, loaded, restored, stored, to_another_mesh):
    declares(f"{__name__}.{_program.__name__}")
