"""What ``--import`` runs: what it raises is said, and a run is not resumed with other code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import Placement

from verifier.campaign import request as recording
from verifier.cli import main as entry
from verifier.core.interrupts import Interrupts
from verifier.execution.imports import (
    ImportFailedError,
    command_names,
    exchanged_alone,
    follow,
    imports_beside,
    own_rules,
    places_of_rules,
    registered_by,
    rules_of_the_user,
    run_file,
    run_imports,
)
from verifier.execution.registrations import Lacking, Registered, Source
from verifier.gate.baseline import Baseline
from verifier.meshes.processes import PoolError, RulesNotInRanks
from verifier.planning.families import Family, installed_families
from verifier.rules.campaign.workers import WorkerError
from verifier.runs.revision import import_digests
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import keys_of_rules, registries_of_rules, replaced_strategy


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "my_rules"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").write_text("from my_rules.kernels import rows\ndef install(): rows.done = True\n")
    (folder / "kernels" / "__init__.py").touch()
    (folder / "kernels" / "rows.py").write_text("done = False\n")
    (tmp_path / "my_module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_rules", "my_module")]:
        del sys.modules[name]


def test_a_file_that_was_edited_meanwhile_is_why_ranks_lack_its_rules(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.touch()
    run_file(file)
    found = Lacking("aten.exp.default", Registered("rule", (Source("edited", str(file), 1, "rule"),)))
    assert "a rank that imports edited does not register it" in str(RulesNotInRanks(found, [], "", 0))
    os.utime(file, ns=(0, 0))
    said = str(RulesNotInRanks(found, [], "", 0))
    assert said == f"aten.exp.default: {file} has changed since this process ran it; run the command again"


def test_the_code_of_a_whole_package_counts(package: Path) -> None:
    names = ["my_rules.install", "my_rules.kernels.rows"]
    run_imports(names)
    before = import_digests(names)
    assert len({*before.values()}) == 1
    (package / "kernels" / "rows.py").write_text("done = None\n")
    after = import_digests(names)
    assert all(after[name] != before[name] for name in names)


def test_of_a_module_or_a_file_its_own_code_counts(package: Path) -> None:
    file = package.parent / "my_module.py"
    names = ["my_module", str(file), "sys"]
    run_imports(names)
    before = import_digests(names)
    assert before["my_module"] == before[str(file)]
    assert before["sys"] == ""
    (package / "kernels" / "rows.py").write_text("done = None\n")
    assert import_digests(names) == before
    file.write_text("x = 2\n")
    assert import_digests(["my_module"])["my_module"] != before["my_module"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('needs torch 3')", "SystemExit: needs torch 3"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("sys.exit(None)", "SystemExit"),
        ("raise OSError('gone')", "OSError: gone"),
    ],
)
def test_a_file_that_quits_does_not_end_the_run_as_if_all_were_well(
    end: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quits.py"
    file.write_text(f"import sys\n{end}\n")
    out = tmp_path / "none"
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "embedding", "--import", str(file), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: --import {file}: {said} ({file}:2)\n"
    assert not out.exists()
    with pytest.raises(ImportFailedError, match=said):  # in a rank, which reports exceptions and no exits
        run_imports([str(file)])


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (1, 1), (2, 2), ("no torch", 2)])
def test_only_an_exit_without_a_word_is_status_0(
    code: int | str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry._status_of(lambda: sys.exit(code), Interrupts()) == status
    assert capsys.readouterr().err == ("no torch\n" if isinstance(code, str) else "")


@pytest.mark.parametrize("kind", [PoolError, WorkerError])
def test_a_file_that_fails_in_other_processes_alone_is_one_line(
    kind: type[RuntimeError], capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise kind("a rank did not start: --import quits.py: SystemExit: 0")

    assert entry._status_of(failing, Interrupts()) == 2
    assert capsys.readouterr().err == "error: a rank did not start: --import quits.py: SystemExit: 0\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:\n    pass\n", r"SyntaxError: invalid syntax \({}/user_file.py:1\)"),
        ("import user_helper\n\nuser_helper.get(3)\n", r"KeyError: 3 \({}/user_helper.py:2\)"),
        ("import torch\n\ntorch.mm(1, 2)\n", r"TypeError: .* \({}/user_file.py:3\)"),
        ("import pytest\npytest.skip('no GPU', allow_module_level=True)\n", r"Skipped: no GPU \({}/user_file.py:2\)"),
        ("import no_such_module_here\n", r"ModuleNotFoundError: .* \({}/user_file.py:1\)"),
    ],
)
def test_the_line_of_the_users_that_raised_is_said(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "user_helper.py").write_text("def get(key):\n    return {}[key]\n")
    file = tmp_path / "user_file.py"
    file.write_text(source)
    with pytest.raises(ImportFailedError) as raised:
        run_imports([str(file)])
    folder = re.escape(str(tmp_path))
    assert re.fullmatch(f"--import {folder}/user_file.py: {said.format(folder)}", str(raised.value), re.DOTALL)
    sys.path.remove(str(tmp_path))
    sys.modules.pop("user_helper", None)


def test_a_file_of_a_package_that_imports_its_neighbours_is_named_as_a_module(package: Path) -> None:
    file = package / "kernels" / "sums.py"
    file.write_text("from .rows import done\n")
    with pytest.raises(ImportFailedError, match=r"; name it as a module: --import my_rules\.kernels\.sums \("):
        run_imports([str(file)])
    sys.path.remove(str(file.parent))


def test_a_name_that_nothing_has_is_said_without_a_line_of_ours() -> None:
    with pytest.raises(ImportFailedError) as raised:
        run_imports(["no_such_module_here"])
    assert str(raised.value).endswith("No module named 'no_such_module_here'")


RULES = """
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.experimental import register_sharding

