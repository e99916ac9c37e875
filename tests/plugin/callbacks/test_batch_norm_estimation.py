"""Re-estimated BatchNorm averages, compared with averages computed by their formulas."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, check_resumes, same_state, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from observed_runs import acting, with_and_without
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, LitSmall, variant

import lightning_spectral as ls
from lightning_spectral.errors import RoundError
from lightning_spectral.plugin.callbacks import BatchNormEstimation

pytestmark = pytest.mark.filterwarnings("ignore:Round .. clients change num_steps")  # and the server keeps its own
Train = Callable[..., Fitted]
KEEP = {"*.running_*": "server"}
AVERAGES = ("net.1.running_mean", "net.1.running_var", "net.4.running_mean", "net.4.running_var")


class LitTwo(LitMLP):
    """Two BatchNorm layers that average over steps in different ways, followed by dropout, and a step counter."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(dropout=dropout)
        layers = list(self.net)
        self.net = nn.Sequential(
            layers[0], nn.BatchNorm1d(12), nn.ReLU(), layers[2], nn.BatchNorm1d(12, momentum=None), *layers[3:]
        )
        self.register_buffer("num_steps", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


@pytest.fixture
def train(fit: Fit, toy: TensorDataset) -> Train:
    return lambda data=None, **options: fit(seeded(LitTwo), data or clients(toy), **options)


def clients(toy: TensorDataset, **options: Any) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, test=toy, batch_size=5, **options)


