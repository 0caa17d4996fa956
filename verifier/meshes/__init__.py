"""Where level 2 runs: processes that are ranks, or one process that simulates them."""

from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, Spares

__all__ = ["Pool", "PoolError", "PoolKey", "PoolSet", "Spares"]
