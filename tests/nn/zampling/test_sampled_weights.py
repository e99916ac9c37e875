"""Modules whose weights are drawn, against the dense expression Q z in their place, differentiated by autograd."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_spectral.functional.zampling import Clip, Link, Sigmoid, draw_bits
from lightning_spectral.nn.zampling import NAME, Compression, SampledWeights


class Output(nn.Module):
    """First output of a layer; attention takes a sequence three times, as queries, keys and values."""

    def __init__(self, layer: nn.Module, num_inputs: int) -> None:
        super().__init__()
        self.layer, self.num_inputs = layer, num_inputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(*[x] * self.num_inputs)[0]
        return out


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))
    model[2].weight = model[0].weight
    return model


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: randn(7, 6)),
    "one layer": (lambda: nn.Linear(6, 5), lambda: randn(7, 6)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)),
        lambda: randn(3, 2, 5, 5),
    ),
    "attention": (lambda: Output(nn.MultiheadAttention(8, 2), 3), lambda: randn(3, 4, 8)),
    "LSTM": (lambda: Output(nn.LSTM(5, 4, num_layers=2, bidirectional=True), 1), lambda: randn(4, 3, 5)),
    "tied": (tied, lambda: torch.arange(11)),
    "shared layer": (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2), lambda: randn(7, 6)),
}
every_case = pytest.mark.parametrize("case", list(CASES))


def compress(module: nn.Module, link: Link | None = None, **options: Any) -> SampledWeights:
    """Compress in place, with probabilities of which some are 0 or 1."""
    how = Compression(4, **{"degree": 3, **options})
    weights = how.weights_of(module)
    made = SampledWeights(module, weights, how.matrix(weights, seed=1), link or Clip(), how.sampled)
    made.set_probs(1.2 * torch.rand(len(made.scores), generator=torch.Generator().manual_seed(2)) - 0.1)
    return made


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_dense_weights(case: str, z: Tensor, made: SampledWeights) -> Tensor:
    """Output of the dense module, with the rows of Q z in the places of its parameters."""
    module = CASES[case][0]().double()
    columns, values = made.matrix.entries()
    Q = torch.zeros(made.matrix.num_rows, len(z)).double().scatter_(1, columns, values.double())
    weights = Compression(4, degree=3).weights_of(module)
    rows = (Q @ z).split([weight.num_values for weight in weights])
    named = {w.name: part.view(w.shape) for w, part in zip(weights, rows, strict=True)}
    out: Tensor = functional_call(module, named, (CASES[case][1](),))
    return out


@every_case
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("link", [Clip(), Clip(absorbing=False), Sigmoid(), Sigmoid(False)], ids=str)
def test_outputs_and_gradients_are_those_of_the_dense_expression(case: str, sampled: bool, link: Link) -> None:
    module = CASES[case][0]().double()
    made = compress(module, link, sampled=sampled)
    if link == Clip():  # beyond the edges too
        with torch.no_grad():
            made.scores.add_(0.3 * torch.randn(len(made.scores), generator=generator(4)))
    made.draw(generator())
    out = module(CASES[case][1]())
    weigh = randn(*out.shape)
    (out * weigh).sum().backward()
    z = (draw_bits(made.probs, generator()).double() if sampled else made.probs).requires_grad_()
    expected = with_dense_weights(case, z, made)
    # float64 on both sides, and sums of less than 2^10 products of numbers around 1
    close = {"rtol": 2.0**-42, "atol": 2.0**-42}
    torch.testing.assert_close(out, expected, **close)
    (of_bits,) = torch.autograd.grad((expected * weigh).sum(), z)
    assert made.scores.grad is not None
    torch.testing.assert_close(made.scores.grad, link.gradient(made.scores.detach(), of_bits), **close)
    assert made.scores.grad.count_nonzero() > 0


@every_case
def test_only_scores_and_what_is_dense_are_parameters(case: str) -> None:
    module = CASES[case][0]()
    compressed = {weight.name for weight in Compression(4, degree=3).weights_of(module)}
    dense = {name for name, _ in module.named_parameters()} - compressed
    made = compress(module)
    assert {name for name, _ in module.named_parameters()} == dense | {f"{NAME}.scores"}
    assert getattr(module, NAME) is made
    if case == "conv":
        assert dense == {"1.weight", "1.bias"}


def test_a_draw_repeats_with_its_generator_and_the_next_one_differs_also_after_a_backward() -> None:
    module, x = CASES["MLP"][0]().double(), CASES["MLP"][1]()
    made, one = compress(module), generator()
    outputs = []
    for _ in range(3):
        made.draw(one)
        outputs.append(module(x).sum())
        outputs[-1].backward()
    assert len({out.item() for out in outputs}) == 3
    again = generator()
    for out in outputs:
        made.draw(again)
        assert torch.equal(module(x).sum(), out)


def test_each_bit_is_1_with_its_probability() -> None:
    made = compress(nn.Linear(20, 20), Clip())
    probs, one, repeats = made.probs.double(), generator(), 2000
    assert probs.min() == 0.0
    assert probs.max() == 1.0
    share = sum(draw_bits(made.probs, one).double() for _ in range(repeats)) / repeats
    # the standard error of a share; bits of probability 0 and 1 have none
    assert ((share - probs).abs() <= 5 * (probs * (1 - probs) / repeats).sqrt()).all()


def test_bits_do_not_depend_on_the_default_type() -> None:
    """A uniform number in half precision is a multiple of 1/256, so rare bits would come far too often or never."""
    made = compress(nn.Linear(20, 20))
    expected = draw_bits(made.probs, generator())
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(draw_bits(made.probs, generator()), expected)
        finally:
            torch.set_default_dtype(before)


def test_without_sampling_weights_are_expected_ones_and_need_no_generator() -> None:
    module, x = nn.Linear(6, 5), torch.ones(1, 6)
    made = compress(module, sampled=False)
    made.draw()
    first = module(x)
    made.draw(generator())
    assert torch.equal(module(x), first)
    assert torch.equal(torch.cat([module.weight.ravel(), module.bias]), made.matrix.expand(made.probs))


@every_case
def test_at_rest_a_module_can_be_copied_and_pickled_and_the_copy_is_its_own(case: str) -> None:
    module, x = CASES[case][0]().double(), CASES[case][1]()
    made = compress(module)
    made.draw(generator())
    module(x)
    with pytest.raises(RuntimeError, match="deepcopy"):  # negative control: before it rests
        copy.deepcopy(module)
    made.rest()
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
        own = getattr(twin, NAME)
        assert own is not made
        own.set_probs(torch.zeros(len(own.scores)))
        own.draw(generator())
        out = twin(x)
        assert not torch.equal(out, expected)
        out.sum().backward()
        assert made.scores.grad is None
        assert torch.equal(module(x), expected)


@every_case
def test_evaluation_without_gradients_uses_the_weights_drawn_last(case: str) -> None:
    module, x = CASES[case][0]().double(), CASES[case][1]()
    made = compress(module)
    made.draw(generator())
    module(x)
    module.eval()
    with_graph = module(x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), with_graph.detach(), rtol=2.0**-42, atol=2.0**-42)


def test_under_autocast_weights_and_gradients_of_scores_stay_in_full_precision() -> None:
    module = nn.Linear(6, 5)
    made = compress(module)
    with torch.autocast("cpu", torch.bfloat16):
        made.draw(generator())
        out = module(torch.ones(2, 6))
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert made.scores.grad is not None
    assert module.weight.dtype == made.scores.grad.dtype == torch.float32
    assert torch.equal(module.weight.ravel(), made.matrix.expand(draw_bits(made.probs, generator()).float())[:30])


def test_set_probs_sets_scores_that_have_these_probabilities() -> None:
    for link in (Clip(), Sigmoid()):
        made = compress(nn.Linear(6, 5), link)
        probs = torch.linspace(0.1, 0.9, len(made.scores), dtype=torch.float64)
        made.set_probs(probs)
        torch.testing.assert_close(made.probs, probs.float())
        assert not made.probs.requires_grad
        assert made.scores.requires_grad


def test_compressing_twice_is_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 5))
    how = Compression(4, degree=3)
    weights = how.weights_of(module)
    SampledWeights(module, weights, how.matrix(weights, seed=1), Clip())
    with pytest.raises(ValueError, match="Sequential already has an attribute '_zampling': it was compressed before"):
        SampledWeights(module, weights, how.matrix(weights, seed=1), Clip())
