"""Train a small Transformer, sharded over 4 ranks in three ways and in one process, and draw the losses.

``python benchmarks/training_curve.py`` prints the largest difference between the curves, and ends with status 1 if it
is beyond rounding in float32; ``--svg docs/explanations/training-curve.svg`` draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from strategies.models.losses import next_token_loss
from strategies.models.plans import data_parallel, sequence_parallel, tensor_parallel
from strategies.models.transformer import Transformer, TransformerSize
from verifier.meshes.pool import Pool, PoolSet
from verifier.modules.verify import verify_module

STEPS = 50
VOCABULARY = 12
RELATIVE, ABSOLUTE = 1.3e-6, 1e-5
"""What ``torch.testing.assert_close`` allows in float32."""

PLANS = (
    ("tensor parallel", tensor_parallel, "4", None),
    ("sequence parallel", sequence_parallel, "4", None),
    ("data and tensor parallel", data_parallel, "2x2", "(S(0), R)"),
)


@dataclass(frozen=True)
class Curve:
    """The losses of one plan, and those of the local model."""

    name: str
    mesh: str
    losses: tuple[float, ...]
    local: tuple[float, ...]

    @property
    def difference(self) -> float:
        """The largest absolute difference of two losses."""
        return max(abs(a - b) for a, b in zip(self.losses, self.local, strict=True))

    @property
    def equal(self) -> bool:
        """Whether all losses agree as float32 numbers do."""
        pairs = zip(self.losses, self.local, strict=True)
        return all(abs(a - b) <= ABSOLUTE + RELATIVE * abs(b) for a, b in pairs)


def sentences(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [count, length] and those that follow each: ``5 * token + step``, one step for each sentence."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    columns = [start]
    for _ in range(length):
        columns.append((5 * columns[-1] + step) % VOCABULARY)
    tokens = torch.cat(columns, 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(steps: int = STEPS, plans: Sequence[object] = PLANS) -> list[Curve]:
    """Return the curve of each plan."""
    tokens, following = sentences(32, 8)
    curves = []
    pools = PoolSet(Pool)
    try:
        for name, plan, mesh, placements in plans:  # type: ignore[misc]
            result = verify_module(
                partial(Transformer, TransformerSize(vocabulary=VOCABULARY, tied=False)),
                plan,
                [tokens],
                targets=[following],
                loss=next_token_loss,
                optimizer=partial(torch.optim.Adam, lr=0.01),
                mesh=mesh,
                placements=placements,
                steps=steps,
                dtype=torch.float32,
                pools=pools,
            )
            curves.append(Curve(name, mesh, result.losses, result.local_losses))
    finally:
        pools.close()
    return curves


# ------------------------------------------------------------------------------------------------------------- picture
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 52, 44, 16, 44
COLOURS = ("#0969da", "#1a7f37", "#bc4c00")


def svg(curves: Sequence[Curve]) -> str:
    """Return a picture of the curves: the local one as a broad line, the sharded ones as marks on it."""
    local = curves[0].local
    highest = max(local)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + inner_width * step / max(1, len(local) - 1)
        return x, TOP + inner_height * (1 - loss / highest)

    label = f"Loss over {len(local)} steps, from {local[0]:.2f} to {local[-1]:.2f}; sharded and local curves coincide"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in range(int(highest) + 1):
        _, y = place(0, tick)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{tick}</text>')
    for step in range(0, len(local), 10):
        x, y = place(step, 0)
        out.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle" fill="#57606a">{step}</text>')
    out.append(f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#57606a">step</text>')
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in enumerate(local)))
    out.append(f'<path d="M{line}" fill="none" stroke="#afb8c1" stroke-width="7" stroke-linejoin="round"/>')
    out.append(f'<path d="M{LEFT} 20h22" stroke="#afb8c1" stroke-width="7"/>')
    out.append(f'<text x="{LEFT + 28}" y="24" fill="#1f2328">local</text>')
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        shift = number  # marks of different plans do not hide each other
        for step in range(shift, len(curve.losses), len(curves)):
            x, y = place(step, curve.losses[step])
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>')
        x = LEFT + 80 + 150 * number
        out.append(f'<circle cx="{x}" cy="20" r="3" fill="{colour}"/>')
        out.append(f'<text x="{x + 8}" y="24" fill="#1f2328">{curve.name}, {curve.mesh}</text>')
    return "\n".join([*out, "</svg>", ""])


def table(curves: Sequence[Curve]) -> str:
    """Return what came of it as a table in Markdown."""
    lines = [
        "| plan | mesh | first loss | last loss | largest difference from local |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| local | 1 process | {curves[0].local[0]:.6f} | {curves[0].local[-1]:.6f} | |"]
    lines += [f"| {c.name} | {c.mesh} | {c.losses[0]:.6f} | {c.losses[-1]:.6f} | {c.difference:.1e} |" for c in curves]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    options = parser.parse_args()
    curves = train(options.steps)
    print(table(curves))
    if options.svg:
        options.svg.write_text(svg(curves), encoding="utf-8")
    return 0 if all(curve.equal for curve in curves) else 1


if __name__ == "__main__":
    sys.exit(main())
