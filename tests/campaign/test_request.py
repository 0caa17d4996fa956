"""What a plan takes from a request that leaves something open."""

from __future__ import annotations

from pathlib import Path

from verifier.campaign.request import Request, make_plan
from verifier.gate.baseline import Baseline


def test_what_imports_register_is_tried_on_two_meshes_and_entries_of_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "rules_of_a_plan.py"
    file.write_text("import torch\n")
    alone, named = (make_plan(Request(names, imports=[str(file)]), Baseline()) for names in ((), ("embedding",)))
    assert (alone.header.profile, [*map(str, alone.meshes)], alone.meshes_named) == ("own", ["2", "2x2"], True)
    assert (named.header.profile, named.meshes_named) == ("dev", False)
