"""The runtime of every finding's script: it starts ranks, compares tensors, collects the ranks' messages and decides.

A script contains the source of the definitions that it uses from here, so this module needs only torch. Its imports are
those of the template; a definition uses only names that the script has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


# ------------------------------------------------------------------------------------------------------------- imports
def first_import(name: str, number: int) -> None:
    """Import a module, run a file, or call a callable at a dotted path, as --import does."""
    if name.endswith(".py"):
        spec: Any = importlib.util.spec_from_file_location(f"imported_{number}", name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.append(os.path.dirname(name))  # it may import modules beside it
        spec.loader.exec_module(module)
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        parent, _, attribute = name.rpartition(".")
        if error.name != name or not parent:
            raise
        getattr(importlib.import_module(parent), attribute)()


def import_all(names: Sequence[str]) -> None:
    """Import what --import named; rules that this registers replace torch's own."""
    dispatcher: Any = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    rules = [propagator.op_to_rules, propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs]
    keys = [propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy]
    before = [dict(registry) for registry in [*rules, *keys]]
    for number, name in enumerate(names):
        try:
            first_import(name, number)
        except BaseException as error:
            print(f"UNDECIDED: {name} cannot be imported: {type(error).__name__}: {error}", flush=True)
            os._exit(2)
    new = [
        {op for op, held in registry.items() if old.get(op) is not held}
        for old, registry in zip(before, [*rules, *keys], strict=True)
    ]
    for number, asked_first in (1, 2), (0, 1), (0, 2):  # torch's own, which DTensor would ask before
        for op in new[number] - new[asked_first]:
            rules[asked_first].pop(op, None)
    for op in new[4] - new[3]:
        if op in rules[2]:
            keys[0].pop(op, None)
    if new[0]:  # DTensor would decompose these ops first
        decomposing = type(propagator.decomp_strategy)
        has_decomp = decomposing.has_decomp
        decomposing.has_decomp = staticmethod(lambda op: op not in rules[0] and has_decomp(op))


# -------------------------------------------------------------------------------------------------------------- limits
@contextlib.contextmanager
def memory_limited(above: int) -> Iterator[None]:
    """Let allocations fail that need more than ``above`` bytes in addition to the memory that is mapped now."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + above
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


# ------------------------------------------------------------------------------------------------------------- results
class ShardedCallError(Exception):
    """An exception that the sharded call raised, as opposed to one of the script's own code."""


@contextlib.contextmanager
def sharded(step: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ShardedCallError(step, type(error).__name__, str(error)) from error


def children(result: Any) -> list[Any]:
    return list(result.values()) if isinstance(result, dict) else list(result)


def tensors(result: Any) -> list[Any]:
    """The tensors in a result, however it nests them."""
    if isinstance(result, (tuple, list, dict)):
        return [t for item in children(result) for t in tensors(item)]
    return [result] if isinstance(result, torch.Tensor) else []


def nesting(result: Any) -> str:
    """How a result nests its items, as text."""
    if isinstance(result, (tuple, list, dict)):
        keys = list(result) if isinstance(result, dict) else ""
        return f"{type(result).__name__}{keys}({', '.join(map(nesting, children(result)))})"
    return "_"


def outputs(result: Any, arguments: dict[str, Any], written: Sequence[str]) -> list[Any]:
    """The tensors of a result, and the written arguments that the op does not return."""
    found = tensors(result)
    return [*found, *(arguments[n] for n in written if not any(arguments[n] is f for f in found))]


def place(whole: torch.Tensor, part: torch.Tensor, placements: Sequence[Any], mesh: DeviceMesh) -> Any:
    result = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return result.requires_grad_(whole.requires_grad)


class Local:
    """The call on the whole tensors: its results, their gradients, and its arguments after the call."""

    def __init__(self, call: Any, given: dict[str, Any], written: Sequence[str], cotangents: Any = None) -> None:
        wholes = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in given.items()}
        self.error: Exception | None = None
        self.gradients: Sequence[Any] = ()
        try:
            result = call(**wholes)
        except Exception as error:
            self.error = error
            return
        results = outputs(result, wholes, written)
        self.nesting, self.flowing = nesting(result), [i for i, t in enumerate(results) if t.requires_grad]
        if cotangents is not None:
            wanted = [t for t in wholes.values() if t.requires_grad]
            flowing = [results[i] for i in self.flowing]
            self.gradients = torch.autograd.grad(flowing, wanted, cotangents, allow_unused=True)
        self.results = [t.detach() for t in results]
        self.left = {name: t.detach() for name, t in wholes.items()}

    def unlike(self, expected: str | None) -> str:
        """How the call's exception differs from the one of the finding; empty if it does not."""
        raised = None if self.error is None else type(self.error).__name__
        if raised == expected:
            return ""
        wanted = f"expected {expected}" if expected else "expected no exception"
        did = f"raised {raised}: {self.error}" if raised else "did not raise"
        return f"the local call {did}, {wanted}; is all imported that defines what it calls?"


