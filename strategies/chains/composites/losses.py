"""Losses."""

from __future__ import annotations

import torch

from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_F = "torch.nn.functional."


def _reduction(b: Building) -> str:
    return b.pick(("mean", "sum", "none"))


@composite
def _cross_entropy(b: Building) -> None:
    """Targets as ids or shares, weights, ignored targets, smoothing, and positions behind the classes."""
    rows, classes = b.size()
    more = b.pick(((), (), (2,)))
    scores = b.floats(rows, classes, *more)
    options: dict[str, object] = {"reduction": _reduction(b)}
    if b.chance(0.4):
        options["weight"] = b.given(torch.arange(1, classes + 1, dtype=b.dtype) / 2)
    if b.chance(0.3):
        options["label_smoothing"] = 0.25
    if b.chance(0.3):
        target = b.positive(rows, classes, *more)
    else:
        target = b.ids(rows, *more, below=classes)
        if b.chance(0.4):
            options["ignore_index"] = b.pick((0, 1))
    b.call(f"{_F}cross_entropy", scores, target, **options)


@composite
def _nll_loss(b: Building) -> None:
    rows, classes = b.size()
    more = b.pick(((), (), (2, 2)))
    options: dict[str, object] = {"reduction": _reduction(b)}
    if b.chance(0.4):
        options["weight"] = b.given(torch.arange(1, classes + 1, dtype=b.dtype) / 2)
    if b.chance(0.4):
        options["ignore_index"] = b.pick((0, 1))
    b.call(f"{_F}nll_loss", b.floats(rows, classes, *more), b.ids(rows, *more, below=classes), **options)


@composite
def _binary_cross_entropy(b: Building) -> None:
    rows, columns = b.size()
    options: dict[str, object] = {"reduction": _reduction(b)}
    if b.chance(0.4):
        options["weight"] = b.positive(*b.pick(((rows, columns), (columns,), (rows, 1))))
    if b.chance(0.5):
        b.call(f"{_F}binary_cross_entropy", b.positive(rows, columns), b.positive(rows, columns), **options)
        return
    if b.chance(0.4):
        options["pos_weight"] = b.positive(columns)
    scores, target = b.floats(rows, columns), b.positive(rows, columns)
    b.call(f"{_F}binary_cross_entropy_with_logits", scores, target, **options)


@composite
def _distance_loss(b: Building) -> None:
    path = b.pick(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss"))
    rows, columns = b.size()
    target = b.floats(rows, columns)
    b.call(f"{_F}{path}", b.floats(rows, columns), target, reduction=_reduction(b))


@composite
def _kl_div(b: Building) -> None:
    rows, columns = b.size()
    reduction = b.pick(("mean", "sum", "none", "batchmean"))
    target = b.positive(rows, columns)
    b.call(f"{_F}kl_div", b.floats(rows, columns), target, reduction=reduction, log_target=b.chance(0.4))


@composite
def _loss_of_several(b: Building) -> None:
    """Losses of two or three tensors and a margin."""
    rows, columns = b.size()
    kind = b.pick(
        ("cosine_embedding", "margin_ranking", "triplet_margin", "hinge_embedding", "gaussian_nll", "multi_margin")
    )
    reduction = _reduction(b)
    signs = b.given(torch.tensor([1.0, -1.0] * rows, dtype=b.dtype)[:rows])
    one, two = b.floats(rows, columns), b.floats(rows, columns)
    if kind == "cosine_embedding":
        b.call(f"{_F}cosine_embedding_loss", one, two, signs, margin=0.25, reduction=reduction)
    elif kind == "margin_ranking":
        left, right = b.floats(rows), b.floats(rows)
        b.call(f"{_F}margin_ranking_loss", left, right, signs, margin=0.3, reduction=reduction)
    elif kind == "triplet_margin":
        b.call(f"{_F}triplet_margin_loss", one, two, b.floats(rows, columns), margin=3.3, reduction=reduction)
    elif kind == "hinge_embedding":
        b.call(f"{_F}hinge_embedding_loss", b.floats(rows), signs, margin=9.5, reduction=reduction)
    elif kind == "gaussian_nll":
        b.call(f"{_F}gaussian_nll_loss", one, two, b.positive(rows, columns), full=b.chance(0.5), reduction=reduction)
    else:
        b.call(f"{_F}multi_margin_loss", one, b.ids(rows, below=columns), margin=3.3, reduction=reduction)


@composite
def _ctc_loss(b: Building) -> None:
    """Sequences of scores with targets of unequal lengths, which stand in a matrix or behind one another."""
    times, batch = b.rows + 2, b.pick((2, 3, b.mesh.world_size))
    scores = b.call(f"{_F}log_softmax", b.floats(times, batch, b.columns), -1)
    lengths = [b.pick((1, 2)) for _ in range(batch)]
    shape = (sum(lengths),) if b.chance(0.3) else (batch, 2)
    target = b.given(b.tensors.pop(b.ids(*shape, below=b.columns - 1)) + 1)
    sizes: list[object] = [[times] * batch, lengths]
    if b.chance(0.5):
        sizes = [b.given(torch.tensor(size)) for size in sizes]
    b.call(f"{_F}ctc_loss", scores, target, *sizes, reduction=_reduction(b), zero_infinity=b.chance(0.5))
