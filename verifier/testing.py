"""Test cases whose methods run on every rank, as in torch's own distributed tests, but on our own ranks.

``ProcessTestCase`` runs them in processes that are started once and shared by all test cases of the session.
``ThreadTestCase`` runs them in threads of this process. Both are ``unittest.TestCase`` and also run under pytest.
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
    """The base of both kinds. ``setUp`` and ``tearDown`` run once, in this process; the methods below on each rank.

    Attributes
    ----------
    world_size
        Number of ranks; set it in the class.
    limit
        Seconds without an answer after which the ranks count as hung.
    rank
        The rank; -1 in the process that runs ``setUp``.
    """

    world_size: ClassVar[int] = 2
    limit: ClassVar[float] = 60.0
    device_type: ClassVar[str] = "cpu"

    def __init__(self, methodName: str = "runTest") -> None:  # noqa: N803 - unittest's own name
        super().__init__(methodName)
        self.rank = -1
        self._at_end = contextlib.ExitStack()
        if hasattr(type(self), methodName):  # runTest is only a default name
            run = functools.partial(self._run_on_ranks, methodName)
            # keep the attributes of unittest's decorators and pytest's marks, such as an expected failure
            setattr(self, methodName, functools.update_wrapper(run, getattr(type(self), methodName)))

    def rank_setup(self) -> None:
        """Prepare a rank before each test; does nothing by default."""

    def rank_teardown(self) -> None:
        """Clean up a rank after each test, also after a failure."""

    def addCleanup(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N802
        """Call ``function`` at the end of the test on this rank or, from ``setUp``, at the end of the whole test."""
        if self.rank < 0:
            super().addCleanup(function, *args, **kwargs)
        else:
            self._at_end.callback(function, *args, **kwargs)

    def build_device_mesh(self, shape: Sequence[int] | None = None, names: Sequence[str] | None = None) -> DeviceMesh:
        """Return a mesh of all ranks, of ``shape`` or of one dim."""
        dim_names = None if names is None else tuple(names)
        return init_device_mesh(self.device_type, tuple(shape or (self.world_size,)), mesh_dim_names=dim_names)

    def _run_on_ranks(self, method: str) -> None:
        raise NotImplementedError

    @classmethod
    def _run_as(cls, rank: int, method: str) -> None:
        """Run the class's ``method`` as ``rank`` on a new instance, without the wrapper that ``__init__`` sets."""
        instance = cls(method)
        instance.rank = rank
        with instance._at_end:
            instance.rank_setup()
            try:
                getattr(cls, method)(instance)
            except (pytest.skip.Exception, pytest.fail.Exception) as ended:  # no Exceptions, so they would end a rank
                raise _without_pytest(ended) from None
            finally:
                instance.rank_teardown()


class ProcessTestCase(_RankTestCase):
    """A test case whose methods run in one process per rank, with a default process group.

    The processes outlive the test: state that a test leaves in its process is seen by later tests. After a failed test
    the ranks are synchronised, and ranks that died or hang are replaced.

    Attributes
    ----------
    backend, device_type
        ``gloo`` on ``cpu``, or ``nccl`` on ``cuda`` with one GPU per rank.
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

    It starts at once and copies tensors in memory. All threads share one random generator and one interpreter. A thread
    that hangs cannot be ended: it is reported after ``limit`` seconds and keeps running.
    """

    def _run_on_ranks(self, method: str) -> None:
        __tracebackhide__ = True
        raised = run_in_threads(lambda rank: self._run_as(rank, method), self.world_size, self.limit)
        failed = [(rank, error) for rank, error in enumerate(raised) if error is not None]
        causes = [(rank, error) for rank, error in failed if not isinstance(error, SystemExit)]  # they only waited
        causes.sort(key=lambda cause: isinstance(cause[1], unittest.SkipTest))  # failures before skips
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
    """Return pytest's outcome exception as an ``Exception`` that ranks can report."""
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
    """Raise the failure of the ranks, if there is one: a skip as a skip, all else as an AssertionError."""
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
    """Run a method of a :class:`ProcessTestCase` as the rank of this process."""
    target: Any = _imported(module, file)
    for name in qualname.split("."):
        target = getattr(target, name)
    target._run_as(mesh.get_rank(), method)
    if not dist.is_initialized():
        raise ValueError(f"{method} has destroyed the process group, which other tests also use; keep it")


def _imported(module: str, file: str) -> ModuleType:
    """Return the module; by its file if it is a script or is not found by name."""
    if module != "__main__":
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # an import inside the module failed
                raise
    return run_file(Path(file))


# ---------------------------------------------------------------------------------------------------------- decorators
@overload
def with_comms(test: Callable[P, R]) -> Callable[P, R]: ...
@overload
def with_comms(*, backend: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def with_comms(test: Any = None, *, backend: str | None = None) -> Any:
    """Require a process group for a test method, and end the method with a barrier.

    The ranks already have a process group and keep it, so tests for torch's decorator of this name run unchanged.

    Parameters
    ----------
    backend
        The backend that the test needs. If the ranks have another backend, the test raises a ValueError.
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
    """Skip a test or a class of tests if torch sees fewer than ``count`` GPUs."""
    seen = torch.cuda.device_count()
    return unittest.skipIf(seen < count, f"needs {count} GPU{'s' * (count != 1)}, torch sees {seen}")


def run_subtests(
    case: unittest.TestCase, values: Mapping[str, Sequence[object]], test: Callable[..., object], /, **fixed: object
) -> int:
    """Call ``test`` with each combination of ``values``, after one barrier; return the number of calls.

    Stops at the first failure, because other ranks may have failed elsewhere. The exception names the combination.

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
