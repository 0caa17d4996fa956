"""What DTensor decides for a call with given placements of its tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from verifier.torch_internals.caches import traced_once
from verifier.torch_internals.claims.asked_call import MOST_TICKS, bare_mesh
from verifier.torch_internals.claims.listing import Listing
from verifier.torch_internals.claims.values import Propagation, RuleFailure, Slot
from verifier.torch_internals.expanding.free_rules import RedistributesError, free_rules_alone
from verifier.torch_internals.placements import Combination, Placements, placements_of_spec
from verifier.torch_internals.registries import installed_sharded_op
from verifier.torch_internals.sharded_ops import ShardedOp
from verifier.torch_internals.watching import ended_rules

__all__ = ["ClaimReader"]


class ClaimReader(Listing):
    """Reads what DTensor claims for one call, without a process group or DTensors; nothing is run.

    It asks DTensor's sharding propagation, which turns rules into a decision however they were registered. Only the dry
    run of the op on fake tensors is left out, because the results are known.

    Parameters
    ----------
    op
        The overload that is called.
    args, kwargs
        The call, with global tensors.
    result
        What the call returns on the global tensors.

    Attributes
    ----------
    failures
        How DTensor failed where it was asked and did not refuse, by placements; the caller may clear it.
    written
        The arguments with which DTensor would run the op, with a :class:`Slot` for each tensor, by placements: where it
        redistributes, and the op's strategy has written to lists among the arguments that it was given.
    dim_names
        The names of the dims of the meshes for which DTensor is asked; none, unless the caller gives them.
    around
        Returns the context in which rules are asked on a mesh; an empty one, unless the caller gives another.
    watch
        Returns the context in which rules are asked for the first time of a call and a mesh; likewise.
    asks_everywhere
        Whether DTensor is also asked where a strategy that looks at no placements lists no rule.
    lost
        Whether DTensor is not asked any more, usually because it did not come back from a rule of this op. No other
        reader asks it then.
    why_lost
        The reason, for reports.
    """

    def at(
        self, combination: Combination, mesh_shape: tuple[int, ...], rank: int = 0, only_claims: bool = False
    ) -> Propagation | None:
        """Return what DTensor does at ``combination``; None if it has no rule for it or fails to apply one.

        With ``only_claims`` it may also be None where DTensor redistributes.
        """
        if self.lost or (only_claims and not self._may_claim(combination, mesh_shape)):
            return None
        mesh = bare_mesh(mesh_shape, rank, self.dim_names)
        schema = self._schema([self._spec_of(mesh, *placed) for placed in enumerate(combination)])
        free = (
            free_rules_alone(self.op, lambda: self._is_written_to(schema)) if only_claims else contextlib.nullcontext()
        )
        # a strategy that lists its rules has been watched when it did
        watched = contextlib.nullcontext() if self.lists_rules else self.watch()
        try:
            with (
                self.around(mesh), watched, self._without_dry_run(schema), traced_once(self.op, self._call), free,
                ended_rules(MOST_TICKS),
            ):  # fmt: skip
                sharding = self._propagator.propagate_op_sharding_non_cached(schema)
        except RedistributesError:
            return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - strategies refuse and fail in many ways; no exception is a claim
            self._note(combination, error)
            return None
        outputs = self._of_tensors(placements_of_spec(sharding.output_spec))
        changed = sharding.redistribute_schema if sharding.needs_redistribute else None
        inner = [leaf for leaf in pytree.tree_leaves(changed.args_schema if changed else ()) if _is_spec(leaf)]
        placed = [*(one for one in outputs or () if one is not None), *(tuple(spec.placements) for spec in inner)]
        if any(len(one) != mesh.ndim for one in placed):
            text = f"a rule has {min(map(len, placed))} placements for a mesh of {mesh.ndim} dims"
            self.failures[combination] = RuleFailure("ValueError", text)
            return None
        if strange := [p for one in placed for p in one if not isinstance(p, Placement)]:
            self.failures[combination] = RuleFailure("TypeError", f"a rule has {strange[0]!r} in place of a placement")
            return None
        ours = installed_sharded_op(self.op)
        if ours is not None:
            return self._by_kernel(ours, changed or schema, mesh, outputs)
        if changed is None:
            return Propagation(combination, outputs)
        wanted = [leaf for leaf in pytree.tree_leaves(changed.args_schema) if isinstance(leaf, DTensorSpec)]
        in_kwargs = combination[self._in_args :]  # DTensor never redistributes keyword arguments
        inputs = (*(tuple(spec.placements) for spec in wanted), *in_kwargs)
        if not sharding.use_val_from_redistribute_schema:
            if self._is_written_to(schema):
                self.written[combination] = _with_slots(changed.args_schema)
            return Propagation(inputs, outputs)
        return Propagation(inputs, outputs, (changed.op, _with_slots(changed.args_schema)))

    def of_fake_kernel(self) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Return the shapes and dtypes that DTensor gives to the results; None if it cannot tell any."""
        mesh = bare_mesh((2,), 0)
        schema = self._schema([DTensorSpec(mesh, (Replicate(),), tensor_meta=meta) for meta in self._metas])
        try:
            with ended_rules(MOST_TICKS):
                made = self._propagator._propagate_tensor_meta_non_cached(schema)
        except (Exception, SystemExit):  # noqa: BLE001 - there may be no fake kernel, or one that needs values
            return None
        return [(tuple(one.shape), one.dtype) for one in pytree.tree_leaves(made, _is_meta) if _is_meta(one)]

    def _of_tensors(self, outputs: tuple[Placements | None, ...] | None) -> tuple[Placements | None, ...] | None:
        """Return ``outputs`` without what rules say of results that are no tensors."""
        metas = self._result_meta if isinstance(self._result_meta, list | tuple) else [self._result_meta]
        if outputs is None or len(metas) != len(outputs):
            return outputs
        return tuple(None if meta is None else one for one, meta in zip(outputs, metas, strict=True))

    def _by_kernel(
        self, ours: ShardedOp, schema: OpSchema, mesh: DeviceMesh, outputs: tuple[Placements | None, ...] | None
    ) -> Propagation:
        specs = [leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        inputs = tuple(tuple(spec.placements) for spec in specs)
        return Propagation(inputs, outputs, (ours.at(mesh, coordinate, specs), _with_slots(schema.args_schema)))


def _with_slots(args: Sequence[object]) -> tuple[object, ...]:
    numbers = itertools.count()
    filled = pytree.tree_map_only(DTensorSpec, lambda _: Slot(next(numbers)), tuple(args))
    return tuple(filled)


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, TensorMeta)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, DTensorSpec)