@register_sharding(torch.ops.aten.relu.default)
def of_parts(x):
    return [([Partial()], [Partial()])]
"""
RELU = torch.ops.aten.relu.default


def test_a_notice_of_ours_names_no_line_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "noticed.py"
    file.write_text(f"import warnings\nwarnings.warn('of the user')\n{RULES}")
    arguments = ["run", "no-such-op", "--import", str(file), "--out", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["verifier", *arguments])
    with replaced_strategy(RELU), pytest.warns(UserWarning, match="of the user") as shown_as_ever:
        run_beside_a_rule_of_torch(RELU)
    notice, refusal = capsys.readouterr().err.splitlines()
    assert notice.startswith("warning: aten.relu.default: DTensor keeps its own rule")
    assert refusal.startswith("error: no family and no op matches 'no-such-op'")
    assert [Path(warning.filename) for warning in shown_as_ever] == [file]


def run_beside_a_rule_of_torch(op: OpOverload) -> None:
    """Run the command line where ``op`` has a rule that DTensor would ask before any strategy."""
    registries_of_rules()[-1][op] = registries_of_rules()[-1][torch.ops.aten.neg.default]
    with pytest.raises(SystemExit):
        entry.main()


def test_what_families_register_when_they_are_loaded_is_imported_by_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules_of_a_family.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded() -> dict[str, Family]:
        __import__("rules_of_a_family")
        return installed_families()

    monkeypatch.setattr(recording, "installed_families", loaded)
    with replaced_strategy(RELU):
        plan = recording.make_plan(recording.Request(patterns=["embedding"], meshes=["2"]), Baseline())
        rules = rules_of_the_user()
    assert plan.imports == ("rules_of_a_family",)
    assert plan.header.imports == ["rules_of_a_family"]
    assert [(op, modules) for op, (_, modules) in rules.items()] == [(str(RELU), ["rules_of_a_family"])]
    # a worker of the rule check imports it, or ends
    del sys.modules["rules_of_a_family"]
    with replaced_strategy(RELU):
        follow(rules)
        assert rules_of_the_user() == rules
    with replaced_strategy(RELU), pytest.raises(ImportFailedError, match=r"aten.relu.default: .*rules_of_a_family"):
        follow(rules)  # which does not run it again
    del sys.modules["rules_of_a_family"]


def test_nothing_is_imported_beside_what_was_asked_for() -> None:
    with imports_beside(["my_rules.install"]) as imports:
        installed_families()
    assert imports == ["my_rules.install"]


def test_modules_are_named_as_a_command_finds_them(package: Path) -> None:
    run_imports(["my_module", "my_rules.kernels.rows"])
    folder = package.parent
    names = ["my_module", "my_rules.kernels.rows", "my_rules.install", "x.py", str(folder / "my_module.py")]
    assert command_names(names, [], folder) == [*names[:4], "my_module.py"]
    found = command_names(names[:2], [], folder / "elsewhere")
    assert found == [str(folder / "my_module.py"), str(package / "kernels" / "rows.py")]
    assert command_names(names[:2], [], folder.parent)[0] == f"{folder.name}/my_module.py"


WAYS = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._ops._matrix_ops import mm_single_dim_strategy
from torch.distributed.tensor._ops._tensor_ops import stack_strategy
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._op_schema import OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import register_op_strategy, register_prop_rule
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten
register_single_dim_strategy(aten.sub.Tensor)(mm_single_dim_strategy)  # functions of torch's own, of another op
register_op_strategy(aten.bmm.default)(stack_strategy)


@register_sharding([aten.neg.default, torch.ops.prims.neg.default])
def neg(x):
    return [([Replicate()], [Replicate()])]


@register_prop_rule(aten.view.default)
def view(schema):
    return OutputSharding(schema.args_schema[0])


@register_single_dim_strategy(aten.topk.default, schema_info=RuntimeSchemaInfo(1))
def topk(op, args, kwargs):
    return []
"""


