"""What a run says of its losses, of layers that no client trains and of broken weights; and what a round logs."""

import functools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, said_during, seeded
from observed_runs import in_round
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, variant

import lightning_spectral as ls
from lightning_spectral.client.device import WATCHED_ROUNDS
from lightning_spectral.protocol.records import ClientOutcome, LoggedValue, RoundSummary, WorkUnit
from lightning_spectral.server.advice import FirstRounds, check_weights
from lightning_spectral.server.metrics import round_means, round_metrics


def flat(learns_after: int = 1000) -> LitNet:
    """A network whose loss stays at 2, but falls to 0.1 after some rounds."""

    def loss(lit: Any, batch: Any) -> Tensor:
        outputs = lit(batch[0]).sum()
        return outputs - outputs.detach() + (0.1 if lit.trainer.current_epoch >= learns_after else 2.0)

    return LitNet(nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)), lr=1e-6, loss=loss)


@pytest.fixture
def told(toy: TensorDataset, fit: Fit) -> Any:
    """What a fit says; of one client with one batch in each round."""
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), batch_size=4)

    def run(module: Any, algorithm: ls.Algorithm, max_epochs: int = 31, **options: Any) -> list[str]:
        options = {"clients_per_round": 1, "local_epochs": 1, **options}
        return said_during(partial(fit, module, data, algorithm=algorithm, max_epochs=max_epochs, **options))

    return run


def test_it_is_told_after_thirty_rounds_with_the_figures_and_the_remedies(told: Any) -> None:
    (message,) = told(seeded(flat), ls.SpectralSharding())
    assert message == (
        "Round 29: the training loss has hardly fallen since rounds 5 to 9: 2 now, 2 then. If the validation metrics "
        "do not improve either, clip gradients with `local_hooks=[GradientClip(1.0)]`; if `FedAvg()` learns on the "
        "same clients, also try twice and four times its learning rate, then a larger keep ratio."
    )
    assert told(seeded(flat), ls.SpectralSharding(), max_epochs=29) == []


@pytest.mark.parametrize(
    "algorithm", [ls.FedAvg(), ls.SpectralSharding(spectral_start=None, keep_ratio=0.8)], ids=["FedAvg", "no start"]
)
def test_nothing_is_told_where_no_random_weights_were_started(algorithm: ls.Algorithm, told: Any) -> None:
    """Fine-tuning may have little left to learn."""
    assert not [text for text in told(seeded(flat), algorithm) if "hardly fallen" in text]


def test_nothing_is_told_of_a_run_that_learns(told: Any) -> None:
    assert told(seeded(flat, learns_after=20), ls.SpectralSharding()) == []


def said(losses: Iterable[tuple[int, float]]) -> dict[int, str]:
    """What is said of the losses of some rounds after a spectral start, by round."""
    half = ls.SpectralSharding().bind(seeded(flat))
    half.started = frozenset(["net.1"])
    watch = FirstRounds()
    return {r: text for r, loss in losses if (text := watch.note_loss(half, loss, r))}


@pytest.mark.parametrize(
    ("losses", "flat"),
    [
        ([2.3] * 30, True),
        ([5.0] * 5 + [2.6] * 25, True),  # more than half of the first
        ([6.0] * 5 + [2.6] * 25, False),  # less: it may have converged
        ([2.3] * 10 + [2.1] * 20, True),
        ([2.3] * 10 + [2.0] * 20, False),
        ([2.3] * 25 + [1.0, 1.0, 2.3, 2.3, 2.3], False),  # the mean counts
        ([2.3] * 25 + [3.0] * 5, True),
        ([2.3] * 25 + [30.0] * 5, False),  # something else is wrong
        ([-2.3] * 30, False),
        ([0.0] * 30, False),
        ([math.nan] * 2 + [2.3] * 28, True),  # nobody trained in two rounds
        ([2.3] * 7 + [math.nan] + [2.3] * 22, True),
        ([2.3] * 29 + [math.inf], True),  # one bad round of 30
        ([math.nan] * 10 + [2.3] * 20, False),  # resumed after round 9
        ([2.3] * 25 + [math.nan] * 5, False),
        ([math.nan] * 30, False),
        ([2.3] * 25 + [math.inf, -math.inf] * 2 + [math.nan], False),
    ],
)
def test_flat_is_what_has_hardly_fallen_since_the_first_few_rounds(losses: list[float], flat: bool) -> None:
    assert list(said([*enumerate(losses), *enumerate(losses, 30)])) == ([29] if flat else [])


def test_a_model_that_idles_in_the_last_of_these_rounds_is_told_in_its_next() -> None:
    rounds = [0, 3, 6, 7, 8, 12, 20, 26, 28, 33, 34]  # those in which this model was trained
    assert list(said([(r, 2.3) for r in rounds])) == [33]


def test_a_run_that_exploded_is_not_called_flat_as_well() -> None:
    told = said(enumerate([1.0, *[4.0] * 40]))
    assert list(told) == [1]
    assert told[1].startswith("the training loss is 4, 4 times that of round 0 (1). Lower the learning rate")


