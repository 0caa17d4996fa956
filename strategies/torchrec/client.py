"""One training step of TorchRec's ``EmbeddingBagCollection``, whole or sharded; needs the extra ``torchrec``.

Only the inputs are ours: TorchRec's own planner entries, sharder, kernels and collectives run on the ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.torchrec.checks import LayoutError, check_table
from strategies.torchrec.tables import group_of, held

__all__ = ["TRAIN_BAGS", "check_dtensors", "keys_of", "train_bags"]

TRAIN_BAGS = "strategies.torchrec.client.train_bags"
RATE = 0.5


def keys_of(features: Sequence[Sequence[int]]) -> list[str]:
    """Return the sorted keys of TorchRec's results: ``f1``, or ``f1@t0`` if several tables share the feature.

    >>> keys_of([[0, 1], [1]])
    ['f0', 'f1@t0', 'f1@t1']
    """
    everything = [feature for some in features for feature in some]
    return sorted(
        f"f{feature}" if everything.count(feature) == 1 else f"f{feature}@t{table}"
        for table, some in enumerate(features)
        for feature in some
    )


def train_bags(
    tables: list[torch.Tensor],
    ids: list[torch.Tensor],
    lengths: list[torch.Tensor],
    cotangents: list[torch.Tensor],
    features: list[list[int]],
    pooling: list[str],
    plan: list[list[Any]],
    ranks_per_host: int,
) -> list[torch.Tensor]:
    """Return the pooled bags of each key, sorted by key, and each table after one step of SGD.

    Plain tensors go through the unsharded collection. Replicated DTensors go through the sharded collection: its tables
    have the same values, and each rank looks up some of the bags.

    Parameters
    ----------
    tables
        Float32 [rows, columns].
    ids, lengths
        For each feature the rows that its bags look up, i64[n], and the number of rows of each bag, i64[bags].
    cotangents
        For each key, in the order of :func:`keys_of`, the gradient of its bags, [bags, columns].
    features, pooling
        For each table the features that are looked up in it, and ``"SUM"`` or ``"MEAN"``.
    plan
        For each table the name of a function of ``torchrec.distributed.sharding_plan``, its arguments by name, and the
        compute kernel.
    ranks_per_host
        Number of consecutive ranks that TorchRec treats as one host.
    """
    if not isinstance(tables[0], DTensor):
        collection = _collection(tables, features, pooling)
        found = collection(_batch(ids, lengths, 0, len(lengths[0]))).to_dict()
        _step(collection, found, cotangents)
        return [*_sorted(found), *(bag.weight.detach() for bag in collection.embedding_bags.values())]
    mesh = tables[0].device_mesh
    group = group_of(mesh)
    tables, ids, lengths, cotangents = (
        [tensor.to_local().detach() for tensor in some]  # type: ignore[attr-defined]
        for some in (tables, ids, lengths, cotangents)
    )
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if len(lengths[0]) % ranks:
        raise NotImplementedError(f"{len(lengths[0])} bags on {ranks} ranks: TorchRec needs the same number on each")
    share = len(lengths[0]) // ranks
    first, last = rank * share, (rank + 1) * share
    with _hosts(ranks_per_host):
        sharded = _sharded(_collection(tables, features, pooling), plan, mesh, ranks_per_host)
        weights = _weights(sharded)
        _for_each_part(weights, lambda table, part, rows, columns: part.copy_(tables[table][rows, columns]))
        found = sharded(_batch(ids, lengths, first, last)).wait().to_dict()
        # TorchRec divides gradients by the number of ranks.
        _step(sharded, found, [ranks * cotangent[first:last] for cotangent in cotangents])
    trained = [torch.zeros(table.shape) for table in tables]
    whole = _for_each_part(weights, lambda table, part, rows, columns: trained[table][rows, columns].copy_(part))
    for table, result in enumerate(trained):
        if table not in whole:
            dist.all_reduce(result, group=group)
    bags = [
        DTensor.from_local(
            part,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((share * ranks, part.shape[1])),
            stride=(part.shape[1], 1),
        )
        for part in _sorted(found)
    ]
    return [*bags, *(DTensor.from_local(result, mesh, [Replicate()], run_check=False) for result in trained)]


def check_dtensors(
    mesh: DeviceMesh, tables: list[torch.Tensor], plan: list[list[Any]], ranks_per_host: int, spoilt: int | None = None
) -> dict[int, str]:
    """Check the DTensors that TorchRec returns for the tables of a sharded collection; every rank has to call this.

    Parameters
    ----------
    tables, plan, ranks_per_host
        As in :func:`train_bags`. Data-parallel tables are plain tensors and are not checked.
    spoilt
        The table whose first rank changes a number, for tests of the check.

    Returns
    -------
    dict
        The problem of each table, by the table's number; an empty text if there is none.
    """
    with _hosts(ranks_per_host):
        collection = _collection(tables, [[number] for number in range(len(tables))], ["SUM"] * len(tables))
        sharded = _sharded(collection, plan, mesh, ranks_per_host, as_dtensors=True)
        weights = dict(enumerate(_weights(sharded)))
        found: dict[int, str] = {}
        for number, weight in weights.items():
            if not isinstance(weight, DTensor):
                continue
            with torch.no_grad():
                for chunk, part in held(weight):
                    part.copy_(tables[number][slice(*chunk.rows), slice(*chunk.columns)])
                    if number == spoilt and chunk.offsets == (0, 0):
                        part[0, 0] += 1
            try:
                check_table(weight, tables[number])
                found[number] = ""
            except LayoutError as error:
                found[number] = str(error)
    return found


def _collection(tables: list[torch.Tensor], features: list[list[int]], pooling: list[str]) -> Any:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=table.shape[0],
            embedding_dim=table.shape[1],
            feature_names=[f"f{feature}" for feature in features[number]],
            pooling=PoolingType[pooling[number]],
        )
        for number, table in enumerate(tables)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    with torch.no_grad():
        for number, table in enumerate(tables):
            collection.embedding_bags[f"t{number}"].weight.copy_(table)
    return collection


def _batch(ids: list[torch.Tensor], lengths: list[torch.Tensor], first: int, last: int) -> Any:
    """Return bags ``first`` to ``last`` of all features."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    bounds = [(int(some[:first].sum()), int(some[:last].sum())) for some in lengths]
    return KeyedJaggedTensor(
        keys=[f"f{number}" for number in range(len(ids))],
        values=torch.cat([some[start:stop] for some, (start, stop) in zip(ids, bounds, strict=True)]),
        lengths=torch.cat([some[first:last] for some in lengths]),
    )


