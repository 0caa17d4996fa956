"""Where level 2 runs: processes that are ranks, or one process that simulates them."""

from verifier.meshes.pool import Pool, PoolError, PoolKey, PoolSet

__all__ = ["Pool", "PoolError", "PoolKey", "PoolSet"]
