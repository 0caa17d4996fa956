"""What tests of strategies undo after themselves."""

from __future__ import annotations

import pytest

from verifier.planning import own_samples


@pytest.fixture
def samples_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the samples that a test declares, so that tests may run in any order."""
    declared = {name: [*makers] for name, makers in own_samples._makers.items()}
    monkeypatch.setattr(own_samples, "_makers", declared)