def written_out(lit: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """Mean over batches of each layer's mean and unbiased variance, by their formulas, in double precision."""
    found: dict[str, list[Tensor]] = {name: [] for name in AVERAGES}
    weights = {name: value.double() for name, value in lit.state_dict().items()}
    for x in batches:
        h = x.double()
        for linear, norm in (("net.0", "net.1"), ("net.3", "net.4")):
            h = h @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"]
            mean = h.sum(0) / len(h)
            squares = ((h - mean) ** 2).sum(0)
            found[f"{norm}.running_mean"].append(mean)
            found[f"{norm}.running_var"].append(squares / (len(h) - 1))
            h = (h - mean) / (squares / len(h) + 1e-5).sqrt()
            h = (h * weights[f"{norm}.weight"] + weights[f"{norm}.bias"]).relu()
    return {name: torch.stack(values).mean(0) for name, values in found.items()}


def assert_close(state: Any, expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        # float32 sums of up to 120 values of order one, through two layers
        torch.testing.assert_close(state[name].double(), value, rtol=1e-5, atol=1e-6)


class LitTeacher(LitTwo):
    """Takes part of its input from a frozen network in eval mode, and has a layer that steps do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).requires_grad_(False).eval()
        self.teacher[0].running_mean.fill_(2.0)
        self.aside = nn.BatchNorm1d(3).requires_grad_(False)
        self.aside.running_var.fill_(4.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((self.teacher(x), y), batch_idx)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_layers_that_no_client_trains_keep_their_averages(toy: TensorDataset, fit: Fit) -> None:
    lit = seeded(LitTeacher)
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    fitted = fit(lit, clients(toy), callbacks=[BatchNormEstimation()])
    frozen = [name for name, _ in lit.named_buffers() if name.startswith(("teacher", "aside"))]
    assert len(frozen) == 6
    assert all(torch.equal(fitted.state[name], before[name]) for name in frozen)
    with torch.no_grad():
        seen = lit.teacher(toy.tensors[0])
    assert_close(fitted.state, written_out(fitted.module, [seen]))


@pytest.mark.parametrize("max_batches", [None, 3])
def test_batches_are_nearly_equal_and_count_equally(max_batches: int | None, toy: TensorDataset, train: Train) -> None:
    data = clients(toy, eval_batch_size=17, client_val_fraction=0.25)
    fitted = train(data=data, callbacks=[BatchNormEstimation(max_batches=max_batches)])
    batches = [x for x, _ in data.shuffled_batches(0, ("BatchNorm estimation", 2), max_batches)]
    assert [len(x) for x in batches] == [16, 16, 16, 16, 16, 16][:max_batches]  # 96 of 120 examples are for training
    trained = {tuple(row) for row in toy.tensors[0][data.partition.indices].tolist()}
    shown = [tuple(row) for x in batches for row in x.tolist()]
    assert set(shown) <= trained
    assert len(set(shown)) == len(shown) == (len(trained) if max_batches is None else 48)
    assert_close(fitted.state, written_out(fitted.module, batches))
    other = [x for x, _ in data.shuffled_batches(0, ("BatchNorm estimation", 1), max_batches)]
    assert not torch.equal(other[0], batches[0])


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Round 0. the running averages of:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5}, scaler=True), ls.SpectralSharding(keep_ratio=0.5)],
    ids=["FedAvg", "width", "spectral"],
)
def test_training_and_global_draws_are_those_without_it(algorithm: Any, toy: TensorDataset, train: Train) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        ours = train(algorithm=algorithm, buffers=KEEP, callbacks=[BatchNormEstimation()])
        after = torch.rand(3)
        torch.manual_seed(5)
        plain = train(algorithm=algorithm, buffers=KEEP)
        assert torch.equal(torch.rand(3), after)
    assert torch.equal(ours.weights, plain.weights)
    assert torch.equal(plain.state["net.1.running_mean"], torch.zeros(12))  # the server's own, unchanged
    assert ours.state["num_steps"] == 0  # the steps were taken by a copy
    assert ours.state["net.1.num_batches_tracked"] == 1  # 120 examples, batches of up to 256
    assert_close(ours.state, written_out(ours.module, [toy.tensors[0]]))
    one, two = (with_and_without(fitted.rows, "val")[1] for fitted in (ours, plain))
    assert one == two
    assert ours.rows != plain.rows
    assert ours.ledger.rows == plain.ledger.rows
    averaged = train()
    if isinstance(algorithm, ls.FedAvg):
        assert averaged.ledger.rows[0].uplink_bytes - ours.ledger.rows[0].uplink_bytes == 4 * len(AVERAGES) * 12


def test_validation_and_checkpoints_have_the_new_averages(toy: TensorDataset, train: Train, tmp_path: Path) -> None:
    """`ClientEvaluation` precedes it in the list but acts after it."""

    class Evaluation(ls.ClientEvaluation):
        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            seen.append({name: pl_module.module.state_dict()[name].clone() for name in AVERAGES})
            super().on_round_end(trainer, pl_module, summary)

    seen: list[dict[str, Tensor]] = []
    data = clients(toy, client_val_fraction=0.25)
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    fitted = train(
        data=data,
        buffers=KEEP,
        callbacks=[Evaluation(), BatchNormEstimation(), saver],
        trainer={"enable_checkpointing": True},
    )
    trained = toy.tensors[0][data.partition.indices]
    for round_idx in range(3):
        state = torch.load(tmp_path / f"{round_idx}.ckpt", weights_only=True)["state_dict"]
        lit = seeded(LitTwo)
        lit.load_state_dict(state)
        assert_close(state, written_out(lit, [trained]))
        assert same_state({name: state[name] for name in AVERAGES}, seen[round_idx])
        with torch.no_grad():
            expected = nn.functional.cross_entropy(lit.eval()(toy.tensors[0]), toy.tensors[1])
        assert fitted.rows[round_idx]["val_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_it_acts_in_the_rounds_that_are_validated_and_after_the_last(train: Train) -> None:
    means: list[Tensor] = []
    seen = acting(on_round_end=lambda trainer, model, summary: means.append(model.module.net[1].running_mean.clone()))
    callbacks = [BatchNormEstimation(every_n_rounds=2), seen]
    train(buffers=KEEP, callbacks=callbacks, max_epochs=5, trainer={"check_val_every_n_epoch": 2})
    changes = [bool((one != two).any()) for one, two in zip([torch.zeros(12), *means], means, strict=False)]
    assert changes == [False, True, False, True, True]


def test_a_run_resumes(toy: TensorDataset, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitTwo, clients(toy, eval_batch_size=17), tmp_path, callbacks=[BatchNormEstimation()])


def test_each_of_several_models_that_has_averages_gets_its_own(toy: TensorDataset, quiet: Any) -> None:
    models = {name: ls.FederatedModule(seeded(lit)) for name, lit in (("two", LitTwo), ("none", LitMLP))}
    federation = ls.MultiModelModule(models, participation=ls.FullParticipation())
    data = ls.MultiModelDataModule({name: clients(toy) for name in models})
    pl.Trainer(max_epochs=2, callbacks=[BatchNormEstimation()], num_sanity_val_steps=0, **quiet).fit(federation, data)
    lit = models["two"].module
    assert_close(lit.state_dict(), written_out(lit, [toy.tensors[0]]))


def test_averages_per_width_without_a_client_of_the_whole_width_are_refused(train: Train) -> None:
    def run(keep_ratio: Any, widths: Any) -> None:
        algorithm = ls.WidthSharding(keep_ratio=keep_ratio, step_widths=widths, averages_per_width=True)
        train(algorithm=algorithm, callbacks=[BatchNormEstimation()], max_epochs=1)

    run({0.5: 0.5, 1.0: 0.5}, (0.25, 0.5, 1.0))
    with pytest.raises(ValueError, match=r"estimates averages of the whole model, .* those of width 0.5"):
        run(0.5, (0.25, 0.5))


def test_what_has_no_averages_to_estimate_is_refused(quiet: Any) -> None:
    manual = seeded(LitSmall)
    manual.automatic_optimization = False
    of_manual = ls.FederatedModule(manual, clients_per_round=1)
    refused: list[tuple[Any, Any, str]] = [
        (ls.FederatedModule(seeded(LitMLP), clients_per_round=1), ValueError, "finds no BatchNorm layer with averages"),
        (
            ls.FederatedModule(ls.nn.use_batch_statistics(seeded(LitSmall)), clients_per_round=1),
            ValueError,
            "finds no BatchNorm layer with averages",
        ),
        (of_manual, ValueError, "which trains in LitSmall, under manual optimisation"),
        (seeded(LitSmall), TypeError, "LitSmall trains on batches; wrap it"),
    ]
    for model, error, message in refused:
        with pytest.raises(error, match=message):
            BatchNormEstimation().setup(pl.Trainer(**quiet), model, "fit")


def test_a_step_that_fails_is_named(toy: TensorDataset, fit: Fit) -> None:
    def penalised(self: Any, batch: Any, batch_idx: int) -> Tensor:
        """Larger batches than those of clients are too many for it; gradients can be asked for everywhere."""
        loss = LitTwo.training_step(self, batch, batch_idx)
        penalty = torch.autograd.grad(loss, self.net[0].bias, create_graph=True)[0].square().sum()
        if len(batch[0]) > 30:
            raise ZeroDivisionError("too many")
        return loss + penalty

    kind = variant(LitTwo, training_step=penalised)
    lit = seeded(kind)
    with pytest.raises(RoundError, match=r"Round 0, BatchNorm estimation: ZeroDivisionError: too many"):
        fit(lit, clients(toy), callbacks=[BatchNormEstimation()])
    plain = fit(seeded(kind), clients(toy), max_epochs=1)
    assert same_state(lit.state_dict(), plain.state)  # the clients' averages are kept


class TestFaults:
    @staticmethod
    def broken(toy: TensorDataset, **options: Any) -> ls.FederatedDataModule:
        """One example is NaN, so one client's update is not finite."""
        x, y = toy.tensors
        x = x.clone()
        x[7, 2] = float("nan")
        return clients(TensorDataset(x, y), **options)

    @pytest.mark.filterwarnings("ignore:.*not finite:lightning_spectral.SpectralWarning")
    def test_a_batch_with_nan_is_left_out_where_such_clients_are(self, toy: TensorDataset, train: Train) -> None:
        data = self.broken(toy, eval_batch_size=10)
        with pytest.warns(ls.SpectralWarning, match="Round 0, BatchNorm estimation: 1 of 12 batches are left out"):
            fitted = train(data=data, callbacks=[BatchNormEstimation()], max_epochs=1)
        batches = [x for x, _ in data.shuffled_batches(0, ("BatchNorm estimation", 0)) if not x.isnan().any()]
        assert len(batches) == 11
        assert fitted.state["net.1.num_batches_tracked"] == 11
        assert_close(fitted.state, written_out(fitted.module, batches))

    @pytest.mark.filterwarnings("ignore:.*not finite:lightning_spectral.SpectralWarning")
    def test_where_such_clients_end_a_run_it_is_an_error(self, toy: TensorDataset, train: Train) -> None:
        options: dict[str, Any] = {"callbacks": [BatchNormEstimation()], "max_epochs": 1, "clients_per_round": 1}
        with pytest.raises(RoundError, match=r"BatchNorm estimation: 1 of 1 batches are left out.*eval_batch_size"):
            train(data=self.broken(toy), **options)
        strict = ls.Faults(on_not_finite=ls.server.Raise())
        with pytest.raises(RoundError, match="BatchNorm estimation: an average becomes NaN or infinite"):
            train(data=self.broken(toy, eval_batch_size=10), faults=strict, seed=1, **options)

    @pytest.mark.filterwarnings("ignore:.*failed:lightning_spectral.SpectralWarning")
    def test_a_batch_on_which_the_step_fails_is_left_out_too(self, toy: TensorDataset, fit: Fit) -> None:
        def picky(lit: Any, batch: Any) -> None:
            if batch[0].isnan().any():
                raise ValueError("NaN in a batch")

        faults = ls.Faults(on_error=ls.LeaveOut())
        with pytest.warns(ls.SpectralWarning, match="BatchNorm estimation: 1 of 12 batches are left out"):
            fitted = fit(
                seeded(variant(LitTwo, before_step=picky)),
                self.broken(toy, eval_batch_size=10),
                callbacks=[BatchNormEstimation()],
                max_epochs=1,
                faults=faults,
            )
        assert all(bool(value.isfinite().all()) for value in fitted.state.values())
