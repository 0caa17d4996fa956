"""``verify`` as a plain function, for scripts and notebooks; in pytest the fixture of that name shares its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from verifier.calls.result import Verification
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.execution.imports import run_imports
from verifier.meshes.pool import Pool, PoolSet

__all__ = ["verify"]


def verify(
    op: OpCase | Callable[..., object] | str,
    /,
    *args: object,
    mesh: MeshSpec | str | int = 2,
    imports: Sequence[str] = (),
    pools: PoolSet | None = None,
    seed: int = 0,
    **options: Any,
) -> Verification:
    """Run ``op(*args, **kwargs)`` on a mesh, sharded in many ways, and compare with the same call on one process.

    Parameters
    ----------
    op, args, options
        As :meth:`verifier.calls.verifier.Verifier.__call__` takes them.
    mesh
        As ``"2x2"``, ``4``, ``"simulated:8"`` or a :class:`MeshSpec`.
    imports
        Modules and files that register rules, by name; this process and each rank run them first.
    pools
        Ranks to use; without it ranks are started, which takes seconds, and ended.
    seed
        Fixes which combinations are sampled, how Partial arguments are split, and the cotangents.

    Raises
    ------
    VerificationError
        For the first result that is wrong, with the command that reproduces it left out: nothing is recorded.
    PoolError
        If the ranks do not start.

    Source: the semantics of placements are those of ``torch.distributed.tensor``.
    """
    with ExitStack() as stack:
        if pools is None:
            run_imports(imports)
            pools = PoolSet(lambda key: Pool(key, tuple(imports), imported_here=True))
            stack.callback(pools.close)
        spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.parse(str(mesh))
        return Verifier(pools, spec, seed)(op, *args, **options)
