"""Runs the calls on which torch's own validator calls a rule incorrect through DTensor, in real processes.

:func:`try_all` is what ``peer_accusations.py`` needs; that file tells what counts as tried and what as right.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2

# Kernels that are exact on small integers, the triangular solve because its diagonal is drawn from powers of two: their
# results are compared bit for bit.
EXACT = {
    "baddbmm",
    "bmm",
    "expand",
    "expand_copy",
    "index_fill",
    "index_select",
    "linalg.solve_triangular",
    "reshape",
    "to",
    "view",
    "view_copy",
}

DOMAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geometric": lambda values: (values >= 1) & (values == values.round()),
    "log_normal": lambda values: (values > 0) & values.isfinite(),
}


@dataclass(frozen=True)
class Accusation:
    """A rule that the validator calls incorrect, with its reasons and the calls on which it does so."""

    op: str
    aten: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cause: str
    reasons: tuple[str, ...]
    samples: int
    calls: tuple[dict[str, Any], ...]

    @property
    def rule(self) -> str:
        """The rule as the validator prints it."""
        outputs = ", ".join(self.outputs)
        return f"{', '.join(self.inputs)} -> {outputs if len(self.outputs) == 1 else f'({outputs})'}"


@dataclass(frozen=True)
class Trial:
    """What the ranks saw of one call with one draw of values."""

    executed: bool
    failure: str
    local_call: str
    note: str = ""


# Placements, as the validator prints them.


def input_placement(text: str) -> Placement:
    """Return the placement that ``text`` names; ``R``, ``S(d)`` and ``P(op)`` occur in accused inputs."""
    if text == "R":
        return Replicate()
    kind, _, argument = text.removesuffix(")").partition("(")
    assert kind in ("S", "P"), text
    return Shard(int(argument)) if kind == "S" else Partial(argument)


def whole(text: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor that local tensors ``parts`` stand for under the placement that ``text`` names."""
    kind, _, argument = text.removesuffix(")").partition("(")
    if kind == "R":
        return parts[0]
    if kind == "S":
        return torch.cat(list(parts), int(argument))
    if kind == "_S":  # each of the `factor` pieces of the tensor dim was sharded by itself
        dim, factor = map(int, argument.split(","))
        pieces = [part.chunk(factor, dim) for part in parts]
        return torch.cat([pieces[rank][piece] for piece in range(factor) for rank in range(len(parts))], dim)
    stacked = torch.stack(list(parts))
    if kind == "_NormP":
        order = float(argument)
        return (stacked.double().abs() ** order).sum(0) ** (1 / order)
    assert kind == "P", text
    match argument:
        case "sum":
            return stacked.sum(0)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0)
    raise ValueError(f"no rule to combine {text!r}; known are R, S, _S, _NormP and P")