def _sorted(found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [found[key].detach().contiguous() for key in sorted(found)]


def _step(module: torch.nn.Module, found: dict[str, torch.Tensor], cotangents: list[torch.Tensor]) -> None:
    losses = [(found[key] * cotangent).sum() for key, cotangent in zip(sorted(found), cotangents, strict=True)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(module.parameters(), lr=RATE).step()  # fused tables were updated in the backward


@contextmanager
def _hosts(ranks_per_host: int) -> Iterator[None]:
    """Set the number of ranks per host as torchrun does, and let TorchRec make new process groups.

    TorchRec's cached process groups are wrong for other hosts, and for a pool of ranks that was repaired since.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_host)))
        stack.enter_context(patch.multiple("torchrec.distributed.comm", _INTRA_PG=None, _CROSS_PG=None))
        yield


def _sharded(
    collection: Any, plan: list[list[Any]], mesh: DeviceMesh, ranks_per_host: int, *, as_dtensors: bool = False
) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv

    logging.getLogger("torchrec").setLevel(logging.ERROR)  # it warns about each table and each group
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE})
    entries = {f"t{n}": getattr(sharding_plan, name)(**options) for n, (name, options, _) in enumerate(plan)}
    made = sharding_plan.construct_module_sharding_plan(
        collection, entries, sharder, local_size=ranks_per_host, world_size=mesh.size(), device_type="cpu"
    )
    for number, (name, _, kernel) in enumerate(plan):
        if name != "data_parallel":
            made[f"t{number}"].compute_kernel = kernel
    group = mesh.get_group()
    environment = ShardingEnv(mesh.size(), dist.get_rank(group), group, output_dtensor=as_dtensors)
    return sharder.shard(collection, made, environment, torch.device("cpu"))


def _weights(sharded: Any) -> list[Any]:
    """Return the tables of a sharded collection in order, each a ``ShardedTensor``, a DTensor or a plain tensor."""
    state = sharded.state_dict()
    return [state[key] for key in sorted(state, key=lambda key: int(key.split(".")[-2].removeprefix("t")))]


def _for_each_part(weights: list[Any], use: Callable[[int, torch.Tensor, slice, slice], object]) -> list[int]:
    """Call ``use`` for each part of a table that this rank has; return the tables that the rank has completely."""
    replicated = []
    with torch.no_grad():
        for table, weight in enumerate(weights):
            if not hasattr(weight, "local_shards"):
                replicated.append(table)
                use(table, weight, slice(None), slice(None))
                continue
            for shard in weight.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                use(table, shard.tensor, slice(row, row + rows), slice(column, column + columns))
    return replicated
