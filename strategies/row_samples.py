"""The source "sharded_rows": calls of our own operators, for the rule check.

The arguments fit each other as in the calls of our own functions: bags follow each other, counts are the counts of the
bags, and shards of positions end at the edges of bags if a call claims so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from strategies.embedding.ops import ROW_POWERS
from strategies.embedding_bag.ops import BAG_OPS
from verifier.core.case import OpCase
from verifier.core.wording import did_you_mean
from verifier.rules.samples import Sample, SampleOptions, Target, Values, names_overload
from verifier.torch_internals.ops import registered_overloads

__all__ = ["SOURCE", "RowSampleSource"]

Arguments = tuple[object, ...]

_VALUES = ((-3, -2, -1, 1, 2, 3, 4), (-1, 1, 2), (-2, -1, 0, 1, 2, 3))
"""Values of tables and gradients, in turn for each draw: many values, few values for ties, and values with a 0."""
_TOGETHER = "its arguments belong together: only what DTensor claims is tried"


@dataclass(frozen=True)
class _Size:
    rows: int
    columns: int
    bags: int
    positions: int


# rows, columns, bags and positions all differ, so that a mix-up of dims shows; some bags are empty
_SIZES = (_Size(7, 5, 4, 9), _Size(4, 3, 2, 7), _Size(17, 8, 6, 16), _Size(5, 4, 3, 13), _Size(6, 10, 9, 8))
# numbers of bags that the world sizes up to 4, 6 and 8 divide
_ALIGNED = (_Size(7, 5, 24, 24), _Size(9, 3, 24, 48), _Size(17, 8, 48, 144), _Size(5, 4, 72, 72), _Size(6, 10, 48, 96))


class _Draw:
    """The ids, bags and values of one draw of a call."""

    def __init__(self, size: _Size, dtype: torch.dtype, generator: torch.Generator, number: int, aligned: bool) -> None:
        self.size, self.dtype, self.aligned = size, dtype, aligned
        self._generator, self._number = generator, number
        self.ids = self.integers(0, size.rows, size.positions)
        if aligned:
            edges = torch.arange(0, size.positions + 1, size.positions // size.bags)
        else:
            inner = self.integers(0, size.positions + 1, size.bags - 1).sort().values
            last = size.positions - number % 2  # an id after the last bag is in no bag
            edges = torch.cat([torch.tensor([0]), inner.clamp(max=last), torch.tensor([last])])
        self.starts, self.stops = edges[:-1].clone(), edges[1:].clone()
        self.bags = torch.searchsorted(edges[1:].contiguous(), torch.arange(size.positions), right=True)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def values(self, *shape: int) -> torch.Tensor:
        palette = torch.tensor(_VALUES[self._number % len(_VALUES)], dtype=self.dtype)
        return palette.take(self.integers(0, len(palette), *shape))

    @property
    def weight(self) -> torch.Tensor:
        return self.values(self.size.rows, self.size.columns)

    @property
    def gradient(self) -> torch.Tensor:
        return self.values(self.size.bags, self.size.columns)

    def of_bag(self, bag: int, padding_idx: int) -> list[int]:
        """Return the ids of a bag without padding."""
        ids = self.ids[self.starts[bag] : self.stops[bag]].tolist()
        return [each for each in ids if each != padding_idx]

    def counts(self, padding_idx: int) -> torch.Tensor:
        return torch.tensor([len(self.of_bag(bag, padding_idx)) for bag in range(self.size.bags)])

    def maxima(self, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
        rows = [weight[self.of_bag(bag, padding_idx)] for bag in range(self.size.bags)]
        return torch.stack([each.amax(0) if each.numel() else weight.new_zeros(weight.shape[1]) for each in rows])


def _sum(draw: _Draw, padding_idx: int, *, mean: bool = False, samples: bool = False) -> Arguments:
    given = draw.values(draw.size.positions) if samples else None
    counts = draw.counts(padding_idx) if mean else None
    return draw.weight, draw.ids, draw.starts, draw.stops, given, counts, padding_idx, draw.aligned


def _max(draw: _Draw, padding_idx: int) -> Arguments:
    return draw.weight, draw.ids, draw.starts, draw.stops, draw.counts(padding_idx), padding_idx, draw.aligned


def _first(draw: _Draw, padding_idx: int) -> Arguments:
    weight = draw.weight
    return weight, draw.ids, draw.starts, draw.stops, draw.maxima(weight, padding_idx), padding_idx


def _weight_gradient(draw: _Draw, padding_idx: int, samples: bool) -> Arguments:
    given = draw.values(draw.size.positions) if samples else None
    return draw.gradient, draw.ids, draw.bags, given, draw.size.rows, padding_idx


def _max_gradient(draw: _Draw) -> Arguments:
    winners = draw.integers(-1, draw.size.rows, draw.size.bags, draw.size.columns)
    return draw.gradient, winners, draw.size.rows


def _powers(draw: _Draw, order: float) -> Arguments:
    return draw.weight, torch.unique(draw.ids), order


@dataclass(frozen=True)
class _Way:
    """One way of calling an op: ``make`` returns the arguments."""

    op: str
    label: str
    make: Callable[[_Draw], Arguments]
    exact: bool = True
    aligned: bool = False


_NONE, _PAD = -1, 2
_WAYS = (
    _Way("sum_bags", "sum", lambda draw: _sum(draw, _NONE)),
    _Way("sum_bags", "sum, padding", lambda draw: _sum(draw, _PAD)),
    _Way("sum_bags", "sum, sample weights", lambda draw: _sum(draw, _PAD, samples=True)),
    _Way("sum_bags", "sum, aligned", lambda draw: _sum(draw, _PAD, samples=True), aligned=True),
    _Way("sum_bags", "mean", lambda draw: _sum(draw, _PAD, mean=True), exact=False),
    _Way("sum_bags", "mean, aligned", lambda draw: _sum(draw, _PAD, mean=True), False, aligned=True),
    _Way("max_bags", "max", lambda draw: _max(draw, _NONE)),
    _Way("max_bags", "max, padding", lambda draw: _max(draw, _PAD)),
    _Way("max_bags", "max, aligned", lambda draw: _max(draw, _PAD), aligned=True),
    _Way("first_of_max", "", lambda draw: _first(draw, _NONE)),
    _Way("first_of_max", "padding", lambda draw: _first(draw, _PAD)),
    _Way("count", "", lambda draw: (draw.ids, draw.starts, draw.stops, _NONE)),
    _Way("count", "padding", lambda draw: (draw.ids, draw.starts, draw.stops, _PAD)),
    _Way("weight_gradient", "", lambda draw: _weight_gradient(draw, _NONE, samples=False)),
    _Way("weight_gradient", "padding, sample weights", lambda draw: _weight_gradient(draw, _PAD, samples=True)),
    _Way("max_gradient", "", _max_gradient),
    _Way("sample_gradient", "", lambda draw: (draw.gradient, draw.weight, draw.ids, draw.bags, _NONE)),
    _Way("sample_gradient", "padding", lambda draw: (draw.gradient, draw.weight, draw.ids, draw.bags, _PAD)),
    _Way("row_powers", "2-norm", lambda draw: _powers(draw, 2.0)),
    _Way("row_powers", "1-norm", lambda draw: _powers(draw, 1.0)),
    _Way("row_powers", "0.5-norm", lambda draw: _powers(draw, 0.5), exact=False),
    _Way("row_powers", "0-norm", lambda draw: _powers(draw, 0.0)),
    _Way("row_powers", "inf-norm", lambda draw: _powers(draw, math.inf)),
)


@dataclass(frozen=True)
class _RowSample:
    """One way of calling one op; see :class:`verifier.rules.samples.Sample`."""

    way: _Way
    options: SampleOptions
    not_testable: str = ""
    claims_only: str = _TOGETHER

    @property
    def op(self) -> str:
        return f"sharded_rows.{self.way.op}.default"

    @property
    def origin(self) -> str:
        return self.way.label or self.way.op

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call at size number ``size`` with the values of draw number ``draw``, or None."""
        sizes = _ALIGNED if self.way.aligned else _SIZES
        if values is not Values.USUAL or not 0 <= size < min(len(sizes), self.options.sizes):
            return None
        text = f"{self.op}|{self.origin}|{size}|{draw}|{self.options.seed}"
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        made = _Draw(sizes[size], self.options.dtype, generator, draw, self.way.aligned)
        return OpCase(self.op, f"torch.ops.{self.op}", self.way.make(made), exact=self.way.exact)


