"""What a call on plain tensors of a device does otherwise than on the CPU, where the reference is made."""

from __future__ import annotations

import torch

from verifier.core.case import Trial
from verifier.core.verdict import Phase
from verifier.oracle.comparison import Spot, compare
from verifier.oracle.reference import Reference, expected_value, make_reference, output_names
from verifier.oracle.tolerance import accepted_error

__all__ = ["other_kernel"]


def other_kernel(trial: Trial, reference: Reference, device: torch.device) -> str:
    """Return what the call on plain tensors of ``device`` does otherwise than the reference; empty if nothing.

    A failure of a trial on such a device says nothing of the rule, as DTensor runs the same kernels. Where both calls
    raise, they count as equal.
    """
    plain = make_reference(trial.case, device)
    if plain.raised is not None or reference.raised is not None:
        if plain.raised is not None and reference.raised is not None:
            return ""
        return f"{_way(device, plain.raised)}, and {_way('cpu', reference.raised)}, both without DTensor"
    if len(plain.outputs) != len(reference.outputs):
        return f"{device} gives {len(plain.outputs)} tensors without DTensor, and the CPU {len(reference.outputs)}"
    return next((text for spot in _spots(trial, reference) if (text := _other(trial, plain, reference, spot))), "")


def _way(device: object, raised: Exception | None) -> str:
    where = str(device).partition(":")[0]
    return f"{where} raises {type(raised).__name__}" if raised is not None else f"{where} returns"


def _spots(trial: Trial, reference: Reference) -> list[Spot]:
    spots = [Spot(Phase.GATHER, name) for name in output_names(reference)]
    spots += [Spot(Phase.INPUTS, name) for name in reference.names]
    if reference.differentiable and reference.wanted and not reference.no_gradient:
        wanted = [f"{reference.names[i]}.grad" for i in reference.wanted]
        spots += [
            Spot(Phase.GATHER_GRADIENT, name, backward)
            for backward in range(len(trial.cotangents)) for name in wanted
        ]  # fmt: skip
    return spots


def _other(trial: Trial, plain: Reference, reference: Reference, spot: Spot) -> str:
    expected = expected_value(reference, spot, trial.seed)
    try:
        got = expected_value(plain, spot, trial.seed)
    except RuntimeError as error:  # a kernel that the device lacks, in the backward pass
        return f"{_way(plain.inputs[0].device, error)} in the backward pass, and cpu returns, both without DTensor"
    if got is None or expected is None:
        return ""
    found = compare(got.detach().cpu(), expected.detach(), accepted_error(trial, reference, expected, spot))
    if found is None:
        return ""
    _, text, wanted, _ = found
    return f"{spot.subject}: the kernel of {got.device.type} gives {text} without DTensor, and that of the CPU {wanted}"
