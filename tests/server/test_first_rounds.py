"""The first rounds say why a run will not learn: once, when it is true, and not otherwise."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from federation import Fit, Fitted, said_during, seeded
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Known, Moment
from lightning_spectral.protocol.buffer_rules import buffer_rules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary, WorkUnit
from lightning_spectral.server.advice import FirstRounds, relative_updates, smaller_updates


def pushed(lr: float = 1e-3, losses: Sequence[float] = (1.0,)) -> LitNet:
    """Every step moves every weight by the learning rate; the loss of each round is given."""

    def loss(lit: Any, batch: Any) -> Any:
        push = lit.net.weight.sum()
        return push - push.detach() + losses[min(lit.trainer.current_epoch, len(losses) - 1)]

    return LitNet(nn.Linear(6, 6), lr, loss=loss)


def wide() -> LitNet:
    """Wide enough for the spectrum of its middle layer to be that of a random matrix."""
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    return LitNet(nn.Sequential(*layers), lr=0.05)


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), batch_size=4)


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


def random_start(**options: Any) -> ls.SpectralSharding:
    return ls.SpectralSharding(**{"strategy": ls.Unbiased(), "keep_ratio": 0.1, "spectral_start": None, **options})


class TestUpdates:
    def test_an_update_that_dwarfs_its_weight_is_named_once(self, data: Any, fit: Fit) -> None:
        module = seeded(pushed, lr=3.0)
        norm = float(module.net.weight.detach().norm())
        said = said_during(lambda: fit(module, data))
        (message,) = [text for text in said if "mean update" in text]
        ratio = 3 * 3.0 * 6 / norm  # three steps a client, 36 equal entries
        assert message.startswith(f"Round 0: the clients' mean update of 'net.weight' is {ratio:.3g} times as large")
        assert "Lower the learning rate" in message
        assert said == [message]

    def test_a_quarter_of_it_is_nothing_to_mention(self, data: Any, fit: Fit) -> None:
        assert said_during(lambda: fit(seeded(pushed, lr=0.75), data)) == []

    def test_vectors_and_weights_that_are_nearly_zero_are_left_out(self) -> None:
        layer, zero = nn.Linear(3, 3), nn.Linear(3, 3)
        for parameter in (*layer.parameters(), *zero.parameters()):
            parameter.grad = torch.full_like(parameter, 7.0)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.constant_(zero.weight, 1e-4)
        assert list(relative_updates(nn.Sequential(layer, zero))) == [(pytest.approx(14.0), "0.weight")]
        assert list(relative_updates(nn.Sequential(nn.Linear(3, 3)))) == []  # a round without survivors

    def test_the_worst_is_named_and_later_rounds_are_not_watched(self) -> None:
        server = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for layer, push in zip(server, (20.0, 30.0), strict=True):
            nn.init.constant_(layer.weight, 1.0)
            layer.weight.grad = torch.full_like(layer.weight, push)
        watch = FirstRounds()
        (message,) = said_during(lambda: [watch.end(ls.FedAvg().bind(server), summary_of(9, 1.0)) for _ in range(2)])
        assert message.startswith("Round 9: the clients' mean update of '1.weight' is 30 times")
        assert said_during(lambda: FirstRounds().end(ls.FedAvg().bind(server), summary_of(10, 1.0))) == []


@pytest.mark.parametrize(
    ("algorithm", "advised"),
    [(ls.FedAvg(), False), (ls.SpectralSharding(), False), (ls.SpectralSharding(clip_weight_lr=3.0), True)],
    ids=["no such bound", "bounded", "not bounded"],
)
def test_a_bound_is_advised_only_if_the_algorithm_has_one_that_is_not_set(algorithm: Any, advised: bool) -> None:
    half = algorithm.bind(nn.Sequential(*(seeded(nn.Linear, 8, 8) for _ in range(3))))
    nn.init.constant_(half.server[1].weight, 1.0)
    half.server[1].weight.grad = torch.full((8, 8), 20.0)
    watch = FirstRounds()
    update, loss = said_during(lambda: [watch.end(half, summary_of(r, value)) for r, value in enumerate((1.0, 9.0))])
    lost = replace(summary_of(0, 1.0).clients[0], left_out="not_finite")
    with pytest.raises(ls.errors.RoundError) as caught:
        ls.Faults().check_round(0, [lost], smaller_updates(half))
    for message in (update, loss, str(caught.value)):
        assert "Lower the learning rate, " in message
        assert ("with `clip_weight_lr=1`" in message) == advised


def summary_of(round_idx: int, loss: float) -> RoundSummary:
    return RoundSummary(round_idx, (ClientOutcome(round_idx, WorkUnit(0), 1.0, 10, 3, loss, 0, 0),), {}, {}, {})


class TestLosses:
    @pytest.mark.parametrize(
        ("losses", "told"),
        [
            ([2.0, 5.9, 6.1, 100.0], "Round 2: the training loss is 6.1, 3.05 times that of round 0 (2)."),
            ([math.nan, 2.0, 7.0], "Round 2: the training loss is 7, 3.5 times that of round 1 (2)."),
            ([1.0] * 19 + [4.0], "Round 19: the training loss is 4, 4 times that of round 0 (1)."),
            ([1.0] * 20 + [4.0], None),
            ([2.0, math.inf, math.nan], None),
            ([-2.0, 50.0], None),
            ([0.0, 50.0], None),
            ([1e-3, 50.0], None),
            ([6.0, 2.0, 6.1, 1.0], None),
        ],
    )
    def test_a_loss_far_above_its_start_is_told_once(self, losses: list[float], told: str | None) -> None:
        watch, silent = FirstRounds(), FirstRounds(warns=False)

        def run(watch: FirstRounds) -> None:
            for round_idx, loss in enumerate(losses):
                watch.end(ls.FedAvg().bind(nn.Linear(1, 1)), summary_of(round_idx, loss))

        assert [text.split(" Lower")[0] for text in said_during(lambda: run(watch))] == ([told] if told else [])
        assert said_during(lambda: run(silent)) == []

    def test_it_is_the_loss_that_is_logged(self, data: Any, fit: Fit) -> None:
        with pytest.warns(ls.SpectralWarning, match=r"Round 2: the training loss is 8, 4 times that of round 0 \(2\)"):
            fitted = fit(pushed(losses=[2.0, 5.0, 8.0]), data)
        assert [row["fl/loss"] for row in fitted.rows] == pytest.approx([2.0, 5.0, 8.0])


class TestSubModels:
    def test_random_terms_of_random_weights_are_told_once_with_the_figure(self, data: Any, fit: Fit) -> None:
        (message,) = said_during(lambda: fit(seeded(wide), data, algorithm=random_start()))
        assert message.startswith("Round 0: sub-models of keep ratio 0.1 are mostly noise: the expected")
        figure, least = (float(re.search(rf"{words} ([0-9.]+\d)", message)[1]) for words in ("of one is", "be below"))
        assert 4.0 < figure < 9.0  # (1 / r - 1) where the spectrum is flat, and somewhat less where it is not
        assert 0.5 < least < 0.9
        start = "`spectral_start=ls.SpectralStart()` too, unless you compare strategies"
        assert f"Use a larger keep ratio or {start}, which are equal then; ls.plugin.callbacks.Spec" in message

    def test_remedies_are_those_that_are_left(self, data: Any, fit: Fit) -> None:
        algorithm = random_start(spectral_start=ls.SpectralStart())  # half of what Unbiased draws is tail
        (message,) = said_during(lambda: fit(seeded(wide), data, algorithm=algorithm))
        assert "Use a larger keep ratio or ls.TopN(), which has the least error;" in message
        assert said_during(lambda: fit(seeded(wide), data, algorithm=replace(algorithm, strategy=ls.TopN()))) == []

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        "algorithm",
        [
            ls.FedAvg(),
            ls.SpectralSharding(),
            random_start(strategy=ls.Collective(), spectral_start=ls.SpectralStart()),
            random_start(keep_ratio=1.0),
            random_start(strategy=ls.TopN(), keep_ratio=0.6),
        ],
        ids=repr,
    )
    def test_a_healthy_run_is_told_nothing(self, algorithm: Any, data: Any, fit: Fit) -> None:
        run = partial(fit, seeded(wide), data, algorithm=algorithm)
        assert said_during(lambda: run(callbacks=[ls.plugin.callbacks.UpdateAlignment(1)])) == []

    def test_a_resumed_run_has_been_told(self, data: Any, fit: Fit, tmp_path: Any) -> None:
        fitted: list[Fitted] = []
        assert len(said_during(lambda: fitted.append(fit(seeded(wide), data, algorithm=random_start())))) == 1
        fitted[0].trainer.save_checkpoint(ckpt := tmp_path / "three rounds.ckpt")
        resumed = partial(fit, seeded(wide), data, max_epochs=5, ckpt_path=ckpt, algorithm=random_start())
        assert said_during(resumed) == []

    def test_the_worst_keep_ratio_is_named(self) -> None:
        algorithm, server = random_start(), seeded(wide)
        cohort = Cohort(0, 0, {ratio: (WorkUnit(2 * i), WorkUnit(2 * i + 1)) for i, ratio in enumerate((0.5, 0.1))})
        half = algorithm.bind(server)
        opened: Any = half.open(cohort)
        errors = opened.term_draws["net.2"].client_errors()
        assert errors[0.1] > 1 > errors[0.5]
        (told,) = half.advice(Moment.BEFORE_TRAINING, opened)
        assert told.startswith("sub-models of keep ratio 0.1 are mostly noise")
        assert f"the expected squared error of one is {errors[0.1]:.3g} times" in told

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "strategy", [ls.Unbiased(), ls.Collective(), ls.PriSM(), ls.sharding.Scaled(ls.TopN())], ids=repr
    )
    def test_the_figure_is_the_mean_over_draws(self, strategy: Any) -> None:
        server, num_draws = seeded(wide), 2000
        units = tuple(map(WorkUnit, range(num_draws)))
        opened: Any = random_start(strategy=strategy, keep_ratio=0.3).bind(server).open(Cohort(0, 0, {0.3: units}))
        weight = server.net[2].weight.detach()
        errors = []
        for unit in units:
            sent = opened.send(unit)[0].tensors
            sub_model = (sent["net.2.u"] * sent["net.2.omega"]) @ sent["net.2.v"]
            errors.append(float((weight - sub_model).square().sum() / weight.square().sum()))
        found = torch.tensor(errors)
        five_sigma = 5 * float(found.std()) / num_draws**0.5 + 1e-5
        assert abs(float(found.mean()) - opened.term_draws["net.2"].client_errors()[0.3]) <= five_sigma


def test_a_second_fit_is_watched_anew(data: Any, fit: Fit) -> None:
    model = ls.FederatedModule(seeded(pushed, lr=3.0), clients_per_round=2)
    told = [said_during(lambda: fit(model, data, max_epochs=1)) for _ in range(2)]
    assert [len(texts) for texts in told] == [1, 0]  # by then the weights are as large as the updates


@pytest.mark.slow
def test_a_default_fit_on_clients_that_differ_is_told_nothing(lit_mlp: Any, toy: TensorDataset, fit: Fit) -> None:
    data = ls.FederatedDataModule(toy, ls.DirichletPartitioner(num_clients=8, alpha=0.5), batch_size=4)
    for algorithm in (None, ls.SpectralSharding(), ls.SpectralSharding(keep_ratio={0.2: 0.5, 0.4: 0.5})):
        run = partial(fit, seeded(lit_mlp), data, algorithm=algorithm, clients_per_round=4, max_epochs=8)
        assert said_during(lambda run=run: run()) == []


def normed() -> LitNet:
    """With a BatchNorm whose averages can be estimated."""
    return LitNet(nn.Sequential(nn.BatchNorm1d(6), *wide().net), lr=0.05, example=torch.zeros(2, 6))


KEPT = {"*.running_*": "server"}
STEP_WIDTHS = ls.WidthSharding(keep_ratio=1.0, step_widths=(0.5, 1.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"buffers": KEPT},
        {"algorithm": ls.WidthSharding(), "buffers": KEPT},
        {"algorithm": STEP_WIDTHS, "buffers": KEPT},
        {"algorithm": ls.LoRA(2, None)},
    ],
    ids=repr,
)
def test_averages_that_nobody_sets_are_named(options: dict[str, Any], data: Any, fit: Fit) -> None:
    (said,) = said_during(lambda: fit(seeded(normed), data, max_epochs=2, **options))
    assert said.startswith("Round 0: the running averages of net.0 are still 0 and 1")
    estimation = ls.plugin.callbacks.BatchNormEstimation(every_n_rounds=2)
    assert said_during(lambda: fit(seeded(normed), data, max_epochs=2, callbacks=[estimation], **options)) == []
    learned = seeded(normed)
    learned.net[0].running_mean += 0.1
    assert said_during(lambda: fit(learned, data, max_epochs=1, **options)) == []


def test_averages_may_rest_where_all_steps_of_a_round_may_be_narrow() -> None:
    narrow, at_server, whole = (
        half.advice(Moment.RESTING_AVERAGES)
        for half in (
            STEP_WIDTHS.bind(seeded(normed)),
            STEP_WIDTHS.bind(seeded(normed), known=Known(buffer_rules(seeded(normed), KEPT))),
            ls.WidthSharding().bind(seeded(normed)),
        )
    )
    assert narrow
    assert not at_server
    assert not whole


def test_averages_of_clients_and_those_of_a_round_without_any_are_not_named(data: Any, fit: Fit) -> None:
    assert said_during(lambda: fit(seeded(normed), data, max_epochs=2)) == []
    assert said_during(lambda: fit(seeded(normed), data, buffers=KEPT, local_epochs=0, max_epochs=2)) == []
