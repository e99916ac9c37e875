"""Input checks shared by the sampling mathematics; each error names the rule, the value and the remedy."""

import math

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole


def as_magnitudes(values: Tensor, name: str) -> Tensor:
    """Check a vector of sizes or singular values and return it in float64.

    Args:
        values: Shape ``(N,)``, N >= 1, floating point, finite and non-negative.
        name: Argument name for the error message.

    Returns:
        The values in float64, shape ``(N,)``, on their own device.

    Raises:
        ValueError: If the shape, the type or a value is invalid.

    Example:
        >>> as_magnitudes(torch.tensor([2.0, -1.0]), "sizes")
        Traceback (most recent call last):
        ValueError: `sizes` must be finite and non-negative, got -1.0 at index 1.
    """
    if values.ndim != 1 or values.numel() == 0:
        raise ValueError(f"`{name}` must have shape (N,) with N >= 1, got shape {tuple(values.shape)}.")
    if not values.is_floating_point():
        raise ValueError(f"`{name}` must be a floating-point tensor, got {values.dtype}; call .double() on it.")
    smallest, largest = (float(extreme) for extreme in values.detach().aminmax())  # NaN if any value is
    if not (smallest >= 0 and largest < math.inf):
        index = int((~(torch.isfinite(values) & (values >= 0))).nonzero()[0])
        raise ValueError(f"`{name}` must be finite and non-negative, got {values[index].item()} at index {index}.")
    return values.detach().double()


def check_num_terms(num_terms: int, num_total: int) -> None:
    """Check that ``num_terms`` of ``num_total`` terms can be drawn.

    Raises:
        TypeError: If ``num_terms`` is not a whole number: no draw would ever have this size.
        ValueError: If it is not in ``[1, num_total]``.
    """
    Whole()("num_terms", num_terms)
    if not 1 <= num_terms <= num_total:
        raise ValueError(f"`num_terms` must be in [1, N={num_total}], got {num_terms}.")


def check_cohort_size(cohort_size: float) -> None:
    """Check the number of clients, which may be any real number >= 1, e.g. Kish's effective number.

    Raises:
        ValueError: If ``cohort_size`` is not a finite number >= 1.
    """
    if not (math.isfinite(cohort_size) and cohort_size >= 1):
        raise ValueError(f"`cohort_size` must be a finite number >= 1, got {cohort_size}.")


def check_num_samples(num_samples: int) -> None:
    """Check the number of independent draws.

    Raises:
        TypeError: If ``num_samples`` is not a whole number.
        ValueError: If it is below one.
    """
    Whole(at_least=1)("num_samples", num_samples)


def as_probabilities(values: Tensor, name: str) -> Tensor:
    """Check a vector of probabilities and return it in float64 on the CPU.

    Args:
        values: Shape ``(N,)``, N >= 1, each in ``[0, 1]``.
        name: Argument name for the error message.

    Returns:
        The probabilities, shape ``(N,)``, float64, on the CPU, where the fits run.

    Raises:
        ValueError: If the shape, the type or a value is invalid.
    """
    probs = as_magnitudes(values, name).cpu()
    if (probs > 1).any():
        index = int((probs > 1).nonzero()[0])
        raise ValueError(f"`{name}` must be in [0, 1], got {probs[index].item()} at index {index}.")
    return probs


def as_inclusion_probs(inclusion_probs: Tensor) -> tuple[Tensor, int]:
    """Check the inclusion probabilities of a fixed-size design and find its sample size.

    Args:
        inclusion_probs: Shape ``(N,)``, each in ``[0, 1]``, summing to an integer n >= 1 within 1e-6 n (a tolerance
            for float32 input).

    Returns:
        The probabilities in float64 on the CPU, shape ``(N,)``, and n.

    Raises:
        ValueError: If a probability is invalid or the sum is not an integer.

    Example:
        >>> as_inclusion_probs(torch.tensor([1.0, 0.5, 0.25]))
        Traceback (most recent call last):
        ValueError: `inclusion_probs` must sum to a whole number of terms, at least 1, got the sum 1.75.
    """
    probs = as_probabilities(inclusion_probs, "inclusion_probs")
    total = float(probs.sum())
    num_terms = round(total)
    if num_terms < 1 or abs(total - num_terms) > 1e-6 * num_terms:
        raise ValueError(f"`inclusion_probs` must sum to a whole number of terms, at least 1, got the sum {total:.9g}.")
    return probs, num_terms
