"""The pytest plugin: ``verify``, meshes, Hypothesis profiles, and a recorded run of what the tests did.

It is loaded in every session of everyone who has the distribution installed, so it imports nothing heavy until a
fixture of its own is used or one of its profiles is asked for by name, and leaves all other sessions as they are.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from verifier.calls.session import SessionRecord
    from verifier.calls.verifier import Verifier
    from verifier.core.case import MeshSpec
    from verifier.core.interrupts import Interrupts
    from verifier.meshes.crew import PoolKey
    from verifier.meshes.pool import Pool, PoolSet
    from verifier.modules.outcomes import ModuleVerification
    from verifier.records.schema import RunRecord

__all__ = ["mesh", "mesh_pools", "verifier_imports", "verify", "verify_module"]

PROFILES = ("dev", "ci", "nightly", "gpu")
_HANDED_OVER = "dtensor_verifier_run"
_DEFAULT_MESH = "2"
_LIVE_POOLS = 3


@dataclass
class _Session:
    """What this process has of the session: its own record, and what the workers of pytest-xdist handed over."""

    own: SessionRecord | None = None
    verify: Verifier | None = None
    others: list[RunRecord] = field(default_factory=list)
    lost_workers: int = 0
    stored: RunRecord | None = None
    interrupts: Interrupts | None = None
    """Which signal has ended the session; None in a worker of pytest-xdist, which the controller ends."""


_SESSION = pytest.StashKey[_Session]()
_PATH = tuple(sys.path)
"""Where modules are found before pytest adds the folders of tests: by a command that is typed where pytest was."""
_PATH_HANDED_OUT = "dtensor_verifier_path"


# ------------------------------------------------------------------------------------------------------------- options
def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("verifier", "DTensor sharding strategy verifier")
    group.addoption(
        "--verifier-mesh",
        action="append",
        default=[],
        metavar="MESH",
        help=f"Mesh of the fixture mesh, as 4, 2x2 or simulated:8; repeatable, the first is verify's default. "
        f"[default: {_DEFAULT_MESH}]",
    )
    group.addoption(
        "--verifier-backend",
        choices=("simulated", "gloo", "nccl"),
        default="gloo",
        help="Backend of meshes without one. [default: gloo]",
    )
    group.addoption(
        "--verifier-seed", type=int, default=0, metavar="N", help="Fixes what verify samples and draws. [default: 0]"
    )
    group.addoption(
        "--verifier-import",
        action="append",
        default=[],
        metavar="MODULE_OR_FILE",
        help="What to run first, here and in every rank; repeatable.",
    )
    group.addoption(
        "--verifier-out", default="reports", metavar="DIR", help="Folder of the recorded runs. [default: reports]"
    )


def _register_profiles(name: object) -> None:
    """Register our profiles if one of them is wanted.

    Not always: importing Hypothesis takes a tenth of a second, and ``ci`` is a name of Hypothesis's own as well.
    """
    if name in PROFILES:
        from verifier.planning.profiles import register_profiles

        register_profiles()


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # before any conftest.py, so that a profile of the same name that one of them registers is the one that counts
    _register_profiles(getattr(early_config.known_args_namespace, "hypothesis_profile", None))


@pytest.hookimpl(tryfirst=True)  # Hypothesis's own pytest_configure loads the profile
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SESSION] = _Session()
    name = config.getoption("--hypothesis-profile", default=None)
    if name in PROFILES:
        from hypothesis import settings
        from hypothesis.errors import InvalidArgument

        try:
            settings.get_profile(name)
        except InvalidArgument:  # a conftest.py loaded this plugin, too late for the hook above
            _register_profiles(name)
    if config.getoption("--verifier-mesh"):
        try:
            _meshes(config)
        except ValueError as error:
            raise pytest.UsageError(f"--verifier-mesh: {error}") from error
    if not config.getoption("--verifier-out"):
        raise pytest.UsageError("--verifier-out '' names no folder; give a path, as . for this one")
    for name in config.getoption("--verifier-import"):
        if name.endswith(".py") and not Path(name).is_file():
            raise pytest.UsageError(f"--verifier-import {name}: there is no file {Path(name).absolute()}")


def _meshes(config: pytest.Config) -> list[MeshSpec]:
    from verifier.core.case import MeshSpec

    backend = config.getoption("--verifier-backend")
    device = "cuda" if backend == "nccl" else "cpu"
    texts = config.getoption("--verifier-mesh") or [_DEFAULT_MESH]
    return [MeshSpec.parse(text, backend, device) for text in texts]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for the fixture ``mesh`` once for each ``--verifier-mesh``, unless they name meshes."""
    texts = metafunc.config.getoption("--verifier-mesh")
    if len(texts) < 2 or "mesh" not in metafunc.fixturenames:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "mesh" in ([name.strip() for name in names.split(",")] if isinstance(names, str) else names):
            return
    metafunc.parametrize("mesh", texts, indirect=True)


