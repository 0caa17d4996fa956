"""Stand-in CPU kernels, in plain torch, for ops that torch runs on other devices only.

They serve the verifier alone. Importing a module of this package registers its kernels in this process, if torch has
none. A case names such an op by its path here (:data:`STAND_INS`), and the module of the programs imports all modules
here, so that each process that runs a case has the kernel. A script has a copy of the module, so the modules import
nothing but torch and each other.

Results that a kernel does not document, such as the state of a generator, are constants here, and
:func:`verifier.core.ops.opaque_results` names them. Dropout is refused, because its results depend on the generator.
"""

from __future__ import annotations

from verifier.core.ops import stands_in

__all__ = ["SCALED_MM", "STAND_INS"]

_ATTENTION = "strategies.kernels.attention"

STAND_INS = {
    "aten._scaled_dot_product_flash_attention.default": f"{_ATTENTION}.flash",
    "aten._scaled_dot_product_flash_attention_backward.default": f"{_ATTENTION}.flash_backward",
    "aten._scaled_dot_product_efficient_attention.default": f"{_ATTENTION}.efficient",
    "aten._scaled_dot_product_efficient_attention_backward.default": f"{_ATTENTION}.efficient_backward",
    "aten._scaled_dot_product_cudnn_attention.default": f"{_ATTENTION}.cudnn",
    "aten._scaled_dot_product_cudnn_attention_backward.default": f"{_ATTENTION}.cudnn_backward",
    "aten._fused_rms_norm_backward.default": "strategies.kernels.rms_norm.backward",
}
"""The path of each overload without a CPU kernel of torch's; the object at the path is the overload itself."""

SCALED_MM = "strategies.kernels.scaled_mm.product"
"""The path of ``_scaled_mm``, for calls with scales that torch's CPU kernel refuses."""

for _op, _path in (*STAND_INS.items(), ("aten._scaled_mm.default", SCALED_MM)):
    stands_in(_op, _path)
