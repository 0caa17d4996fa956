"""Styles, rules of users and what is given to meshes and files, wrong in one way each; every function puts one in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dicts
import torch.distributed.tensor.experimental as experimental
import torch.distributed.tensor.parallel.style as styles
from torch.distributed.tensor import DTensor, Partial


def inputs_negated() -> None:
    """A style for inputs gives the negative."""
    before = styles.PrepareModuleInput._prepare_input_arg
    styles.PrepareModuleInput._prepare_input_arg = lambda self, given, *rest: -before(self, given, *rest)


def inputs_by_keyword_forgotten() -> None:
    """A style for inputs that are given by keyword gives their double."""
    before = styles.PrepareModuleInput._prepare_input_kwarg_fn

    def prepared(self: Any, inputs: Any, named: Any, mesh: Any) -> Any:
        return before(self, inputs, {name: value * 2 for name, value in named.items()}, mesh)

    styles.PrepareModuleInput._prepare_input_kwarg_fn = prepared


def buffers_of_modules_doubled() -> None:
    """A module that is distributed has twice its buffers."""
    before = torch.distributed.tensor.distribute_module

    def distributed(module: Any, *given: Any, **options: Any) -> Any:
        for buffer in before(module, *given, **options).buffers():
            buffer.mul_(2)
        return module

    torch.distributed.tensor.distribute_module = distributed


def products_mapped_twice() -> None:
    """A function of local tensors has twice its result."""
    before = experimental.local_map
    experimental.local_map = lambda function, **options: before(lambda *given: 2 * function(*given), **options)


def sums_registered_as_averages() -> None:
    """A rule of the user's has averages where it says sums."""
    before = experimental.register_sharding

    def registering(op: Any) -> Any:
        def registered(rule: Any) -> Any:
            def asked(*given: Any) -> Any:
                return [
                    ([Partial("avg") if one.is_partial() else one for one in made], wanted)
                    for made, wanted in rule(*given)
                ]

            return before(op)(asked)

        return registered

    experimental.register_sharding = registering


def exponentials_forgotten() -> None:
    """The exponential is the tensor itself."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.exp.default] = lambda op, args, kwargs: args[0].clone()


def wholes_negated() -> None:
    """The whole tensor is the negative."""
    before = DTensor.full_tensor
    DTensor.full_tensor = lambda self, **options: -before(self, **options)


def state_dicts_negated() -> None:
    """What a state dict gives to a DTensor is the negative."""
    before = state_dicts._distribute_tensors

    def distributed(found: Any, keys: Any, *rest: Any) -> None:
        before(found, keys, *rest)
        for key in keys:
            found[key].to_local().neg_()

    state_dicts._distribute_tensors = distributed


def cosines_forgotten() -> None:
    """The cosine, which is the derivative of the sine, is the tensor itself."""
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.cos.default] = lambda op, args, kwargs: args[0].clone()
