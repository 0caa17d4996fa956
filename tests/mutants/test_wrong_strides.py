"""A view whose strides are wrong is caught, by the verifier and by the script of the finding; a right one is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verifier.calls.result import WrongShape
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.findings.script.render import render_script
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.comparison import have_same_strides
from verifier.processes.scripts import run_to_end

MUTANT = Path(__file__).with_name("wrong_strides.py")
MESH = MeshSpec((2,))
OP = "aten.t.default"
LIMIT = 60.0


def turned(*shape: int) -> OpCase:
    numbers = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return OpCase(OP, f"torch.ops.{OP}", (numbers,), family="opinfo")


def test_strides_of_a_view_are_compared(verify: Verifier, tmp_path: Path) -> None:
    assert set(verify(turned(4, 3), mesh=MESH).counts) == {VerdictKind.PASS}
    pools = PoolSet(lambda key: Pool(key, [str(MUTANT)]))
    try:
        mutated = Verifier(pools, MESH)
        with pytest.raises(WrongShape, match=r"output: strides got \[4, 1\], expected \[1, 3\]") as caught:
            mutated(turned(4, 3), placements=["S(0)"])
        # of a column both strides are those of the same memory
        assert mutated(turned(4, 1), placements=["S(0)"]).counts == {VerdictKind.PASS: 1}
    finally:
        pools.close()
    failure = caught.value.failure
    script = tmp_path / "script.py"
    script.write_text(render_script(failure.trial, failure.verdict), encoding="utf-8")
    assert run_to_end(script, LIMIT)[0] == 0
    script.write_text(
        script.read_text().replace("\n\ndef call(", f"\n\nexec(open({str(MUTANT)!r}).read())\n\n\ndef call(")
    )
    status, said = run_to_end(script, LIMIT)
    assert status == 1, said
    assert "output 0: has strides [4, 1], expected [1, 3]" in said


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), True),
        (torch.zeros(3, 4), torch.zeros(4, 3).t(), False),
        (torch.zeros(1, 4), torch.zeros(4, 1).t(), True),
        (torch.zeros(0, 4), torch.zeros(4, 0).t(), True),
        (torch.zeros(()), torch.zeros(()), True),
    ],
)
def test_a_stride_counts_along_a_dim_of_more_than_one(got: torch.Tensor, expected: torch.Tensor, same: bool) -> None:
    assert have_same_strides(got, expected) is same
