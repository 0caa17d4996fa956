"""Ranks that torchrun started: what they find, what a lost one costs, and that nothing of a job is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_processes import LIMIT, WRONG_GRADIENT_RULE, comparable, environment, wait_until
from fault_trials import BATCH, FAULTY, MESH, kinds, trial, wait_for_end
from forked_commands import Command, run_module
from leftovers import children

from verifier.cli.app import app
from verifier.core.observation import Fate
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.processes import PoolError
from verifier.meshes.torchrun.connections import Doorway
from verifier.meshes.torchrun.controller import Cluster
from verifier.meshes.torchrun.environment import TorchrunRank
from verifier.processes.forks import FORKS
from verifier.records.schema import FAILS

# a limit that a busy machine keeps: the number of examples ends the run
REQUEST = ["run", "embedding_dense_backward", "--max-examples", "2", "--seed", "5", "--time-limit", "300"]
LITTLE_MINIMISING = """
from verifier.campaign import investigation

investigation.MINIMISING_LIMIT = 5.0
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def as_started_by_torchrun(rank: int, world_size: int, port: int, **others: object) -> dict[str, str]:
    """Return the environment of a process of torchrun, each on a node of its own, whose rank 0 has the store."""
    return environment(
        RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=0, GROUP_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        TORCHELASTIC_RUN_ID="test", TORCHELASTIC_RESTART_COUNT=0, TORCHELASTIC_MAX_RESTARTS=0,
        TORCHELASTIC_USE_AGENT_STORE=False, **others,
    )  # fmt: skip


@contextmanager
def processes(started: Sequence[subprocess.Popen[str] | Command]) -> Iterator[None]:
    """End what is left of ``started`` when the block is over."""
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


# ------------------------------------------------------------------------------------------------------------- torchrun
def torchrun(folder: Path, nodes: int, per_node: int, arguments: Sequence[str]) -> list[tuple[int, str]]:
    """Run the command line under one torchrun for each node; return the exit status and the output of each."""
    port = free_port()
    words = [
        "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1", "-m", "verifier", *arguments,
    ]  # fmt: skip
    started = [Command(words, folder) for _ in range(nodes)]
    with processes(started):
        printed = [process.communicate(timeout=LIMIT)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("per_node", "meshes"), [(1, ("2",)), pytest.param(2, ("2", "2x2"), marks=pytest.mark.nightly)], ids=str
)
def test_torchrun_on_two_nodes_finds_what_an_ordinary_run_finds(
    per_node: int, meshes: tuple[str, ...], tmp_path: Path
) -> None:
    """A wrong rule among them, for which every torchrun ends with an error."""
    (tmp_path / "rules.py").write_text(WRONG_GRADIENT_RULE.read_text() + LITTLE_MINIMISING)
    request = [*REQUEST, *(word for mesh in meshes for word in ("--mesh", mesh)), "--import", "rules.py"]
    ended = torchrun(tmp_path, 2, per_node, [*request, "--out", "cluster"])
    assert [status for status, _ in ended] == [1, 1], ended
    text = "".join(printed for _, printed in ended)
    assert text.count(f"torchrun: {2 * per_node} ranks on 1 machine") == 1

    alone = run_module("verifier", *request, "--out", "alone", folder=tmp_path)
    assert alone.returncode == 1, alone.stderr

    one, other = (_result(tmp_path / out) for out in ("cluster", "alone"))
    assert one["header"].pop("places").startswith(f"torchrun: {2 * per_node} ranks")
    assert other["header"].pop("places") == ""
    shown = [(finding["verdict"], finding["script_status"]) for finding in one["findings"]]
    assert shown == [("WRONG_VALUE", FAILS)]
    for each in (one, other):  # how small a finding becomes within its time limit depends on how busy the machine is
        each["findings"] = sorted((finding["verdict"], finding["trial"]["case"]["op"]) for finding in each["findings"])
    assert one["counts_by_mesh"] == other["counts_by_mesh"]
    assert {*meshes} <= set(one["counts_by_mesh"])
    assert one == other


