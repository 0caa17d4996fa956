"""Rules that only a test session has registered: they are in the ranks as well, or ``verify`` says why they cannot be.

Each rule here is wrong on purpose, so that a ``verify`` that passes has not seen it.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_commands import run_module
from sessions import newest, run_session
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from verifier.calls.result import WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.modules.verify import verify_module
from verifier.testing import ProcessTestCase
from verifier.torch_internals.registries import registries_of_rules, replaced_strategy

ROOT = Path(__file__).resolve().parents[2]
MESH = MeshSpec((2,), "simulated")
SIMULATED = "--verifier-mesh=simulated:2"
X = torch.tensor([[1.0, -2.0], [3.0, -4.0], [5.0, 6.0], [-7.0, 8.0]], dtype=torch.float64)
RELU, NEG = torch.ops.aten.relu.default, torch.ops.aten.neg.default

BY_SHARDING = """
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.aten.relu.default)
    def relu_of_parts(x):
        return [([one], [one]) for one in (Replicate(), Shard(0), Partial())]
"""
BY_MESH_DIM = """
    import torch
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

    def exp_of_parts(op, args, kwargs):
        assert not kwargs
        return [[Partial(), Partial()]]

    register_single_dim_strategy(torch.ops.aten.exp.default)(exp_of_parts)
