"""What a rank says of an exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from verifier.core.observation import Raised
from verifier.execution.trial_log import TrialLog
from verifier.torch_internals import recording, watching
from verifier.torch_internals.watching import EndlessRuleError


def told(file: str, error: Exception) -> Raised:
    """Return what is said of an exception that a function in ``file`` has raised."""
    scope: dict[str, Callable[[Exception], None]] = {}
    exec(compile("def fail(error):\n    raise error\n", file, "exec"), {}, scope)  # type: ignore[arg-type]
    log = TrialLog(None)
    try:
        scope["fail"](error)
    except Exception as caught:  # noqa: BLE001 - it is what is asked about
        log.fail(caught)
    assert log.raised is not None
    return log.raised


@pytest.mark.parametrize("file", [recording.__file__, watching.__file__])
def test_what_fails_while_a_call_is_watched_is_ours(file: str) -> None:
    assert told(file, RuntimeError("no storage")).ours
    endless = told(file, EndlessRuleError("a rule does not come back"))
    assert (endless.ours, endless.endless) == (False, True)


def test_what_torch_raises_is_not_ours() -> None:
    assert not told(f"{torch.__path__[0]}/distributed/tensor/_api.py", RuntimeError("no storage")).ours
