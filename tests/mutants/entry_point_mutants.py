"""Entry points of DTensor that are wrong in one way each; every function puts one in the place of torch's."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.tensor as factories
import torch.distributed.tensor._api as api
import torch.distributed.tensor._redistribute as redistributing
import torch.distributed.tensor.experimental._attention as context
import torch.distributed.tensor.parallel as parallel
import torch.distributed.tensor.parallel.input_reshard
import torch.distributed.tensor.parallel.loss as losses
import torch.distributed.tensor.parallel.style as styles
from torch.distributed.checkpoint import state_dict as restoring
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

resharding: Any = sys.modules["torch.distributed.tensor.parallel.input_reshard"]


def ones_that_are_two() -> None:
    """Each rank fills its shard with another number."""
    before = api._dtensor_init_helper

    def made(init: Any, size: Any, **kwargs: Any) -> DTensor:
        return (
            before(torch.full, size, fill_value=2.0, **kwargs) if init is torch.ones else before(init, size, **kwargs)
        )

    api._dtensor_init_helper = made


def identities_forgotten() -> None:
    """Nothing is written."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.eye.m_out] = lambda op, args, kwargs: kwargs["out"]


def equal_denied() -> None:
    """Every rank says that its tensors are not equal."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = lambda op, args, kwargs: False


def losses_without_weights() -> None:
    """The weights of classes are left out."""
    before = losses._nll_loss_forward
    losses._nll_loss_forward = lambda x, target, weight, local, *rest: before(x, target, None, None, *rest)


def styles_without_reduction() -> None:
    """The parts of a result are called the result."""

    def prepared(layouts: Any, local: bool, module: Any, outputs: Any, mesh: Any) -> DTensor:
        return DTensor.from_local(outputs.to_local(), mesh, layouts, run_check=False)

    styles.RowwiseParallel._prepare_output_fn = staticmethod(prepared)


def gradients_of_locals_doubled() -> None:
    """What from_local gives to the local tensors is twice their gradient."""
    before = api._FromTorchTensor.backward
    api._FromTorchTensor.backward = staticmethod(lambda ctx, gradient: before(ctx, gradient * 2))


def callers_tensors_counted_up() -> None:
    """The tensor that the caller has given is written to."""
    before = factories.distribute_tensor

    def distributed(tensor: torch.Tensor, *given: Any, **options: Any) -> DTensor:
        made = before(tensor, *given, **options)
        tensor.add_(1)
        return made

    factories.distribute_tensor = distributed


def cumulated_sums_forgotten() -> None:
    """Nothing is summed."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.cumsum.default] = lambda op, args, kwargs: args[0]


def said_placements_of_gradients_forgotten() -> None:
    """The gradient of a local tensor is laid out as the tensor, whatever the caller says."""
    before = api._ToTorchTensor.forward
    api._ToTorchTensor.forward = staticmethod(lambda ctx, given, placements: before(ctx, given, None))


def numbers_that_divide_twice() -> None:
    """A number divides once more, a tensor does not."""

    def divided(_op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        by = args[1] if isinstance(args[1], torch.Tensor) else args[1] ** 2
        return torch.mul(args[0], 1 / by, **kwargs)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.div.Tensor] = divided


def sums_written_twice() -> None:
    """What is written to the tensor given as ``out`` is twice the sum."""

    def summed(_op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return kwargs["out"].fill_(2 * float(args[0].full_tensor().sum()))

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.sum.IntList_out] = summed


def copies_that_are_negative() -> None:
    """A deep copy has the other sign, unless it begins behind its storage, where torch's own raises."""
    before = DTensor.__deepcopy__
    DTensor.__deepcopy__ = lambda self, memo: before(self, memo) if self.storage_offset() else -self


def products_forgotten_in_inference() -> None:
    """In inference mode, a product is the tensor itself."""
    product = torch.ops.aten.mul.Tensor

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        return args[0].clone() if torch.is_inference_mode_enabled() else torch.ops.aten.add.Tensor(args[0], args[0])

    DTensor._op_dispatcher._custom_op_handlers[product] = handled