def test_an_import_has_registered_what_it_registers_in_whatever_way(tmp_path: Path) -> None:
    aten = torch.ops.aten
    ops = [aten.bmm.default, aten.neg.default, aten.sub.Tensor, aten.topk.default, aten.view.default]
    ops.append(torch.ops.prims.neg.default)
    strategies, keys = dict(registries_of_rules()[2]), keys_of_rules()[0]
    (tmp_path / "ways.py").write_text(WAYS)
    (tmp_path / "nothing.py").touch()
    names = [str(tmp_path / "nothing.py"), str(tmp_path / "ways.py")]
    with contextlib.ExitStack() as stack:
        for op in ops:
            stack.enter_context(replaced_strategy(op))
        registries_of_rules()[2][aten.view.default] = strategies[aten.view.default]
        keys.setdefault(aten.topk.default, RuntimeSchemaInfo(1))  # as of a strategy for whole meshes, until 2.14
        helped = run_imports(names)
        assert registered_by(names) == tuple(map(str, ops))
        assert registered_by(names[:1]) == ()
        assert "aten.view.default" in helped
        assert aten.view.default not in registries_of_rules()[2], "DTensor would ask it before the prop rule"
        assert aten.topk.default not in keys, "DTensor would ask it before the key of the strategy for one mesh dim"
        assert {*map(str, ops)} <= {*own_rules()}
        places = places_of_rules()
        assert places["aten.neg.default"][1] == 1 + WAYS.splitlines().index(
            "@register_sharding([aten.neg.default, torch.ops.prims.neg.default])"
        )
        assert "aten.bmm.default" not in places
    assert registered_by(names) == (), "the rules are no longer there"


def test_a_prop_rule_is_asked_before_the_op_is_decomposed(tmp_path: Path) -> None:
    op, tensor = torch.ops.aten.t.default, torch.ones(3, 4)
    (tmp_path / "prop_rule.py").write_text(
        """
import torch
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._ops.utils import register_prop_rule


@register_prop_rule(torch.ops.aten.t.default)
def t(schema):
    return OutputSharding(schema.args_schema[0])
"""
    )
    shards: tuple[Placement, ...] = (Shard(0),)
    with replaced_strategy(op):
        asked = ClaimReader(op, (tensor,), {}, tensor.t())
        before = asked.at((shards,), (2,))
        assert run_imports([str(tmp_path / "prop_rule.py")]) == ["aten.t.default"]
        after = asked.at((shards,), (2,))
    assert before is not None
    assert before.outputs == ((Shard(1),),), "it is decomposed into a transposition"
    assert after is not None
    assert after.outputs == (shards,)


@pytest.mark.usefixtures("rules_taken_back")
def test_what_torch_has_anyway_counts_as_registered_and_is_told_from_rules_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        """
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops.utils import register_op_strategy

propagator = DTensor._op_dispatcher.sharding_propagator
aten = torch.ops.aten
strategy = propagator.op_single_dim_strategy_funcs[aten.neg.default]
propagator.register_single_dim_op_strategy(aten.neg.default, strategy)
register_op_strategy(aten.view.default)(propagator.op_strategy_funcs[aten.view.default])
register_op_strategy(aten.permute.default)(propagator.op_strategy_funcs[aten.stack.default])
"""
    )
    names = [str(tmp_path / "again.py")]
    run_imports(names)
    assert registered_by(names) == ("aten.neg.default", "aten.permute.default", "aten.view.default")
    assert {"aten.neg.default", "aten.view.default"} <= exchanged_alone()
    assert "aten.permute.default" not in exchanged_alone()