@dataclass(frozen=True)
class RowSampleSource:
    """Draws calls of the library ``sharded_rows``; see :class:`verifier.rules.samples.SampleSource`.

    ``--import strategies.install`` installs the rules of these ops.
    """

    name: str = "sharded_rows"

    def prepare(self) -> None:
        """Do nothing: there is nothing to load."""

    def select(self, patterns: Sequence[str]) -> tuple[Target, ...]:
        """Return the ops that match a glob, such as ``sharded_rows.*_bags.default``; without globs all ops with rules.

        Raises
        ------
        ValueError
            If a pattern matches no op, or only ops without rules.
        """
        known = sorted(str(sharded.op) for sharded in (*BAG_OPS, ROW_POWERS))
        with_rules = {str(op) for op in registered_overloads()}
        if not patterns:
            return tuple(Target(name, self.name) for name in known if name in with_rules)
        names: set[str] = set()
        for pattern in patterns:
            matches = {name for name in known if names_overload(pattern, name)}
            if not matches:
                raise ValueError(f"no op of sharded_rows matches {pattern!r}{did_you_mean(pattern, known)}")
            if not matches & with_rules:
                raise ValueError(f"{pattern!r}: these ops have no rules before --import strategies.install")
            names |= matches & with_rules
        return tuple(Target(name, self.name) for name in sorted(names))

    def samples(self, target: Target, options: SampleOptions) -> Iterator[Sample]:
        """Yield the samples of ``target``, in the same order at each call."""
        ways = [way for way in _WAYS if target.name == f"sharded_rows.{way.op}.default"]
        yield from (_RowSample(way, options) for way in ways[: options.max_samples])


SOURCE = RowSampleSource()