def second_gradients_forgotten() -> None:
    """The first gradient that is added to another in place is lost."""
    handlers, sums = DTensor._op_dispatcher._custom_op_handlers, torch.ops.aten.add_.Tensor
    handlers[sums] = lambda op, args, kwargs: (handlers.pop(sums), args[0])[1]


def distributed_views_untransposed() -> None:
    """The strides of the given tensor are lost."""
    before = factories.distribute_tensor

    def distributed(tensor: torch.Tensor, *given: Any, **options: Any) -> DTensor:
        elements = tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
        return before(tensor if tensor.is_contiguous() else elements, *given, **options)

    factories.distribute_tensor = distributed


def transposed_conjugates_forgotten() -> None:
    """A transposition loses the bit that says that elements are conjugated."""

    def handled(op: Any, args: Any, kwargs: Any) -> DTensor:
        local = args[0]._local_tensor
        local = (local.conj() if local.is_conj() else local).t()
        turned = [Shard(1 - one.dim) if isinstance(one, Shard) else one for one in args[0].placements]
        return DTensor.from_local(local, args[0].device_mesh, turned, run_check=False)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.t.default] = handled


def numbers_one_too_small() -> None:
    """A number that is read out of a tensor of integers is one too small."""

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        return args[0].to_local().item() - 1

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = handled


def gradients_of_gradients_halved() -> None:
    """What is differentiated again gets half the gradient through a redistribution."""
    before = redistributing.Redistribute.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        return before(ctx, gradient / 2 if torch.is_grad_enabled() else gradient)

    redistributing.Redistribute.backward = staticmethod(backward)


def outputs_exchanged() -> None:
    """The last output comes first."""
    before = styles.PrepareModuleOutput._prepare_out_fn
    styles.PrepareModuleOutput._prepare_out_fn = lambda self, outputs, mesh: before(self, outputs, mesh)[::-1]


def plain_tensors_forgotten() -> None:
    """A plain tensor is not compared with."""
    maximum = torch.ops.aten.maximum.default  # no other program calls it, and this is not taken back
    DTensor._op_dispatcher._custom_op_handlers[maximum] = lambda op, args, kwargs: args[0].clone()


def third_derivatives_halved() -> None:
    """What only the second gradient of lgamma calls is half of what it should be."""
    polygamma = torch.ops.aten.polygamma.default

    def handled(op: Any, args: Any, kwargs: Any) -> DTensor:
        order, value = args
        local = op(order, value.to_local()) / 2
        return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=value.shape,
                                  stride=value.stride())  # fmt: skip

    DTensor._op_dispatcher._custom_op_handlers[polygamma] = handled


def pickles_that_are_negative() -> None:
    """What is pickled is the negative."""
    before = torch.Tensor.__reduce_ex__
    DTensor.__reduce_ex__ = lambda self, protocol: before(-self.detach(), protocol)


def numbers_that_are_negative() -> None:
    """A DTensor that is taken for a number is its negative."""
    DTensor.__float__ = lambda self: -self.item()


def saved_inputs_negated() -> None:
    """What comes back of a shard that was kept for the backward pass is the negative."""
    before = resharding._unpack_hook_tp
    resharding._unpack_hook_tp = lambda mesh, dim, kept: -before(mesh, dim, kept)


def plans_of_the_first_rank() -> None:
    """All ranks take the parameters of the first, whatever the caller says."""
    before = parallel.parallelize_module
    parallel.parallelize_module = lambda module, mesh, plan, src_data_rank=0: before(module, mesh, plan)


def checked_replicas_negated() -> None:
    """What is checked by from_local becomes its negative."""
    before = api.check_tensor_meta

    def checked(local: torch.Tensor, **options: Any) -> Any:
        found = before(local, **options)
        local.detach().neg_()
        return found

    api.check_tensor_meta = checked


def chunks_that_are_negative() -> None:
    """What a checkpoint reads of a DTensor is the negative."""
    before = DTensor.__get_tensor_shard__
    DTensor.__get_tensor_shard__ = lambda self, index: before(self, index).neg_()


