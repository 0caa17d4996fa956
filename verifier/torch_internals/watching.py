"""Watches for collectives, conversions to coarser dtypes, and rules without an end while code runs."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of numbers, which takes longer than the calls
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUNCTIONAL_COLLECTIVES",
    "CollectiveWatch",
    "EndlessRuleError",
    "Issued",
    "NarrowingWatch",
    "RedistributionWatch",
    "SlowRulesError",
    "count_collectives",
    "ended_rules",
    "memory_of",
    "next_sequence_number",
    "watched_collectives",
]


@contextlib.contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count the collectives that really run inside the block, by name, with torch's ``CommDebugMode``."""
    from torch.distributed.tensor.debug import CommDebugMode  # loads torch's compiler, which takes 0.4 s

    counts: dict[str, int] = {}
    mode = CommDebugMode()  # type: ignore[no-untyped-call]
    with mode:
        yield counts
    for op, count in mode.get_comm_counts().items():
        name = str(op).rsplit(".", 1)[-1]
        counts[name] = counts.get(name, 0) + count


_C10D_NAMES = {  # the names in torch.distributed; functional collectives have the same names
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "scatter_": "scatter",
}


def _collective_name(op: OpOverload) -> str | None:
    """Return the name of a collective; None for any other op, such as a wait or an op that only passes a tensor on."""
    name = op.overloadpacket.__name__
    if op.namespace == "c10d":
        return _C10D_NAMES.get(name)
    functional = op.namespace == "_c10d_functional" and name in FUNCTIONAL_COLLECTIVES
    return name if functional or name == "shard_dim_alltoall" else None


class CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen`` for each collective that this thread issues, with its name and the autograd node that it runs in.

    The node is given by its sequence number, which grows in the order of the forward pass; it is None outside a
    backward pass. For DTensors, the watch sees the collectives on their local tensors.
    """

    def __init__(self, seen: Callable[[str, int | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        name = _collective_name(func)
        if name is not None:
            node = torch._C._current_autograd_node()
            self._seen(name, None if node is None else node._sequence_nr())
        return func(*args, **(kwargs or {}))


class NarrowingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps in ``eps`` that of the coarsest dtype to which this thread converts values of a finer dtype; 0 for none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            before, after = (
                torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else None
                for one in (source, result)
            )
            if before is not None and after is not None and after > before:
                self.eps = max(self.eps, after)
        return result


@dataclass(frozen=True)
class Issued:
    """A collective as it was issued, padding included.

    Parameters
    ----------
    name
        As in ``torch.distributed``, such as ``all_gather_into_tensor``.
    ranks
        The ranks of its process group.
    dtype
        Of what is sent, as ``float32``.
    sent, received
        Bytes of the tensors that this rank gives to the collective, and of those that it gets from it.
    """

    name: str
    ranks: tuple[int, ...]
    dtype: str
    sent: int
    received: int


class watched_collectives:  # noqa: N801 - a context manager, and a class, since each trial enters it
    """Inside, :class:`RedistributionWatch` sees collectives.

    The packets of functional collectives are replaced by callables that call them. A dispatch mode would see each op,
    and double the time of a redistribution.
    """

    __slots__ = ()
    _entered = 0

    def __enter__(self) -> None:
        watched_collectives._entered += 1
        if watched_collectives._entered == 1:
            for packet in _packets():
                setattr(packet.namespace, packet.name, packet)

    def __exit__(self, *_: object) -> None:
        watched_collectives._entered -= 1
        if not watched_collectives._entered:
            for packet in _packets():
                setattr(packet.namespace, packet.name, packet.called)


class RedistributionWatch:
    """A context that keeps what a redistribution of ``local`` does on this rank: ``issued`` has its collectives.

    It sees them inside :class:`watched_collectives`.
    """

    __slots__ = ("_before", "_kept", "_local", "_peak", "issued")

    def __init__(self, local: torch.Tensor) -> None:
        self.issued: list[Issued] = []
        self._local = {memory_of(local): _size(local)}
        self._peak = _size(local)
        self._before = self._local
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> RedistributionWatch:
        _watches.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watches.pop()

    def saw(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note a collective with its arguments and its result."""
        given, made = _tensors(args[0]), _tensors(result)
        sent, received = ({memory_of(one): _size(one) for one in tensors} for tensors in (given, made))
        dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
        self.issued.append(Issued(name, _ranks_of(args), dtype, sum(map(_size, given)), sum(map(_size, made))))
        self._alive(self._before | sent)
        self._alive(sent | received)
        self._before = received
        self._kept = made  # so that nothing else gets its memory before the next collective

    def peak(self, result: torch.Tensor) -> int:
        """Return the most bytes of local tensors that were alive at once, as far as collectives show it.

        They are those of the tensor that is redistributed, and with it what a collective takes and gives, or what one
        gives and the next takes, or what the last gives and the ``result``.
        """
        self._alive(self._before | {memory_of(one): _size(one) for one in _tensors(result)})
        return self._peak

    def _alive(self, held: dict[int, int]) -> None:
        self._peak = max(self._peak, sum((held | self._local).values()))


_watches: list[RedistributionWatch] = []


