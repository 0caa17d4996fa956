"""What is tried: an op with its arguments, on a mesh, under a combination of placements.

Nothing here runs anything. A family draws an :class:`OpCase`; together with a :class:`MeshSpec` and a combination of
placements it is a :class:`Trial`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from verifier.torch_internals.placements import Combination, Placements

__all__ = ["BACKENDS", "IN_INFERENCE_MODE", "MOST_RANKS", "Backend", "MeshSpec", "OpCase", "Trial"]

Backend = Literal["simulated", "gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("simulated", "gloo", "nccl")
DEFAULT_MESHES = ("2", "3", "4", "2x2", "8", "2x3")
MOST_RANKS = 64
"""The most ranks that are started on one machine; on a cluster, torchrun starts the ranks."""


@dataclass(frozen=True, order=True)
class MeshSpec:
    """The shape, backend and device of a mesh; holds no process and no process group.

    With ``flat``, each submesh of several mesh dims is there as a flattened one, too, and torch merges collectives.
    ``names`` has the names of the mesh dims, if they have any.

    >>> MeshSpec.parse("2x2+flat")
    MeshSpec(shape=(2, 2), backend='gloo', device='cpu', flat=True)
    >>> str(MeshSpec.parse("simulated:8"))
    'simulated:8'
    >>> MeshSpec.parse("2x2+dp,tp").names
    ('dp', 'tp')
    """

    shape: tuple[int, ...]
    backend: Backend = "gloo"
    device: str = "cpu"
    flat: bool = False
    names: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def suffix(self) -> str:
        """What stands after the shape in the text of the mesh."""
        return f"+{','.join(self.names)}" if self.names else "+flat" * self.flat

    def __str__(self) -> str:
        text = self.shape_text + self.suffix
        return text if self.backend == "gloo" else f"{self.backend}:{text}"

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the position of ``rank`` in the mesh, one index per mesh dim, row-major."""
        coordinate = []
        for extent in reversed(self.shape):
            coordinate.append(rank % extent)
            rank //= extent
        return tuple(reversed(coordinate))

    @classmethod
    def parse(cls, text: str, backend: Backend = "gloo", device: str = "cpu") -> MeshSpec:
        """Return the mesh that ``[BACKEND:]N[xN...][+flat]`` or ``[BACKEND:]N[xN...]+NAME[,NAME...]`` names.

        Raises
        ------
        ValueError
            If the text is malformed, a mesh dim has size 0, a mesh of one dim is to be flattened, or not each mesh dim
            has a name of its own.
        """
        prefix, colon, shape_text = text.strip().rpartition(":")
        if colon:
            if prefix not in BACKENDS:
                raise ValueError(f"mesh {text!r}: backend {prefix!r} is none of {', '.join(BACKENDS)}")
            backend = prefix
        shape_text, plus, suffix = shape_text.partition("+")
        names = tuple(suffix.split(",")) if plus and suffix != "flat" else ()
        named = [name for name in names if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name)]
        if names and (len(named) < len(names) or len({*names}) != shape_text.count("x") + 1):
            text, suffix = text[:80], suffix[:80]
            raise ValueError(f"mesh {text!r}: {suffix!r} after the + is not flat, and not a name for each mesh dim")
        if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", shape_text):
            raise ValueError(f"mesh {text[:80]!r} is not a shape such as 4, 2x2 or simulated:8")
        shape = tuple(int(extent) for extent in shape_text.split("x"))
        if not all(shape):
            raise ValueError(f"mesh {text!r} has a mesh dim of size 0; every mesh dim needs at least one rank")
        if len(shape) > 3:
            raise ValueError(f"mesh {text!r} has {len(shape)} mesh dims; at most 3 are supported")
        if plus and not names and len(shape) == 1:
            raise ValueError(f"mesh {text!r}: a mesh of one dim has no submeshes that could be flattened")
        return cls(shape, backend, device, bool(plus) and not names, names)


IN_INFERENCE_MODE = "whole in inference mode"
"""The tag of cases whose call is made in inference mode."""


@dataclass(frozen=True, eq=False)
class OpCase:
    """A concrete local call, with values.

    Parameters
    ----------
    op
        The aten operator under test, as ``aten.embedding.default``. Findings and tables are filed under its name.
    call
        Dotted path of the callable that is called, as ``torch.nn.functional.embedding``.
    args, kwargs
        Arguments with *global* values: tensors, ``nn.Parameter``, nested lists and tuples of them, scalars.
    family
        Name of the family that drew the case.
    exact
        True if every value in the call is a small integer and the op's results on them are exact in the dtype. Results
        are then compared bit for bit.
    tags
        The classes of input that the case belongs to, counted in coverage (``"empty shard"``, ``"0-d indices"``).
    """

    op: str
    call: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    family: str = ""
    exact: bool = True
    tags: frozenset[str] = frozenset()

    @property
    def in_inference_mode(self) -> bool:
        """Whether the call is made in inference mode, where a composite op reaches DTensor whole."""
        return IN_INFERENCE_MODE in self.tags


@dataclass(frozen=True)
class Trial:
    """A case on a mesh under a combination.

    Parameters
    ----------
    combination
        Placements of each tensor argument.
    cotangents
        One entry per backward pass: the placements of the cotangent of each differentiable output.
    seed
        Fixes how Partial arguments are split, and the values of the cotangents.
    trace
        Also count collectives with ``CommDebugMode`` (slower).
    fault
        A fault to inject, only for tests of the verifier. The number is the rank: ``"raise:1"``, ``"hang:1"``,
        ``"kill:1"``, ``"kill:0,2"``.
    """

    case: OpCase
    mesh: MeshSpec
    combination: Combination
    cotangents: tuple[tuple[Placements, ...], ...] = ()
    seed: int = 0
    trace: bool = False
    fault: str | None = None