Use = Callable[[Any, int], list[int]]  # from the module and the class of a batch to the experts that it uses
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)


def but_the_last(lit: Any, label: int) -> list[int]:
    return [0, 1]


def with_experts(lit_mlp: Any, use: Use) -> Any:
    """A module with three layers of its own before its network; a client uses some of them."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for expert in use(self, int(y[0])):
            x = x + self.experts[expert](x)
        return lit_mlp.training_step(self, (x, y), batch_idx)

    def prepare(lit: Any) -> None:
        lit.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    return seeded(variant(lit_mlp, prepare, training_step=training_step))


@pytest.fixture
def by_class(toy: TensorDataset) -> ls.FederatedDataModule:
    """Three clients, each with the examples of one class."""
    return ls.FederatedDataModule(toy, ls.NaturalPartitioner(toy.tensors[1]), batch_size=40)


@pytest.fixture
def fit_one(fit: Fit, by_class: ls.FederatedDataModule) -> Any:
    sharding = ls.SpectralSharding(keep_ratio=0.5, layers=EVERY_LAYER)
    return partial(fit, data=by_class, algorithm=sharding, clients_per_round=1)


@pytest.mark.parametrize(
    "use",
    [
        lambda lit, label: [label],
        lambda lit, label: [expert for expert in range(3) if torch.rand(()) < 0.5],
        lambda lit, label: list(range(min(lit.current_epoch + 1, 3))),
    ],
    ids=["of the class", "at random", "unfrozen"],
)
def test_layers_that_some_client_trains_are_no_concern(use: Use, lit_mlp: Any, fit_one: Any) -> None:
    lit = with_experts(lit_mlp, use)
    before = [expert.weight.clone() for expert in lit.experts]
    assert said_during(lambda: fit_one(lit, max_epochs=WATCHED_ROUNDS)) == []
    assert not any(torch.equal(expert.weight, w) for expert, w in zip(lit.experts, before, strict=True))


@pytest.mark.parametrize(("num_rounds", "last"), [(1, 0), (WATCHED_ROUNDS, 9), (WATCHED_ROUNDS + 1, 9)])
def test_a_layer_that_no_client_trains_is_named_once(num_rounds: int, last: int, lit_mlp: Any, fit_one: Any) -> None:
    (said,) = said_during(lambda: fit_one(with_experts(lit_mlp, but_the_last), max_epochs=num_rounds))
    assert said.startswith(f"Round {last}: no client has given a gradient to these sharded layers: experts.2. If `tr")
    assert "SpectralSharding(exclude=[...])" in said


def saving(path: Path, round_idx: int) -> ls.RoundCallback:
    return in_round(round_idx, on_train_epoch_end=lambda trainer, model: trainer.save_checkpoint(path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saved", [2, WATCHED_ROUNDS - 1])
def test_a_resumed_run_knows_who_had_a_gradient_before(saved: int, lit_mlp: Any, fit_one: Any, tmp_path: Path) -> None:
    """After the checkpoint no client uses the first two layers; the last is used then, or the first rounds are over."""
    path = tmp_path / "saved.ckpt"
    first = with_experts(lit_mlp, but_the_last)
    assert len(said_during(lambda: fit_one(first, max_epochs=saved + 1, callbacks=[saving(path, saved)]))) == 1
    again = with_experts(lit_mlp, lambda lit, label: [2])
    assert said_during(lambda: fit_one(again, max_epochs=WATCHED_ROUNDS + 1, ckpt_path=path)) == []


def test_a_resumed_run_still_names_a_layer_that_nobody_trains(lit_mlp: Any, fit_one: Any, tmp_path: Path) -> None:
    path, lit = tmp_path / "saved.ckpt", partial(with_experts, lit_mlp, but_the_last)
    said_during(lambda: fit_one(lit(), max_epochs=3, callbacks=[saving(path, 2)]))
    (said,) = said_during(lambda: fit_one(lit(), max_epochs=WATCHED_ROUNDS, ckpt_path=path))
    assert "layers: experts.2." in said


ALGORITHMS = [
    ls.FedAvg(),
    ls.SpectralSharding(keep_ratio=0.5),
    ls.SpectralSharding(keep_ratio=0.5, spectral_start=None),
]
TOLERANT = ls.Faults(on_error=ls.LeaveOut(1.0), on_not_finite=ls.LeaveOut(1.0))


class Breaks(torch.optim.SGD):
    """Puts a value into one weight at each step."""

    value = math.nan

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][self.which].view(-1)[0] = self.value


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize(("which", "name"), [(0, "net.0.weight"), (2, "net.2.weight"), (5, "net.5.bias")])
@pytest.mark.parametrize("faults", [None, TOLERANT], ids=["default", "tolerant"])
def test_a_server_step_that_broke_a_weight_is_named(
    algorithm: Any, which: int, name: str, faults: Any, lit: Any, data: Any, fit: Fit
) -> None:
    breaking = partial(variant(Breaks, which=which), lr=1.0)
    options = {"algorithm": algorithm, "server_optimizer": breaking, "faults": faults}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ls.SpectralWarning)  # no client is left out on the way
        with pytest.raises(ls.errors.RoundError) as caught:
            fit(lit, data, max_epochs=3, trainer={"limit_val_batches": 0}, **options)
    told = str(caught.value)
    assert told.startswith(f"Round 1: the server's weights were not finite before it began: '{name}' had a NaN")
    assert "the server optimizer's step did it" in told
    assert "client 1" not in told


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("layer", [0, 2])
def test_initial_weights_are_named(algorithm: Any, layer: int, lit: Any, data: Any, fit: Fit) -> None:
    nn.init.constant_(lit.net[layer].weight, math.inf)
    with pytest.raises(
        ls.errors.RoundError, match=rf"Round 0: .* 'net.{layer}.weight' had .* These are the initial weights"
    ):
        fit(lit, data, algorithm=algorithm)


def failing_step(batch: Any, batch_idx: int) -> Any:
    raise FloatingPointError("NaN in the logits")


@pytest.mark.parametrize("faults", [ls.Faults(), TOLERANT], ids=["raise", "leave out"])
def test_a_step_that_fails_on_such_weights_is_not_the_clients_fault(
    faults: ls.Faults, lit: Any, data: Any, fit: Fit
) -> None:
    nn.init.constant_(lit.net[0].bias, math.nan)
    lit.training_step = failing_step
    with pytest.raises(ls.errors.RoundError, match=r"Round 0: the server's weights .* 'net.0.bias'") as caught:
        fit(lit, data, faults=faults)
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_a_client_is_still_to_blame_where_the_server_is_fine(lit: Any, data: Any, fit: Fit) -> None:
    lit.register_buffer("mask", torch.full((3,), -math.inf))
    lit.frozen_mask = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    lit.training_step = failing_step
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: FloatingPointError: NaN in"):
        fit(lit, data)


def test_a_healthy_round_never_reads_the_weights(data: Any, lit: Any, fit: Fit, monkeypatch: Any) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("a pass over all weights")

    for module in ("round", "advice"):
        monkeypatch.setattr(f"lightning_spectral.server.{module}.check_weights", read)
    fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5), max_epochs=2)


def test_many_broken_weights_are_counted(lit_mlp: Any) -> None:
    module = seeded(lit_mlp)
    check_weights(module, 3)
    for parameter in module.parameters():
        nn.init.constant_(parameter, math.nan)
    with pytest.raises(
        ls.errors.RoundError, match=r"^Round 3: .*: 'net.0.weight', 'net.0.bias', 'net.2.weight' and 3 more had"
    ):
        check_weights(module, 3)


def outcome(client_id: int, size: int, loss: float, logged: dict[str, float]) -> ClientOutcome:
    entries = {name: LoggedValue(value, prog_bar=True, logger=False) for name, value in logged.items()}
    return ClientOutcome(0, WorkUnit(client_id, coefficient=size), 1.0, size, 1, loss, 8, 8, logged=entries)


def test_what_clients_logged_is_weighted_by_their_examples() -> None:
    means = round_means([outcome(0, 4, 0.0, {"loss": 2.0}), outcome(1, 6, 0.0, {"loss": 7.0, "rare": 3.0})])
    assert means["loss"] == LoggedValue(pytest.approx((4 * 2.0 + 6 * 7.0) / 10), prog_bar=True, logger=False)
    assert means["rare"].value == 3.0


def test_means_of_a_round_do_not_depend_on_the_order_of_its_clients() -> None:
    generator = random.Random(0)
    clients = [outcome(i, 1 + i, generator.gauss(0, 10.0 ** (i % 9)), {}) for i in range(20)]
    losses = set()
    plain = set()
    for _ in range(20):
        generator.shuffle(clients)
        losses.add(round_metrics(RoundSummary(0, tuple(clients), {}, {}, {}))["fl/loss"])
        plain.add(functools.reduce(operator.add, (client.loss * client.num_examples for client in clients)))
    assert len(losses) == 1
    assert len(plain) > 1  # or the test would show nothing


@pytest.mark.parametrize(
    ("values", "expected", "not_finite"),
    [([math.inf, 1.0], 1.0, 1.0), ([math.inf, -math.inf], math.nan, 2.0), ([1.0, 3.0], 2.0, None)],
)
def test_means_are_over_what_is_finite_and_the_rest_is_counted(
    values: list[float], expected: float, not_finite: float | None
) -> None:
    clients = [outcome(i, 1, value, {"x": value}) for i, value in enumerate(values)]
    metrics = round_metrics(RoundSummary(0, tuple(clients), {}, {}, {}))
    for mean in (round_means(clients)["x"].value, metrics["fl/loss"]):
        assert mean == pytest.approx(expected, nan_ok=True)
    assert metrics.get("fl/values_not_finite") == (None if not_finite is None else 2 * not_finite)  # loss and x
