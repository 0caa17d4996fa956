"""Calls of overloads that no OpInfo dispatches to, and of arguments that OpInfo lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

from strategies.opinfo.handmade import attention, convolutions, embeddings, matrices, norms, others, training
from strategies.opinfo.handmade.sample import HandmadeSample, Way
from verifier.rules.samples import Sample, SampleOptions

__all__ = ["NO_CALLS", "handmade_of_row", "handmade_overloads", "handmade_samples"]

_RATE = "level 1 does not yet read rules of lists that stand beside a single tensor by keyword, the learning rate"

_DRY_RUN = "DTensor's dry run of the op on meta tensors fails, whatever the placements"

NO_CALLS = {
    **{f"aten.{name}.default": _DRY_RUN for name in ("_fused_adam", "_fused_adamw")},
    **{f"aten.{name}.Tensor": _DRY_RUN for name in ("_foreach_addcmul_", "_foreach_addcdiv_")},
    **{f"aten.{name}.tensor_lr": _RATE for name in ("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")},
    "aten._amp_foreach_non_finite_check_and_unscale_.default": "DTensor runs its own handler, on plain tensors",
    "aten.bernoulli.float_out": "random, and DTensor promises nothing of its numbers",
    "aten.is_same_size.default": "returns no tensor; DTensor compares the global shapes itself",
    "prims.copy_to.default": "its result is its first argument, which level 2 does not yet tell from a copy",
    "aten.eye.m_out": "no tensor argument is read",
    "aten.rand.default": "has no tensor argument, so that it never reaches DTensor's rules",
    "aten.randn.default": "has no tensor argument, so that it never reaches DTensor's rules",
}
"""Overloads with a rule for which there is no call, and the reason."""


@cache
def _ways() -> dict[str, tuple[Way, ...]]:
    found: dict[str, list[Way]] = {}
    modules = (attention, matrices, norms, others, training, convolutions, embeddings)
    for way in chain.from_iterable(module.WAYS for module in modules):
        found.setdefault(way.op, []).append(way)
    return {op: tuple(ways) for op, ways in found.items()}


def handmade_overloads() -> Sequence[str]:
    """Return the overloads that have handmade calls beside those that belong to an OpInfo, sorted."""
    return sorted(op for op, ways in _ways().items() if not all(way.row for way in ways))


def handmade_samples(op: str, options: SampleOptions) -> Iterator[Sample]:
    """Yield the handmade samples of an overload, in the same order at each call.

    An overload in ``NO_CALLS`` has one that cannot be tested, with the reason.
    """
    if op in NO_CALLS:
        yield HandmadeSample(Way(op, "no call", lambda draw: ()), options, NO_CALLS[op])
    ways = _ways().get(op, ())
    made = sorted((HandmadeSample(way, options) for way in ways), key=lambda sample: sample.rare)
    yield from (sample for sample in made if options.rare or not sample.rare)


def handmade_of_row(row: str, options: SampleOptions) -> Iterator[Sample]:
    """Yield the handmade samples that belong to an OpInfo, in the same order at each call."""
    made = (HandmadeSample(way, options) for way in chain.from_iterable(_ways().values()) if way.row == row)
    yield from (sample for sample in made if options.rare or not sample.rare)
