"""What is wrong in one way each with the ops that embedding bags and norms of rows are made of.

Level 1 checks the true ops and the wrong ones on the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.embedding.ops import ROW_POWERS
from strategies.embedding_bag.ops import BAG_OPS
from strategies.row_samples import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import Sample, SampleOptions, Target
from verifier.torch_internals.registries import replaced_sharded_op
from verifier.torch_internals.sharded_ops import ShardedOp

OPS = {str(sharded.op).split(".")[1]: sharded for sharded in (*BAG_OPS, ROW_POWERS)}
MESHES = (MeshSpec((2,)), MeshSpec((3,)), MeshSpec((2, 2)))


def sample_of(name: str, origin: str) -> Sample:
    """Return one way of calling an op, by the names that the source of samples gives them."""
    samples = SOURCE.samples(Target(str(OPS[name].op), SOURCE.name), SampleOptions())
    return next(sample for sample in samples if sample.origin == origin)


def check(sharded: ShardedOp, sample: Sample, products: int = 12) -> SampleReport:
    assert sample.op == str(sharded.op)
    return check_sample(sample, CheckOptions(MESHES, products=products, claims_only=True, samples_called_again=0))


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
    name, origin
        The op, and the way of calling it.
    changes
        What of the op is replaced.
    accused
        The rule that does not hold, as level 1 writes it.
    """

    fault: str
    name: str
    origin: str
    changes: dict[str, Any]
    accused: str

    @property
    def mutant(self) -> ShardedOp:
        return replace(OPS[self.name], **self.changes)

    def accusations(self) -> set[str]:
        """Return the rules that level 1 accuses where the mutant is in the place of the op."""
        with replaced_sharded_op(self.mutant):
            report = check(self.mutant, sample_of(self.name, self.origin))
        return texts(one.rule for one in report.wrong)


MUTANTS = (
    BagMutant("local mean, then sum; row-wise", "sum_bags", "mean", {"kernel": local_mean},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("local mean, then sum; position-wise", "sum_bags", "mean", {"kernel": local_mean},
              "R, S(0), R, R, R -> P(sum)"),
    BagMutant("mean divides by the difference of offsets", "sum_bags", "mean", {"kernel": offsets_apart},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("padding compared with local rows", "sum_bags", "sum, sample weights", {"kernel": padding_by_local_row},
              "S(0), R, R, R, R -> P(sum)"),
    BagMutant("offsets sharded without the halo", "sum_bags", "sum, sample weights", {"kernel": without_halo},
              "R, R, S(0), S(0), R -> S(0)"),
    BagMutant("weight and per-sample weights both Partial", "sum_bags", "sum, sample weights",
              {"rules": rules([SUM, SUM, R, R, R, SUM])}, "P(sum), R, R, R, P(sum) -> P(sum)"),
    BagMutant("bags and positions cut each by themselves", "sum_bags", "sum",
              {"rules": rules([S0, R, S0, S0, S0])}, "R, S(0), S(0), S(0) -> S(0)"),
    BagMutant("bags with their positions inside a cut of bags", "sum_bags", "sum, aligned",
              {"rules": rules([S0, R, S0, S0, S0, S0], [S0, R, R, S0, S0, R])},
              "(R, R), (R, S(0)), (S(0), S(0)), (S(0), S(0)), (R, S(0)) -> (S(0), S(0))"),
    BagMutant("bags with their positions inside a cut of positions", "max_bags", "max, aligned",
              {"rules": rules([S0, R, S0, S0, S0, S0], [MAX, R, S0, R, R, R])},
              "(R, R), (S(0), S(0)), (R, S(0)), (R, S(0)), (R, S(0)) -> (P(max), S(0))"),
    BagMutant("weight P(max) under sum", "sum_bags", "sum, sample weights", {"rules": rules([MAX, MAX, R, R, R, R])},
              "P(max), R, R, R, R -> P(max)"),
    BagMutant("an empty local bag counts as 0 under max", "max_bags", "max, padding", {"kernel": empty_is_zero},
              "S(0), R, R, R, R -> P(max)"),
    BagMutant("-inf also for bags that are empty everywhere", "max_bags", "max, padding", {"kernel": empty_is_infinite},
              "S(0), R, R, R, R -> P(max)"),
    BagMutant("weight P(sum) under max", "max_bags", "max, padding", {"rules": rules([SUM, SUM, R, R, R, R])},
              "P(sum), R, R, R, R -> P(sum)"),
    BagMutant("positions counted from the rank's first", "first_of_max", "padding", {"kernel": own_position},
              "R, S(0), R, R, R -> P(min)"),
    BagMutant("gradient of max to the last rank that has it", "first_of_max", "padding",
              {"rules": rules([MAX, S0, R, R, R, R])}, "S(0), R, R, R, R -> P(max)"),
    BagMutant("norm inf of column shards summed", "row_powers", "inf-norm", {"rules": rules([SUM, Shard(1), R])},
              "S(1), R -> P(sum)"),
    BagMutant("counts of a mean not reduced", "count", "padding", {"rules": rules([R, S0, R, R])}, "S(0), R, R -> R"),
    BagMutant("gradient of position shards not reduced", "weight_gradient", "padding, sample weights",
              {"rules": rules([R, R, S0, S0, S0])}, "R, S(0), S(0), S(0) -> R"),
    BagMutant("gradient of max Partial by winners that every rank has", "max_gradient", "max_gradient",
              {"rules": rules([SUM, R, R])}, "R, R -> P(sum)"),
    BagMutant("gradient of samples cut as the bags are", "sample_gradient", "padding",
              {"rules": rules([S0, S0, R, R, R])}, "S(0), R, R, R -> S(0)"),
)  # fmt: skip
