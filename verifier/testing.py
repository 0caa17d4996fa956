"""Test cases whose methods run on every rank, as in torch's own tests of distributed code, on our own ranks.

``ProcessTestCase`` runs them in processes that are started once and shared by all test cases of the session,
``ThreadTestCase`` in threads of this process. Both are ``unittest.TestCase`` and run under pytest, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import itertools
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, ParamSpec, TypeVar, overload

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verifier.core.case import Backend, MeshSpec
from verifier.core.observation import Fate
from verifier.execution.imports import run_file
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import RulesNotInRanks
from verifier.meshes.tasks import Task, TaskOutcome
from verifier.torch_internals.simulation import run_in_threads

__all__ = ["ProcessTestCase", "ThreadTestCase", "run_on_rank", "run_subtests", "skip_unless_gpus", "with_comms"]

P = ParamSpec("P")
R = TypeVar("R")


class _RankTestCase(unittest.TestCase):
    """What both kinds share. ``setUp`` and ``tearDown`` run once, here; the methods below on each rank.

    Attributes
    ----------
    world_size
        Number of ranks; set it in the class.
    limit
        Seconds without an answer after which the ranks count as hung.
    rank
        Which rank this is; -1 where ``setUp`` runs.
    """

    world_size: ClassVar[int] = 2
    limit: ClassVar[float] = 60.0
    device_type: ClassVar[str] = "cpu"

    def __init__(self, methodName: str = "runTest") -> None:  # noqa: N803 - unittest's own name
        super().__init__(methodName)
        self.rank = -1
        self._at_end = contextlib.ExitStack()
        if hasattr(type(self), methodName):  # runTest exists in name only
            run = functools.partial(self._run_on_ranks, methodName)
            # what decorators of unittest and marks of pytest have noted, such as that it is expected to fail
            setattr(self, methodName, functools.update_wrapper(run, getattr(type(self), methodName)))

    def rank_setup(self) -> None:
        """Prepare a rank before each test; does nothing unless a class overrides it."""

    def rank_teardown(self) -> None:
        """Clean a rank up after each test, whether or not it failed."""

    def addCleanup(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N802
        """Have ``function`` called at the end: of the test on this rank, or in ``setUp`` of the whole test."""
        if self.rank < 0:
            super().addCleanup(function, *args, **kwargs)
        else:
            self._at_end.callback(function, *args, **kwargs)

    def build_device_mesh(self, shape: Sequence[int] | None = None, names: Sequence[str] | None = None) -> DeviceMesh:
        """Return a mesh of all ranks: of one dim, or of ``shape``."""
        dim_names = None if names is None else tuple(names)
        return init_device_mesh(self.device_type, tuple(shape or (self.world_size,)), mesh_dim_names=dim_names)

    def _run_on_ranks(self, method: str) -> None:
        raise NotImplementedError

    @classmethod
    def _run_as(cls, rank: int, method: str) -> None:
        """Run ``method`` of a new instance as ``rank``: that of the class, not what ``__init__`` puts over it."""
        instance = cls(method)
        instance.rank = rank
        with instance._at_end:
            instance.rank_setup()
            try:
                getattr(cls, method)(instance)
            except (pytest.skip.Exception, pytest.fail.Exception) as ended:  # no Exceptions, and so the end of a rank
                raise _without_pytest(ended) from None
            finally:
                instance.rank_teardown()


class ProcessTestCase(_RankTestCase):
    """A test case whose methods run in one process per rank, with a default process group.

    The processes outlive the test: what one leaves behind in its process, others find. After a test that failed they
    are brought together again, and those that are gone or hang are replaced.

    Attributes
    ----------
    backend, device_type
        As of a mesh: ``gloo`` on ``cpu``, or ``nccl`` on ``cuda`` with one GPU per rank.
    """

    backend: ClassVar[Backend] = "gloo"

    def _run_on_ranks(self, method: str) -> None:
        __tracebackhide__ = True
        cls = type(self)
        if "<locals>" in cls.__qualname__:
            raise ValueError(
                f"{cls.__qualname__} is made by a function, where no rank finds it; put it at the top level"
            )
        mesh = MeshSpec((self.world_size,), self.backend, self.device_type)
        arguments = (cls.__module__, inspect.getfile(cls), cls.__qualname__, method)
        task = Task("verifier.testing.run_on_rank", arguments, mesh, limit=self.limit)
        try:
            outcome = _pools().of(mesh).call(task)
        except RulesNotInRanks as error:
            raise ValueError(f"{error.text('an import in this test file')}; or register it in rank_setup") from error
        _raise_for(outcome, f"{cls.__qualname__}.{method} on {self.world_size} ranks, backend {self.backend}")


class ThreadTestCase(_RankTestCase):
    """A test case whose methods run in one thread per rank, with torch's threaded process group.

    It starts at once and moves tensors in memory; all threads share one random generator and one interpreter. A thread
    that hangs cannot be ended: it is reported after ``limit`` and left behind.
    """

    def _run_on_ranks(self, method: str) -> None:
        __tracebackhide__ = True
        raised = run_in_threads(lambda rank: self._run_as(rank, method), self.world_size, self.limit)
        failed = [(rank, error) for rank, error in enumerate(raised) if error is not None]
        causes = [(rank, error) for rank, error in failed if not isinstance(error, SystemExit)]  # of those who waited
        causes.sort(key=lambda cause: isinstance(cause[1], unittest.SkipTest))  # one that fails counts more
        for rank, error in causes or failed:
            if isinstance(error, unittest.SkipTest):
                raise error
            if isinstance(error, _ExpectedFailure):
                pytest.xfail(str(error))
            where = f"{type(self).__qualname__}.{method} on {self.world_size} threads"
            lines = traceback.format_exception(error)
            raise AssertionError(_message(rank, type(error).__name__, str(error), where, "".join(lines)))


class _ExpectedFailure(Exception):  # noqa: N818 - it is no error
    """``pytest.xfail`` was called."""


def _without_pytest(ended: BaseException) -> Exception:
    """Return what pytest ended a test with as an exception that ranks may report."""
    if isinstance(ended, pytest.skip.Exception):
        return unittest.SkipTest(str(ended))
    return _ExpectedFailure(str(ended)) if isinstance(ended, pytest.xfail.Exception) else AssertionError(str(ended))


@functools.cache
def _pools() -> PoolSet:
    pools = PoolSet(Pool)
    atexit.register(pools.close)
    return pools


def _message(rank: int, kind: str, text: str, where: str, lines: str) -> str:
    indented = "\n".join(f"  {line}" for line in lines.strip().splitlines())
    return f"rank {rank} raised {kind}: {text}\n  in {where}\n{indented}"


def _raise_for(outcome: TaskOutcome, where: str) -> None:
    """Raise what the ranks raised, if they did: a skip as a skip, all else as an AssertionError."""
    __tracebackhide__ = True
    if outcome.ok:
        return
    found = outcome.failure()
    if outcome.fate in (Fate.HANG, Fate.DIED) or found is None:
        raise AssertionError(f"{outcome.fate}: {outcome.detail}\n  in {where}")
    rank, raised = found
    if raised.type == "SkipTest":
        raise unittest.SkipTest(raised.message)
    if raised.type == _ExpectedFailure.__name__:
        pytest.xfail(raised.message)
    raise AssertionError(_message(rank, raised.type, raised.message, where, raised.traceback))


# ----------------------------------------------------------------------------------------------------------- on a rank
def run_on_rank(mesh: DeviceMesh, module: str, file: str, qualname: str, method: str) -> None:
    """Run a method of a :class:`ProcessTestCase` as the rank that this process is."""
    target: Any = _imported(module, file)
    for name in qualname.split("."):
        target = getattr(target, name)
    target._run_as(mesh.get_rank(), method)
    if not dist.is_initialized():
        raise ValueError(f"{method} has destroyed the process group, which is that of other tests, too; let it be")


def _imported(module: str, file: str) -> ModuleType:
    """Return the module; by its file if it is a script, or is not found by name."""
    if module != "__main__":
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # the module or its package is found, and imports another
                raise
    return run_file(Path(file))


# ---------------------------------------------------------------------------------------------------------- decorators
@overload
def with_comms(test: Callable[P, R]) -> Callable[P, R]: ...
@overload
def with_comms(*, backend: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def with_comms(test: Any = None, *, backend: str | None = None) -> Any:
    """Have a test method begin with a process group, and end on all ranks together.

    The process group of the ranks is there already and stays; so tests that are written for torch's decorator of this
    name run unchanged.

    Parameters
    ----------
    backend
        The backend that the test is for; where the ranks have another one, it raises ValueError.
    """
    if test is None:
        return functools.partial(with_comms, backend=backend)

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            raise ValueError(
                f"{test.__qualname__} has no process group; derive its class from ProcessTestCase or ThreadTestCase"
            )
        if backend is not None and backend != dist.get_backend():
            raise ValueError(f"{test.__qualname__} is for backend {backend}, the ranks have {dist.get_backend()}")
        result = test(*args, **kwargs)
        dist.barrier()
        return result

    return wrapper


def skip_unless_gpus(count: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Skip a test, or a class of them, where torch sees fewer than ``count`` GPUs."""
    seen = torch.cuda.device_count()
    return unittest.skipIf(seen < count, f"needs {count} GPU{'s' * (count != 1)}, torch sees {seen}")


def run_subtests(
    case: unittest.TestCase, values: Mapping[str, Sequence[object]], test: Callable[..., object], /, **fixed: object
) -> int:
    """Call ``test`` with each combination of ``values``, on ranks that are brought together once; return how many.

    Ends with the first that fails, since other ranks may have failed elsewhere; the exception says which one it was.

    >>> run_subtests(unittest.TestCase(), {"dim": [0, 1], "keepdim": [True, False]}, lambda dim, keepdim: None)
    4
    """
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    for combination in combinations:
        with case.subTest(**combination):
            try:
                test(**combination, **fixed)
            except unittest.SkipTest:
                raise
            except Exception as error:
                error.add_note("subtest " + ", ".join(f"{name}={value!r}" for name, value in combination.items()))
                raise
    return len(combinations)
