"""Preprocessing of images before training."""

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole


def standardize_images(images: Tensor, image_dims: int = 3) -> Tensor:
    r"""Give each image mean 0 and standard deviation 1, over all its pixels and channels.

    An image of n values becomes :math:`(x - \bar x) / \max(\sigma, 1 / \sqrt n)`. So a constant image becomes zeros,
    and a nearly constant one does not become noise. No statistics of the whole data set, which no client has, are
    needed. Integers become the default floating-point type.

    Args:
        images: One image, or any number of them, of shape ``(..., channels, height, width)`` or with the channels last.
        image_dims: Number of trailing dimensions that make up one image: 3, or 2 for grey images without a channel.

    Note:
        The bound is in the unit of the pixels, so an image in ``[0, 1]`` counts as nearly constant sooner than the same
        image in ``0 ... 255``: with 32 x 32 pixels in three colours, below a standard deviation of 0.018.

    Reference:
        ``tf.image.per_image_standardization``, which Korzhenkov & Louizos (2024) apply.

    Example:
        >>> standardize_images(torch.tensor([[[[0, 255], [255, 0]]]], dtype=torch.uint8)).flatten()
        tensor([-1.,  1.,  1., -1.])
    """
    image_dims = Whole(at_least=1)("image_dims", image_dims)
    if not isinstance(images, Tensor):
        raise TypeError(f"`images` must be a tensor, got a {type(images).__name__}; convert with torch.from_numpy.")
    if images.ndim < image_dims or not images.shape[-image_dims:].numel() or images.is_complex():
        raise ValueError(
            f"`images` must be real, with at least one pixel in the last {image_dims} dimensions, got {images.dtype} "
            f"of shape {tuple(images.shape)}; grey images without a channel need image_dims=2."
        )
    values = images if images.is_floating_point() else images.to(torch.get_default_dtype())
    std, mean = torch.std_mean(values, tuple(range(-image_dims, 0)), correction=0, keepdim=True)
    return (values - mean) / std.clamp(min=values.shape[-image_dims:].numel() ** -0.5)