def _result(out: Path) -> dict[str, Any]:
    (path,) = (out / "runs").glob("*/run.json")
    return comparable(path)


# ------------------------------------------------------------------------------------------- a cluster in this process
def _without_servers(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that has fork servers of its own."""
    return {name: value for name, value in variables.items() if name != FORKS}


@contextmanager
def cluster(world_size: int, folder: Path) -> Iterator[tuple[Cluster, list[Command]]]:
    """Yield a cluster whose controller is this process, and its keepers."""
    port = free_port()
    variables = as_started_by_torchrun(0, world_size, port)
    own = TorchrunRank.read(variables)
    assert own is not None
    keepers = [
        Command(["-m", "verifier"], folder, _without_servers(as_started_by_torchrun(rank, world_size, port)))
        for rank in range(1, world_size)
    ]
    with processes(keepers), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with Cluster(own) as ranks:
            yield ranks, keepers


@pytest.mark.ranks
def test_what_befalls_a_rank_of_a_cluster_costs_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults mean the same as on one machine, and a keeper that is lost ends the run."""
    with cluster(2, tmp_path) as (ranks, (keeper,)):
        monkeypatch.delenv(FORKS)  # as in the keeper, so that /proc tells which of the two started a rank
        with Pool(PoolKey.of(MESH), trial_limit=3.0, grace=0.5, starter=ranks.starter()) as pool:
            assert kinds(list(pool.run(BATCH))) == [VerdictKind.PASS] * len(BATCH)
            first = pool.pids
            assert [os.getpid() in ancestors(first[0]), keeper.pid in ancestors(first[1])] == [True, True]

            batch = [*BATCH]
            for fault, kind, fate, detail in (
                ("raise:1", VerdictKind.CRASH, Fate.STUCK, "after 0.5 s: rank 0 in forward, rank 1 raised"),
                ("hang:1", VerdictKind.HANG, Fate.HANG, "after 3 s: ranks 0, 1 in forward"),
                ("abort:1", VerdictKind.DIED, Fate.DIED, "rank 1 ended with signal SIGABRT in forward"),
            ):
                batch[FAULTY] = trial("P(sum)", fault)
                expected = [VerdictKind.PASS] * len(BATCH)
                expected[FAULTY] = kind
                observations = list(pool.run(batch))
                assert kinds(observations) == expected, fault
                assert observations[FAULTY].fate is fate
                assert detail in observations[FAULTY].detail

            restarts, pids = pool.restarts, pool.pids
            assert first[1] != pids[1]
            os.kill(pids[1], signal.SIGKILL)  # between trials, for which none is to blame
            assert kinds(list(pool.run(BATCH))) == [VerdictKind.PASS] * len(BATCH)
            assert (pool.restarts, pool.pids[0]) == (restarts + 1, pids[0])

            with pytest.raises(PoolError, match="a world of 3 ranks was asked for, torchrun started 2"):
                Pool(PoolKey(3, "gloo", "cpu"), starter=ranks.starter()).start()

            held = pool.pids
            keeper.kill()
            with pytest.raises(PoolError, match=r"the process that torchrun started as rank 1, on .*, is gone"):
                list(pool.run(BATCH))
        assert wait_for_end(held, 30) == []


def ancestors(pid: int) -> list[int]:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [parent, *ancestors(parent)] if parent else []


# ---------------------------------------------------------------------------------- jobs without torchrun to clean up
def start(folder: Path, world_size: int, arguments: Sequence[str]) -> list[Command]:
    """Start the processes of a job as torchrun would, in order of rank."""
    port = free_port()
    return [
        Command(["-m", "verifier", *arguments], folder, as_started_by_torchrun(rank, world_size, port))
        for rank in range(world_size)
    ]


LONG = ["run", "embedding", "--mesh", "2", "--profile", "nightly", "--out", "long"]


def journal_has_trials(folder: Path) -> bool:
    return any('"trial"' in path.read_text() for path in folder.glob("long/runs/*/journal.jsonl"))


@pytest.mark.ranks
def test_when_rank_0_is_killed_nothing_of_the_job_is_left(tmp_path: Path) -> None:
    before = children()
    job = start(tmp_path, 2, LONG)
    with processes(job):
        wait_until(lambda: journal_has_trials(tmp_path), "a trial")
        workers = sorted(children() - before - {process.pid for process in job})
        assert len(workers) >= 2
        job[0].kill()
        assert "error: rank 0 is gone, so rank 1 ends" in job[1].communicate(timeout=LIMIT)[0]
        assert job[1].returncode == 2
        assert wait_for_end(workers, 30) == []


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_job_with_what_is_known(
    number: signal.Signals, status: int | None, tmp_path: Path
) -> None:
    """SIGTERM comes to all processes, from torchrun; the keepers wait for rank 0, which records the run."""
    before = children()
    job = start(tmp_path, 2, LONG)
    with processes(job):
        wait_until(lambda: journal_has_trials(tmp_path), "a trial")
        workers = sorted(children() - before - {process.pid for process in job})
        for process in reversed(job) if status else job[:1]:
            process.send_signal(number)
        printed = [process.communicate(timeout=LIMIT)[0] for process in job]
        assert [process.returncode for process in job] == [status or job[0].returncode] * 2, printed
        assert wait_for_end(workers, 30) == []
    (record,) = tmp_path.glob("long/runs/*/run.json")
    run = json.loads(record.read_text())
    assert not run["complete"]
    assert run["trials"]


@pytest.mark.ranks
def test_a_mesh_larger_than_the_world_is_refused_on_all_ranks(tmp_path: Path) -> None:
    job = start(tmp_path, 2, ["run", "embedding", "--mesh", "2x2"])
    with processes(job):
        printed = [process.communicate(timeout=LIMIT)[0] for process in job]
        assert [process.returncode for process in job] == [2, 2], printed
        assert "error: mesh 2x2 has 4 ranks; torchrun started 2" in printed[0]
        assert printed[1] == ""


# ------------------------------------------------------------------------------------------------------- without ranks
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rules", "mul"], "rules uses no ranks; run it by itself, without torchrun"),
        (["merge", "one", "two"], "merge uses no ranks"),
        (["report"], "report under torchrun has no use for its ranks; add --fresh"),
        (["gate"], "gate under torchrun has no use for its ranks; add --fresh"),
    ],
)
def test_commands_that_need_no_ranks_are_refused_under_torchrun(arguments: list[str], message: str) -> None:
    own = TorchrunRank(0, 1, 0, 0, "127.0.0.1", 0, 0)
    with pytest.raises(ValueError, match=message):
        app(arguments, obj=Cluster(own), standalone_mode=False)