# ---------------------------------------------------------------------------------------------------------- comparison
def cut(whole: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """The chunks of a tensor, as torch.chunk splits it, and empty ones up to ``parts``."""
    size = whole.shape[dim]
    width = -(-size // parts)
    starts = [min(index * width, size) for index in range(parts)]
    return [whole.narrow(dim, start, min(width, size - start)) for start in starts]


def promised(whole: torch.Tensor, placements: Sequence[Any], mesh: Sequence[int], rank: int) -> torch.Tensor | None:
    """The rank's local tensor of a tensor that is replicated or sharded; None if any placement is Partial."""
    coordinate: list[int] = []
    for extent in reversed(mesh):
        coordinate.insert(0, rank % extent)
        rank //= extent
    for placement, extent, index in zip(placements, mesh, coordinate, strict=False):
        if type(placement) is Shard:
            whole = cut(whole, placement.dim, extent)[index]
        elif hasattr(placement, "split_factor"):
            pieces = cut(whole, placement.dim, placement.split_factor)
            whole = torch.cat([cut(piece, placement.dim, extent)[index] for piece in pieces], placement.dim)
        elif type(placement) is not Replicate:
            return None
    return whole


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype in which torch can compare them."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor


def differs(got: torch.Tensor, expected: torch.Tensor, absolute: float) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype or got.layout != expected.layout:
        return True
    got, expected = comparable(got), comparable(expected)
    if torch.equal(got, expected):  # takes no memory, which may be short
        return False
    same = (got == expected) | ((got != got) & (expected != expected))
    if absolute:
        same |= (got - expected).abs() <= absolute
    return not bool(same.all())


def shown(tensor: torch.Tensor) -> str:
    return str(tensor.tolist() if tensor.numel() else f"nothing, of shape {list(tensor.shape)}")


class Rank(NamedTuple):
    """The rank on which the comparison runs, and the link to the parent."""

    number: int
    mesh: DeviceMesh
    send: Callable[[str, Any], None]

    def tell(self, problem: str) -> None:
        self.send("problem", problem)

    def announce(self, results: Sequence[Any]) -> None:
        """Send the placements of this rank's results, before a collective in which ranks that disagree may hang."""
        self.send("placements", [str(t.placements) if isinstance(t, DTensor) else "" for t in results])


def check(what: str, got: Any, expected: torch.Tensor, absolute: float, rank: Rank) -> None:
    """Compare a DTensor with the expected tensor, and send how it differs."""
    if not isinstance(got, DTensor):
        rank.tell(f"{what}: is a plain tensor, expected a DTensor")
        return
    if got.shape != expected.shape:
        rank.tell(f"{what}: has shape {list(got.shape)}, expected {list(expected.shape)}")
        return
    if (meta := got._spec.tensor_meta) is not None and meta.dtype != expected.dtype:
        rank.tell(f"{what}: DTensor takes it for {meta.dtype}, expected {expected.dtype}")
        return
    if any(getattr(placement, "dim", -1) >= expected.ndim for placement in got.placements):
        rank.tell(f"{what}: placed as {got.placements}, expected placements of a tensor with {expected.ndim} dims")
        return
    if expected.layout is not torch.strided:
        return
    with sharded("the result"):
        mine = got.to_local().detach().cpu()
    part = promised(expected, got.placements, rank.mesh.shape, rank.number)
    if part is not None and differs(mine, part, absolute):
        rank.tell(f"{what}: rank {rank.number} holds {shown(mine)}, expected {shown(part)}")
    with sharded("gathering"), torch.no_grad():
        whole = got.full_tensor().cpu()
    if differs(whole, expected, absolute):
        rank.tell(f"{what}: gathered {shown(whole)}, expected {shown(expected)}")


def call_sharded(call: Any, arguments: dict[str, Any], written: Sequence[str], local: Local, rank: Rank) -> Any:
    """The results of the call on DTensors; None if its exception or its results already decide."""
    try:
        with sharded("the call"):
            result = call(**arguments)
    except ShardedCallError:
        if local.error is None:
            raise
        return None  # the local call raises as well
    results = outputs(result, arguments, written)
    if local.error is not None:
        returned = [(t.to_local() if isinstance(t, DTensor) else t).tolist() for t in results]
        rank.tell(f"the local call raises {local.error!r}, the sharded one returns {returned}")
        return None
    rank.announce(results)
    if nesting(result) != local.nesting:
        rank.tell(f"returned {nesting(result)}, expected {local.nesting}")
        return None
    return results


def check_placements(results: Sequence[Any], asked: Sequence[Any], rank: Rank) -> None:
    for i, (got, where) in enumerate(zip(results, asked, strict=False)):
        if where is not None and isinstance(got, DTensor) and tuple(got.placements) != tuple(where):
            rank.tell(f"output {i}: placed as {got.placements}, expected {where}")


def check_strides(results: Sequence[Any], expected: Sequence[torch.Tensor], rank: Rank) -> None:
    for i, (got, wanted) in enumerate(zip(results, expected, strict=False)):
        if any(n > 1 and a != b for n, a, b in zip(wanted.shape, got.stride(), wanted.stride(), strict=False)):
            rank.tell(f"output {i}: has strides {list(got.stride())}, expected {list(wanted.stride())}")


def check_gradients(
    results: Sequence[Any], cotangents: list[Any], arguments: dict[str, Any], local: Local, accepted: Any, rank: Rank
) -> None:
    names = [name for name, argument in arguments.items() if argument.requires_grad]
    flowing, wanted = [results[i] for i in local.flowing], [arguments[n] for n in names]
    with sharded("the backward pass"):
        gradients = torch.autograd.grad(flowing, wanted, cotangents, allow_unused=True)
    rank.announce(gradients)
    for name, got, expected, absolute in zip(names, gradients, local.gradients, accepted, strict=False):
        if (got is None) != (expected is None):
            rank.tell(f"gradient of {name}: got {got}, expected {expected}")
        elif got is not None and (isinstance(got, DTensor) or expected.numel()):
            check(f"gradient of {name}", got, expected, absolute, rank)


def check_written(
    arguments: dict[str, DTensor], before: dict[str, Any], given: Any, local: Local, accepted: Any, rank: Rank
) -> None:
    """Compare the arguments after the call."""
    for name, argument in arguments.items():
        if differs(local.left[name], given[name].detach(), 0.0):  # the local call writes to it
            check(name, argument.detach(), local.left[name], accepted[name], rank)
        elif differs(argument.to_local().detach().cpu(), before[name].cpu(), 0.0):
            rank.tell(f"{name} was changed: {before[name].tolist()} became {argument.to_local().tolist()}")


# --------------------------------------------------------------------------------------------------------------- ranks
START_LIMIT = 80.0  # seconds without a message from any rank, before the sharded call
QUIET_LIMIT = 40.0  # the same, after all ranks have begun the call
LATE_LIMIT = 3.0  # the same, after a rank has ended without a failure that counts
SEEN_LIMIT = 1.0  # the same, after a rank has shown the defect


def flattened_mesh(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh with all its flattened submeshes, for which torch merges collectives."""
    names = tuple(f"dim{d}" for d in range(len(shape)))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for count in range(2, len(names) + 1):
        for dims in itertools.combinations(names, count):
            mesh[dims]._flatten()
    return mesh


def rank_main(
    number: int, port: int, shape: Sequence[int], device: str, backend: str, compare: Any, link: Any, make: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    said: tuple[str, Any] = "right", None
    try:
        if device == "cuda":
            torch.cuda.set_device(number % torch.cuda.device_count())
        where, size = f"tcp://127.0.0.1:{port}", math.prod(shape)
        dist.init_process_group(backend, init_method=where, rank=number, world_size=size)
        mesh = make(device, tuple(shape))
        if unlike := compare(Rank(number, mesh, lambda *words: link.send(words))):
            said = "undecided", unlike
    except ShardedCallError as error:
        said = "raised", error.args
    except BaseException as error:
        traceback.print_exc()
        said = "undecided", f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError, EOFError):  # the parent may have seen enough
        link.send(said)
        link.recv()  # waits until the parent ends the rank: other ranks may still wait for this one
    os._exit(0)


REFUSALS = (
    "no valid sharding strategy for the input placements",
    "in-place operations that require placement changes are not supported",
    "does not support complex tensors",
    "Please redistribute the",
)  # what DTensor or a collective says of a call that it refuses, under one version of torch or another


class Heard:
    """The messages of the ranks: whether they show the defect (a crash, say, or a hang), or why it is undecided.

    A plain refusal is no crash, unless the crash reads as one.
    """

    def __init__(self, ranks: int, crashes: bool, raised: str | None, silent: bool, plain: bool = False) -> None:
        self.ranks, self.crashes, self.raised, self.is_silent, self.plain = ranks, crashes, raised, silent, plain
        self.seen, self.doubts, self.unclear = False, list[str](), False
        self.ready, self.ended, self.placed = set[int](), set[int](), dict[int, list[Any]]()

    def fails(self, what: str) -> None:
        self.seen = True
        print(f"FAILS {what}", flush=True)

    def take(self, rank: int, kind: str, said: Any) -> None:
        if kind == "ready":
            self.ready.add(rank)
        elif kind == "placements":
            self.placed.setdefault(rank, []).append(said)
            turn = len(self.placed[rank]) - 1
            held = {str(theirs[turn]) for theirs in self.placed.values() if len(theirs) > turn}
            if len(held) > 1:
                self.fails(f"ranks hold their results as {' and as '.join(sorted(held))}")
        elif kind == "problem":
            self.fails(f"on rank {rank}: {said}")
        else:
            self.ended.add(rank)
        if kind == "undecided":
            self.unclear = True
            self.doubts.append(f"rank {rank}: {said}")
        if kind == "raised":
            step, name, message = said
            text = f"the sharded call raised {name}: {message}"
            refused = not self.plain and any(refusal in message for refusal in REFUSALS)
            if self.crashes and self.raised in (name, None) and not refused:
                self.fails(f"on rank {rank}: {text}")
            else:
                self.doubts.append(f"rank {rank}: in {step}, {text}")

    def lose(self, rank: int, status: int | None) -> None:
        """Record that a rank died, which can be the defect only after its sharded call has begun."""
        self.ended.add(rank)
        if rank in self.ready and self.is_silent:
            self.fails(f"rank {rank} died with status {status}")
        else:
            self.unclear = True
            self.doubts.append(f"rank {rank} ended with status {status}")

    def silent(self) -> None:
        """Record that all ranks are silent, which can be the defect only if all were in the sharded call."""
        quiet = sorted(set(range(self.ranks)) - self.ended)
        if self.seen:
            return  # the silent ranks wait for the one that failed
        if self.is_silent and len(self.ready) == self.ranks and not self.unclear:
            self.fails(f"ranks {quiet} hang")
        else:
            self.doubts.append(f"ranks {quiet} have not answered in time")

    def patience(self) -> float:
        if self.seen:
            return SEEN_LIMIT
        if self.doubts:
            return LATE_LIMIT
        return QUIET_LIMIT if len(self.ready) == self.ranks else START_LIMIT

    def decide(self) -> int:
        """Return the exit status, and print what it means."""
        if self.seen:
            print("the defect is there")
        elif self.doubts:
            print("\n".join(f"UNDECIDED: {doubt}, and that is not the defect" for doubt in self.doubts))
        else:
            print("the defect is gone")
        return 1 if self.seen else 2 if self.doubts else 0


def run(
    compare: Any,
    shape: Sequence[int],
    device: str,
    backend: str,
    heard: Heard,
    processes: list[Any],
    make: Any = init_device_mesh,
) -> int:
    """Start the ranks, let each compare on the mesh that it makes, and return the exit status.

    Started ranks are added to ``processes``.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    needed = heard.ranks if backend == "nccl" else 1
    if device == "cuda" and gpus < needed:
        print(f"UNDECIDED: {needed} GPUs are needed, and there are {gpus}")
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context, links = get_context("spawn"), dict[Any, int]()
    for rank in range(heard.ranks):
        mine, theirs = context.Pipe()
        os.environ["PYTHONHASHSEED"] = str(rank)  # sets have another order on each rank, the same in each run
        given = (rank, port, shape, device, backend, compare, theirs, make)
        process = context.Process(target=rank_main, args=given, daemon=True)
        process.start()
        processes.append(process)
        theirs.close()  # the link then ends with the rank
        links[mine] = rank
    until = time.monotonic() + START_LIMIT
    while len(heard.ended) < heard.ranks:
        listening = [link for link, rank in links.items() if rank not in heard.ended]
        spoken: list[Any] = connection.wait(listening, until - time.monotonic())
        for link in spoken:
            rank = links[link]
            try:
                heard.take(rank, *link.recv())
            except (EOFError, OSError):
                processes[rank].join(5)
                heard.lose(rank, processes[rank].exitcode)
        if not spoken:
            heard.silent()
            break
        until = time.monotonic() + heard.patience()
    for process in processes:
        process.kill()
    return heard.decide()
