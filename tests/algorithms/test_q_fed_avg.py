"""q-FedAvg against the paper's formulas in a loop, and in runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_rounds import DirectRounds, assert_close
from federation import Fit, check_resumes, same_state, seeded
from observed_runs import acting
from other_process import toy_data
from torch import Tensor, nn
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import Unusable
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.sums import SummandError

SIZES = {0: 10, 1: 20, 2: 30, 3: 40}
COHORTS = [(1, 3), (0,), (0, 1, 2), (0, 1, 2, 3), (2, 3)]


class Line(nn.Linear):
    """With a running average beside its parameters."""

    def __init__(self) -> None:
        super().__init__(3, 1, dtype=torch.float64)
        self.register_buffer("usual", torch.zeros(2, dtype=torch.float64))


def trained_by(client: int, download: Download) -> Upload:
    """Whatever training comes to: another move and another loss for each client and round."""
    draw = torch.Generator().manual_seed(100 * client + download.round_idx)
    moved = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        for name, tensor in download.tensors.items()
    }
    loss = float(torch.rand((), generator=draw, dtype=torch.float64)) * 3
    return Upload(download.unit, moved, num_steps=1, loss_before=loss)


def published_step(x: dict[str, Tensor], uploads: list[tuple[float, Upload]], q: float, L: float) -> dict[str, Tensor]:
    """Algorithm 2, equations as printed, with weights in the place of an even sample."""
    numerator = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    denominator = 0.0
    for weight, upload in uploads:
        F = upload.loss_before + 1e-10
        delta_w = {name: L * (x[name] - upload.tensors[name]) for name in x}
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in delta_w.values()))
        for name in x:
            numerator[name] += weight * F**q * delta_w[name]
        denominator += weight * (q * F ** (q - 1) * norm**2 + L * F**q)
    return {name: x[name] - numerator[name] / denominator for name in x}


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_rounds_are_those_of_the_published_algorithm(q: float) -> None:
    rounds = DirectRounds(ls.QFedAvg(q=q, lipschitz=20.0), seeded(Line), {}, absolute=False)
    x = {name: p.detach().clone() for name, p in rounds.server.named_parameters()}
    usual = torch.zeros(2, dtype=torch.float64)
    for cohort in COHORTS:
        uploads: list[tuple[float, Upload]] = []

        def train(download: Download) -> Upload:
            client = download.unit.client_id
            upload = trained_by(client, download)
            uploads.append((SIZES[client], upload))  # noqa: B023
            return upload

        rounds.play({client: SIZES[client] for client in cohort}, train)
        x = published_step(x, uploads, q, 20.0)
        total = sum(weight for weight, _ in uploads)
        usual = sum(weight * upload.tensors["usual"] for weight, upload in uploads) / total  # as FedAvg, of any loss
        assert_close(rounds.weights(), {**x, "usual": usual}, 1e-12)


def test_coefficients_of_an_unbiased_sampler_are_divided_below_the_fraction_bar_alone() -> None:
    """With q = 0 it is FedAvg's step, and everywhere it has the length of the coefficients."""
    for q in (0.0, 1.0):
        steps = []
        for scale in (0.01, 0.02):
            algorithms = [ls.QFedAvg(q=q, lipschitz=20.0), ls.FedAvg()]
            ours, theirs = (DirectRounds(algorithm, seeded(Line), {}) for algorithm in algorithms)
            for rounds in (ours, theirs):
                coefficients = {client: scale * size for client, size in SIZES.items()}
                rounds.play(coefficients, lambda download: trained_by(download.unit.client_id, download))
            if q == 0.0:
                assert_close(ours.weights(), theirs.weights(), 1e-12)
            steps.append(ours.weights()["weight"] - seeded(Line).weight.detach())
        torch.testing.assert_close(steps[1], 2 * steps[0], rtol=1e-9, atol=0)


def test_a_client_without_a_loss_or_with_a_huge_one_has_no_finite_summand() -> None:
    opened, (unit,) = DirectRounds(ls.QFedAvg(q=3.0), seeded(Line), {}).open({0: 1.0})
    download, receipt = opened.send(unit)
    upload = trained_by(0, download)
    for loss in (math.nan, math.inf, 1e300):
        with pytest.raises(SummandError, match="its contribution to the sums holds values up to"):
            opened.add(receipt, replace(upload, loss_before=loss))
    with pytest.raises(Unusable, match=r"powers of losses, which must not be negative, got -0\.5; add a constant"):
        opened.add(receipt, replace(upload, loss_before=-0.5))
    assert [mean.weights.sum for mean in opened.sums] == [0, 0]  # nothing was added
    opened.add(receipt, replace(upload, num_steps=0, loss_before=math.nan))
    assert [mean.weights.num_terms for mean in opened.sums] == [1, 0]