class _Packet:
    """An op packet of a functional collective that tells the innermost watch of its calls.

    It passes for the packet itself: torch may keep it as a key when it loads a module meanwhile.
    """

    def __init__(self, namespace: Any, name: str) -> None:
        self.namespace, self.name, self.called = namespace, name, getattr(namespace, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.called(*args, **kwargs)
        if _watches:
            _watches[-1].saw(self.name, args, result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.called, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.called

    def __hash__(self) -> int:
        return hash(self.called)


@functools.cache
def _packets() -> tuple[_Packet, ...]:
    functional = [name for name in FUNCTIONAL_COLLECTIVES if hasattr(torch.ops._c10d_functional, name)]
    return (
        *(_Packet(torch.ops._c10d_functional, name) for name in functional),
        _Packet(torch.ops._dtensor, "shard_dim_alltoall"),
    )


def _tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in ``value`` that have memory of their own; an asynchronous tensor has another inside."""
    if isinstance(value, torch.Tensor):
        return [value] if type(value) in (torch.Tensor, torch.nn.Parameter) else []
    return [one for item in value for one in _tensors(item)] if isinstance(value, list | tuple) else []


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def memory_of(local: torch.Tensor) -> int:
    """Return the address of a local tensor's memory; 0 if it has none.

    The memory of a tensor that stands in for what a collective is writing is that of what is written.
    """
    if isinstance(local, AsyncCollectiveTensor):
        local = local.elem
    return local.untyped_storage().data_ptr()


def _ranks_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the process group among the arguments of a collective; none if there is no group."""
    for arg in reversed(args):
        if isinstance(arg, str):  # the name of the group comes last, after that of a reduction
            group = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(arg))  # type: ignore[attr-defined]
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(arg, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(arg))
    return ()


def next_sequence_number() -> int:
    """Return the sequence number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


FUNCTIONAL_COLLECTIVES = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)


# ------------------------------------------------------------------------------------------------- rules without an end
_TICK = 2.5
"""Seconds of the process's own time between two looks at what runs."""
_PLANNERS = (
    os.path.join("distributed", "tensor", "_ops", "utils.py"),
    os.path.join("distributed", "tensor", "_ops", "single_dim_strategy.py"),
    os.path.join("distributed", "tensor", "_ops", "registration.py"),
)
"""Files whose functions may go through many combinations of rules, and come to an end."""


class EndlessRuleError(RuntimeError):
    """A call of a function that works out rules does not come back."""


class SlowRulesError(RuntimeError):
    """DTensor takes too long to work out rules."""


class _Interrupted(BaseException):
    """Takes an error past torch's handlers for exceptions."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error


class ended_rules:  # noqa: N801 - a context manager, and a class, since a trial enters it several times
    """Ends a rule of DTensor's that does not come back inside the block.

    A rule is said not to come back if one and the same call of a function that works out rules, not of what goes
    through combinations of rules, is still running after 2.5 s of the process's own time. Rules take milliseconds. Only
    the main thread is watched.

    Parameters
    ----------
    longest
        After so many ticks of 2.5 s the block is ended, whatever runs; 0 for no limit.

    Raises
    ------
    EndlessRuleError
        If a rule does not come back.
    SlowRulesError
        If the block has taken ``longest`` ticks.
    """

    __slots__ = ("_before", "_handler", "_longest", "_ticks", "_watches")

    def __init__(self, longest: int = 0) -> None:
        self._longest = longest
        self._ticks = 0
        self._before: set[FrameType] = set()

    def __enter__(self) -> None:
        self._watches = threading.current_thread() is threading.main_thread()
        if self._watches:
            self._handler = _signal.signal(_signal.SIGVTALRM, self._look)
            _signal.setitimer(_signal.ITIMER_VIRTUAL, _TICK, _TICK)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._watches:
            _signal.setitimer(_signal.ITIMER_VIRTUAL, 0.0)
            _signal.signal(_signal.SIGVTALRM, self._handler)
            self._before.clear()
        if isinstance(error, _Interrupted):
            raise error.error from None

    def _look(self, _number: int, frame: FrameType | None) -> None:
        self._ticks += 1
        stack = list(_callers(frame))
        endless = next((one for one in stack if one in self._before), None)
        if endless is not None and _works_out_rules(endless):
            name = f"{endless.f_code.co_name} ({os.path.basename(endless.f_code.co_filename)})"
            raise _Interrupted(EndlessRuleError(f"{name} does not come back"))
        if self._ticks == self._longest:
            raise _Interrupted(SlowRulesError(f"DTensor works out rules for more than {self._ticks * _TICK:g} s"))
        self._before = set(stack)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _works_out_rules(frame: FrameType) -> bool:
    """Return whether a frame is of a rule: in a file of torch's rules, or outside torch if DTensor asks it for one."""
    file = frame.f_code.co_filename
    if f"{os.sep}torch{os.sep}" in file:
        return f"{os.sep}_ops{os.sep}" in file and not file.endswith(_PLANNERS)
    return any(_asks_for_rules(caller.f_code) for caller in _callers(frame.f_back))


def _asks_for_rules(code: CodeType) -> bool:
    return code.co_filename.endswith(_PLANNERS) or code.co_name in ("propagate_op_sharding_non_cached", "enumerated")
