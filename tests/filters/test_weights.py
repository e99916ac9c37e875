"""Weights of clients, and work that does not count: what the server averages, and what they do not go with."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, check_resumes, same_state, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls
from lightning_spectral.filters import FedNova, Weights
from lightning_spectral.testing import check_filter

SIZES = (5, 30, 10)


def by_id(client_id: int, num_examples: int) -> float:
    return 1.0 + client_id


def data(examples: Any = None, batch_size: int = 4) -> Any:
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    examples = toy_examples(sum(SIZES)) if examples is None else examples
    return ls.FederatedDataModule(examples, ls.NaturalPartitioner(owners), batch_size=batch_size)


def alone(fit: Fit, client: int) -> dict[str, torch.Tensor]:
    """The weights after a round of one client: all others have weight zero."""
    only = Weights(lambda client_id, num_examples: float(client_id == client))
    fitted = fit(seeded(LitMLP), data(), clients_per_round=3, filters=[only])
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
    check_filter(Weights("uniform"), seeded(LitMLP, dropout=0.0), toy_examples(8).tensors, algorithm=algorithm)


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
        impossible = Weights(lambda client_id, num_examples: weight)
        with pytest.raises(ValueError, match=r"Weights must be finite and at least 0, got .* for client [012]"):
            fit(seeded(LitMLP), data(), clients_per_round=2, filters=[impossible])

    def test_a_round_of_weights_that_are_all_zero_is_told(self, fit: Fit) -> None:
        with pytest.warns(ls.SpectralWarning, match="`Weights` gives 0 to all clients of a round"):
            fit(seeded(LitMLP), data(), clients_per_round=2, filters=[Weights(lambda client_id, num_examples: 0)])

    def test_a_run_is_resumed_with_the_same_function_alone(self) -> None:
        names = [repr(Weights(by)) for by in (by_id, copy.copy(by_id), "uniform")]
        assert names[0] == names[1] == f"Weights(by={__name__}.by_id)"
        assert names[2] == "Weights(by='uniform')"


CENTERS = torch.tensor([[1.0, -2.0], [4.0, 0.5], [-3.0, 2.0]], dtype=torch.float64)
EPOCHS, SGD, NOVA = (1, 3, 8), partial(torch.optim.SGD, lr=0.01), [FedNova()]
OPTIMUM = (torch.tensor(SIZES)[:, None] * CENTERS).sum(0) / sum(SIZES)


class LitBowl(pl.LightningModule):
    """Half the squared distance from what a client has seen; all its examples are its center, and a batch."""

    def __init__(self, start: Tensor, optimizer: Any) -> None:
        super().__init__()
        self.point, self.make = nn.Parameter(start.clone()), optimizer
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1.0
        return 0.5 * (self.point - batch[0]).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def moved(fit: Fit, optimizer: Any = SGD, epochs: Any = EPOCHS, filters: Any = NOVA, start: Any = OPTIMUM) -> Any:
    """How far a round moves the server's point, and the fit."""
    clients = data(TensorDataset(CENTERS.repeat_interleave(torch.tensor(SIZES), 0)), batch_size=max(SIZES))
    fitted = fit(LitBowl(start, optimizer), clients, clients_per_round=3, local_epochs=[*epochs], filters=filters)
    return fitted.module.point.detach() - start, fitted


def by_hand(number: int, gradient: Any, start: Tensor, lr: float, options: Any) -> Tensor:
    optimizer = torch.optim.SGD([point := start.clone().requires_grad_()], lr=lr, **options)
    for _ in range(number):
        point.grad = gradient(point.detach())
        optimizer.step()
    return point.detach() - start


