"""Wrong plans of whole models are caught, and the submodule is named in which the first difference arises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import module_mutants
import output_mutants
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from strategies.models.layers import MLP, RMSNorm, StackedMLP
from strategies.models.losses import next_token_loss
from strategies.models.plans import sequence_parallel_mlp, tensor_parallel, tensor_parallel_mlp
from strategies.models.transformer import Transformer, TransformerSize
from verifier.calls.result import NothingVerified
from verifier.core.verdict import VerdictKind
from verifier.modules.outcomes import ModuleError, ModuleVerification
from verifier.modules.verify import sum_of_squares

Verify = Callable[..., ModuleVerification]

GENERATOR = torch.Generator().manual_seed(3)
ROWS = torch.randn(6, 10, generator=GENERATOR)
IDS, NEXT = torch.randint(0, 12, (2, 3, 8), generator=GENERATOR)
LANGUAGE = {"targets": [NEXT], "loss": next_token_loss}
BY_ROWS = {"placements": "S(0)", "outputs": "S(0)", "loss": sum_of_squares, "loss_placements": "P(sum)"}


def failure(verify_module: Verify, model: object, plan: object, inputs: list[Any], **options: object) -> ModuleError:
    with pytest.raises(ModuleError) as caught:
        verify_module(model, plan, inputs, mesh=2, **options)
    return caught.value


def first_line(error: ModuleError) -> str:
    return str(error).partition("\n")[0]


@pytest.mark.parametrize(
    ("plan", "kind", "module", "likely", "options"),
    [
        (module_mutants.row_wise_without_reduction, "WRONG_VALUE", "layers.1.down", "was the reduction left out", {}),
        (module_mutants.bias_on_every_rank, "WRONG_VALUE", "layers.0.down", "", {}),
        (module_mutants.input_not_prepared, "WRONG_SHAPE", "layers.1.up", "this rank's part of its input", BY_ROWS),
        (module_mutants.gradient_doubled_in_a_hook, "WRONG_GRADIENT", "layers.1.relu", "2 times", {"steps": 2}),
    ],
)
def test_first_submodule_is_named(
    verify_module: Verify, plan: object, kind: str, module: str, likely: str, options: Mapping[str, object]
) -> None:
    error = failure(verify_module, StackedMLP, plan, [ROWS], **options)
    assert (error.kind, error.first and error.first.module) == (kind, module)
    lines = str(error).splitlines()
    assert lines[0].startswith(f"{kind} ")
    assert lines[1].startswith(f"  in StackedMLP under {plan.__name__} on mesh 2, backend gloo, during ")  # type: ignore[attr-defined]
    assert lines[2].startswith(f"  first in the submodule {module} (")
    assert likely in lines[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_few_bits_hide_nothing(verify_module: Verify, dtype: torch.dtype) -> None:
    for plan in (module_mutants.row_wise_without_reduction, module_mutants.gradient_doubled_in_a_hook):
        error = failure(verify_module, StackedMLP, plan, [ROWS], dtype=dtype)
        assert error.first is not None
        assert error.first.module == ("layers.1.relu" if error.first.phase == "backward" else "layers.1.down")
    model = partial(Transformer, TransformerSize(layers=2))
    verify_module(model, tensor_parallel, [IDS], mesh=2, dtype=dtype, **LANGUAGE)


def test_plan_that_prepares_its_input_passes(verify_module: Verify) -> None:
    verify_module(StackedMLP, module_mutants.rows, [ROWS], mesh=2, **BY_ROWS)


def test_mesh_of_the_plan_may_have_other_names_but_not_other_dims(verify_module: Verify) -> None:
    verify_module(MLP, module_mutants.on_another_mesh, [ROWS], mesh=2)
    with pytest.raises(NothingVerified, match="output: it is on a mesh with the dims one, all, which are not among tp"):
        verify_module(MLP, module_mutants.on_a_mesh_of_more_dims, [ROWS], mesh=2)


def test_values_of_the_first_difference_are_those_of_the_rank(verify_module: Verify) -> None:
    error = failure(verify_module, StackedMLP, module_mutants.bias_on_every_rank, [ROWS])
    first = error.first
    assert first is not None
    torch.manual_seed(0)
    model = StackedMLP().double()
    expected = model.layers[0](ROWS.double())[0, 0].item()
    bias = model.layers[0].down.bias[0].item()  # type: ignore[union-attr]
    assert (first.subject, first.rank, first.index) == ("output of layers.0.down", 0, (0, 0))
    assert float(first.expected) == pytest.approx(expected, rel=1e-12)
    assert float(first.got) == pytest.approx(expected + bias, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (output_mutants.answer_moved, "WRONG_VALUE output [0, 0] on rank 0"),
        (output_mutants.answer_and_more, "WRONG_VALUE output.text on rank 0: got nothing, expected 'result'"),
    ],
)
def test_outputs_are_compared_that_the_loss_does_not_see(verify_module: Verify, plan: object, text: str) -> None:
    options = {"loss": module_mutants.loss_of_the_deviation}
    verify_module(output_mutants.AnsweringMLP, tensor_parallel_mlp, [ROWS], mesh=2, **options)
    error = failure(verify_module, output_mutants.AnsweringMLP, plan, [ROWS], **options)
    assert [found.subject for found in error.differences] == [text.split()[1]]
    assert text.partition(" [")[2] in first_line(error)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (output_mutants.report_of_another_size, "output['size'] on rank 1: got 0."),
        (output_mutants.report_of_one_row_more, "output['rows'] on rank 0: got 7, expected 6"),
        (output_mutants.report_of_something_else, "output['about'][0] on rank 0: got 'means', expected 'sums'"),
        (output_mutants.report_of_zero, "output['about'][1] on rank 0: got 0, expected None"),
        (
            output_mutants.report_with_more,
            "output['about'][2] on rank 0: got nothing, expected nothing in it",
        ),
        (output_mutants.report_as_a_tensor, "output['rows'] on rank 0: got a tensor of [], expected 6"),
        (output_mutants.report_in_a_tuple, "output['values'] on rank 0: got nothing, expected a tensor of [6, 10]"),
    ],
)
def test_what_is_no_tensor_is_compared(verify_module: Verify, plan: object, text: str) -> None:
    options = {"loss": output_mutants.loss_of_the_report}
    error = failure(verify_module, output_mutants.Reporting, plan, [ROWS], **options)
    assert first_line(error).startswith(f"WRONG_VALUE {text}")
    assert len(error.differences) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_no_tensor_may_be_another_object(verify_module: Verify, dtype: torch.dtype) -> None:
    options = {"loss": output_mutants.loss_of_the_report, "mesh": 2, "dtype": dtype}
    verify_module(output_mutants.Reporting, output_mutants.report_unchanged, [ROWS], **options)


def test_a_number_of_one_rank(verify_module: Verify) -> None:
    """A model that counts its rows counts those of the rank; that differs, and the message says why."""
    options = {**BY_ROWS, "loss": output_mutants.sum_of_the_rows}
    error = failure(verify_module, output_mutants.Reporting, sequence_parallel_mlp, [ROWS], **options)
    assert [found.subject for found in error.differences] == ["output['size']", "output['rows']"]
    assert "is it made of this rank's part only?" in str(error)


def test_several_outputs_have_a_placement_each(verify_module: Verify) -> None:
    options = {**BY_ROWS, "loss": output_mutants.sum_of_the_rows}
    model, plan = output_mutants.RowsAndTotal, sequence_parallel_mlp
    verify_module(model, plan, [ROWS], mesh=2, **options | {"outputs": ["S(0)", "R"]})
    error = failure(verify_module, model, plan, [ROWS], **options | {"outputs": ["R", "R"]})
    assert (error.kind, error.first and error.first.subject) == (VerdictKind.WRONG_SHAPE, "output 0")
    with pytest.raises(
        ValueError, match=r"^outputs 'S\(0\)' of output 1: it is a tensor of 0 dims; give outputs that fit"
    ):
        verify_module(model, plan, [ROWS], mesh=2, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
def test_complex_buffers_and_inputs_stay_complex(verify_module: Verify, dtype: torch.dtype | None) -> None:
    turns = torch.polar(torch.ones(5), torch.arange(5.0))
    for inputs in ([ROWS], [ROWS, turns]):
        verify_module(output_mutants.Rotated, tensor_parallel_mlp, inputs, mesh=2, dtype=dtype)
    error = failure(verify_module, output_mutants.Rotated, output_mutants.not_turned, [ROWS], dtype=dtype)
    assert "output" in {found.subject for found in error.differences}


def test_terms_that_cancel_are_rounded(verify_module: Verify) -> None:
    model, plan = output_mutants.NormAtTheEnd, output_mutants.mlp_parallel
    verify_module(model, plan, [ROWS], mesh=2, loss=output_mutants.sum_of_all)
    verify_module(model, plan, [ROWS, torch.randn(6, 1, generator=GENERATOR).requires_grad_()], mesh=2)
    error = failure(verify_module, model, plan, [ROWS], loss=output_mutants.sum_and_a_little)
    assert [found.subject for found in error.differences] == ["loss"]


def test_gradients_of_inputs_by_name(verify_module: Verify) -> None:
    gate = torch.randn(6, 10, generator=GENERATOR).requires_grad_()
    plan = output_mutants.gradient_of_the_gate_doubled
    error = failure(verify_module, output_mutants.Gated, plan, [ROWS], kwargs={"gate": gate})
    assert [found.subject for found in error.differences] == ["gradient of input gate"]


def test_warnings_of_a_plan_are_passed_on(verify_module: Verify) -> None:
    for _ in range(2):  # also where a rank has given the warning before
        result = verify_module(MLP, module_mutants.one_name_is_wrong, [ROWS], mesh=2)
        first, second = result.warnings
        assert first.startswith("UserWarning: Parallelize plan key 'dwn' could not be resolved")
        assert second == "rank 1: RuntimeWarning: only here"
        assert "\n  warned by the plan: UserWarning: Parallelize plan key 'dwn'" in result.describe()
    unknown = "  warned by the plan: UserWarning: Parallelize plan key '{}' could not be resolved"
    error = failure(verify_module, MLP, module_mutants.one_name_is_wrong_and_the_output_moved, [ROWS])
    assert error.kind is VerdictKind.WRONG_VALUE
    assert unknown.format("dwn") in str(error)
    error = failure(verify_module, MLP, module_mutants.the_name_that_counts_is_wrong, [ROWS])
    assert error.kind is VerdictKind.CRASH
    assert unknown.format("dwn") in str(error)
    with pytest.raises(NothingVerified, match="nothing is sharded") as caught:
        verify_module(MLP, module_mutants.every_name_is_wrong, [ROWS], mesh=2)
    assert unknown.format("upp") in str(caught.value)


def test_untied_weights_are_named(verify_module: Verify) -> None:
    model = partial(Transformer, TransformerSize(layers=1))
    error = failure(verify_module, model, module_mutants.weights_untied, [IDS], **LANGUAGE)
    assert error.kind is VerdictKind.WRONG_GRADIENT
    assert error.first is not None
    assert error.first.subject in ("gradient of output.weight", "gradient of tokens.weight")
    assert "tokens.weight and output.weight are one parameter in the local model" in str(error)


def test_half_of_the_positions(verify_module: Verify) -> None:
    """Two ranks cannot add half of the positions to their own; the message says in which submodule that ends."""
    model = partial(Transformer, TransformerSize(layers=1))
    error = failure(verify_module, model, module_mutants.half_the_positions, [IDS], **LANGUAGE)
    assert error.kind is VerdictKind.CRASH
    assert "\n  raised in the submodule layers.0\n" in str(error)


@pytest.mark.parametrize(
    ("plan", "options", "note"),
    [
        (
            module_mutants.raises_in_the_backward_of_relu,
            {},
            "likely in that of the submodule layers.1.relu: its output",
        ),
        (
            module_mutants.raises_in_the_backward_of_down,
            {},
            "likely in that of the submodule layers.1.down: its output",
        ),
        (
            tensor_parallel_mlp,
            {"loss": module_mutants.loss_that_raises_in_backward},
            "before the output of any submodule had its gradient",
        ),
    ],
)
def test_exceptions_in_backward_are_placed(
    verify_module: Verify, plan: object, options: Mapping[str, object], note: str
) -> None:
    error = failure(verify_module, StackedMLP, plan, [ROWS], **options)
    assert first_line(error) == "CRASH rank 0 raised ZeroDivisionError: on the way back"
    assert f"\n  raised in the backward pass, {note}" in str(error)


@pytest.mark.parametrize(
    ("plan", "options", "kind", "subject"),
    [
        (module_mutants.gradient_of_the_input_doubled, {}, "WRONG_GRADIENT", "gradient of input 0"),
        (module_mutants.one_parameter_frozen, {}, "WRONG_GRADIENT", "gradient of up.bias"),
        (module_mutants.weight_moved_after_its_gradient, {}, "WRONG_VALUE", "down.bias"),
        (module_mutants.with_another_buffer, {}, "WRONG_VALUE", "parameters and buffers"),
        (module_mutants.ranks_hold_different_kinds, {}, "RANKS_DISAGREE", "output of the model"),
        (tensor_parallel_mlp, {"loss": output_mutants.loss_beside_the_output}, "WRONG_VALUE", "loss"),
    ],
)
def test_only_one_check_sees_it(
    verify_module: Verify, plan: object, options: Mapping[str, object], kind: str, subject: str
) -> None:
    error = failure(verify_module, MLP, plan, [ROWS.clone().requires_grad_()], **options)
    assert (error.kind, error.first and error.first.subject) == (kind, subject)
    own = {found.subject for found in error.differences} - {subject, "output", "loss"}
    # what the optimiser makes of a wrong gradient is wrong as well
    assert own <= {subject.removeprefix("gradient of ")}


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [(module_mutants.decay_skipped_on_one_rank, 1), (module_mutants.other_beta_on_one_rank, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wrong_steps_of_adam(verify_module: Verify, optimizer: object, steps: int, dtype: torch.dtype) -> None:
    """Elements whose gradient is next to 0 may be off by a step of Adam; the others show what is wrong."""
    model = partial(Transformer, TransformerSize(vocabulary=40, layers=1, tied=False))
    options = {**LANGUAGE, "optimizer": optimizer, "steps": steps, "dtype": dtype}
    error = failure(verify_module, model, tensor_parallel, [IDS], **options)
    assert {found.phase for found in error.differences} == {"step"}


def test_rows_without_a_gradient_do_not_move(verify_module: Verify) -> None:
    """What is 0 on all ranks is not off by rounding, so that no step is made of it."""
    options = {"optimizer": module_mutants.unused_rows_move, "dtype": torch.float32}
    plan, ids = RowwiseParallel(input_layouts=Replicate()), torch.tensor([0, 2, 2, 7, 1])
    error = failure(verify_module, partial(nn.Embedding, 12, 4), plan, [ids], **options)
    assert [found.subject for found in error.differences] == ["weight"]


def test_parameters_of_integers_have_no_rounding(verify_module: Verify) -> None:
    verify_module(module_mutants.Quantized, tensor_parallel_mlp, [ROWS], mesh=2)
    plan = module_mutants.weight_moved_after_its_gradient
    error = failure(verify_module, module_mutants.Quantized, plan, [ROWS])
    assert [found.subject for found in error.differences] == ["down.bias"]


def test_shared_buffers_may_be_one_each(verify_module: Verify) -> None:
    verify_module(module_mutants.SharedMask, module_mutants.with_masks_of_their_own, [ROWS], mesh=2)


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_large_buffers_hide_nothing(verify_module: Verify, masked: float) -> None:
    model = partial(module_mutants.MaskedMLP, masked)
    error = failure(verify_module, model, module_mutants.weight_moved_after_its_gradient, [ROWS])
    assert [found.subject for found in error.differences] == ["down.bias"]


def test_masked_outputs_hide_nothing(verify_module: Verify) -> None:
    options = {"loss": output_mutants.last_class}
    verify_module(output_mutants.MaskedScores, tensor_parallel_mlp, [ROWS], mesh=2, **options)
    error = failure(verify_module, output_mutants.MaskedScores, output_mutants.all_scores_moved, [ROWS], **options)
    assert [found.subject for found in error.differences] == ["output"]


def test_gradient_of_a_replica_that_is_not_reduced(verify_module: Verify) -> None:
    """A weight that every rank has, applied to the positions of each rank."""
    options = {"placements": "S(1)", "outputs": "S(1)", "loss": sum_of_squares, "loss_placements": "P(sum)"}
    values = torch.randn(2, 4, 10, generator=GENERATOR)
    error = failure(verify_module, partial(RMSNorm, 10), module_mutants.gradient_not_reduced, [values], **options)
    assert error.kind is VerdictKind.WRONG_GRADIENT
    assert [found.subject for found in error.differences] == ["gradient of weight", "weight"]


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        (module_mutants.one_rank_raises, VerdictKind.CRASH, "CRASH rank 1 raised ZeroDivisionError: only here"),
        (module_mutants.one_rank_waits, VerdictKind.HANG, "HANG after 3 s: rank"),
        (module_mutants.one_rank_dies, VerdictKind.DIED, "DIED rank 1 ended with exit status 3 in forward"),
    ],
)
def test_ranks_that_do_not_come_to_an_end(verify_module: Verify, plan: object, kind: VerdictKind, text: str) -> None:
    error = failure(verify_module, MLP, plan, [ROWS], limit=3.0 if kind is VerdictKind.HANG else 60.0)
    assert error.kind is kind
    assert first_line(error).startswith(text)
    assert "in MLP under " in str(error)
    assert ("raised in the submodule relu" in str(error)) is (kind is VerdictKind.CRASH)
    verify_module(MLP, tensor_parallel_mlp, [ROWS], mesh=2)  # the ranks can be used again
