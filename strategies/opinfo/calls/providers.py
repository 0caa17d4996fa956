"""Which OpInfos dispatch to ops that no OpInfo has the name of; to look through all OpInfos takes 25 s of a process."""

from __future__ import annotations

import torch

__all__ = ["PROVIDERS", "is_known"]

_TORCH = "2.13"
"""The version of torch whose OpInfos were looked through."""

PROVIDERS: dict[str, tuple[str, ...]] = {
    "aten._conj.default": (
        "fft.hfft",
        "fft.hfft2",
        "fft.hfftn",
    ),
    "aten._conj_physical.default": (
        "fft.ihfft2",
        "fft.ihfftn",
    ),
    "aten._euclidean_dist.default": ("cdist",),
    "aten._fft_c2r.default": (
        "fft.hfft",
        "fft.hfft2",
        "fft.hfftn",
    ),
    "aten._linalg_check_errors.default": (
        "linalg.cholesky",
        "linalg.eig",
        "linalg.eigvals",
    ),
    "aten._local_scalar_dense.default": (
        "_foreach_add",
        "item",
        "narrow",
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": ("nn.functional.scaled_dot_product_attention",),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        "nn.functional.scaled_dot_product_attention",
    ),
    "aten._trilinear.default": ("nn.functional.bilinear",),
    "aten._unique.default": ("index_fill",),
    "aten._unique2.default": ("unique",),
    "aten._unsafe_view.default": (
        "__rmatmul__",
        "as_strided",
        "as_strided_copy",
    ),
    "aten._upsample_nearest_exact1d.default": ("nn.functional.interpolate",),
    "aten._upsample_nearest_exact1d_backward.default": ("nn.functional.interpolate",),
    "aten._upsample_nearest_exact2d.default": ("nn.functional.interpolate",),
    "aten._upsample_nearest_exact2d_backward.default": ("nn.functional.interpolate",),
    "aten._upsample_nearest_exact3d.default": ("nn.functional.interpolate",),
    "aten._upsample_nearest_exact3d_backward.default": ("nn.functional.interpolate",),
    "aten.add.Scalar": (
        "acos",
        "asin",
        "asinh",
    ),
    "aten.add_.Scalar": (
        "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout",
        "nn.functional.rms_norm",
    ),
    "aten.add_.Tensor": (
        "_unsafe_masked_index_put_accumulate",
        "_upsample_bilinear2d_aa",
        "cartesian_prod",
    ),
    "aten.addmm.out": ("nn.functional.linear_cross_entropy",),
    "aten.addmm_.default": ("nn.functional.linear_cross_entropy",),
    "aten.alias.default": ("nn.functional.instance_norm",),
    "aten.amax.out": ("nn.functional.linear_cross_entropy",),
    "aten.batch_norm_backward.default": ("_batch_norm_with_update",),
    "aten.bernoulli_.float": (
        "nn.functional.alpha_dropout",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
    ),
    "aten.bitwise_and_.Tensor": (
        "cumprod",
        "isclose",
        "linalg.vander",
    ),
    "aten.bitwise_or_.Tensor": ("isclose",),
    "aten.ceil_.default": (
        "nanquantile",
        "quantile",
    ),
    "aten.clamp.default": ("corrcoef",),
    "aten.clamp_.default": ("nn.functional.gaussian_nll_loss",),
    "aten.clamp_min.default": (
        "native_group_norm",
        "nn.functional.ctc_loss",
        "nn.functional.normalize",
    ),
    "aten.clamp_min_.Tensor": ("nn.functional.cosine_similarity",),
    "aten.clamp_min_.default": (
        "nn.functional.cosine_embedding_loss",
        "nn.functional.hinge_embedding_loss",
        "nn.functional.margin_ranking_loss",
    ),
    "aten.col2im.default": ("nn.functional.unfold",),
    "aten.convolution.default": (
        "nn.functional.conv1d",
        "nn.functional.conv2d",
        "nn.functional.conv3d",
    ),
    "aten.convolution_backward.default": (
        "nn.functional.conv1d",
        "nn.functional.conv2d",
        "nn.functional.conv3d",
    ),
    "aten.copy_.default": (
        "H",
        "T",
        "__radd__",
    ),
    "aten.detach.default": (
        "__getitem__",
        "__radd__",
        "__rdiv__",
    ),
    "aten.digamma_.default": ("mvlgamma",),
    "aten.div.Scalar": (
        "cumulative_trapezoid",
        "gradient",
        "masked.normalize",
    ),
    "aten.div.out": ("nn.functional.linear_cross_entropy",),
    "aten.div_.Scalar": (
        "nn.functional.binary_cross_entropy",
        "nn.functional.binary_cross_entropy_with_logits",
        "nn.functional.dropout",
    ),
    "aten.div_.Tensor": (
        "addcdiv",
        "linalg.eig",
        "linalg.eigh",
    ),
    "aten.eq.Scalar": (
        "__rpow__",
        "atan2",
        "cdist",
    ),
    "aten.exp_.default": ("nn.functional.linear_cross_entropy",),
    "aten.fill_.Scalar": (
        "addcdiv",
        "atanh",
        "lerp",
    ),
    "aten.ge.Scalar": (
        "__rpow__",
        "corrcoef",
        "cov",
    ),
    "aten.gt.Scalar": (
        "linalg.matrix_rank",
        "logcumsumexp",
        "renorm",
    ),
    "aten.index.Tensor": (
        "__getitem__",
        "index_put",
    ),
    "aten.index_add_.default": (
        "as_strided",
        "as_strided_copy",
        "nn.functional.linear_cross_entropy",
    ),
    "aten.le.Scalar": (
        "corrcoef",
        "cov",
        "nn.functional.kl_div",
    ),
    "aten.lerp_.Tensor": (
        "nanquantile",
        "quantile",
    ),
    "aten.lift_fresh.default": (
        "H",
        "T",
        "__getitem__",
    ),
    "aten.log_.default": ("nn.functional.linear_cross_entropy",),
    "aten.logical_and_.default": (
        "corrcoef",
        "cumprod",
        "linalg.vander",
    ),
    "aten.logical_not_.default": (
        "fmax",
        "fmin",
        "nanmean",
    ),
    "aten.logical_or_.default": (
        "fmax",
        "fmin",
        "max",
    ),
    "aten.lt.Scalar": (
        "istft",
        "logcumsumexp",
        "nanquantile",
    ),
    "aten.masked_fill_.Scalar": (
        "cdist",
        "copysign",
        "cumprod",
    ),
    "aten.mm.out": ("nn.functional.linear_cross_entropy",),
    "aten.mul.Scalar": (
        "add",
        "addbmm",
        "addcdiv",
    ),
    "aten.mul.out": ("nn.functional.linear_cross_entropy",),
    "aten.mul_.Scalar": (
        "fft.hfft",
        "fft.hfft2",
        "fft.hfftn",
    ),
    "aten.mul_.Tensor": (
        "combinations",
        "nn.functional.linear_cross_entropy",
    ),
    "aten.native_group_norm_backward.default": ("nn.functional.group_norm",),
    "aten.ne.Scalar": (
        "cov",
        "cumprod",
        "isclose",
    ),
    "aten.neg_.default": (
        "nn.functional.binary_cross_entropy",
        "nn.functional.linear_cross_entropy",
    ),
    "aten.nll_loss2d_backward.default": (
        "nn.functional.cross_entropy",
        "nn.functional.linear_cross_entropy",
        "nn.functional.nll_loss",
    ),
    "aten.nll_loss2d_forward.default": (
        "nn.functional.cross_entropy",
        "nn.functional.linear_cross_entropy",
        "nn.functional.nll_loss",
    ),
    "aten.norm.ScalarOpt_dim": (
        "nn.functional.pairwise_distance",
        "nn.functional.triplet_margin_loss",
        "nn.functional.triplet_margin_with_distance_loss",
    ),
    "aten.pow.Scalar": (
        "ldexp",
        "logaddexp2",
    ),
    "aten.pow.Tensor_Scalar": (
        "asinh",
        "atanh",
        "erf",
    ),
    "aten.pow_.Scalar": (
        "linalg.norm",
        "linalg.vector_norm",
        "nn.functional.normalize",
    ),
    "aten.reciprocal_.default": ("native_group_norm",),
    "aten.reflection_pad1d.default": (
        "nn.functional.pad",
        "stft",
    ),
    "aten.reflection_pad1d_backward.default": (
        "nn.functional.pad",
        "stft",
    ),
    "aten.reflection_pad2d.default": ("nn.functional.pad",),
    "aten.reflection_pad2d_backward.default": ("nn.functional.pad",),
    "aten.reflection_pad3d.default": ("nn.functional.pad",),
    "aten.reflection_pad3d_backward.default": ("nn.functional.pad",),
    "aten.relu_.default": (
        "cumprod",
        "linalg.vander",
        "masked.cumprod",
    ),
    "aten.remainder.Scalar": ("take_along_dim",),
    "aten.replication_pad1d.default": ("nn.functional.pad",),
    "aten.replication_pad1d_backward.default": ("nn.functional.pad",),
    "aten.replication_pad2d.default": ("nn.functional.pad",),
    "aten.replication_pad2d_backward.default": ("nn.functional.pad",),
    "aten.replication_pad3d.default": ("nn.functional.pad",),
    "aten.replication_pad3d_backward.default": ("nn.functional.pad",),
    "aten.rsub.Scalar": (
        "nn.functional.multilabel_soft_margin_loss",
        "signal.windows.bartlett",
    ),
    "aten.scatter_.value": (
        "cumprod",
        "linalg.vander",
        "masked.cumprod",
    ),
    "aten.sqrt_.default": ("nn.functional.cosine_embedding_loss",),
    "aten.squeeze_.dim": (
        "__rmatmul__",
        "matmul",
        "nanquantile",
    ),
    "aten.sub.Scalar": (
        "__rpow__",
        "acosh",
        "cumprod",
    ),
    "aten.sub_.Tensor": (
        "atanh",
        "lerp",
        "linalg.householder_product",
    ),
    "aten.transpose_.default": (
        "nanquantile",
        "quantile",
        "stft",
    ),
    "aten.tril_.default": (
        "linalg.householder_product",
        "ormqr",
    ),
    "aten.unsqueeze_.default": (
        "nanquantile",
        "native_group_norm",
        "quantile",
    ),
    "aten.upsample_bicubic2d.default": ("nn.functional.interpolate",),
    "aten.upsample_bicubic2d_backward.default": ("nn.functional.interpolate",),
    "aten.upsample_bilinear2d.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_bilinear",
    ),
    "aten.upsample_bilinear2d_backward.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_bilinear",
    ),
    "aten.upsample_linear1d.default": ("nn.functional.interpolate",),
    "aten.upsample_linear1d_backward.default": ("nn.functional.interpolate",),
    "aten.upsample_nearest1d.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_nearest1d_backward.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_nearest2d.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_nearest2d_backward.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_nearest3d.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_nearest3d_backward.default": (
        "nn.functional.interpolate",
        "nn.functional.upsample_nearest",
    ),
    "aten.upsample_trilinear3d.default": ("nn.functional.interpolate",),
    "aten.upsample_trilinear3d_backward.default": ("nn.functional.interpolate",),
}
"""By overload, the first OpInfos whose samples dispatch to it, if no OpInfo that is its own does.

Overloads that no OpInfo dispatches to are not among them.
"""


def is_known() -> bool:
    """Return whether :data:`PROVIDERS` is true of the torch that is installed."""
    return torch.__version__.startswith(f"{_TORCH}.")
