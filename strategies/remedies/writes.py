"""Remedies by which DTensor refuses to write where the caller would not see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strategies.remedies.placing import VALUES, is_partial
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, Placed, refused, tensors
from verifier.torch_internals.amending.watching import users_copies_unwritten, views_of_copies_unwritten

__all__ = ["REMEDIES"]

_WRITTEN = {
    "rrelu_with_noise": (1,),
    "_batch_norm_with_update": (3, 4),
    "_native_batch_norm_legit": (3, 4),
    "native_batch_norm": (3, 4),
    "_fused_adam_": (2, 3, 4),
    "_fused_adamw_": (2, 3, 4),
}
"""The positions of tensors, or lists of them, that these ops write to beside the first argument or without a name that
says so."""
_WRITING = tuple(f"aten.{op}.default" for op in _WRITTEN)
_FILLING = ("aten.fill_.*", "aten.fill.Scalar_out")
_SCATTERING = tuple(f"aten.{op}_.*" for op in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"))
_VIEWS = (
    "alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice",
    "split*", "squeeze", "t", "tensor_split", "transpose", "unbind", "unfold", "unsqueeze", "view",
)  # fmt: skip


def _writes_to_a_copy(decision: Decision) -> bool:
    positions = _WRITTEN[decision.op.split(".")[1]]
    pairs = [(decision.given[n], decision.args[n]) for n in positions if n < len(decision.args)]
    return any(tensors(given) != tensors(placed) for given, placed in pairs)


@contextmanager
def _copies_unwritten() -> Iterator[None]:
    why = "is not supported where what it writes to is redistributed"
    with refused(_WRITING, _writes_to_a_copy, why), users_copies_unwritten():
        yield


def _changes_its_shape(decision: Decision) -> bool:
    tensor = decision.args[0]
    if 1 not in tensor.shape:
        return False
    dims = decision.args[1] if len(decision.args) > 1 else range(len(tensor.shape))
    return any(tensor.shape[dim] == 1 for dim in ([dims] if isinstance(dims, int) else dims))


def _fills_parts(decision: Decision) -> bool:
    return is_partial(decision.args[0])


def _is_relabelled(decision: Decision) -> bool:
    """Return whether an op that keeps the shape of the tensor to which it writes gives it other placements."""
    written = decision.given[0] if decision.given else None
    placements = decision.outputs[0] if decision.outputs else None
    return isinstance(written, Placed) and placements is not None and written.placements != placements


REMEDIES = (
    Remedy(
        "writes-to-copies",
        "refuse to redistribute an argument that the op writes to, whatever the op is called",
        _copies_unwritten,
        _WRITING,
        VALUES | {"MUTATED_INPUT"},
        refuses=True,
        beside_rules=True,
    ),
    Remedy(
        "views-of-copies",
        "refuse to write to a view whose base was redistributed, and to the base of a view that is in use, or do not "
        "redistribute for a view (_dispatch.py)",
        views_of_copies_unwritten,
        tuple(f"aten.{view}.*" for view in _VIEWS),
        VALUES,
        refuses=True,
    ),
    Remedy(
        "placements-in-place",
        "refuse to write in place where the result would have other placements than the tensor, for ops that keep "
        "the shape (_ops/_tensor_ops.py, and _dispatch_fast_path_python_tail in _dispatch.py)",
        lambda: refused(_SCATTERING, _is_relabelled, "is not supported in place where it changes placements"),
        _SCATTERING,
        refuses=True,
    ),
    Remedy(
        "squeeze-in-place",
        "give the DTensor the shape of the result as well, or refuse (dispatch of ops in place in _dispatch.py)",
        lambda: refused(("aten.squeeze_.*",), _changes_its_shape, "is not supported in place where it drops dims"),
        ("aten.squeeze_.*",),
        refuses=True,
    ),
    Remedy(
        "filled-parts",
        "claim no partial placement for fill_, because every rank's part would be the whole value",
        lambda: refused(_FILLING, _fills_parts, "is not supported on parts of a reduction"),
        (*_FILLING, "aten.lerp.*"),
        VALUES,
        refuses=True,
    ),
)
