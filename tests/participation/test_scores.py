"""From figures to scores: gaps, zeros and invalid values."""

import math

import pytest
import torch
from populations import GAPS, MIXED
from torch import Tensor

from lightning_spectral.participation import LossVarianceReduced, Uniform
from lightning_spectral.participation.sampler import sampling_scores

NAN = math.nan


def test_scores_are_weighted_figures() -> None:
    figures = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, 6.0]])
    expected = MIXED.weights * torch.tensor([[1.0, 2.0, 3.0]] * 3 + [[4.0, 0.0, 6.0]])
    assert torch.equal(LossVarianceReduced(active=1).scores(MIXED, figures), expected)


def test_unknown_figures_count_as_the_largest_known_of_their_model() -> None:
    # client 1 has examples but is not available; its figure is still known
    figures = torch.tensor([[NAN, NAN], [9.0, NAN], [5.0, NAN], [NAN, NAN]])
    filled = torch.tensor([[9.0, 1.0], [0.0, 0.0], [5.0, 0.0], [9.0, 1.0]])
    assert torch.equal(sampling_scores(GAPS, figures), GAPS.weights * filled)
    assert torch.equal(sampling_scores(GAPS, None), GAPS.weights)


def test_figures_of_a_client_without_examples_do_not_matter() -> None:
    figures = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1e9, NAN]])  # client 1 has no examples of model 1
    without = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
    assert torch.equal(sampling_scores(MIXED, figures), sampling_scores(MIXED, without))
    infinite = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.inf, NAN]])
    assert torch.equal(sampling_scores(MIXED, infinite), sampling_scores(MIXED, without))


def test_a_model_whose_figures_are_all_zero_or_negative_is_not_starved() -> None:
    figures = torch.tensor([[1.0, 0.0, 0.0], [4.0, 0.0, -1.0]])
    scores = sampling_scores(MIXED, figures)
    assert torch.equal(scores[:, 1:], MIXED.weights[:, 1:])
    probs = LossVarianceReduced(active=1).probs(scores)
    assert bool((probs.sum(0) > 0).all())
    assert abs(float(probs.sum()) - 1) < 1e-15


def test_negative_figures_count_as_zero() -> None:
    negative, zero = (torch.tensor([[value, 2.0, 3.0], [4.0, NAN, 6.0]]) for value in (-1.0, 0.0))
    assert torch.equal(sampling_scores(MIXED, negative), sampling_scores(MIXED, zero))


def test_samplers_without_a_figure_ignore_figures() -> None:
    assert torch.equal(Uniform(active=1).scores(GAPS, torch.full((4, 2), math.inf)), GAPS.can.double())


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (torch.tensor([[1.0, 2.0, 3.0], [math.inf, NAN, 6.0]]), "got inf of client 1, model 0; its training diverged"),
        (torch.tensor([[1.0, 2.0, -math.inf], [1.0, NAN, 6.0]]), "got -inf of client 0, model 2"),
        (torch.ones(2, 2), r"`figures` must have shape \(N, S\) = \(2, 3\), got \(2, 2\)"),
    ],
)
def test_bad_figures_are_refused(figures: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_scores(MIXED, figures)
