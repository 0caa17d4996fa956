"""Remedies for the rules of losses that are means."""

from __future__ import annotations

from strategies.remedies.placing import VALUES, has_uneven_shards, is_sharded, partials
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, vetoed

__all__ = ["REMEDIES"]

_MEAN = 1
_REDUCTION = {
    "mse_loss": 2, "huber_loss": 2, "smooth_l1_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4, "mse_loss_backward": 3, "huber_loss_backward": 3,
    "smooth_l1_loss_backward": 3, "soft_margin_loss_backward": 3, "binary_cross_entropy_backward": 4,
}  # fmt: skip
"""The position of the argument ``reduction``."""
_FORWARD = tuple(f"aten.{op}.default" for op in _REDUCTION if not op.endswith("_backward"))
_BACKWARD = tuple(f"aten.{op}.*" for op in _REDUCTION if op.endswith("_backward"))
_WEIGHTED = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


def _is_mean(decision: Decision) -> bool:
    position = _REDUCTION[decision.op.split(".")[1]]
    return bool(decision.argument(position, "reduction", _MEAN) == _MEAN)


def _averages(decision: Decision) -> bool:
    return any("avg" in partials(output) for output in decision.outputs if output is not None)


def _averages_unevenly(decision: Decision) -> bool:
    return _is_mean(decision) and _averages(decision) and has_uneven_shards(decision)


def _divides_by_the_shard(decision: Decision) -> bool:
    """Return whether the tensor, whose elements the mean counts, is sharded."""
    return _is_mean(decision) and any(map(is_sharded, decision.args[1:3]))


REMEDIES = (
    Remedy(
        "gradients-of-means",
        "claim shards for the backward op of a loss only if its reduction is not a mean, because the local kernel "
        "divides by the number of elements of the shard",
        lambda: vetoed(_BACKWARD, _divides_by_the_shard),
        (*_BACKWARD, *_FORWARD),
        VALUES,
    ),
    Remedy(
        "means-of-uneven-shards",
        "claim P(avg) for the mean of a loss only if all shards have the same size",
        lambda: vetoed(_FORWARD, _averages_unevenly),
        (*_FORWARD, *_BACKWARD),
        VALUES,
    ),
    Remedy(
        "means-by-weight",
        "do not claim P(avg) for the mean of nll_loss, which divides by the weights of the targets that count",
        lambda: vetoed(_WEIGHTED, _averages),
        ("aten.nll_loss*",),
        VALUES,
    ),
)
