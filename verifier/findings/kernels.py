"""What a local kernel of torch's does by itself, whatever DTensor's rules say."""

from __future__ import annotations

import torch

from verifier.core.verdict import VerdictKind
from verifier.findings.grouping import ZEROS_OF_AUTOGRAD
from verifier.placements.algebra import split
from verifier.records.schema import FindingRecord
from verifier.records.values import load_trial
from verifier.rules.execute import LocalCall
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.torch_internals.names import OpOverload

__all__ = ["is_dtype_of_empty_shards", "is_zeros_of_autograd"]


def is_zeros_of_autograd(finding: FindingRecord) -> bool:
    """Return whether nothing is wrong but that torch's own formula for a gradient makes plain tensors of zeros.

    An op that only reads the sizes of an argument has such a gradient. Of an op of torch's the formula is in C++, and
    comes before all rules. One of the user's may make what it likes.
    """
    return finding.op.startswith(("aten.", "prims.")) and str(ZEROS_OF_AUTOGRAD) in finding.groups


def is_dtype_of_empty_shards(finding: FindingRecord) -> bool:
    """Return whether results have a wrong dtype because the local kernel gives tensors without elements another one.

    The op runs here on the local tensors of each rank, without DTensor. No rule can mend a dtype: placements do not
    change it. So the finding counts as the kernel's if exactly ranks with an empty shard get another dtype than the
    call on the whole tensors.
    """
    if finding.verdict != VerdictKind.WRONG_DTYPE:
        return False
    trial = load_trial(finding.trial)
    call = LocalCall(trial.case)
    if not isinstance(call.op, OpOverload) or len(call.tensors) != len(trial.combination):
        return False
    shape = trial.mesh.shape
    cut = [
        split(tensor, placements, shape, trial.seed)
        for tensor, placements in zip(call.tensors, trial.combination, strict=True)
    ]
    differ = []
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            expected = _dtypes(call, call.tensors)
            for rank in range(trial.mesh.world_size):
                local = [shards[rank] for shards in cut]
                if _dtypes(call, local) != expected:
                    differ.append(any(one.numel() < whole.numel() and not one.numel()
                                      for one, whole in zip(local, call.tensors, strict=True)))  # fmt: skip
        except CALL_ERRORS:
            return False
    return bool(differ) and all(differ)


def _dtypes(call: LocalCall, tensors: list[torch.Tensor]) -> list[torch.dtype]:
    return [one.dtype for one in call(tensors).tensors]
