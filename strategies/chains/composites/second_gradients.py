"""Gradients of gradients, whose formulas call functions that no forward pass and no first gradient calls."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.chains import second_gradients
from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_TWICE = f"{second_gradients.__name__}.twice"
_POINTWISE = (
    *("exp", "sin", "tanh", "sigmoid", "rsqrt", "log", "log1p", "lgamma", "sinc", "erf", "erfinv", "acos", "square"),
    *("special.i0", "special.i0e", "special.i1", "special.i1e", "special.erfcx", "special.ndtri", "special.log_ndtr"),
    *(f"nn.functional.{name}" for name in ("gelu", "silu", "mish", "softplus", "elu", "selu", "celu", "logsigmoid")),
    *(f"nn.functional.{name}" for name in ("hardswish", "softsign", "leaky_relu", "tanhshrink", "relu", "glu")),
)
_OF_TWO = (
    *("mul", "div", "pow", "atan2", "hypot", "maximum", "xlogy", "logaddexp", "cdist", "special.xlog1py"),
    "nn.functional.cosine_similarity",
)
_LOSSES = (
    *("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("kl_div", "soft_margin_loss", "poisson_nll_loss"),
)
_ALONG_A_DIM = (
    *("sum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "softmax", "log_softmax", "logcumsumexp", "var", "std"),
    *("amax", "sort", "cummax", "flip", "unsqueeze", "masked.logsumexp", "masked.softmax"),
)


@composite
def _second_gradients(b: Building) -> None:
    """Second gradients of functions of each element."""
    b.positive(*(2 * size for size in b.size()))
    path = b.pick(_POINTWISE)
    b.program(_TWICE, f"torch.{path}", [], {})
    _differentiated(b)


@composite
def _second_gradients_of_two(b: Building) -> None:
    """Second gradients of functions of two tensors."""
    b.positive(*b.size())
    b.positive(*b.size())
    b.program(_TWICE, f"torch.{b.pick(_OF_TWO)}", [], {})
    _differentiated(b)


@composite
def _second_gradients_of_losses(b: Building) -> None:
    """Second gradients of losses with each reduction."""
    b.positive(*b.size())
    b.positive(*b.size())
    name = b.pick(_LOSSES)
    reduction = b.pick(("none", "batchmean" if name == "kl_div" else "mean", "sum"))
    b.program(_TWICE, f"torch.nn.functional.{name}", [], {"reduction": reduction})
    _differentiated(b)


@composite
def _second_gradients_along_a_dim(b: Building) -> None:
    """Second gradients of reductions, scans and transforms along a dim that is counted from either end."""
    path, dim = b.pick(_ALONG_A_DIM), b.pick((0, 1, -1, -2))
    b.positive(*b.size())
    b.program(_TWICE, f"torch.{path}", [[dim]] if path == "flip" else [dim], {})
    _differentiated(b)


@composite
def _second_gradients_of_norms(b: Building) -> None:
    """Second gradients of norms, and of transforms whose dim is no positional argument."""
    dim = b.pick((0, 1, -1, -2))
    b.positive(*b.size())
    path, *given = b.way(
        ("norm",), ("norm", 3.0), ("linalg.vector_norm", 1.0), ("linalg.vector_norm", 3.0),
        ("nn.functional.normalize", 2.0), ("nn.functional.normalize", 1.0), ("fft.fft",), ("fft.ifft",), ("fft.rfft",),
        ("fft.ihfft",), ("trapezoid",), ("diff",),
    )  # fmt: skip
    everywhere = path.endswith("norm") and b.chance(0.5)
    b.program(_TWICE, f"torch.{path}", given, {} if everywhere else {"dim": dim})
    _differentiated(b)


@composite
def _second_gradients_of_layers(b: Building) -> None:
    """Second gradients of layers, products and lookups."""
    rows, columns = b.size()
    images = {"stride": b.pick((1, 2)), "padding": b.pick((0, 1))}
    path, shapes, given, options = b.way(
        ("nn.functional.linear", [(rows, columns), (3, columns), (3,)], [], {}),
        ("matmul", [(rows, columns), (columns, 3)], [], {}),
        ("bmm", [(rows, columns, 2), (rows, 2, 3)], [], {}),
        ("addmm", [(3,), (rows, columns), (columns, 3)], [], {}),
        ("nn.functional.layer_norm", [(rows, columns)], [[columns]], {}),
        ("nn.functional.rms_norm", [(rows, columns)], [[columns]], {}),
        ("nn.functional.group_norm", [(rows, 2 * columns, 2)], [2], {}),
        ("nn.functional.batch_norm", [(rows + 1, columns)], [None, None], {"training": True}),
        ("nn.functional.conv1d", [(rows, columns, 5), (3, columns, 2)], [], images),
        ("nn.functional.conv2d", [(rows, columns, 4, 5), (3, columns, 2, 2)], [], images),
        ("nn.functional.scaled_dot_product_attention", [(rows, 2, columns, 4)] * 3, [], {"is_causal": True}),
        ("nn.functional.interpolate", [(rows, columns, 3)], [], {"scale_factor": 2.0, "mode": "linear"}),
        ("nn.functional.avg_pool1d", [(rows, columns, 4)], [2], {}),
        ("nn.functional.embedding", [(columns, 3)], [], {}),
        ("take_along_dim", [(rows, columns)], [], {"dim": 0}),
    )
    if path == "nn.functional.embedding":
        b.ids(rows, below=columns)
    for shape in shapes:
        b.positive(*shape)
    if path == "take_along_dim":
        b.ids(rows, columns, below=rows)
    b.program(_TWICE, f"torch.{path}", given, options)
    _differentiated(b)


@composite
def _second_gradients_in_parallel(b: Building) -> None:
    """Second gradients of losses whose classes are sharded, with weights and ignored targets."""
    more = b.pick(((), (), (2,)))
    b.positive(*b.size(), *more)
    y = b.ids(b.rows, *more, below=b.columns)
    options: dict[str, object] = {"reduction": b.pick(("mean", "sum", "none"))}
    if b.chance(0.3):
        b.positive(b.columns)
    if b.chance(0.3):
        options["ignore_index"] = 0
        b.tensors[y].flatten()[::2] = 0
    others: list[Placement] = [b.pick((Replicate(), Shard(0))) for _ in range(b.mesh.ndim - 1)]
    where = b.pick(range(b.mesh.ndim))
    b.program(f"{second_gradients.__name__}.parallel", [*others[:where], Shard(1), *others[where:]], options)
    _differentiated(b)


def _differentiated(b: Building) -> None:
    """Let no argument want a gradient: the program takes all gradients."""
    for tensor in b.tensors.values():
        tensor.requires_grad_(False)


@composite
def _transformed(b: Building) -> None:
    """First and second derivatives, and functions of each row, by the transforms of ``torch.func``."""
    b.tensors[b.positive(*b.size())].requires_grad_(False)
    kind = b.pick(("grad", "hessian", "hessian", "jacrev", "jacfwd", "vmap"))
    path, *given = b.way(
        ("torch.sin",), ("torch.exp",), ("torch.square",), ("torch.softmax", -1), ("torch.cumsum", -1),
        ("torch.flip", [-1]), ("torch.sum", -1), ("torch.mean", -1),
    )  # fmt: skip
    b.program(f"{second_gradients.__name__}.transformed", kind, path, given)
