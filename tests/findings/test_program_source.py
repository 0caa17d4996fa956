"""The source of a program has each function that it calls, once."""

from __future__ import annotations

import torch

from verifier.findings.script.source import needs_its_module, program_source


def halved(values: torch.Tensor) -> torch.Tensor:
    return values if len(values) < 2 else ends(values[: len(values) // 2])


def ends(values: torch.Tensor) -> torch.Tensor:
    """Return the first element, by way of a function that calls this one."""
    return halved(values)


def program(values: torch.Tensor) -> torch.Tensor:
    return ends(values)


def test_functions_that_call_each_other() -> None:
    call = f"{__name__}.program"
    assert not needs_its_module(call)
    source = program_source(call)
    assert [source.count(f"def {name}(") for name in ("halved", "ends", "program")] == [1, 1, 1]
    assert source.index("def ends(") < source.index("def program(")