# ------------------------------------------------------------------------------------------------------------ fixtures
@pytest.fixture(scope="session")
def verifier_imports(pytestconfig: pytest.Config) -> Sequence[str]:
    """Modules and files to run first in this process and in every rank; override it to register your own rules."""
    imports: list[str] = pytestconfig.getoption("--verifier-import")
    return imports


@pytest.fixture(scope="session")
def mesh_pools(pytestconfig: pytest.Config, verifier_imports: Sequence[str]) -> Iterator[PoolSet]:
    """The processes that play ranks: this process's own, started when needed, ended with the session."""
    from verifier.core.case import MeshSpec
    from verifier.events import PoolRestarted
    from verifier.execution.imports import ImportFailedError, run_imports
    from verifier.meshes.pool import Pool, PoolSet

    try:
        run_imports(verifier_imports)
    except ImportFailedError as error:
        pytest.fail(f"{error}".replace("--import", "--verifier-import", 1), pytrace=False)

    def make(key: PoolKey) -> Pool:
        def restarted(reason: str, seconds: float) -> None:
            record = pytestconfig.stash[_SESSION].own
            if record is not None and record.used:
                record(PoolRestarted(MeshSpec((key.world_size,), key.backend, key.device), reason, seconds))  # type: ignore[arg-type]

        return Pool(key, verifier_imports, on_restart=restarted, imported_here=True)

    pools = PoolSet(make, keep=_LIVE_POOLS)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mesh(request: pytest.FixtureRequest) -> MeshSpec:
    """A mesh: the parameter of ``parametrize("mesh", ["4", "2x2"], indirect=True)``, or of ``--verifier-mesh``."""
    from verifier.core.case import MeshSpec

    wanted = getattr(request, "param", None)
    if wanted is None:
        return _meshes(request.config)[0]
    if isinstance(wanted, MeshSpec):
        return wanted
    backend = request.config.getoption("--verifier-backend")
    return MeshSpec.parse(str(wanted), backend, "cuda" if backend == "nccl" else "cpu")


@pytest.fixture(scope="session")
def verify(pytestconfig: pytest.Config, mesh_pools: PoolSet, verifier_imports: Sequence[str]) -> Verifier:
    """``verify(op, *args, **kwargs)``: compare an op on a mesh, sharded in many ways, with the same call unsharded.

    See :meth:`verifier.calls.verifier.Verifier.__call__`. Works inside ``@given`` tests; load one of the profiles
    there, or set ``deadline=None``, since the first call starts the ranks.
    """
    from verifier.calls.session import SessionRecord
    from verifier.calls.verifier import Verifier
    from verifier.execution.imports import command_names
    from verifier.gate.baseline import load_baseline

    _end_in_order(pytestconfig)
    folder = Path(pytestconfig.getoption("--verifier-out"))
    baseline = load_baseline(folder / "baseline.toml", missing_ok=True)
    seed = pytestconfig.getoption("--verifier-seed")
    command = shlex.join(["pytest", *map(str, pytestconfig.invocation_params.args)])
    path = getattr(pytestconfig, "workerinput", {}).get(_PATH_HANDED_OUT, _PATH)
    named = partial(command_names, path=path, folder=pytestconfig.invocation_params.dir)
    record = SessionRecord(command, seed, (), baseline)
    backend = pytestconfig.getoption("--verifier-backend")
    verifier = Verifier(mesh_pools, _meshes(pytestconfig)[0], seed, backend, record, folder, named)
    session = pytestconfig.stash[_SESSION]
    session.own, session.verify = record, verifier
    return verifier


