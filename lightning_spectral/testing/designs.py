"""The contract of a sampling design, as a test."""

import torch
from torch import Tensor

from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is


def _cases() -> dict[str, Tensor]:
    steep = [0.9, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05, 0.05]
    mixed = [0.2, 1.0, 0.05, 0.0, 0.8, 0.6, 1.0, 0.9, 0.1, 0.3, 0.05, 0.0]
    cases = {
        "uneven": steep,
        "certain and impossible terms, shuffled": mixed,
        "one of many": [0.4, 0.3, 0.15, 0.1, 0.05],
        "all but one": [0.99, 0.9, 0.7, 0.41],
        "one open place beside a certain term": [1.0, 0.5, 0.5],
        "nearly certain terms": [1 - 1e-9, 0.5, 0.5, 1e-9, 0.7, 0.3],
        "certain terms only": [0.0, 1.0, 1.0, 0.0],
        "all terms": [1.0, 1.0, 1.0],
        "twenty terms": [0.05 + 0.9 * i / 19 for i in range(20)],
    }
    return {name: torch.tensor(probs, dtype=torch.float64) for name, probs in cases.items()}


def check_design(design: Design, *, num_samples: int = 4000) -> None:
    """Check that a design satisfies the contract of :class:`~lightning_spectral.designs.Design`.

    This checks that draws have the exact size, and terms are sorted and distinct; that certain terms are always drawn
    and impossible ones never; that the frequencies of terms are within five standard deviations of their inclusion
    probabilities; that rows are independent; that the same generator state gives the same draw and a different state a
    different one; that ``sample`` equals ``fit`` and ``draw``, and ``fit_all`` equals ``fit``; and that bad input
    raises errors.

    Args:
        design: The design. It must accept any inclusion probabilities.
        num_samples: Number of draws in each case; more draws reveal smaller deviations.

    Example:
        >>> from lightning_spectral.designs import ConditionalPoisson
        >>> check_design(ConditionalPoisson())
    """
    check_is("design", design, Design)
    for name, probs in _cases().items():
        where = f"{design!r} on '{name}'"
        draws = design.sample(probs, num_samples, torch.Generator().manual_seed(1))
        check_rows(draws, probs, num_samples, where)
        check_frequencies(draws, probs, where)
        _check_independence(draws, probs, where)
        _check_repeatable(design, probs, draws, where)
    _check_fits_together(design)
    _check_errors(design)


def check_rows(draws: Tensor, probs: Tensor, num_samples: int, where: str) -> None:
    """Check type, shape, range and order of a draw; ``where`` starts the error message."""
    shape = (num_samples, round(float(probs.sum())))
    assert draws.dtype == torch.int64, f"{where}: terms have dtype {draws.dtype}, not int64."
    assert tuple(draws.shape) == shape, f"{where}: the draw has shape {tuple(draws.shape)}, not {shape}."
    assert bool(((draws >= 0) & (draws < len(probs))).all()), f"{where}: a term is not in [0, N)."
    assert bool((draws.diff(dim=1) > 0).all()), f"{where}: the terms of a row are not sorted and distinct."


def _indicators(draws: Tensor, num_total: int) -> Tensor:
    """Indicators of the terms in each sample, shape (num_samples, N), as float64."""
    return torch.zeros(len(draws), num_total, dtype=torch.float64).scatter_(1, draws, 1.0)


def check_frequencies(draws: Tensor, probs: Tensor, where: str) -> None:
    """Check the frequency of each term against its probability; ``where`` starts the error message."""
    frequencies = _indicators(draws, len(probs)).mean(0)
    sigma = (probs * (1 - probs) / len(draws)).sqrt()
    # Allow one draw more or less, because the frequency of a rare term is not near normal.
    bound = torch.where((probs > 0) & (probs < 1), 5 * sigma + 1 / len(draws), 0.0)
    for term in range(len(probs)):
        assert abs(frequencies[term] - probs[term]) <= bound[term], (
            f"{where}: term {term} has frequency {float(frequencies[term]):.5f} in {len(draws)} samples, "
            f"but inclusion probability {float(probs[term]):.5f}."
        )


def _check_independence(draws: Tensor, probs: Tensor, where: str) -> None:
    variance = probs * (1 - probs)
    tested = variance > 1e-3  # a correlation of terms that hardly ever change cannot be measured
    deviations = (_indicators(draws, len(probs)) - probs)[:, tested] / variance[tested].sqrt()
    correlations = (deviations[1:] * deviations[:-1]).mean(0)
    # Under independence each correlation has mean 0 and variance 1 / (number of pairs).
    bound = 5 / (len(draws) - 1) ** 0.5
    assert bool((correlations.abs() <= bound).all()), (
        f"{where}: consecutive samples are correlated by {float(correlations.abs().max()):.3f} > {bound:.3f}."
    )


def _check_repeatable(design: Design, probs: Tensor, draws: Tensor, where: str) -> None:
    same = design.fit(probs).draw(len(draws), torch.Generator().manual_seed(1))
    assert torch.equal(draws, same), f"{where}: fit and draw from the same generator state differ from sample."
    other = design.sample(probs, len(draws), torch.Generator().manual_seed(2))
    fixed = bool(((probs == 0) | (probs == 1)).all())
    assert fixed or not torch.equal(draws, other), f"{where}: the draw does not depend on the generator."


def _check_fits_together(design: Design) -> None:
    cases = _cases()
    for (name, probs), fitted in zip(cases.items(), design.fit_all(list(cases.values())), strict=True):
        alone, together = (one.draw(50, torch.Generator().manual_seed(3)) for one in (design.fit(probs), fitted))
        assert torch.equal(alone, together), f"{design!r} on '{name}': `fit_all` draws differently from `fit`."


def _check_errors(design: Design) -> None:
    for why, probs in {
        "their sum 1.5 is not whole": [0.5, 0.5, 0.5],
        "one is above 1": [1.5, 0.5],
        "one is negative": [-0.5, 0.75, 0.75],
        "one is NaN": [float("nan"), 1.0],
        "they have two dimensions": [[0.5, 0.5]],
    }.items():
        try:
            design.fit(torch.tensor(probs, dtype=torch.float64))
        except ValueError:
            continue
        raise AssertionError(f"{design!r}: fit accepted inclusion probabilities although {why}.")
