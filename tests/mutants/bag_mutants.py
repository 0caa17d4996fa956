"""Calls of the ops that embedding bags and norms of rows are made of, and what is wrong with them in one way each.

Level 1 checks the true ops and the wrong ones on the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.embedding.ops import ROW_POWERS
from strategies.embedding_bag.ops import BAG_OPS
from verifier.cases import MeshSpec, OpCase
from verifier.rules.check import CheckOptions, check_sample
from verifier.rules.results import SampleReport
from verifier.torch_internals import ShardedOp, replaced_sharded_op

OPS = {str(sharded.op).split(".")[1]: sharded for sharded in (*BAG_OPS, ROW_POWERS)}
MESHES = (MeshSpec((2,)), MeshSpec((3,)), MeshSpec((2, 2)))
# rows, columns, and the sizes of bags: uneven, with empty bags, fewer bags than ranks
SIZES = ((5, 3, (2, 0, 3, 1)), (4, 2, (0, 4)), (6, 4, (1, 1, 0, 2, 3)))

Args = tuple[object, ...]


def floats(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator).double()  # few values, so that there are ties


def bags(g: torch.Generator, rows: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, and where bags start and stop."""
    edges = torch.tensor([0, *accumulate(sizes)])
    return torch.randint(0, rows, (sum(sizes),), generator=g), edges[:-1].clone(), edges[1:].clone()


def owners(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(sizes))


