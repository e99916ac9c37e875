"""Links between scores and probabilities, and their gradients written out by hand."""

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.zampling import Clip, Link, Sigmoid

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def scores_and_gradients(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores outside, at the edges of and inside [0, 1], each with a gradient of either sign and none."""
    scores = torch.tensor([-3.0, -0.1, 0.0, 0.2, 0.5, 0.9, 1.0, 1.1, 4.0], dtype=dtype).repeat_interleave(3)
    return scores, torch.tensor([-2.0, 0.0, 0.7], dtype=dtype).repeat(9)


@pytest.mark.parametrize("absorbing", [True, False])
def test_clip_passes_the_gradient_of_bits_inside_and_at_an_edge_only_if_it_leads_back_and_nothing_absorbs(
    absorbing: bool,
) -> None:
    scores, of_bits = scores_and_gradients()
    expected = []
    for s, g in zip(scores.tolist(), of_bits.tolist(), strict=True):
        inside = 0 < s < 1
        comes_back = (s <= 0 and -g > 0) or (s >= 1 and -g < 0)  # a step of descent is in the direction of -g
        expected.append(g if inside or (comes_back and not absorbing) else 0.0)
    assert Clip(absorbing).gradient(scores, of_bits).tolist() == expected


def test_clip_is_absorbing_unless_asked() -> None:
    assert Clip().absorbing
    scores, of_bits = scores_and_gradients()
    assert not torch.equal(Clip().gradient(scores, of_bits), Clip(absorbing=False).gradient(scores, of_bits))


@dtypes
def test_clip_clips_and_its_gradient_inside_is_that_of_autograd(dtype: torch.dtype) -> None:
    scores, of_bits = scores_and_gradients(dtype)
    assert Clip().probs(scores).tolist() == [min(max(s, 0.0), 1.0) for s in scores.tolist()]
    leaf = scores.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(Clip().probs(leaf), leaf, of_bits)
    edge = (scores == 0) | (scores == 1)  # where the derivative is a convention
    assert torch.equal(Clip().gradient(scores, of_bits)[~edge], by_autograd[~edge])


@dtypes
def test_sigmoid_straight_through_has_the_gradient_of_autograd_and_the_other_one_p_times_as_much(
    dtype: torch.dtype,
) -> None:
    scores, of_bits = scores_and_gradients(dtype)
    leaf = scores.clone().requires_grad_()
    probs = Sigmoid().probs(leaf)
    (by_autograd,) = torch.autograd.grad(probs, leaf, of_bits)
    # a sigmoid, a difference and three products round
    few = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(Sigmoid().gradient(scores, of_bits), by_autograd, rtol=few, atol=0)
    times_p = Sigmoid(straight_through=False).gradient(scores, of_bits)
    torch.testing.assert_close(times_p, by_autograd * probs.detach(), rtol=few, atol=0)
    torch.testing.assert_close(probs.detach(), 1 / (1 + torch.exp(-scores)), rtol=few, atol=0)


@dtypes
@pytest.mark.parametrize("link", [Clip(), Clip(False), Sigmoid(), Sigmoid(margin=1e-4), Sigmoid(False, 0.3)], ids=str)
def test_probabilities_come_back_from_their_scores_within_the_margin(link: Link, dtype: torch.dtype) -> None:
    probs = torch.linspace(0, 1, 101, dtype=dtype)
    margin = link.margin if isinstance(link, Sigmoid) else 0.0
    scores = link.scores(probs)
    assert scores.isfinite().all()
    # the slope of a score is 1 / (p (1 - p)), that of a probability its inverse: both round some steps of |score| <= 10
    few = 0.0 if isinstance(link, Clip) else 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(link.probs(scores), probs.clamp(margin, 1 - margin), rtol=0, atol=few)


def test_scores_of_clip_are_a_copy() -> None:
    probs = torch.tensor([0.25])
    Clip().scores(probs).fill_(1.0)
    assert probs.tolist() == [0.25]


@pytest.mark.parametrize("margin", [0.0, -0.1, 0.5, 1.0, float("nan")])
def test_a_margin_without_finite_scores_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match=r"`margin` must be in \(0, 0\.5\), got .*; the score of a probability of 0"):
        Sigmoid(margin=margin)
