"""Where level 2 runs: processes that are ranks, or one process that simulates them."""

from verifier.meshes.cluster import Cluster
from verifier.meshes.crew import PoolKey
from verifier.meshes.keeper import keep_place
from verifier.meshes.places import Place, gpu_problem, gpus_shared, local_places
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, RulesNotInRanks, Spares
from verifier.meshes.torchrun import TorchrunRank

__all__ = [
    "Cluster",
    "Place",
    "Pool",
    "PoolError",
    "PoolKey",
    "PoolSet",
    "RulesNotInRanks",
    "Spares",
    "TorchrunRank",
    "gpu_problem",
    "gpus_shared",
    "keep_place",
    "local_places",
]