@pytest.mark.processes
def test_torchrun_that_would_take_findings_for_failures_is_refused(tmp_path: Path) -> None:
    variables = as_started_by_torchrun(0, 1, free_port()) | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    ended = run_module("verifier", "run", "embedding", folder=tmp_path, environment=variables)
    assert ended.returncode == 2
    assert "torchrun --max-restarts 3 would run everything again" in ended.stderr


def test_a_process_that_torchrun_did_not_start_has_no_place_in_a_cluster() -> None:
    assert TorchrunRank.read({"RANK": "1", "WORLD_SIZE": "2"}) is None


@pytest.mark.processes
def test_a_process_that_does_not_know_the_key_is_turned_away() -> None:
    doorway = Doorway()
    program = (
        "import sys; from verifier.meshes.torchrun.connections import connect\n"
        "connect('127.0.0.1', int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3])"
    )
    with socket.create_connection(("127.0.0.1", doorway.port)) as scanner:
        scanner.send(b"GET / HTTP/1.0\r\n\r\n" * 10)
        known, wrong = doorway.key.hex(), bytes(32).hex()
        callers = [
            subprocess.Popen([sys.executable, "-c", program, str(doorway.port), key, hello], env=environment(),
                             stderr=subprocess.DEVNULL, text=True)
            for key, hello in ((wrong, "wrong"), (known, "right"))
        ]  # fmt: skip
        with processes(callers):
            entered = doorway.accept(time.monotonic() + LIMIT)
    assert entered is not None
    assert entered[1] == "right"
    doorway.close()