def _end_in_order(config: pytest.Config) -> None:
    """Have SIGTERM and SIGHUP end the session as a Ctrl-C does, so that what the tests did is recorded."""
    if hasattr(config, "workerinput"):
        return
    from verifier.core.interrupts import ENDING_SIGNALS, one_interrupt_at_a_time

    handling = ExitStack()
    others = [number for number in ENDING_SIGNALS if number is not signal.SIGINT]  # which pytest handles itself
    config.stash[_SESSION].interrupts = handling.enter_context(one_interrupt_at_a_time(signals=others))
    config.add_cleanup(handling.close)


@pytest.fixture(scope="session")
def verify_module(pytestconfig: pytest.Config, mesh_pools: PoolSet) -> Callable[..., ModuleVerification]:
    """``verify_module(model, plan, inputs, ...)``: compare a sharded model, as it trains, with the local one.

    See :func:`verifier.modules.verify.verify_module`. The mesh is the first ``--verifier-mesh`` unless a call names
    one; what it does is not recorded in the run.
    """
    from verifier.modules.verify import verify_module

    return partial(verify_module, mesh=_meshes(pytestconfig)[0], pools=mesh_pools)


# ----------------------------------------------------------------------------------------------------------- recording
@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist what was to be found before the folders of tests, which its path begins with."""
    node.workerinput[_PATH_HANDED_OUT] = list(_PATH)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Take over what a worker of pytest-xdist recorded."""
    session = node.config.stash[_SESSION]
    output = getattr(node, "workeroutput", None)
    if output is None:
        session.lost_workers += 1
    elif _HANDED_OVER in output:
        import msgspec

        from verifier.records.schema import RunRecord

        session.others.append(msgspec.json.decode(output[_HANDED_OVER], type=RunRecord))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Hand what ``verify`` did to the controller, or, there, write the run of the whole session."""
    mine = session.config.stash[_SESSION]
    complete = exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    if mine.own is not None and mine.verify is not None:
        mine.own.imports = mine.verify.imports
    own = mine.own.record(complete) if mine.own is not None else None
    if hasattr(session.config, "workeroutput"):
        if own is not None:
            import msgspec

            session.config.workeroutput[_HANDED_OVER] = msgspec.json.encode(own).decode()
        return
    records = [*mine.others, *([own] if own is not None else [])]
    if records:
        from verifier.calls.session import store_session
        from verifier.runs.store import RunStore

        store = RunStore(Path(session.config.getoption("--verifier-out")))
        mine.stored = store_session(records, store, complete and not mine.lost_workers)
    if mine.interrupts is not None and mine.interrupts.status is not None:
        session.exitstatus = mine.interrupts.status


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[_SESSION].stored
    if run is None:
        return
    from verifier.core.wording import plural
    from verifier.records.files import out_option
    from verifier.records.schema import FAILS

    counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts.items())
    terminalreporter.section("verifier")
    terminalreporter.write_line(
        f"{plural(run.trials, 'trial')}: {counts or 'none'}; {plural(len(run.findings), 'finding')}"
    )
    for finding in run.findings:
        first = finding.message.partition("\n")[0]
        terminalreporter.write_line(f"  {finding.fingerprint} {finding.verdict} in {finding.op}: {first}")
        if not finding.known and finding.script_status != FAILS:
            terminalreporter.write_line(f"    its script shows nothing yet: {finding.script_status}")
    rest = out_option(Path(config.getoption("--verifier-out")))
    terminalreporter.write_line(f"recorded as {run.header.id}; to see it: python -m verifier report{rest}")
