"""Zampling in whole rounds: what travels, what the server makes of it, and what is refused."""

import math
import pickle
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from direct_rounds import DirectRounds
from federation import Fit, said_during, seeded
from observed_runs import acting
from one_client import client_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.zampling import BITS, GRID, SCORES
from lightning_spectral.functional.zampling import pack_bits
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator

SMALL = ls.Zampling(4, degree=3)
STEEP = 100.0  # a learning rate for scores that pass through a sigmoid


class Small(LitNet):
    """One hidden layer, with a norm or without; no dropout, so that an oracle can follow it."""

    def __init__(self, lr: float = 3.0, norm: bool = False, optimizer: Any = None) -> None:
        net = nn.Sequential(nn.Linear(6, 12), *([nn.BatchNorm1d(12)] if norm else []), nn.ReLU(), nn.Linear(12, 3))
        super().__init__(net, lr, optimizer=optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4), val=toy, batch_size=10)


def dense_matrix(algorithm: ls.Zampling, module: nn.Module, seed: int) -> Tensor:
    """Q, entry by entry, in float64."""
    matrix = algorithm.scheme().matrix(algorithm.scheme().weights_of(module), seed)
    columns, values = matrix.entries()
    return torch.zeros(matrix.num_rows, matrix.num_columns, dtype=torch.float64).scatter_(1, columns, values.double())


