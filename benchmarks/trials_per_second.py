"""Trials per second of the pool and of simulated ranks, beside tests written the way torch's own DTensor tests are.

    python benchmarks/trials_per_second.py [--trials 400] [--spawned 3]

One run measures all of them, so that the ratios hold whatever the machine does meanwhile. A trial is one row-, column-
or batch-wise embedding with its forward and backward pass, every comparison included. Repeated shapes are in the cache
of DTensor's sharding propagation, new ones never are. The other side spawns its processes for each test, as torch's own
multi-process tests do: it distributes the same tensors, runs the same op forward and backward and compares the gathered
results.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from verifier.cases import MeshSpec, OpCase, Trial, VerdictKind
from verifier.meshes import Pool, PoolKey
from verifier.oracle import judge
from verifier.reference import make_reference

PLACEMENTS = (
    ((Shard(0),), (Replicate(),)),
    ((Shard(1),), (Replicate(),)),
    ((Replicate(),), (Shard(0),)),
    ((Replicate(),), (Replicate(),)),
)


def make_case(rows: int, columns: int, ids: int) -> OpCase:
    """Return a lookup of ``ids`` rows in a table of ``rows`` x ``columns``."""
    generator = torch.Generator().manual_seed(rows * 1000 + ids)
    weight = torch.randint(-8, 9, (rows, columns), generator=generator).double().requires_grad_()
    indices = torch.randint(0, rows, (ids,), generator=generator)
    return OpCase("aten.embedding.default", "torch.nn.functional.embedding", (), {"weight": weight, "input": indices})


def trials(mesh: MeshSpec, count: int, new_shapes: bool) -> Iterator[Trial]:
    """Yield ``count`` trials; with ``new_shapes`` each in a shape of its own."""
    for number in range(count):
        case = make_case(17 + number, 8, 12) if new_shapes else SAME
        cotangent = ((Replicate(),),)
        yield Trial(case, mesh, PLACEMENTS[number % len(PLACEMENTS)], (cotangent,), number)


SAME = make_case(17, 8, 12)


def measure(mesh: MeshSpec, count: int, new_shapes: bool) -> tuple[float, float, int]:
    """Return trials per second, the verifier's own share of the time, and the number of cache misses."""
    todo = list(trials(mesh, count, new_shapes))
    own: Counter[str] = Counter()
    misses = 0
    with Pool(PoolKey.of(mesh)) as pool:
        for observation in pool.run(todo[:8]):  # starts the ranks and, for repeated shapes, fills the cache
            assert observation.reports
        references = {id(trial.case): make_reference(trial.case) for trial in todo}
        started = time.perf_counter()
        for observation in pool.run(todo[8:]):
            verdict = judge(observation, references[id(observation.trial.case)])
            assert verdict.kind is VerdictKind.PASS, verdict
            for report in observation.reports:
                assert report is not None
                misses += report.cache_misses
                own.update({name: round(seconds * 1e9) for name, seconds in report.seconds})
        seconds = time.perf_counter() - started
    share = (own["setup"] + own["compare"]) / max(1, own["total"])
    return (count - 8) / seconds, share, misses


def spawned_test(rank: int, world_size: int, port: int) -> None:
    """One test in the style of torch's own."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    weight, indices = SAME.kwargs["weight"], SAME.kwargs["input"]
    assert isinstance(weight, torch.Tensor)
    assert isinstance(indices, torch.Tensor)
    for weight_placements, index_placements in PLACEMENTS[:1]:
        table = distribute_tensor(weight.detach(), mesh, weight_placements).requires_grad_()
        output = torch.nn.functional.embedding(distribute_tensor(indices, mesh, index_placements), table)
        local = weight.detach().requires_grad_()
        expected = torch.nn.functional.embedding(indices, local)
        gathered = output.full_tensor()
        torch.testing.assert_close(gathered, expected)
        gathered.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(table.grad.full_tensor(), local.grad)
    dist.destroy_process_group()


def measure_spawned(world_size: int, count: int) -> float:
    """Return tests per second where each test spawns its own processes."""
    seconds = []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = time.perf_counter()
        torch.multiprocessing.spawn(spawned_test, (world_size, port), world_size)
        seconds.append(time.perf_counter() - started)
    return 1 / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--spawned", type=int, default=3, help="tests in the other style, each about 5 s")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {arguments.trials} trials each")
    print(f"{'mesh':14} {'shapes':9} {'trials/s':>9} {'own share':>10} {'misses':>7}")
    rates = {}
    for text in ("2", "4", "simulated:2", "simulated:4"):
        for new_shapes in (False, True):
            rate, share, misses = measure(MeshSpec.parse(text), arguments.trials, new_shapes)
            rates[text, new_shapes] = rate
            print(f"{text:14} {'new' if new_shapes else 'repeated':9} {rate:9.1f} {share:10.0%} {misses:7}", flush=True)
    for text in ("2", "4", "simulated:2", "simulated:4"):
        share = 1 - rates[text, True] / rates[text, False]
        print(f"sharding propagation on cache misses: {share:.0%} of a trial in a new shape on mesh {text}")
    for world_size in (2, 4):
        rate = measure_spawned(world_size, arguments.spawned)
        ratio = rates[str(world_size), False] / rate
        print(
            f"processes spawned per test, {world_size} ranks: {rate:.2f} tests/s; the pool is {ratio:.0f} times as fast"
        )


if __name__ == "__main__":
    main()