def local_share(text: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return what ``rank`` must hold of ``tensor``, or None where a placement leaves that open."""
    kind, _, argument = text.removesuffix(")").partition("(")
    if kind == "R":
        return tensor
    if kind not in ("S", "_S"):
        return None
    dim, factor = map(int, argument.split(",")) if kind == "_S" else (int(argument), 1)
    shares = []
    for piece in tensor.chunk(factor, dim):
        chunks = piece.chunk(RANKS, dim)
        shares.append(chunks[rank] if rank < len(chunks) else piece.narrow(dim, 0, 0))
    return torch.cat(shares, dim)


# Values.


def draw(
    described: dict[str, Any], placement: str, op: str, position: int, seed: torch.Generator
) -> list[torch.Tensor]:
    """Return the local tensors of an argument, one per rank: integers of both signs, none of them zero.

    Parts of a ``Partial`` are drawn rank by rank, so that each rank decides some of the elements and none decides all.
    """
    shape, dtype = described["shape"], getattr(torch, described["dtype"])
    if "values" in described:  # indices
        return [torch.tensor(described["values"], dtype=dtype).reshape(shape) for _ in range(RANKS)]

    def integers(largest: int) -> torch.Tensor:
        size = torch.randint(1, largest + 1, shape, generator=seed)
        return (size * (torch.randint(0, 2, shape, generator=seed) * 2 - 1)).to(dtype)

    if placement.startswith("P("):
        return [integers(9) for _ in range(RANKS)]
    tensor = integers(9)
    if op == "linalg.solve_triangular" and position == 0:
        diagonal = tensor.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(diagonal.sign() * 2 ** (diagonal.abs() % 2))  # powers of two keep the solution exact
    shares = [local_share(placement, tensor, rank) for rank in range(RANKS)]
    return [share.clone(memory_format=torch.contiguous_format) for share in shares if share is not None]


def is_tensor(argument: Any) -> bool:
    """Tell a stored tensor from every other stored argument."""
    return isinstance(argument, dict) and "shape" in argument


def stored_tensors(argument: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors of a stored argument from left to right."""
    if is_tensor(argument):
        yield argument
    elif isinstance(argument, list):
        for item in argument:
            yield from stored_tensors(item)


def filled(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a stored argument as torch takes it, with the next of ``tensors`` for each stored one."""
    if is_tensor(argument):
        return next(tensors)
    if isinstance(argument, list):
        return [filled(item, tensors) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, text),) = argument.items()
    match kind:
        case "float":
            return float(text)
        case "device":
            return torch.device(text)
    return getattr(torch, text)  # a dtype or a memory format


def allowed_error(accusation: Accusation, call: dict[str, Any], seen: Sequence[torch.Tensor]) -> float:
    """Return how far a result may be from the reference: 0 where it is exact, else 64 units of the largest value."""
    if accusation.op in EXACT and not any(isinstance(value, float) for value in call["kwargs"].values()):
        return 0.0
    largest = max(1.0, *(float(tensor.abs().max()) for tensor in seen if tensor.numel()))
    return 64 * torch.finfo(torch.float32).eps * largest


def difference(got: torch.Tensor, expected: torch.Tensor, allowed: float, what: str) -> str:
    """Return what tells ``got`` from ``expected``, or nothing where they agree."""
    if got.shape != expected.shape:
        return f"{what} has shape {list(got.shape)}, expected {list(expected.shape)}"
    agree = (got.double() - expected.double()).abs() <= allowed
    if bool(agree.all()):
        return ""
    first = int((~agree).flatten().nonzero()[0])
    values = f"got {got.flatten()[first].item():g}, expected {expected.flatten()[first].item():g}"
    return f"{what}: {values} ({int((~agree).sum())} of {agree.numel()} elements differ)"


# One call.


class LocalCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels that DTensor calls, with their positional arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def spelled(func: Any, args: Sequence[Any]) -> str:
    """Return a call in one line, with the shapes of its tensors."""
    shown = [f"T{list(item.shape)}" if isinstance(item, torch.Tensor) else repr(item) for item in args]
    return f"{func.__name__.partition('.')[0]}({', '.join(shown)})"


def gathered(item: Any) -> list[Any]:
    """Return the item of each rank."""
    items: list[Any] = [None] * RANKS
    dist.all_gather_object(items, item)
    return items


def as_list(result: Any) -> list[Any]:
    """Return the tensors that an op returned."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def was_executed(func: Any, calls: LocalCalls, shards: Sequence[torch.Tensor]) -> str:
    """Return the local call of ``func`` if it was given these very ``shards``, or nothing."""
    for seen, args in calls.seen:
        tensors = [item for item in args if type(item) is torch.Tensor]  # no FakeTensor, which has no data
        if seen is func and [t.data_ptr() for t in tensors] == [shard.data_ptr() for shard in shards]:
            return spelled(func, args)
    return ""


def judge_values(
    accusation: Accusation,
    call: dict[str, Any],
    expected: Sequence[torch.Tensor],
    outputs: Sequence[DTensor],
) -> str:
    """Return how ``outputs`` break the promise of the accused output placements, or nothing."""
    failures = []
    for text, reference, output in zip(accusation.outputs, expected, outputs, strict=True):
        local = output.to_local()
        parts = gathered(local)
        allowed = allowed_error(accusation, call, [reference, *parts])
        share = local_share(text, reference, dist.get_rank())
        if share is not None:
            failures.append(difference(local, share, allowed, f"rank {dist.get_rank()}'s local tensor"))
        else:
            failures.append(difference(whole(text, parts), reference, allowed, "the local tensors together"))
        if len({part.shape for part in parts}) > 1 and any(gathered(failures[-1])):
            continue  # shapes that differ where they should not could hang the collective
        try:
            failures.append(difference(output.full_tensor(), reference, allowed, "full_tensor()"))
        except RuntimeError as error:
            failures.append(f"full_tensor() raises {error}")
    return "; ".join(failure for failure in failures if failure)


def judge_draws(op: str, drawn: torch.Tensor, kernel: Callable[[], torch.Tensor]) -> tuple[str, str]:
    """Return what is wrong with this rank's random numbers, and a note on how they relate to those of other ranks.

    No value is promised. What is: each rank draws its own shard, in place, from the distribution that was asked for.
    """
    parts = gathered(drawn)
    if not bool(DOMAINS[op](drawn).all()):
        return "numbers that the distribution cannot give", ""
    note = "equal seeds give equal shards" if torch.equal(parts[0], parts[1]) else ""
    return difference(drawn, kernel(), 0.0, "the kernel on a tensor of this size, with this seed"), note


def try_once(accusation: Accusation, call: dict[str, Any], number: int, mesh: DeviceMesh) -> Trial:
    """Run one call through DTensor on all ranks and return what came of it; the same on every rank."""
    rank, seed = dist.get_rank(), torch.Generator().manual_seed(number)
    stored = list(stored_tensors([*call["args"], *call["kwargs"].values()]))
    globals_, shards, inputs = [], [], []
    for position, (text, described) in enumerate(zip(accusation.inputs, stored, strict=True)):
        parts = draw(described, text, accusation.op, position, seed)
        globals_.append(whole(text, parts))
        shards.append(parts[rank])
        size, stride = globals_[-1].shape, globals_[-1].stride()
        placements = (input_placement(text),)
        inputs.append(DTensor.from_local(parts[rank], mesh, placements, run_check=False, shape=size, stride=stride))
    name, _, overload = accusation.aten.removeprefix("aten.").partition(".")
    func = getattr(getattr(torch.ops.aten, name), overload)

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        left = iter(tensors)
        args = [filled(argument, left) for argument in call["args"]]
        return func(*args, **{key: filled(argument, left) for key, argument in call["kwargs"].items()})

    torch.manual_seed(number)
    result, error, calls, communication = None, "", LocalCalls(), CommDebugMode()  # type: ignore[no-untyped-call]
    with communication, calls:
        try:
            result = run(inputs)
        except RuntimeError as exception:  # what a kernel raises
            error = f"rank {rank} raises {exception}"
    local_call = was_executed(func, calls, shards)
    outputs = as_list(result) if not error else []
    promised = tuple(str(output.placements[0]) for output in outputs)
    executed = bool(local_call) and communication.get_total_counts() == 0
    executed = executed and (bool(error) or promised == accusation.outputs)
    failure, note = error, ""
    if not any(gathered(error)) and all(gathered(executed)):
        if accusation.op in DOMAINS:

            def kernel() -> torch.Tensor:
                torch.manual_seed(number)
                return torch.as_tensor(run([torch.empty_like(shards[0])]))

            failure, note = judge_draws(accusation.op, shards[0], kernel)
        else:
            failure = judge_values(accusation, call, as_list(run(globals_)), outputs)
    failures = [each for each in gathered(failure) if each]
    return Trial(all(gathered(executed)), failures[0] if failures else "", local_call, note)


def run_rank(rank: int, folder: str, accusations: Sequence[Accusation], draws: int) -> None:
    """Be one rank: try everything, and on rank 0 leave the trials in ``folder``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    tried = [
        [try_once(accusation, call, number, mesh) for call in accusation.calls for number in range(draws)]
        for accusation in accusations
    ]
    if rank == 0:
        torch.save([[astuple(trial) for trial in trials] for trials in tried], f"{folder}/trials")
    dist.barrier()
    dist.destroy_process_group()


def try_all(accusations: Sequence[Accusation], draws: int) -> list[tuple[Trial, ...]]:
    """Return the trials of each of ``accusations`` by real processes, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, accusations, draws), nprocs=RANKS)  # type: ignore[no-untyped-call]
        stored = torch.load(f"{folder}/trials")
    return [tuple(Trial(*trial) for trial in trials) for trials in stored]