def test_small_losses_to_a_high_power_keep_their_digits() -> None:
    """The factor of all summands is the same, so only the grid of the exact sums could tell."""
    ends = []
    for scale in (1.0, 1e-3):
        rounds = DirectRounds(ls.QFedAvg(q=4.0, lipschitz=1e-30), seeded(Line), {}, absolute=False)

        def train(download: Download) -> Upload:
            upload = trained_by(download.unit.client_id, download)
            return replace(upload, loss_before=scale * (1.0 + download.unit.client_id))  # noqa: B023

        rounds.play(SIZES, train)
        ends.append(rounds.weights())
    assert_close(ends[1], ends[0], 1e-6)


# Plain SGD without dropout, so that the loss before training can be computed beside it.
class LitLoss(LitMLP):
    def __init__(self) -> None:
        super().__init__(momentum=0.0, dropout=0.0)


def test_devices_say_the_loss_at_the_downloaded_weights(data: Any, fit: Fit) -> None:
    class Watch(ls.RoundCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, turn: Any) -> None:
            net = seeded(LitLoss)
            net.load_state_dict(turn.download.tensors)
            x, y = data.train[data.partition[turn.unit.client_id]]
            expected = float(nn.functional.cross_entropy(net(x), y).detach())
            assert turn.upload.loss_before == pytest.approx(expected, rel=1e-5)
            assert turn.upload.loss_before != pytest.approx(turn.upload.loss, rel=1e-3)
            watched.append(turn.unit.client_id)

    watched: list[int] = []
    fit(seeded(LitLoss), data, algorithm=ls.QFedAvg(), max_epochs=2, callbacks=[Watch()], seed=3)
    assert len(watched) == 8


def test_a_resumed_run_equals_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, data, tmp_path, algorithm=ls.QFedAvg(q=2.0), seed=3)
    fair, plain = (fit(seeded(LitMLP), data, algorithm=a, seed=3).state for a in (ls.QFedAvg(q=2.0), ls.FedAvg()))
    assert not same_state(fair, plain)


COUNTS: list[int] = []  # of steps, in every local epoch


class LitCollects(LitMLP):
    """Keeps the losses of an epoch in a list until it ends, as many modules do."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, norm=True)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        COUNTS.append(len(self.losses))
        self.losses.clear()


def test_reading_the_loss_leaves_nothing_behind_for_training(fit: Fit) -> None:
    """So without fairness it is federated averaging, up to rounding."""
    states = []
    for algorithm, passes in ((ls.FedAvg(), 1), (ls.QFedAvg(q=0.0), 2)):
        COUNTS.clear()
        states.append(fit(seeded(LitCollects), toy_data(), algorithm=algorithm, max_epochs=2, seed=3).state)
        assert passes * 8 * [3] == COUNTS  # of four clients with ten examples each, in two rounds
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


class LitWeighted(LitLoss):
    """Its loss has a weight that a hook sets, and a penalty on the gradient of its input."""

    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 3.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight += 1.0 if batch_idx == 0 else 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(x).square().sum(), x, create_graph=True)
        return self.weight * super().training_step(batch, batch_idx) + slope.square().mean()


def test_the_loss_is_that_of_the_step_with_its_hooks_and_gradients(fit: Fit) -> None:
    """One client with one batch: the loss before training is that of its only step."""
    uploads: list[Upload] = []
    watch = acting(on_client_end=lambda trainer, model, turn: uploads.append(turn.upload))
    toy = toy_examples()
    one = ls.FederatedDataModule(toy, ls.IIDPartitioner(1), batch_size=len(toy))
    fit(seeded(LitWeighted), one, algorithm=ls.QFedAvg(), clients_per_round=1, max_epochs=3, callbacks=[watch])
    assert len(uploads) == 3
    assert [upload.loss_before for upload in uploads] == pytest.approx([upload.loss for upload in uploads], rel=1e-6)


def test_a_step_that_trains_by_itself_cannot_measure() -> None:
    lit = LitLoss()
    lit.automatic_optimization = False
    with pytest.raises(ValueError, match="q-FedAvg reads losses with `training_step`, which trains under manual"):
        ls.FederatedModule(lit, algorithm=ls.QFedAvg(), clients_per_round=2)
