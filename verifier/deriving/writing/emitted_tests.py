"""Writes the test file that goes with a derived strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from verifier.core.case import OpCase
from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.gradients import has_gradients
from verifier.deriving.writing.subject import Target, strategy_name
from verifier.planning.own_samples import callable_of
from verifier.rules.execute import CALL_ERRORS, LocalCall
from verifier.torch_internals.names import OpOverload

__all__ = ["text_of_test"]

_MOST_TESTED = 3
"""Calls in a test file."""
_MESHES, _LOCAL_MESHES = ("2", "2x2"), ("2", "3", "2x2")
"""The meshes of a test file; the rules of a strategy are also checked by the gate."""


def text_of_test(
    ops: Mapping[OpOverload, Sequence[CallEvidence]],
    module: str,
    imports: Sequence[str] = (),
    folder: Path | None = None,
    target: Target = Target.SINGLE_DIM,
    gradients: bool = False,
) -> str:
    """Return a test file for the pytest plugin: calls on some meshes, under the code in ``module``.

    Parameters
    ----------
    ops
        The op and those that run in its gradient, each with its calls.
    imports
        Files and modules that define the op; the test imports them first.
    folder
        Where the test is going to be; this folder if it is None.
    gradients
        Whether all that runs in the gradient of the first op has a strategy, so that the test asks for the gradient.
    """
    local, first = target is Target.LOCAL_MAP, next(iter(ops))
    found, defining = _imports_of_test(imports, folder or Path())
    title = "on local tensors" if local else "with its derived strategy"
    use = f"import {module}" + ("" if local else "  # noqa: F401 - registers the strategy")
    tests = [_test_of(op, calls, module, local, gradients and op is first) for op, calls in ops.items()]
    itertools = "import itertools\n\n" if local else ""
    return f'''"""{callable_of(str(first)) or first} {title}, on real ranks."""

{itertools}{found}import pytest
import torch

{defining}{use}

{(chr(10) * 3).join(tests)}
'''


def _test_of(op: OpOverload, calls: Sequence[CallEvidence], module: str, local: bool, gradients: bool) -> str:
    """Return the test of one op, after its calls."""
    name = strategy_name(op)
    chosen = [call for call in calls if call.holding and not call.rare][:_MOST_TESTED]
    wanted = [local or (gradients and has_gradients(call.case)) for call in chosen]
    texts = [f"    ({_arguments(call.case, one)})," for call, one in zip(chosen, wanted, strict=True)]
    body = _TEST_OF_FUNCTION if local else "    verify(torch.ops.{op}, *args, mesh=mesh, **kwargs)"
    return f"""CALLS_OF_{name.upper()} = [
{chr(10).join(texts)}
]


@pytest.mark.parametrize("mesh", [{", ".join(f'"{mesh}"' for mesh in (_LOCAL_MESHES if local else _MESHES))}])
@pytest.mark.parametrize(("args", "kwargs"), CALLS_OF_{name.upper()})
def test_{name}(verify, args, kwargs, mesh):
{body.format(op=op, module=module, name=name)}"""


_TEST_OF_FUNCTION = """\
    rules = {module}.{name}_rules(*args, **kwargs)
    ways = itertools.product([inputs for _, inputs, _ in rules], repeat=mesh.count("x") + 1)
    ways = (list(zip(*way, strict=True)) for way in ways)
    alike = (way for way in ways if all(len({{p for p in one if p.is_partial()}}) < 2 for one in way))
    placements = list(itertools.islice(alike, 64))  # DTensor reduces a tensor in one way
    verify({module}.{name}_sharded, *args, mesh=mesh, combinations=placements, **kwargs)"""
"""Tries the rules alone: the function refuses other placements."""


def _imports_of_test(imports: Sequence[str], folder: Path) -> tuple[str, str]:
    """Return the lines that let the test find the files of ``imports``, and those that import all of them."""
    lines: list[str] = []
    elsewhere: dict[str, None] = {}
    for name in imports:
        is_file = name.endswith(".py")
        module = Path(name).stem if is_file else name
        lines.append(f"import {module}  # noqa: F401 - given with --import\n")
        if is_file and (beside := os.path.relpath(Path(name).resolve().parent, folder.resolve())) != os.curdir:
            elsewhere[f"sys.path.append(str(Path(__file__).parent / {beside!r}))\n"] = None
    found = "".join(["import sys\nfrom pathlib import Path\n\n", *elsewhere, "\n"]) if elsewhere else ""
    return found, "".join(lines)


def _arguments(case: OpCase, differentiable: bool) -> str:
    special = not differentiable and _says_nothing(case)
    args = ", ".join(_value(value, differentiable, special) for value in case.args)
    kwargs = ", ".join(f"{name!r}: {_value(value, differentiable, special)}" for name, value in case.kwargs.items())
    return f"({args}{',' if len(case.args) == 1 else ''}), {{{kwargs}}}"


def _says_nothing(case: OpCase) -> bool:
    """Return whether all results of a call are false everywhere for usual values, as those of ``isnan`` are."""
    call = LocalCall(case)
    usual = [
        (torch.arange(t.numel()) % 7 - 3).to(t.dtype).reshape(t.shape) if t.is_floating_point() else t
        for t in call.tensors
    ]
    try:
        with torch.no_grad():
            results = call(usual).tensors
    except CALL_ERRORS:
        return False
    return all(result.dtype == torch.bool and not result.any() for result in results)


def _value(value: object, differentiable: bool, special: bool) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and special:
            values = 'torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])'
            return f"{values}[torch.arange({value.numel()}) % 4].to({value.dtype}).reshape({list(value.shape)})"
        if value.is_floating_point():
            text = f"(torch.arange({value.numel()}) % 7 - 3).to({value.dtype}).reshape({list(value.shape)})"
            return f"{text}.requires_grad_()" if differentiable else text
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(one, differentiable, special) for one in value)}]"
    return repr(value)
