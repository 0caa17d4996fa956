"""Facts about single ops, each with its reason; all other facts are derived from schemas and samples."""

from __future__ import annotations

__all__ = [
    "BITWISE",
    "CODES",
    "COMPARED",
    "EVEN_SIZE",
    "FOREACH_SHAPES",
    "KEEP_VALUES",
    "RANDOM_BASES",
    "SAME_AS",
    "SIZES",
    "UNINITIALISED",
    "UNIQUE_INDICES",
    "WITH_FRACTIONS",
    "WITH_ZEROS",
    "WRITE_ONLY",
]

SIZES: tuple[dict[str, int], ...] = (
    {"S": 5, "M": 7, "L": 11, "XS": 3},  # uneven shards on 2 and on 3 ranks
    {"S": 3, "M": 2, "L": 5, "XS": 1},  # extents smaller than the number of ranks: empty shards
    {"S": 6, "M": 4, "L": 9, "XS": 2},  # mostly even shards; extents differ per dim if the call allows it
    {"S": 7, "M": 5, "L": 13, "XS": 3},
    {"S": 4, "M": 8, "L": 12, "XS": 2},
)
"""Values of the constants in torch's sample generators, per size."""

EVEN_SIZE = 4
"""The size whose extents OpInfo can halve, and the larger ones twice."""

SKEWED = frozenset({2})
"""The sizes at which equal extents are made to differ, if the call allows it."""

REGENERATIONS = 4
"""Number of different values for ops that keep OpInfo's values."""

FOREACH_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((5, 3), (7, 2)),
    ((2, 1), (1, 3)),
    ((6, 4), (4, 6)),
    ((7, 5), (3, 11)),
    ((4, 8), (8, 6)),
)
"""Shapes of the tensors of a foreach list, per size."""

BITWISE = {"nextafter": "within any tolerance its result is its argument"}
"""Ops whose results are compared bit for bit, whatever they are."""

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize", "resize_as"}
    # for an enlarged image, their CPU kernels return other results at each call (torch 2.13.0)
    | {"upsample_bicubic2d_aa", "upsample_bilinear2d_aa", "upsample_lanczos2d_aa"}
)
"""Bases of ops whose result is partly or completely uninitialised."""

NO_BACKWARD = {"_segment_reduce": "its kernel on CPU crashes for some of the samples (torch 2.13.0)"}
"""OpInfos whose backward pass is not run, with the reason."""

WITH_FRACTIONS = frozenset({"frac"})
"""Bases of ops that give 0 for every integer, which usual values are: a quarter of these is taken."""

WITH_ZEROS = frozenset({"logical_and", "logical_not", "logical_or", "logical_xor"})
"""Bases of ops that ask which elements are 0, of which usual values have none: every third element is."""

WRITE_ONLY = frozenset({"fill", "zero", "copy"})
"""Ops that write into their first argument and do not read it."""

RANDOM_BASES = frozenset({"multinomial", "native_dropout", "rrelu_with_noise"})
"""Bases of ops that draw random numbers, but not all of whose overloads are tagged so."""

UNIQUE_INDICES = {
    "scatter": "with an index twice in a line, which source wins is not defined",
    "index_copy": "with an index twice, which source wins is not defined",
    "index_put": "with an index twice and no accumulation, which value wins is not defined",
    "_index_put_impl": "as index_put",
    "_unsafe_index_put": "as index_put",
    "put": "as index_put",
    "max_unpool2d": "two maxima at one place: which wins is not defined",
    "max_unpool3d": "as max_unpool2d",
    "masked_scatter": "takes as many elements of the source as the mask has",
}
"""Ops whose integer (and bool) tensors keep the values that OpInfo generates."""