def sequences_out_of_order() -> None:
    """Buffers are put together as the ranks have them."""
    before = context.context_parallel_unshard

    def unsharded(mesh: Any, buffers: Any, dims: Any, load_balancer: Any = None) -> Any:
        return [one.flip(dim) for one, dim in zip(before(mesh, buffers, dims), dims, strict=True)]

    context.context_parallel_unshard = unsharded


def outputs_written_twice() -> None:
    """What is written to the tensor given as ``out`` is twice the exponential."""

    def doubled(_op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return kwargs["out"].copy_(torch.exp(args[0]) * 2)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.exp.out] = doubled


def outputs_that_are_copies() -> None:
    """What is written to a view that is given as ``out`` goes to a copy."""

    def copied(_op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        out = kwargs["out"]
        return out.clone().copy_(torch.sqrt(args[0].redistribute(placements=out.placements)))

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.sqrt.out] = copied


def numbers_drawn_in_vain() -> None:
    """The generator gives one number more than the op takes."""

    def handled(op: Any, args: Any, kwargs: Any) -> DTensor:
        torch.rand(1, generator=kwargs["generator"])
        chosen = op(args[0].to_local(), *args[1:], **kwargs)
        return DTensor.from_local(chosen, args[0].device_mesh, args[0].placements, run_check=False)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.multinomial.default] = handled


def gelus_doubled() -> None:
    """What gelu returns is doubled."""

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        made = torch.ops.aten.clone.default(args[0])
        made._local_tensor.copy_(torch.nn.functional.gelu(args[0]._local_tensor) * 2)
        return made

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.gelu.default] = handled


def gradients_of_moved_blocks_doubled() -> None:
    """The gradient of what is gathered or cut is doubled."""
    before = redistributing.NestedRedistribute.forward

    def forward(ctx: Any, given: Any, *rest: Any) -> Any:
        made = before(ctx, given, *rest)
        return made if given.ndim < 3 else made * 2

    redistributing.NestedRedistribute.forward = staticmethod(forward)


def redistributed_blocks_turned() -> None:
    """What is gathered or cut is flipped."""
    before = redistributing.Redistribute.forward

    def forward(ctx: Any, given: Any, *rest: Any) -> Any:
        made = before(ctx, given, *rest)
        return made if given.ndim < 3 else made.flip(0)

    redistributing.Redistribute.forward = staticmethod(forward)


def blocks_not_flipped() -> None:
    """A flip leaves its tensor as it is."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.flip.default] = lambda op, args, kwargs: args[0]


def powers_doubled() -> None:
    """A power, and the one in its gradient, is doubled."""

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        made = torch.ops.aten.clone.default(args[0])
        made._local_tensor.copy_(args[0]._local_tensor.pow(args[1]) * 2)
        return made

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.pow.Tensor_Scalar] = handled


def sharded_gradients_doubled() -> None:
    """``fully_shard`` reduces twice each gradient."""
    held: Any = FSDPParam
    before = held._get_grad_inner_tensor
    held._get_grad_inner_tensor = lambda self, gradient: before(self, gradient * 2)


def momenta_forgotten() -> None:
    """The state of an optimiser is not restored."""
    restoring.set_optimizer_state_dict = lambda *given, **options: None  # type: ignore[assignment]


def deferred_gradients_halved() -> None:
    """``fully_shard`` with replicas takes half of what was left without a reduction."""
    held: Any = FSDPParamGroup
    before = held.post_backward

    def reduced(self: Any, *given: Any) -> Any:
        before(self, *given)
        for one in self.fsdp_params if self._is_hsdp and not self.reduce_grads else ():
            one._unsharded_param.grad.div_(2)

    held.post_backward = reduced


def images_copied_twice() -> None:
    """What is copied to a tensor of four dims is doubled."""
    copy = torch.ops.aten.copy_.default

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        args[0]._local_tensor.copy_(args[1]._local_tensor * (2 if args[0].ndim == 4 else 1))
        return args[0]

    DTensor._op_dispatcher._custom_op_handlers[copy] = handled
