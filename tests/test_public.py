"""The public face: what users may build on is there, is documented, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

import verifier

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "public.md"
NAMES = [name for name in verifier.__all__ if name != "__version__"]


def test_the_lists_of_public_names_agree() -> None:
    assert sorted(verifier._PUBLIC) == NAMES
    assert {*NAMES} <= {*dir(verifier)}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_that_of_its_module_and_has_a_docstring(name: str) -> None:
    value = getattr(verifier, name)
    assert value is getattr(import_module(verifier._PUBLIC[name]), name)
    assert name in import_module(verifier._PUBLIC[name]).__all__
    assert value.__doc__


def test_the_page_documents_every_public_name_and_no_other() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert sorted(rows) == NAMES


def test_what_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'verifier' has no attribute 'Pool'"):
        getattr(verifier, "Pool")  # noqa: B009 - mypy knows that it is not there


@pytest.mark.processes
def test_importing_the_package_loads_nothing() -> None:
    program = "import sys; before = {*sys.modules}; import verifier; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.partition(".")[0] in ("torch", "typer")] == []
    assert [name for name in done.stdout.split() if name.startswith("verifier")] == ["verifier"]


@pytest.mark.ranks
@pytest.mark.parametrize("op", [torch.mul, torch.Tensor.mul, "aten.mul.Tensor"], ids=["function", "method", "path"])
def test_verify_without_pytest_proves_a_right_rule(op: Callable[..., object] | str) -> None:
    result = verifier.verify(op, torch.arange(1.0, 6.0), 2.0, mesh="simulated:2")
    assert result.counts[verifier.VerdictKind.PASS] > 0
    assert not [kind for kind in result.counts if kind.bad]


@pytest.mark.ranks
def test_verify_without_pytest_raises_for_a_wrong_rule() -> None:
    """``fill_`` puts the value once for each rank into a tensor that is P(sum): known, e9445693288c."""
    with pytest.raises(verifier.VerificationError, match="got 6"):
        verifier.verify(torch.ops.aten.fill_.Scalar, torch.zeros(4), 3.0, mesh="simulated:2", placements=["P(sum)"])
