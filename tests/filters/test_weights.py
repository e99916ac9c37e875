"""Weights of clients: what the server averages with them, and what they do not go with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.filters import Weights
from lightning_spectral.testing import check_filter

SIZES = (5, 30, 10)


def by_id(client_id: int, num_examples: int) -> float:
    return 1.0 + client_id


def data() -> Any:
    from toy_models import toy_examples

    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    return ls.FederatedDataModule(toy_examples(sum(SIZES)), ls.NaturalPartitioner(owners), batch_size=4)


def alone(fit: Fit, client: int) -> dict[str, torch.Tensor]:
    """The weights after a round of one client: all others have weight zero."""

    def only(client_id: int, num_examples: int) -> float:
        return float(client_id == client)

    fitted = fit(seeded(LitMLP), data(), clients_per_round=3, filters=[Weights(only)])
    return {name: p.detach().double() for name, p in fitted.module.named_parameters()}


@pytest.mark.parametrize(
    ("by", "expected"), [("examples", SIZES), ("uniform", (1, 1, 1)), (by_id, (1, 2, 3))], ids=["examples", "1", "f"]
)
def test_the_average_has_these_weights(by: Any, expected: tuple[int, ...], fit: Fit) -> None:
    found = fit(seeded(LitMLP), data(), clients_per_round=3, filters=[Weights(by)])
    each = [alone(fit, client) for client in range(3)]
    for name, parameter in found.module.named_parameters():
        mean = sum(w * own[name] for w, own in zip(expected, each, strict=True)) / sum(expected)
        # clients' weights are single precision: their mean is within a few of its roundings
        torch.testing.assert_close(parameter.detach().double(), mean, rtol=0, atol=4 * 2**-24 * float(mean.abs().max()))


def test_numbers_of_examples_are_the_default_bit_for_bit(fit: Fit) -> None:
    plain, said = (
        fit(seeded(LitMLP), data(), clients_per_round=2, max_epochs=3, filters=filters)
        for filters in ([], [Weights("examples")])
    )
    assert torch.equal(plain.weights, said.weights)
    assert plain.rows == said.rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding.published(ls.Unbiased(), 0.5)], ids=["", "s"])
def test_it_keeps_the_contract(algorithm: Any) -> None:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    check_filter(Weights("uniform"), seeded(LitMLP, dropout=0.0), batch, algorithm=algorithm)


class TestMistakes:
    @pytest.mark.parametrize("by", ["size", None, 3])
    def test_what_says_no_weights_is_refused(self, by: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="`by` must be 'examples' or 'uniform'"):
            Weights(by)

    def test_unbiased_samplers_have_weights_of_their_own(self) -> None:
        with pytest.raises(ValueError, match="The weights of Uniform make its average unbiased"):
            ls.FederatedModule(LitMLP(), participation=ls.Uniform(active=4), filters=[Weights("uniform")])
        ls.FederatedModule(LitMLP(), participation=ls.Uniform(active=4, normalize=True), filters=[Weights("uniform")])

    def test_privacy_needs_equal_weights(self) -> None:
        private = ls.ClientPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)
        with pytest.raises(ValueError, match="Weights changes the weights of clients, and ClientPrivacy needs equal"):
            ls.FederatedModule(LitMLP(), participation=ls.Uniform(active=4), filters=[Weights("uniform"), private])

    @pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
    def test_impossible_weights_name_the_client(self, weight: float, fit: Fit) -> None:
        def impossible(client_id: int, num_examples: int) -> float:
            return weight

        with pytest.raises(ValueError, match=r"Weights must be finite and at least 0, got .* for client [012]"):
            fit(seeded(LitMLP), data(), clients_per_round=2, filters=[Weights(impossible)])

    def test_a_run_is_resumed_with_the_same_function_alone(self) -> None:
        names = [repr(Weights(by)) for by in (by_id, copy.copy(by_id), "uniform")]
        assert names[0] == names[1] == f"Weights(by={__name__}.by_id)"
        assert names[2] == "Weights(by='uniform')"