KEEP_VALUES = {
    "searchsorted": "the sequence must be sorted",
    "bucketize": "the boundaries must be sorted",
    "histogram": "the bin edges must be sorted",
    "_histogramdd_from_bin_tensors": "the bin edges must be sorted",
    "_linalg_eigh": "reads one triangle of a symmetric matrix",
    "_linalg_svd": "the result is unique up to sign only for distinct singular values",
    "_linalg_det": "returns a factorisation whose pivots jump where elements tie",
    "_linalg_slogdet": "as _linalg_det",
    "_linalg_solve_ex": "as _linalg_det, and needs a matrix with an inverse",
    "linalg_inv_ex": "needs a matrix with an inverse",
    "linalg_qr": "unique only for full rank",
    "linalg_eig": "eigenvectors are unique only for distinct eigenvalues",
    "linalg_lu": "the pivots jump where elements tie",
    "linalg_lu_factor_ex": "the pivots jump where elements tie",
    "linalg_lu_solve": "takes factors and pivots that belong together",
    "linalg_ldl_factor_ex": "the matrix must be symmetric",
    "linalg_ldl_solve": "takes factors and pivots that belong together",
    "linalg_lstsq": "unique only for full rank",
    "linalg_cholesky_ex": "the matrix must be positive definite",
    "cholesky": "the matrix must be positive definite",
    "cholesky_solve": "takes a factor with a nonzero diagonal",
    "cholesky_inverse": "takes a factor with a nonzero diagonal",
    "linalg_solve_triangular": "the diagonal must not be near 0",
    "triangular_solve": "the diagonal must not be near 0",
    "lu_unpack": "pivots are a permutation",
    "linalg_householder_product": "takes reflectors of a factorisation",
    "ormqr": "takes reflectors of a factorisation",
    "geqrf": "unique only for full rank",
    "linalg_matrix_exp": "large elements overflow",
    "linalg_pinv": "rank is decided by a threshold",
    "_ctc_loss": "targets and lengths belong together",
    "_ctc_loss_backward": "takes what the forward saved",
    "segment_reduce": "lengths must add up to the size",
    "_segment_reduce_backward": "lengths must add up to the size",
    "_embedding_bag": "offsets must be sorted and start at 0",
    "_embedding_bag_forward_only": "offsets must be sorted and start at 0",
    "embedding_bag": "offsets must be sorted and start at 0",
    "_embedding_bag_backward": "takes what the forward saved",
    "_embedding_bag_dense_backward": "takes what the forward saved",
    "_embedding_bag_per_sample_weights_backward": "takes what the forward saved",
    "grid_sampler_2d": "a grid point outside the image is read as padding",
    "grid_sampler_3d": "a grid point outside the image is read as padding",
    "grid_sampler_2d_backward": "as the forward",
    "grid_sampler_3d_backward": "as the forward",
    "_grid_sampler_2d_cpu_fallback": "as the forward",
    "fractional_max_pool2d": "where the regions begin is computed from a tensor of numbers in 0..1",
    "fractional_max_pool3d": "as fractional_max_pool2d",
    "fractional_max_pool2d_backward": "takes what the forward saved",
    "fractional_max_pool3d_backward": "takes what the forward saved",
    "_pack_padded_sequence": "lengths must be sorted",
    "multinomial": "takes probabilities",
    "_fused_adam": "the second moments and the steps must be positive",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "takes what the forward saved",
    "_scaled_dot_product_flash_attention_backward": "takes what the forward saved",
}
"""Ops whose tensors all keep OpInfo's values, which are generated again for each draw."""

SAME_AS = {
    "ilshift": "lshift",
    "irshift": "rshift",
    "ixor": "xor",
    "iand": "and",
    "ior": "or",
    "xor": "bitwise_xor",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "clip": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "subtract": "sub",
    "embedding_bag_forward_only": "embedding_bag",
    "multiply": "mul",
    "divide": "div",
    "absolute": "abs",
    "negative": "neg",
    "fix": "trunc",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arctan2": "atan2",
    "arccosh": "acosh",
    "arcsinh": "asinh",
    "arctanh": "atanh",
    "true_divide": "div",
    "unsafe_index": "index",
    "unsafe_split_with_sizes": "split_with_sizes",
    "addmm_activation": "addmm",
    "add_relu": "add",
    "unsafe_index_put": "index_put",
    "index_put_impl": "index_put",
    "native_batch_norm_legit": "native_batch_norm",
    "native_batch_norm_legit_functional": "native_batch_norm",
    "native_batch_norm_legit_no_training": "native_batch_norm",
    "batch_norm_with_update": "native_batch_norm",
    "batch_norm_with_update_functional": "native_batch_norm",
    "upsample_bicubic2d_aa": "upsample_bilinear2d_aa",
    "upsample_lanczos2d_aa": "upsample_bilinear2d_aa",
    "upsample_bicubic2d_aa_backward": "upsample_bilinear2d_aa_backward",
    "upsample_lanczos2d_aa_backward": "upsample_bilinear2d_aa_backward",
    "fused_rms_norm": "rms_norm",
    "linalg__powsum": "linalg_vector_norm",
    "foreach_powsum": "foreach_norm",
    "rand_like": "randn_like",
    "normal_functional": "normal",
    "contiguous": "clone",
    "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1",
    "bessel_i1e": "special_i1e",
    "bessel_j0": "special_bessel_j0",
    "bessel_j1": "special_bessel_j1",
    "erfcx": "special_erfcx",
    "ndtri": "special_ndtri",
    "spherical_bessel_j0": "special_spherical_bessel_j0",
    "zeta": "special_zeta",
}
"""Bases (without outer underscores) whose calls can be made from calls of another base."""

CODES: dict[str, tuple[int, ...]] = {
    "reduction": (0, 1, 2),
    "interpolation_mode": (0, 1, 2),
    "padding_mode": (0, 1, 2),
    "normalization": (0, 1, 2),
    "mode": (0, 1, 2),
}
"""Integers that stand for choices, by the names of arguments. Kernels take others for one of them, as no rule does."""

COMPARED = ("padding_idx", "ignore_index")
"""Integers that kernels compare with indices alone, so that any value is safe."""

TRUSTING = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "batch_norm_backward",
    "native_layer_norm",
    "native_group_norm",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "max_unpool",
    "_adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "grid_sampler",
    "_grid_sampler",
    "linalg_ldl_solve",
    "lu_unpack",
    "_ctc_loss",
    "_segment_reduce",
    "_embedding_bag",
    "embedding_bag",
    "unfold_backward",
    "nll_loss_backward",  # writes to the class of a target, wherever that is
    "nll_loss2d_backward",
    "_weight_norm_interface_backward",
)
"""Prefixes of ops whose kernels do not check that the sizes of their arguments agree (torch 2.13.0, CPU). Only the
function that users call checks them."""