class TestFedNova:
    @pytest.mark.parametrize("dampening", [0.0, 0.25])
    @pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.5, True)])
    def test_a_round_is_that_of_a_loop_by_hand(
        self, momentum: float, nesterov: bool, dampening: float, fit: Fit
    ) -> None:
        """The norm of a is how far the same optimizer goes along a constant gradient of one."""
        options: Any = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0 if nesterov else dampening}
        start, change, work = OPTIMUM + 0.5, torch.zeros(2, dtype=torch.float64), 0.0
        for center, size, number in zip(CENTERS, SIZES, EPOCHS, strict=True):
            tau = -float(by_hand(number, torch.ones_like, torch.zeros(1), 1.0, options))
            own = by_hand(number, lambda point, center=center: point - center, start, 0.01, options)
            change, work = change + size / sum(SIZES) * own / tau, work + size / sum(SIZES) * tau
        found, fitted = moved(fit, partial(SGD, **options), start=start)
        torch.testing.assert_close(found, work * change, rtol=1e-6, atol=0)
        assert fitted.rows[0]["fl/mean_work"] == pytest.approx(work)
        assert float(fitted.module.seen) == pytest.approx(sum(n * e for n, e in zip(SIZES, EPOCHS, strict=True)) / 45)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_equal_work_makes_it_federated_averaging(self, momentum: float, fit: Fit) -> None:
        own = partial(SGD, momentum=momentum)
        found, plain = (moved(fit, own, (3, 3, 3), filters, OPTIMUM + 1)[0] for filters in (NOVA, []))
        torch.testing.assert_close(found, plain, rtol=1e-7, atol=0)

    def test_unequal_work_does_not_move_it_from_the_optimum_as_it_does_an_average(self, fit: Fit) -> None:
        shares = torch.tensor([size * (1 - 0.99**number) for size, number in zip(SIZES, EPOCHS, strict=True)]).double()
        biased = (shares[:, None] * CENTERS).sum(0) / shares.sum()
        assert float((biased - OPTIMUM).norm()) > 1.0
        assert float(moved(fit, filters=[], start=biased)[0].norm()) < 1e-6
        found, plain = moved(fit)[0], moved(fit, filters=[])[0]
        assert float(found.norm()) < 0.05 * float(plain.norm())  # what is left is of the order of the learning rate

    def test_it_keeps_the_contract_and_resumes(self, fit: Fit, tmp_path: Path) -> None:
        check_filter(FedNova(), seeded(LitMLP, dropout=0.0), toy_examples(8).tensors)
        check_resumes(fit, LitMLP, data(), tmp_path, clients_per_round=2, local_epochs=[1, 3, 2], filters=NOVA)

    def test_a_round_without_clients_changes_nothing(self, fit: Fit) -> None:
        with pytest.warns(UserWarning, match="no client is left to average"):
            fitted = fit(seeded(LitMLP), data(), clients_per_round=2, filters=NOVA, dropout=ls.ClientDropout(1.0))
        assert same_state(fitted.tensors, seeded(LitMLP).state_dict())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"algorithm": ls.LoRA(2)}, "FedNova needs an algorithm whose clients are needed for nothing but the sum"),
            ({"participation": ls.Uniform(active=2), "clients_per_round": None}, "and FedNova would replace them"),
            ({"filters": [ls.Personal(["net.5.*"], epochs=1), *NOVA]}, "those of Personal.* are its own"),
        ],
    )
    def test_what_it_cannot_divide_is_refused(self, options: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ls.FederatedModule(LitMLP(), **{"clients_per_round": 2, "filters": NOVA, **options})

    def test_updates_may_be_shortened_before_they_are_divided(self, fit: Fit) -> None:
        bounded = [ls.MaxUpdateNorm(1e-3), *NOVA]
        fitted = fit(seeded(LitMLP), data(), clients_per_round=3, local_epochs=[1, 3, 2], filters=bounded)
        assert fitted.rows[0]["fl/clients_bounded"] == 3.0

    def test_who_takes_more_steps_than_it_has_batches_does_not_make_the_others_longer(self, fit: Fit) -> None:
        with pytest.raises(ls.ClientError, match=r"steps of one optimizer, got \d+ for \d+ batches"):
            fit(seeded(LitMLP), data(), algorithm=ls.Ditto(), clients_per_round=2, filters=NOVA)

    def test_devices_that_could_claim_steps_are_refused(self, fit: Fit) -> None:
        with pytest.raises(ValueError, match="over a network could only claim; leave it out"):
            fit(seeded(LitMLP), remote(toy_line(LitMLP)), clients_per_round=2, filters=NOVA)

    @pytest.mark.parametrize("momenta", [(0.9, 0.5), (1.0, 1.0)])
    def test_steps_of_several_momenta_cannot_be_counted(self, momenta: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match="Give all parameters one momentum, below 1"):
            moved(
                fit,
                lambda own: SGD([{"params": [*own], "momentum": momenta[0]}, {"params": [], "momentum": momenta[1]}]),
            )