def sums(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    return (floats(g, rows, columns), *bags(g, rows, sizes), floats(g, sum(sizes)), None, 2, False)


def means(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    ids, starts, stops = bags(g, rows, sizes)
    counts = torch.stack([(ids[a:b] != 2).sum() for a, b in zip(starts, stops, strict=True)])
    return (floats(g, rows, columns), ids, starts, stops, None, counts, 2, False)


def maxima(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    weight, ids, starts, stops, _, counts, padding, aligned = means(g, rows, columns, sizes)
    return (weight, ids, starts, stops, counts, padding, aligned)


def firsts(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    weight, ids, starts, stops, _, padding, _ = args = maxima(g, rows, columns, sizes)
    return (weight, ids, starts, stops, OPS["max_bags"].op(*args), padding)


def counts(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    return (*bags(g, 3, sizes), 2)


def weight_gradients(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    ids, _, _ = bags(g, rows, sizes)
    return (floats(g, len(sizes), columns), ids, owners(sizes), floats(g, sum(sizes)), rows, 2)


def max_gradients(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    winners = torch.randint(-1, rows, (len(sizes), columns), generator=g)
    return (floats(g, len(sizes), columns), winners, rows)


def sample_gradients(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    ids, _, _ = bags(g, rows, sizes)
    return (floats(g, len(sizes), columns), floats(g, rows, columns), ids, owners(sizes), 2)


def powers(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    return (floats(g, rows, columns), torch.randperm(rows, generator=g)[: rows - 1], 1.0)


def largest(g: torch.Generator, rows: int, columns: int, sizes: tuple[int, ...]) -> Args:
    return (*powers(g, rows, columns, sizes)[:2], float("inf"))


@dataclass
class HandMade:
    """A sample whose calls a function makes."""

    op: str
    make: Callable[..., Args]
    exact: bool = True
    origin: str = "by hand"
    not_testable: str = ""
    claims_only: str = ""
    sizes: tuple[Any, ...] = field(default=SIZES)

    def draw(self, size: int, draw: int, *, special: bool = False) -> OpCase | None:
        if size >= len(self.sizes) or special:
            return None
        generator = torch.Generator().manual_seed(1000 * size + draw)
        return OpCase(self.op, f"torch.ops.{self.op}", self.make(generator, *self.sizes[size]), {}, exact=self.exact)


def check(sharded: ShardedOp, make: Callable[..., Args], exact: bool = True) -> SampleReport:
    return check_sample(HandMade(str(sharded.op), make, exact), CheckOptions(MESHES, claims_only=True))


def texts(rules: Any) -> set[str]:
    return {f"{', '.join(rule.inputs)} -> {rule.outputs[0]}" for rule in rules}


# -------------------------------------------------------------------------------------------------------------- mutants
R, S0, SUM, MAX = Replicate(), Shard(0), Partial("sum"), Partial("max")


def local_mean(
    view: Any, weight: Any, indices: Any, starts: Any, stops: Any, samples: Any, counts: Any, *rest: Any
) -> Any:
    """Divide by what the rank has of a bag."""
    own = (indices >= view.bounds(0, 0)[0]) & (indices < view.bounds(0, 0)[1]) & (indices != rest[0])
    before = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
    edges = (torch.cat([starts, stops[-1:]]) - view.bounds(1, 0)[0]).clamp(0, own.numel())
    return OPS["sum_bags"].kernel(view, weight, indices, starts, stops, samples, before[edges].diff(), *rest)


def offsets_apart(view: Any, weight: Any, indices: Any, starts: Any, stops: Any, *rest: Any) -> Any:
    """Divide by the difference of offsets, in which padding counts."""
    return OPS["sum_bags"].kernel(view, weight, indices, starts, stops, rest[0], stops - starts, *rest[2:])


def without_halo(view: Any, weight: Any, indices: Any, starts: Any, stops: Any, *rest: Any) -> Any:
    """Let the last bag of a rank stop where the indices do."""
    return OPS["sum_bags"].kernel(
        view, weight, indices, starts, torch.cat([stops[:-1], stops[-1:] * 0 + len(indices)]), *rest
    )


def empty_is_zero(view: Any, *args: Any) -> Any:
    """Take 0 for the maximum of a bag that is empty here."""
    return OPS["max_bags"].kernel(view, *args).nan_to_num(neginf=0.0)


def empty_is_infinite(view: Any, weight: Any, indices: Any, starts: Any, stops: Any, counts: Any, *rest: Any) -> Any:
    """Take minus infinity for the maximum of a bag that is empty everywhere, too."""
    return OPS["max_bags"].kernel(view, weight, indices, starts, stops, counts + 1, *rest)


def own_position(view: Any, weight: Any, indices: Any, *rest: Any) -> Any:
    """Count positions from the rank's first one."""
    result = OPS["first_of_max"].kernel(view, weight, indices, *rest)
    return torch.where(result == view.shapes[1][0], result, result - view.bounds(1, 0)[0])


def padding_by_local_row(view: Any, weight: Any, indices: Any, *rest: Any) -> Any:
    """Compare the padding with rows as the rank counts them."""
    *others, padding, aligned = rest
    return OPS["sum_bags"].kernel(view, weight, indices, *others, padding + view.bounds(0, 0)[0], aligned)


def rules(*extra: list[Any]) -> Callable[..., list[list[Any]]]:
    return lambda *_: list(extra)


@dataclass(frozen=True)
class BagMutant:
    """An op with a wrong kernel or a wrong rule.

    Parameters
    ----------
    fault
        What is wrong.
    name, make
        The op, and what makes its calls.
    changes
        What of the op is replaced.
    accused
        The rule that does not hold, as level 1 writes it.
    """

    fault: str
    name: str
    make: Callable[..., Args]
    changes: dict[str, Any]
    accused: str

    @property
    def mutant(self) -> ShardedOp:
        return replace(OPS[self.name], **self.changes)

    def accusations(self) -> set[str]:
        """Return the rules that level 1 accuses where the mutant is in the place of the op."""
        with replaced_sharded_op(self.mutant):
            report = check(self.mutant, self.make, exact=self.make is not means)
        return texts(one.rule for one in report.wrong)


MUTANTS = (
    BagMutant("local mean, then sum; row-wise", "sum_bags", means, {"kernel": local_mean},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("local mean, then sum; position-wise", "sum_bags", means, {"kernel": local_mean},
              "R, S(0), R, R, R -> P(sum)"),
    BagMutant("mean divides by the difference of offsets", "sum_bags", means, {"kernel": offsets_apart},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("padding compared with local rows", "sum_bags", sums, {"kernel": padding_by_local_row},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("offsets sharded without the halo", "sum_bags", sums, {"kernel": without_halo},
              "R, R, S(0), S(0), R -> S(0)"),
    BagMutant("weight and per-sample weights both Partial", "sum_bags", sums,
              {"rules": rules([SUM, SUM, R, R, R, SUM])}, "P(sum), R, R, R, P(sum) -> P(sum)"),
    BagMutant("weight P(max) under sum", "sum_bags", sums, {"rules": rules([MAX, MAX, R, R, R, R])},
              "P(max), R, R, R, R -> P(max)"),
    BagMutant("an empty local bag counts as 0 under max", "max_bags", maxima, {"kernel": empty_is_zero},
              "S(0), R, R, R, R -> P(max)"),
    BagMutant("-inf also for bags that are empty everywhere", "max_bags", maxima, {"kernel": empty_is_infinite},
              "S(0), R, R, R, R -> P(max)"),
    BagMutant("weight P(sum) under max", "max_bags", maxima, {"rules": rules([SUM, SUM, R, R, R, R])},
              "P(sum), R, R, R, R -> P(sum)"),
    BagMutant("positions counted from the rank's first", "first_of_max", firsts, {"kernel": own_position},
              "R, S(0), R, R, R -> P(min)"),
    BagMutant("gradient of max to the last rank that has it", "first_of_max", firsts,
              {"rules": rules([MAX, S0, R, R, R, R])}, "S(0), R, R, R, R -> P(max)"),
    BagMutant("norm inf of column shards summed", "row_powers", largest, {"rules": rules([SUM, Shard(1), R])},
              "S(1), R -> P(sum)"),
    BagMutant("counts of a mean not reduced", "count", counts, {"rules": rules([R, S0, R, R])}, "S(0), R, R -> R"),
    BagMutant("gradient of position shards not reduced", "weight_gradient", weight_gradients,
              {"rules": rules([R, R, S0, S0, S0])}, "R, S(0), S(0), S(0) -> R"),
    BagMutant("gradient of max Partial by winners that every rank has", "max_gradient", max_gradients,
              {"rules": rules([SUM, R, R])}, "R, R -> P(sum)"),
    BagMutant("gradient of samples cut as the bags are", "sample_gradient", sample_gradients,
              {"rules": rules([S0, S0, R, R, R])}, "S(0), R, R, R -> S(0)"),
)  # fmt: skip
