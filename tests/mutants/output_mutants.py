"""Models whose results are no plain tensor, or are used by a loss, and plans under which these are wrong."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from strategies.models.layers import MLP
from strategies.models.plans import tensor_parallel_mlp
from verifier.modules.verify import mean_square


class Doubled(torch.autograd.Function):
    """The values, with a gradient twice as large as it is."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def loss_beside_the_output(output: torch.Tensor, *_: object) -> torch.Tensor:
    """Return a loss that differs between ranks and the local model, while its gradient does not."""
    return mean_square(output) + (1.0 if dist.is_initialized() else 0.0)


@dataclass(frozen=True)
class Answer:
    text: str
    values: torch.Tensor


class AnsweringMLP(MLP):
    """An MLP that returns a dataclass."""

    def forward(self, values: torch.Tensor) -> Answer:  # type: ignore[override]
        return Answer("result", super().forward(values))


def answer_and_more(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, output: (output, output.values.clone()))


def answer_moved(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, output: Answer(output.text, output.values + 1.0))


class Reporting(MLP):
    """An MLP that returns tensors and other things in a dict."""

    def forward(self, values: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        output = super().forward(values)
        return {
            "values": output, "size": 0.5 * output.abs().mean().item(), "rows": len(values),
            "about": ("sums", None, {}), "by": self,
        }  # fmt: skip


def loss_of_the_report(report: Any, *_: object) -> torch.Tensor:
    """Return a loss that sees the tensor only."""
    return mean_square((report if isinstance(report, dict) else report[0])["values"])


def _report_with(**changes: object) -> Any:
    def plan(model: nn.Module, mesh: DeviceMesh) -> None:
        tensor_parallel_mlp(model, mesh)
        model.register_forward_hook(lambda _module, _inputs, report: {**report, **changes})

    return plan


def report_unchanged(model: nn.Module, mesh: DeviceMesh) -> None:
    """Not wrong: in another order, a named tuple for a tuple, and an object that is another one in every process."""
    tensor_parallel_mlp(model, mesh)
    about = namedtuple("about", ["what", "why", "more"])
    model.register_forward_hook(
        lambda _module, _inputs, report: {
            "by": object(), **{name: report[name] for name in ("size", "values")},
            "rows": torch.tensor(report["rows"]).numpy()[()], "about": about(*report["about"]),
        }
    )  # fmt: skip


def report_of_another_size(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)

    def change(_module: nn.Module, _inputs: object, report: dict[str, Any]) -> dict[str, Any]:
        return report | {"size": report["size"] * (1 + 1e-4 * mesh.get_rank())}

    model.register_forward_hook(change)


def report_of_one_row_more(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(rows=7)(model, mesh)


def report_of_something_else(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("means", None, {}))(model, mesh)


def report_of_zero(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("sums", 0, {}))(model, mesh)


def report_with_more(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(about=("sums", None, {"more": 1}))(model, mesh)


def report_as_a_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    _report_with(rows=torch.tensor(6))(model, mesh)


def report_in_a_tuple(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.register_forward_hook(lambda _module, _inputs, report: (report,))


class RowsAndTotal(MLP):
    """An MLP that returns what it makes of each row, and a tensor without dims."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        output = super().forward(values)
        return output, output.new_tensor(2.0)


class NormAtTheEnd(nn.Module):
    """What it returns sums to 0 but for rounding, and it does not see what is added to a row."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.norm = nn.LayerNorm(10)

    def forward(self, values: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        output = self.mlp(values)
        result: torch.Tensor = self.norm(output if added is None else output + added)
        return result


def mlp_parallel(model: NormAtTheEnd, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model.mlp, mesh)


class MaskedScores(MLP):
    """Scores of classes, some of which are out of the question."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scores = super().forward(values)
        return scores.masked_fill(torch.eye(*scores.shape, dtype=torch.bool), torch.finfo(scores.dtype).min)


def all_scores_moved(model: MaskedScores, mesh: DeviceMesh) -> None:
    """What cross entropy does not see."""
    tensor_parallel_mlp(model, mesh)
    model.down.register_forward_hook(lambda _module, _inputs, output: output + 1.0)


def last_class(scores: torch.Tensor, *_: object) -> torch.Tensor:
    """Return the mean cross entropy of ``scores`` against the last class."""
    return cross_entropy(scores, torch.full(scores.shape[:1], scores.shape[1] - 1))


def sum_of_all(output: torch.Tensor, *_: object) -> torch.Tensor:
    return output.sum()


def sum_and_a_little(output: torch.Tensor, *_: object) -> torch.Tensor:
    """Return a loss that differs between ranks and the local model by far more than rounding."""
    return output.sum() + (1e-9 if dist.is_initialized() else 0.0)


def sum_of_the_rows(output: Any, *_: object) -> torch.Tensor:
    """Return a loss of what is made of each row."""
    rows: torch.Tensor = output["values"] if isinstance(output, dict) else output[0]
    return rows.square().sum()


class Rotated(MLP):
    """An MLP that turns pairs of features by angles, as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, values: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        pairs = torch.view_as_complex(super().forward(values).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * (self.turns if turns is None else turns)).flatten(-2)


def not_turned(model: Rotated, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)
    model.turns = model.turns.real.to(model.turns.dtype)  # type: ignore[union-attr,operator]


class Gated(MLP):
    """An MLP with inputs by name."""

    def forward(self, values: torch.Tensor, *, gate: torch.Tensor, power: int = 1) -> torch.Tensor:  # type: ignore[override]
        return super().forward(values) * gate**power


def gradient_of_the_gate_doubled(model: nn.Module, mesh: DeviceMesh) -> None:
    tensor_parallel_mlp(model, mesh)

    def double(_module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
        return inputs, kwargs | {"gate": Doubled.apply(kwargs["gate"])}

    model.register_forward_pre_hook(double, with_kwargs=True)
