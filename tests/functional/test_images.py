"""Per-image standardisation against NumPy, image by image."""

from typing import Any

import numpy as np
import pytest
import torch

import lightning_spectral as ls


def literally(image: np.ndarray) -> np.ndarray:
    """The formula of `tf.image.per_image_standardization` for one image."""
    values = image.astype(np.float64)
    return (values - values.mean()) / max(values.std(), 1 / np.sqrt(values.size))


@pytest.mark.parametrize(
    ("shape", "image_dims"),
    [((5, 3, 8, 6), 3), ((3, 8, 6), 3), ((2, 5, 8, 6, 3), 3), ((5, 8, 6), 2), ((4, 1, 1, 1), 3)],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_each_image_is_standardised_as_numpy_does_it(
    shape: tuple[int, ...], image_dims: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, shape, generator=generator).to(dtype)
    found = ls.functional.standardize_images(images, image_dims)
    each = images.reshape(-1, *shape[-image_dims:]).numpy()
    expected = np.stack([literally(image) for image in each]).reshape(shape)
    assert found.dtype == (dtype if dtype.is_floating_point else torch.float32)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 if found.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("contrast", [0.0, 1e-4, 0.01, 0.5])
def test_images_of_little_contrast_are_bounded_not_blown_up(contrast: float) -> None:
    # 48 values: the bound is a standard deviation of 0.14
    image = 0.7 + contrast * (torch.arange(48, dtype=torch.float64) % 2).reshape(3, 4, 4)
    found = ls.functional.standardize_images(image)
    assert found.std(correction=0).item() == pytest.approx(min(1.0, contrast / 2 * 48**0.5), abs=1e-12)
    assert not (contrast == 0.0 and found.any())


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        ([[0.0]], TypeError, "`images` must be a tensor, got a list"),
        (torch.zeros(4, 4), ValueError, r"got torch.float32 of shape \(4, 4\); grey images without a channel"),
        (torch.zeros(2, 3, 0, 4), ValueError, "with at least one pixel"),
        (torch.zeros(1, 2, 2, dtype=torch.complex64), ValueError, "must be real"),
    ],
)
def test_what_is_no_image_is_refused(images: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ls.functional.standardize_images(images)