"""
BY_STRATEGY = """
    import torch
    from torch.distributed.tensor._ops.utils import register_op_strategy

    @torch.library.custom_op("brought_along::squared", mutates_args=())
    def squared(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @squared.register_fake
    def _(x):
        return torch.empty_like(x)

    @register_op_strategy(torch.ops.brought_along.squared.default)
    def as_it_comes(schema):
        return schema.args_schema[0]
"""
BY_PROP_RULE = """
    import torch
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._ops.utils import register_prop_rule
    from verifier.torch_internals.registries import install_handler

    def own_sign(op, x):
        return x

    install_handler(torch.ops.aten.sign.default, own_sign)

    @torch.library.custom_op("brought_along::cubed", mutates_args=())
    def cubed(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    @cubed.register_fake
    def _(x):
        return torch.empty_like(x)

    @register_prop_rule(torch.ops.brought_along.cubed.default)
    def as_it_comes(schema):
        return OutputSharding(schema.args_schema[0])
"""
PURE = """
    from torch.distributed.tensor import Partial

    def abs_of_parts(op, args, kwargs):
        return [[Partial(), Partial()]]
"""
SESSION = """
    import pytest
    import torch
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

    import rules_by_sharding
    from conftest import squared
    from pure import abs_of_parts
    from verifier.torch_internals.registries import replaced_strategy
    from verifier.calls.result import WrongValue

    register_single_dim_strategy(torch.ops.aten.abs.default)(abs_of_parts)
    X = torch.tensor([[1.0, -2.0], [3.0, -4.0], [5.0, 6.0], [-7.0, 8.0]], dtype=torch.float64)
    aten, of_conftest = torch.ops.aten, torch.ops.brought_along

    @pytest.mark.parametrize(
        "op", [aten.relu.default, of_conftest.squared.default, of_conftest.squared, squared, aten.abs.default]
    )
    def test_wrong_rules_are_caught(verify, op):
        with pytest.raises(WrongValue) as caught:
            verify(op, X, placements=["P(sum)"])
        assert "--import tests/test_rules.py" in str(caught.value)

    def test_one_that_is_imported_once_the_ranks_have_started(verify):
        verify(aten.exp.default, X, placements=["S(0)"])
        verify(aten.sign.default, X, placements=["S(0)"])
        import rules_by_mesh_dim
        import rules_by_prop_rule
        for op in (aten.exp.default, aten.sign.default, of_conftest.cubed):
            with pytest.raises(WrongValue):
                verify(op, X, placements=["P(sum)"])

    def test_one_that_a_test_makes(verify):
        with replaced_strategy(aten.neg.default, lambda *_: [[Partial(), Shard(0)]]):
            with pytest.raises(ValueError, match=r"aten.neg.default: .*of module test_rules .*--verifier-import FILE"):
                verify(aten.neg.default, X)
        verify(aten.neg.default, X)
"""


def write(folder: Path, **sources: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))


def reproduce(said: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the last command that a session told its user to type, in ``folder``, as it is."""
    command = re.findall(r"reproduce: (python -m verifier replay .*)", said)[-1]
    return run_module(*shlex.split(command)[2:], folder=folder)


# ------------------------------------------------------------------------------------------------------------ sessions
@pytest.mark.processes
def test_every_way_to_register_is_brought_along(pytester: pytest.Pytester) -> None:
    write(pytester.path, conftest=BY_STRATEGY)
    tests = pytester.path / "tests"
    write(tests, rules_by_sharding=BY_SHARDING, rules_by_mesh_dim=BY_MESH_DIM, rules_by_prop_rule=BY_PROP_RULE)
    write(tests, pure=PURE, test_rules=SESSION)
    result = run_session(pytester, SIMULATED)
    result.assert_outcomes(passed=7)
    assert {"conftest", "tests/rules_by_sharding.py", "tests/test_rules.py"} <= set(newest(pytester).header.imports)


@pytest.mark.processes
def test_what_defines_an_op_is_brought_along_before_its_rules_where_another_op_is_verified(
    pytester: pytest.Pytester,
) -> None:
    defined, registered = BY_STRATEGY.split("@register_op_strategy")
    call = """
        import defined
        import relying
        import torch

        def test_sin(verify):
            verify(torch.ops.aten.sin.default, torch.arange(8.0).reshape(4, 2), placements=["S(0)"])
    """
    relying = "import torch\nfrom torch.distributed.tensor._ops.utils import register_op_strategy\n\n"
    relying += textwrap.dedent("    @register_op_strategy" + registered)
    write(pytester.path, defined=defined, relying=relying, test_sin=call)
    run_session(pytester, SIMULATED).assert_outcomes(passed=1)


@pytest.mark.processes
def test_the_command_that_a_session_prints_reproduces(pytester: pytest.Pytester) -> None:
    call = """
    X = torch.tensor([[1.0, -2.0], [3.0, -4.0], [5.0, 6.0], [-7.0, 8.0]], dtype=torch.float64)

    def test_exp(verify):
        verify(torch.ops.aten.exp.default, X)
"""
    write(pytester.path / "tests of mine", test_exp=BY_MESH_DIM + call)
    result = run_session(pytester, SIMULATED, "--import-mode=importlib", "--verifier-out=my nights")
    result.assert_outcomes(failed=1)
    (finding,) = newest(pytester, "my nights").findings
    assert finding.imports == ["tests of mine/test_exp.py"]
    again = reproduce(str(result.stdout), pytester.path)
    assert again.returncode == 1, again.stderr
    assert "still fails: WRONG_VALUE" in again.stdout


@pytest.mark.processes
def test_what_the_user_named_is_in_the_command_as_well(pytester: pytest.Pytester) -> None:
    write(pytester.path / "tests", rules_by_sharding=BY_SHARDING)
    write(
        pytester.path / "tests",
        test_relu="""
            import torch

            def test_relu(verify):
                verify(torch.ops.aten.relu.default, torch.tensor([[1.0, -2.0], [3.0, -4.0]]))
        """,
    )
    result = run_session(pytester, SIMULATED, "--verifier-import=rules_by_sharding", "-n1")
    result.assert_outcomes(failed=1)
    (finding,) = newest(pytester).findings
    assert finding.imports == newest(pytester).header.imports == ["tests/rules_by_sharding.py"]
    again = reproduce(str(result.stdout), pytester.path)
    assert (again.returncode, again.stderr) == (1, "")


# ------------------------------------------------------------------------------------------------------ in this process
@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    pools = PoolSet(Pool)
    yield pools
    pools.close()


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module with a wrong rule for relu; nothing that a test registers is left."""
    write(tmp_path, rules_to_take_back=BY_SHARDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    registries = registries_of_rules()
    kept = [dict(registry) for registry in registries]
    yield "rules_to_take_back"
    for registry, before in zip(registries, kept, strict=True):
        registry.clear()
        registry.update(before)
    sys.modules.pop("rules_to_take_back", None)


def test_ranks_do_not_keep_what_was_taken_back(pools: PoolSet, rules: str) -> None:
    check = Verifier(pools, MESH)
    assert check(RELU, X, cap=None).counts == {VerdictKind.PASS: 8}
    assert repr(check(RELU, X, cap=None)).endswith(": 8 of 8 combinations, 8 PASS>")
    with replaced_strategy(RELU):
        __import__(rules)
        with pytest.raises(WrongValue) as caught:
            check(RELU, X, placements=["P(sum)"])
        assert caught.value.failure.imports == check.imports == (rules,)
        pids = pools.of(MESH).pids
        check(NEG, X, placements=["S(0)"])
        assert pools.of(MESH).pids == pids  # nothing has changed since
    assert check(RELU, X, cap=None).counts == {VerdictKind.PASS: 8}
    assert pools.of(MESH).imports == ()


def test_a_rule_that_was_replaced_is_not_taken_for_the_first(pools: PoolSet, rules: str) -> None:
    check = Verifier(pools, MESH)
    with replaced_strategy(RELU):
        module = __import__(rules)
        registered = next(registry for registry in registries_of_rules() if RELU in registry)
        of_module = registered[RELU]
        registered[RELU] = functools.partial(of_module.func, functools.partial(module.relu_of_parts))
        with pytest.raises(ValueError, match=f"aten.relu.default: .* module {rules} "):
            check(RELU, X)


def test_torchs_own_functions_count_where_the_user_registers_them(pools: PoolSet, rules: str) -> None:
    check = Verifier(pools, MESH)
    by_mesh_dim = registries_of_rules()[-1]
    by_mesh_dim[NEG] = by_mesh_dim[torch.ops.aten.add.Tensor]
    with pytest.raises(ValueError, match=r"aten.neg.default: .* no module is known that registers it"):
        check(NEG, X)
    del by_mesh_dim[NEG]
    with pytest.raises(ValueError, match=r"aten.neg.default: torch's own rule was taken back here"):
        check(NEG, X)


def test_models_and_test_cases_are_refused_as_well(pools: PoolSet) -> None:
    class Case(ProcessTestCase):
        world_size = 1

        def test_nothing(self) -> None:
            pass

    Case.__qualname__ = "Case"
    with replaced_strategy(NEG, lambda *_: [[Partial(), Replicate()]]):
        with pytest.raises(ValueError, match=r"aten.neg.default: .*--verifier-import FILE"):
            verify_module(nn.Sequential(nn.Linear(2, 2)), {"0": ColwiseParallel()}, [X], pools=pools)
        with pytest.raises(ValueError, match=r"aten.neg.default: .*rank_setup"):
            Case("test_nothing").debug()


@pytest.mark.ranks
def test_ranks_that_were_to_import_more_than_this_process_are_fine(rules: str, tmp_path: Path) -> None:
    pools = PoolSet(lambda key: Pool(key, [str(tmp_path / f"{rules}.py")]))
    with pytest.raises(WrongValue):
        Verifier(pools, MESH)(RELU, X, placements=["P(sum)"])
    pools.close()


@pytest.mark.ranks
def test_a_file_that_starts_ranks_is_not_run_in_ranks_without_end(tmp_path: Path) -> None:
    file = tmp_path / "starts_ranks.py"
    file.write_text(
        "from verifier.meshes.crew import PoolKey; from verifier.meshes.pool import Pool\n"
        "Pool(PoolKey(1, 'simulated', 'cpu')).start()\n"
    )
    with (
        pytest.raises(RuntimeError, match=rf"__name__ == '__main__' \({re.escape(str(file))}:2\)"),
        Pool(PoolKey(1, "simulated", "cpu"), [str(file)]) as pool,
    ):
        pool.start()
