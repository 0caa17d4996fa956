"""How thoroughly level 1 checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verifier.core.case import MeshSpec
from verifier.placements.bounds import leaves_a_rank_empty

__all__ = ["DECISIVE", "DECISIVE_FOR_MISSING", "DRAWS_FOR_MISSING", "SIZES_FOR_MISSING", "CheckOptions", "Position"]

Position = tuple[int, int, int, int]
"""Which combination is being run: sample, mesh, size, combination."""

DRAWS_FOR_MISSING = 20
SIZES_FOR_MISSING = 3
DECISIVE, DECISIVE_FOR_MISSING = 0.1, 0.01
"""A tolerance that is a larger share of the largest element lets too much pass to bear out a claim, or a rule that
nobody claims."""


@dataclass(frozen=True)
class CheckOptions:
    """How thoroughly a sample is checked.

    Parameters
    ----------
    meshes
        Meshes of one dim on which rules are looked for, and of several dims on which products of claims are tried.
    sizes
        How many sizes.
    claims_only
        Try what DTensor claims and nothing else.
    cap
        At most so many input combinations of a call (all of a smaller number, else a pairwise cover).
    products
        At most so many products of one-dim rules on each mesh of several dims.
    samples_with_products
        Of how many samples of each overload products are tried, the first ones: DTensor takes long to decide there.
    samples_called_again
        Of how many samples of each overload second calls are made, to find what DTensor's cache leaves out.
    blank
        Ask DTensor nothing, and try every combination as if it had no rule. The tensors of a list are placed alike.
    emptied
        If ``blank``, a rank may be without elements of a sharded dim of at most this extent; of any if it is None.
    beyond
        Meshes that only strategies of the user's are tried on. Of those with one dim, only the claims are tried that
        DTensor makes on none of ``meshes``: a strategy that looks at the number of ranks may have a rule for 4 alone.
        Those with several dims are left out if the strategy is not told the mesh.
    asked
        Input placements, as text and on one mesh dim: DTensor is asked at these alone, if there are any.
    tried
        Whether claims are tried. If not, each that DTensor makes on one mesh dim counts as one that holds.
    """

    meshes: tuple[MeshSpec, ...]
    sizes: int = 3
    seed: int = 0
    claims_only: bool = False
    cap: int = 256
    products: int = 12
    samples_with_products: int = 2
    samples_called_again: int = 4
    blank: bool = False
    emptied: int | None = None
    beyond: tuple[MeshSpec, ...] = ()
    asked: frozenset[tuple[str, ...]] = frozenset()
    tried: bool = True

    @property
    def flat(self) -> tuple[MeshSpec, ...]:
        return tuple(mesh for mesh in self.meshes if mesh.ndim == 1)

    def leaves_out(self, extent: int, ranks: int, usual: int = 0) -> bool:
        """Return whether a tensor dim is not to be sharded, because a rank would have no elements of it.

        ``usual`` is its extent at the first size: an extent that is 1 at each size is one that the op broadcasts.
        """
        return self.emptied is not None and max(extent, usual) > self.emptied and leaves_a_rank_empty(extent, ranks)

    @property
    def draws(self) -> int:
        """Draws at each size and mesh, so that a rule that is said to be missing has held in at least 20."""
        more = 2 if self.blank else 0  # combinations are left out at some places, and some draws say nothing
        return 3 if self.claims_only else self.telling_draws + more

    @property
    def telling_draws(self) -> int:
        """Draws at each size and mesh that have to say something of a rule that nobody claims."""
        places = max(1, len(self.flat) * min(self.sizes, SIZES_FOR_MISSING))
        return max(3, math.ceil(DRAWS_FOR_MISSING / places))
