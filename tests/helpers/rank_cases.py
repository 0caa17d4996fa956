"""Test cases that run on ranks; the tests of the harness run them and look at what comes of it."""

from __future__ import annotations

import os
import time
import unittest
from collections import Counter
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from strategies.models.plans import sequence_parallel
from strategies.models.transformer import Transformer, TransformerSize
from verifier.core.case import MeshSpec
from verifier.modules.arguments import ModuleCase
from verifier.modules.observing import run_module
from verifier.modules.verify import mean_square
from verifier.testing import (
    ProcessTestCase,
    ThreadTestCase,
    run_subtests,
    skip_unless_gpus,
    with_comms,
)
from verifier.torch_internals.watching import count_collectives

R = Replicate()


class Shared:
    """The same methods for processes and for threads."""

    __test__ = False
    rank: int
    world_size: int

    def rank_setup(self) -> None:
        self.prepared = self.rank + 100

    @with_comms
    def sums(self) -> None:
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        assert value.item() == sum(range(self.world_size))
        assert self.prepared == self.rank + 100
        assert dist.get_rank() == self.rank

    @with_comms
    def shards(self) -> None:
        mesh = self.build_device_mesh()  # type: ignore[attr-defined]
        whole = torch.arange(5.0)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert sharded.to_local().shape[0] == (3 if self.rank == 0 else 2)
        assert torch.equal(sharded.full_tensor(), whole)

    @with_comms
    def row_wise_lookup(self) -> None:
        mesh = self.build_device_mesh()  # type: ignore[attr-defined]
        table, ids = torch.arange(15.0).reshape(5, 3), torch.tensor([0, 4, 3, 1])
        rows = distribute_tensor(table, mesh, [Shard(0)])
        found = torch.nn.functional.embedding(distribute_tensor(ids, mesh, [R]), rows)
        assert torch.equal(found.full_tensor(), table[ids])  # type: ignore[attr-defined]

    cleaned: ClassVar[dict[int, list[str]]] = {}

    def cleans_up(self) -> None:
        order = self.cleaned[self.rank] = []
        self.addCleanup(order.append, "first")  # type: ignore[attr-defined]
        self.addCleanup(order.append, "last")  # type: ignore[attr-defined]
        assert not order

    def is_clean(self) -> None:
        assert self.cleaned[self.rank] == ["last", "first"]

    def cannot_clean_up(self) -> None:
        self.addCleanup(self.cleaned.__getitem__, "nothing")  # type: ignore[attr-defined]

    def one_fails(self) -> None:
        if self.rank == 1:
            raise AssertionError("wrong on this rank")
        dist.all_reduce(torch.zeros(1))  # nobody comes

    def subtests(self) -> None:
        def check(dim: int, factor: int) -> None:
            value = torch.ones(2) * factor
            dist.all_reduce(value)
            assert value[dim].item() < 2 * self.world_size, "too large"

        run_subtests(self, {"dim": [0, 1], "factor": [1, 2]}, check)  # type: ignore[arg-type]

    def skips(self) -> None:
        raise unittest.SkipTest("not on this machine")

    def one_skips_and_one_fails(self) -> None:
        if self.rank == 0:
            raise unittest.SkipTest("not on this rank")
        raise AssertionError("wrong on this rank")

    @skip_unless_gpus(10_000)
    def needs_gpus(self) -> None:
        raise AssertionError("this machine has many GPUs")

    @unittest.expectedFailure
    def fails_as_expected(self) -> None:
        raise AssertionError("known")

    @with_comms(backend="nccl")
    def for_nccl(self) -> None:
        raise AssertionError("ran on another backend")


class Processes(Shared, ProcessTestCase):
    limit = 60.0

    def own_processes(self) -> None:
        pids = [0] * self.world_size
        dist.all_gather_object(pids, os.getpid())
        assert len(set(pids)) == self.world_size

    def collectives_are_those_of_torch(self) -> None:
        """What the watch counts is what torch's own CommDebugMode counts, with checkpointing and without."""
        tokens = torch.arange(8).view(2, 4)
        mesh = self.build_device_mesh(names=("tp",))
        for size in (TransformerSize(layers=1), TransformerSize(layers=1, checkpointed=True)):
            model = sequence_parallel(Transformer(size), mesh)  # sends parameters, which is not counted
            given = ModuleCase(
                model=model, plan=lambda model, mesh: model, inputs=(tokens,), targets=(),
                mesh=MeshSpec((self.world_size,)), dim_names=("tp",), placements=((R,),),
                as_dtensors=False, loss=mean_square, optimizer=partial(torch.optim.SGD, lr=0.1), steps=1, seed=0,
            )  # fmt: skip
            with count_collectives() as counts:
                run = run_module(given, mesh)
            ours: Counter[str] = Counter()
            for one in run.collectives:
                ours[one.name] += one.count
            assert ours
            assert dict(ours) == counts, f"{dict(ours)} != {counts}"

    def destroys_the_group(self) -> None:
        dist.destroy_process_group()


class Hanging(ProcessTestCase):
    __test__ = False
    limit = 2.0

    def one_sleeps(self) -> None:
        if self.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))


class Threads(Shared, ThreadTestCase):
    world_size = 4
    limit = 30.0

    def shards(self) -> None:
        mesh = self.build_device_mesh((2, 2), ("dp", "tp"))
        whole = torch.arange(12.0).view(4, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal(sharded.full_tensor(), whole)


class SlowThreads(ThreadTestCase):
    __test__ = False
    limit = 1.0

    def one_sleeps(self) -> None:
        if self.rank == 1:
            time.sleep(4)