def as_weights(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Cut a long vector into the parameters of a module whose parameters are all compressed."""
    parameters = dict(module.named_parameters())
    parts = flat.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def local_bits(
    net: nn.Module, Q: Tensor, data: Any, ids: tuple[int, int], scores: Tensor, probs_of: Any, step: Any
) -> Tensor:
    """The bits that one client uploads, with everything written out: dense Q, autograd, plain gradient steps."""
    (round_idx, client_id), generator = ids, derived_generator(0, "local bits", *ids)
    for (x, y), _ in data.client_data(Download(WorkUnit(client_id), 1.0, {}, round_idx=round_idx)).epoch(0):
        z = (torch.rand(len(scores), generator=generator) < probs_of(scores)).double().requires_grad_()
        logits = torch.func.functional_call(net, as_weights(net, Q @ z), x.double())
        nn.functional.cross_entropy(logits, y).backward()
        assert z.grad is not None
        scores = step(scores, z.grad)
    return torch.rand(len(scores), generator=derived_generator(0, "uploaded bits", *ids)) < probs_of(scores)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_rounds_are_those_of_the_paper_written_out(data: Any, fit: Fit, smoothing: float) -> None:
    def step(scores: Tensor, gradient: Tensor) -> Tensor:
        return scores - 0.5 * gradient * ((scores > 0) & (scores < 1))

    algorithm, clip = ls.Zampling(4, degree=3, smoothing=smoothing), partial(torch.clamp, min=0, max=1)
    module = seeded(Small, lr=0.5)
    Q = dense_matrix(algorithm, module, seed=0)
    probs = torch.rand(Q.shape[1], generator=derived_generator(0, "probabilities")).double()
    net = seeded(Small).net.double()
    fitted = fit(module, data, algorithm=algorithm, max_epochs=2)
    for round_idx in range(2):
        bits = [local_bits(net, Q, data, (round_idx, client), probs, clip, step) for client in range(4)]
        probs = (torch.stack(bits).double().sum(0) + smoothing) / (4 + 2 * smoothing)
    # p agrees up to half a step of the grid
    assert float((fitted.model.state.probs.detach().double() - probs).abs().max()) <= 0.5 / GRID
    torch.testing.assert_close(fitted.weights.double(), Q @ probs, rtol=1e-5, atol=1e-6)


def test_what_travels_is_a_float_down_and_a_bit_up_for_each_probability(data: Any, fit: Fit) -> None:
    fitted = fit(seeded(Small, norm=True), data, algorithm=SMALL)
    n = math.ceil((6 * 12 + 12 + 12 * 3 + 3) / 4)
    norm = 4 * 12  # weight, bias, running mean and variance
    row = fitted.ledger.rows[0]
    assert fitted.model.state.probs.shape == (n,)
    assert row.uplink_bytes == math.ceil(n / 8) + 4 * norm
    assert row.downlink_bytes == 4 * n + 4 * norm + 8  # and the number of batches


def test_the_papers_network_sends_a_thousandth_of_its_weights_up() -> None:
    mnistfc = nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10))
    algorithm = ls.Zampling(32)
    side = algorithm.bind(mnistfc, algorithm.new_state(mnistfc, 0)).client_side
    client = client_of(side, mnistfc, 1.0)
    n = math.ceil(266_610 / 32)
    side.load(client, Download(WorkUnit(0), 1.0, {"zampling.probs": torch.rand(n)}))
    uploaded = side.collect(client, Download(WorkUnit(0), 1.0, {"zampling.probs": torch.rand(n)})).num_bytes
    assert uploaded == math.ceil(n / 8)
    assert 4 * 266_610 / uploaded > 1023


def test_one_process_draws_one_matrix_and_pickles_none_of_it() -> None:
    server = nn.Linear(40, 30)
    state = SMALL.new_state(server, seed=0)
    half = SMALL.bind(server, state)
    side, size = half.client_side, len(pickle.dumps(half.client_side))
    client = client_of(side, server, 1.0)
    half.settle()  # draws all rows
    assert client._zampling.matrix is state.matrix
    assert len(pickle.dumps(side)) == size < 8 * state.matrix.num_rows
    elsewhere = client_of(pickle.loads(pickle.dumps(side)), server, 1.0)._zampling.matrix
    assert torch.equal(elsewhere.expand(state.probs), state.matrix.expand(state.probs))


def test_the_server_holds_the_expected_network_before_and_after_every_round(data: Any, fit: Fit) -> None:
    worst: list[float] = []

    def compare(trainer: pl.Trainer, model: Any) -> None:
        expected = dense_matrix(SMALL, model.module, 0) @ model.state.probs.detach().double()
        flat = nn.utils.parameters_to_vector(model.module.parameters()).detach()
        worst.append(float((flat.double() - expected).abs().max()))

    watching = acting(on_validation_start=compare)
    fit(seeded(Small), data, algorithm=SMALL, max_epochs=2, callbacks=[watching], trainer={"num_sanity_val_steps": 1})
    assert len(worst) == 3
    assert max(worst) < 1e-6


def test_new_probabilities_are_exactly_the_shares_of_clients_with_a_one(data: Any, fit: Fit) -> None:
    fitted = fit(seeded(Small), data, algorithm=SMALL, max_epochs=2, clients_per_round=3)
    shares = torch.tensor([round(k / 3 * GRID) / GRID for k in range(4)])
    assert bool(torch.isin(fitted.model.state.probs.detach(), shares).all())


def test_the_figures_of_a_round_are_those_of_its_bits_and_of_what_was_sent() -> None:
    """Two clients differ in one of four bits; two probabilities are settled, whatever the clients say."""
    rounds = DirectRounds(ls.Zampling(2, degree=1), nn.Linear(3, 2), {0: 0.5, 1: 0.5})
    rounds.state.probs.data = torch.tensor([0.0, 1.0, 0.5, 0.25])
    opened, units = rounds.open({0: 0.5, 1: 0.5})
    for unit, bits in zip(units, ([False, True, True, False], [False, True, True, True]), strict=True):
        _, receipt = opened.send(unit)
        opened.add(receipt, Upload(unit, {BITS: pack_bits(torch.tensor(bits))}))
    assert opened.observed().figures == {
        "bit_entropy": 0.25,
        "bits_agreed": 0.75,
        "bit_disagreement": 0.25,
        "probs_settled": 0.5,
    }


def test_a_client_says_how_far_training_moved_its_probabilities() -> None:
    """Scores 0.0, 0.9, 0.5 and 0.25 become -1.0, 1.2, 0.6 and 0.25: two probabilities moved, by 0.1."""
    rounds = DirectRounds(ls.Zampling(2, degree=1), nn.Linear(3, 2), {0: 1.0})
    rounds.state.probs.data = torch.tensor([0.0, 0.9, 0.5, 0.25])
    opened, (unit,) = rounds.open({0: 1.0})
    download, _ = opened.send(unit)
    side = rounds.half.client_side
    client = client_of(side, rounds.server, 1.0)
    side.load(client, download)
    client.get_parameter(SCORES).data += torch.tensor([-1.0, 0.3, 0.1, 0.0])
    logged = side.collect(client, download).logged
    assert logged.keys() == {"fl/probs_moved"}
    assert logged["fl/probs_moved"].value == pytest.approx(math.sqrt(2 * 0.1**2 / 4))


@pytest.mark.parametrize(
    ("lr", "options", "times"),
    [(0.1, {}, 1), (3.0, {}, 0), (0.1, {"local_epochs": 0}, 0), (0.1, {"clients_per_round": 1}, 1)],
    ids=["a rate for weights", "a rate for scores", "no training", "one client"],
)
def test_a_rate_that_hardly_moves_scores_is_named_once(
    data: Any, fit: Fit, lr: float, options: dict[str, Any], times: int
) -> None:
    said = said_during(lambda: fit(seeded(Small, lr=lr), data, algorithm=SMALL, max_epochs=3, **options))
    assert [text.split(" by only")[0] for text in said] == ["Round 0: clients move their probabilities"] * times


def test_clients_count_the_same_whatever_their_number_of_examples(toy: TensorDataset, fit: Fit) -> None:
    uneven = ls.FederatedDataModule(toy, ls.NaturalPartitioner([0] * 30 + [1] * 90), val=toy, batch_size=10)
    fitted = fit(seeded(Small), uneven, algorithm=SMALL, clients_per_round=2, max_epochs=1)
    assert set(fitted.model.state.probs.tolist()) == {0.0, 0.5, 1.0}


@pytest.mark.slow
def test_it_learns_and_without_steps_of_the_scores_it_does_not(data: Any, fit: Fit) -> None:
    def accuracy(lr: float) -> float:
        algorithm = ls.Zampling(2, degree=3, link=ls.functional.zampling.Clip(absorbing=False))
        options: dict[str, Any] = {"max_epochs": 15, "local_epochs": 3}
        return fit(seeded(Small, lr=lr), data, algorithm=algorithm, **options).logged["accuracy"]

    # three classes, the largest with less than half of the examples
    assert accuracy(2.0) > 0.75
    with pytest.warns(ls.SpectralWarning, match="by only 0 a round"):
        assert accuracy(0.0) < 0.6


def test_coordinated_bits_have_a_mean_nearer_to_the_probabilities(data: Any, fit: Fit) -> None:
    """No client trains, so all have the same p: K p ones on average; coordinated, K p rounded down or up (K = 3)."""
    start = torch.rand(31, generator=derived_generator(0, "probabilities"))

    def ones(coordinated: bool) -> tuple[Tensor, int]:
        algorithm = ls.Zampling(4, degree=3, coordinated=coordinated)
        fitted = fit(seeded(Small), data, algorithm=algorithm, clients_per_round=3, local_epochs=0)
        return 3 * fitted.model.state.probs.detach(), fitted.ledger.rows[0].downlink_bytes

    (joint, more), (alone, bytes_down) = ones(coordinated=True), ones(coordinated=False)
    assert float((joint - 3 * start).abs().max()) < 1
    assert float((alone - 3 * start).abs().max()) > 1
    assert more == bytes_down + 8


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_probabilities_stay_in_float32_in_any_precision(precision: Any, data: Any, fit: Fit) -> None:
    fitted = fit(seeded(Small), data, algorithm=SMALL, max_epochs=2, trainer={"precision": precision})
    probs = fitted.model.state.probs.detach()
    quarters = torch.tensor([k / 4 for k in range(5)])
    assert probs.dtype == torch.float32
    assert bool(torch.isin(probs, quarters).all())
    assert fitted.ledger.rows[0].downlink_bytes == 4 * len(probs)
    # Qp, rounded to the weights' type, whose eps is the largest relative error of a rounding
    expected = dense_matrix(SMALL, fitted.module, 0) @ probs.double()
    eps = max(torch.finfo(fitted.weights.dtype).eps, 1e-6)
    torch.testing.assert_close(fitted.weights.double(), expected, rtol=eps, atol=1e-6)


def test_a_server_optimizer_cannot_push_probabilities_out_of_the_interval(data: Any, fit: Fit) -> None:
    fitted = fit(seeded(Small), data, algorithm=SMALL, max_epochs=3, server_optimizer=ls.FedAvgM(lr=2.0, momentum=0.9))
    probs = fitted.model.state.probs.detach()
    assert float(probs.min()) == 0.0
    assert float(probs.max()) == 1.0


@pytest.mark.parametrize(("smoothing", "absorbed"), [(0.0, True), (1.0, False)])
def test_smoothing_keeps_probabilities_alive(data: Any, fit: Fit, smoothing: float, absorbed: bool) -> None:
    fitted = fit(seeded(Small), data, algorithm=ls.Zampling(4, degree=3, smoothing=smoothing), max_epochs=4)
    probs = fitted.model.state.probs
    assert bool(((probs == 0) | (probs == 1)).any()) == absorbed


def test_a_client_whose_scores_are_not_finite_is_left_out_although_bits_always_are(data: Any, fit: Fit) -> None:
    def breaks(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and bool((batch[0] == data.train.tensors[0][0]).all(1).any()):
            with torch.no_grad():
                self.get_parameter("_zampling.scores")[0] = math.nan

    with pytest.warns(ls.SpectralWarning, match="is left out of the average: update not finite"):
        fitted = fit(seeded(variant(Small, on_train_batch_end=breaks)), data, algorithm=SMALL, max_epochs=2)
    assert fitted.history.rows[-1]["fl/left_out_not_finite"] == 1.0
    shares = torch.tensor([round(k / 3 * GRID) / GRID for k in range(4)])
    assert bool(torch.isin(fitted.model.state.probs.detach(), shares).all())  # of the three others


class TestRelatives:
    def test_a_supermask_has_a_random_weight_of_its_own_for_each_bit(self) -> None:
        Q = dense_matrix(ls.Zampling.supermask(), nn.Linear(40, 30), seed=0)
        assert torch.equal(Q, Q.diagonal().diag())
        assert Q.diagonal().unique().numel() > 1000

    def test_fed_pm_has_constants_of_e_and_normal_scores(self) -> None:
        """As in its authors' code: c = e sqrt(1 / fan-in), for biases as well, and scores from N(0, 1)."""
        net, algorithm = nn.Linear(40, 300), ls.Zampling.fed_pm()
        diagonal = dense_matrix(algorithm, net, seed=0).diagonal()
        torch.testing.assert_close(diagonal.abs(), torch.full((12300,), math.e * (1 / 40) ** 0.5).double())
        assert abs(int((diagonal > 0).sum()) - 6150) < 5 * (12300 / 4) ** 0.5
        probs = algorithm.new_state(net, seed=0).probs.detach().double()
        scores = torch.logit(probs, eps=1e-7).sort().values
        expected = torch.special.ndtri((torch.arange(12300).double() + 0.5) / 12300)
        distance = float((torch.special.ndtr(scores) - torch.special.ndtr(expected)).abs().max())
        assert distance < 1.95 / 12300**0.5  # Kolmogorov and Smirnov's bound at a level of 0.1 %
        uniform = replace(algorithm, normal_scores=False).new_state(net, seed=0).probs.detach()
        assert float(uniform.std()) > 1.2 * float(probs.std())

    def test_fed_pm_is_its_authors_code_written_out(self, data: Any, fit: Fit) -> None:
        """The mode of a Beta posterior, whose prior Beta(1, 1) is reset each round; gradients are multiplied by p."""

        def step(scores: Tensor, gradient: Tensor) -> Tensor:
            p = torch.sigmoid(scores)
            return scores - STEEP * (gradient * p) * p * (1 - p)

        algorithm, module = ls.Zampling.fed_pm(), seeded(Small, lr=STEEP)
        Q = dense_matrix(algorithm, module, seed=0)
        probs = torch.sigmoid(torch.randn(Q.shape[1], generator=derived_generator(0, "probabilities"))).double()
        net = seeded(Small).net.double()
        fitted = fit(module, data, algorithm=algorithm, max_epochs=2)
        for round_idx in range(2):
            alpha, beta = torch.ones_like(probs), torch.ones_like(probs)
            for client in range(4):
                scores = torch.logit(probs.clamp(0.01, 0.99))
                bits = local_bits(net, Q, data, (round_idx, client), scores, torch.sigmoid, step).double()
                alpha, beta = alpha + bits, beta + 1 - bits
            probs = (alpha - 1) / (alpha + beta - 2)
        assert float((fitted.model.state.probs.detach().double() - probs).abs().max()) <= 0.5 / GRID
        assert 0 < float(((probs == 0) | (probs == 1)).double().mean()) < 1

    def test_the_posterior_mean_has_one_more_zero_and_one_more_one(self, data: Any, fit: Fit) -> None:
        algorithm = ls.Zampling.fed_pm_posterior_mean()
        probs = fit(seeded(Small, lr=STEEP), data, algorithm=algorithm).model.state.probs.detach()
        assert bool(torch.isin(probs, torch.tensor([round(k / 6 * GRID) / GRID for k in range(1, 6)])).all())
        Q = dense_matrix(algorithm, nn.Linear(40, 30), seed=0)
        torch.testing.assert_close(Q.diagonal().abs(), torch.full((1230,), (4 / 40) ** 0.5).double())


FOR_ALL = r"one number for all clients, got .*bits of different matrices cannot be averaged"
ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fewer weights than bits": (
        {"compression": 0.5},
        ValueError,
        "`compression` must be at least 1 and finite, got 0.5; it is the number of weights",
    ),
    "no degree": ({"compression": 8, "degree": None}, ValueError, "so `compression` must be 1, got 8"),
    "smoothing": (
        {"smoothing": -1.0},
        ValueError,
        "`smoothing` must be at least 0 and finite, got -1.0; it is a pseudo-count",
    ),
    "bits": ({"downlink_bits": 32}, ValueError, r"`downlink_bits` must be in \[1, 16\], or None, got 32"),
    "shares of compressions": ({"compression": {8: 0.5, 32: 0.5}}, TypeError, FOR_ALL),
    "a list of compressions": ({"compression": [8, 32]}, TypeError, FOR_ALL),
    "a link of another type": ({"link": "sigmoid"}, TypeError, "`link`"),
}


