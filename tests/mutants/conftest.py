"""Pools for the tests of a module: ranks that nothing changes, and ranks that mutants change."""

from collections.abc import Iterator

import pytest

from verifier.meshes.pool import Pool, PoolSet


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    """Ranks that run torch as it is, but for the remedies that a trial asks for."""
    pools = PoolSet(Pool)
    yield pools
    pools.close()


@pytest.fixture
def pools_of_mutants() -> Iterator[PoolSet]:
    """Ranks into which mutants are installed, apart from ``pools``: a mutant stays, and tests run in any order."""
    pools = PoolSet(Pool)
    yield pools
    pools.close()
