"""Whether level 1 refutes each wrong claim that a pointwise op passes a pending reduction on, and no right one.

    python benchmarks/partial_claims.py [OP ...] [--max-samples 4]

For each op, every claim of the form ``P(k) -> P(k)`` is registered, of a binary op those with a replicated operand as
well. ``rules`` judges all of them. Beside it, each claim is tried on random numbers: a function of the reduced parts
against the reduction of the function of each part. Neither knows of the other.

missed    claims that random numbers refute and ``rules`` does not
accused   claims that ``rules`` refutes and random numbers do not, with what ``rules`` shows. These need another look:
          random numbers are of float64 and finite, and numbers among the arguments have their defaults

All ops take more than ten minutes: ``rules`` confirms each wrong claim on ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

KINDS = ("sum", "avg", "max", "min", "product")
UNARY = """
abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad rad2deg digamma erf erfc erfinv exp exp2 expm1 floor frac
lgamma log log10 log1p log2 neg reciprocal round rsqrt sigmoid sign sgn sin sinc sinh sqrt square tan tanh trunc relu
relu6 silu mish hardswish hardsigmoid selu logit gelu hardtanh softplus leaky_relu elu positive logical_not isnan
isfinite isinf signbit i0 special_i0e special_i1 special_ndtri special_log_ndtr special_entr special_erfcx
special_bessel_j0 nan_to_num
""".split()  # noqa: SIM905 - as a list of strings, each would have a line
BINARY = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum fmax fmin atan2 pow.Tensor_Tensor remainder.Tensor
fmod.Tensor copysign.Tensor hypot xlogy.Tensor logaddexp logaddexp2 logical_and logical_or logical_xor eq.Tensor
ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor heaviside floor_divide clamp_min.Tensor clamp_max.Tensor
special_xlog1py special_zeta rsub.Tensor
""".split()  # noqa: SIM905 - as a list of strings, each would have a line
CLAIMS = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


def claims(op, args, kwargs):
    R, tensors = Replicate(), sum(hasattr(arg, "shape") for arg in args[:2])
    kinds = [Partial(kind) for kind in {kinds!r}]
    if tensors < 2:
        return [[P, P] for P in kinds]
    return [[P, *inputs] for P in kinds for inputs in ((P, R), (R, P), (P, P))]


for name in {ops!r}:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(2), allow_uneven_sharding=True)(claims)
"""
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


def reduced(kind: str, parts: torch.Tensor) -> torch.Tensor | None:
    """Return the reduction of the parts; None if there is none, as for the average of bools."""
    if parts.dtype != torch.bool:
        return REDUCTIONS[kind](parts)
    return parts.any(0) if kind in ("sum", "max") else parts.all(0) if kind in ("min", "product") else None


def numbers(generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield two parts of 400 numbers, of several magnitudes, and of whole numbers and quarters among them."""
    for (scale, shift), steps in product(((1, 0), (3, 0), (10, 0), (0.3, 0.4), (1, 2), (5, 6)), (0, 1, 4)):
        some = torch.randn(2, 400, generator=generator, dtype=torch.float64) * scale + shift
        yield (some * steps).round() / steps + 0.0 if steps else some  # without -0.0


def holds(op: Callable[..., torch.Tensor], kind: str, pending: Sequence[bool]) -> bool:
    """Return whether a claim holds for all random numbers at which the result is finite."""
    generator = torch.Generator().manual_seed(0)
    for first in numbers(generator):
        others = list(numbers(generator))[::4] if len(pending) > 1 else [first]
        for other in others:
            given = (first, other)[: len(pending)]
            whole = op(*(REDUCTIONS[kind](one) if is_ else one[0] for one, is_ in zip(given, pending, strict=True)))
            parts = [
                op(*(one[rank] if is_ else one[0] for one, is_ in zip(given, pending, strict=True))) for rank in (0, 1)
            ]
            together = reduced(kind, torch.stack(parts))
            if together is None:
                return False
            finite = torch.isfinite(whole)
            if not torch.allclose(whole[finite].double(), together[finite].double(), 1e-7, 1e-9, equal_nan=True):
                return False
    return True


def judged(ops: Sequence[str], most: int) -> dict[str, Any]:
    """Return what ``rules`` says of all claims, by op."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "claims.py")
        file.write_text(CLAIMS.format(kinds=KINDS, ops=list(ops)))
        words = ("rules", "--import", str(file), "--world-size", "2,3", "--max-samples", str(most), "--format", "json")
        command = [sys.executable, "-m", "verifier", *words, "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)["ops"]
    return found


def main(arguments: Sequence[str]) -> int:
    """Print which claims were missed, which were accused all the same, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=[*UNARY, *BINARY], metavar="OP")
    parser.add_argument("--max-samples", type=int, default=4)
    options = parser.parse_args(arguments)
    found = judged(options.ops, options.max_samples)
    claims = wrong = missed = accused = 0
    for name in options.ops:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        report = found[f"aten.{packet}.{overload or 'default'}"]
        forms = ((True, False), (False, True), (True, True)) if name in BINARY else ((True,),)
        for kind, pending in product(KINDS, forms):
            placed = [f"P({kind})" if is_ else "R" for is_ in pending]
            refuted = [one for one in (*report["wrong"], *report["special"]) if one["input_placements"] == placed]
            right = holds(op, kind, pending)
            claims, wrong = claims + 1, wrong + (not right)
            if not right and not refuted:
                missed += 1
                print(f"missed   {name} with {', '.join(placed)}")
            if right and refuted:
                accused += 1
                print(f"accused  {name} with {', '.join(placed)}: {refuted[0]['origin']}: {refuted[0]['message']}")
    print(f"{claims} claims of {len(options.ops)} ops, {wrong} wrong: {missed} missed, {accused} accused beside them")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