class TestWhatIsRefused:
    @pytest.mark.parametrize("wrong", ARGUMENTS)
    def test_a_wrong_argument(self, wrong: str) -> None:
        options, error, message = ARGUMENTS[wrong]
        with pytest.raises(error, match=message):
            ls.Zampling(**options)

    def test_more_columns_a_row_than_there_are(self) -> None:
        with pytest.raises(ValueError, match="`degree` must be between 1 and the number of columns, 4, got 10"):
            ls.FederatedModule(Small(), algorithm=ls.Zampling(32), clients_per_round=1)

    def test_an_optimizer_that_trains_none_of_the_compressed_weights(self, data: Any, fit: Fit) -> None:
        module = variant(Small, configure_optimizers=lambda self: torch.optim.SGD(self.net[2].parameters(), lr=0.1))()
        before = module.net[0].weight.detach().clone()
        with pytest.raises(ValueError, match=r"^Zampling replaces net\.0\.weight, .* with random weights, which your"):
            fit(module, data, algorithm=ls.Zampling(2, degree=3, exclude=["net.2.*"]))
        assert torch.equal(module.net[0].weight, before)

    def test_weights_unfrozen_since_the_module_was_wrapped(self, data: Any, fit: Fit) -> None:
        module = Small()
        module.net[0].requires_grad_(False)
        model = fit(module, data, algorithm=SMALL).model
        module.net[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"net\.0\.weight changed since: .*in a new FederatedModule"):
            fit(model, data)
        fit(module, data, algorithm=SMALL)

    def test_groups_of_different_learning_rates(self, data: Any, fit: Fit) -> None:
        def two_rates(self: Any) -> torch.optim.Optimizer:
            first, last = self.net[0].parameters(), self.net[-1].parameters()
            return torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.1}], lr=3.0)

        TwoRates = variant(Small, configure_optimizers=two_rates)
        with pytest.raises(ValueError, match="one vector of scores for all compressed weights, so one optimizer must"):
            fit(seeded(TwoRates), data, algorithm=SMALL)
        fit(seeded(TwoRates), data, algorithm=ls.Zampling(2, degree=3, exclude=["net.2.*"]))

    def test_weight_decay_is_kept_from_the_scores_and_that_is_said(self, data: Any, fit: Fit) -> None:
        plain = fit(seeded(Small), data, algorithm=SMALL)
        with pytest.warns(ls.SpectralWarning, match=r"weight_decay=0.5 of SGD is not applied to Zampling's scores"):
            decayed = fit(
                seeded(Small, optimizer=partial(torch.optim.SGD, lr=3.0, weight_decay=0.5)), data, algorithm=SMALL
            )
        assert torch.equal(plain.model.state.probs, decayed.model.state.probs)


def test_frozen_layers_and_excluded_ones_stay_dense(data: Any, fit: Fit) -> None:
    module = seeded(Small)
    module.net[0].requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fitted = fit(module, data, algorithm=ls.Zampling(2, degree=3, exclude=["*.bias"]))
    assert torch.equal(fitted.state["net.0.weight"], before["net.0.weight"])
    assert fitted.model.state.probs.shape == (18,)  # of the 36 weights of the head
    assert 0 < float((fitted.state["net.2.bias"] - before["net.2.bias"]).abs().max()) < 1


def test_a_round_costs_no_warning_and_says_what_becomes_of_the_weights(
    data: Any, fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error", ls.SpectralWarning)
        partial(fit, max_epochs=2)(seeded(Small), data, algorithm=SMALL)
    assert "123 weights in 4 tensors become random combinations of 31 bits" in caplog.text
