"""Sampled networks are validated like the expected one, and the run is unaffected."""

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning_versions import needs_2_5_3
from observed_runs import Draws, Stirring, acting, assert_only_adds, metrics_by_hand, with_and_without
from one_by_one import Noisy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import SampledNetworks
from lightning_spectral.plugin.callbacks.evaluation import sampling_figures
from lightning_spectral.protocol.rng import derived_generator

ZAMPLING = ls.Zampling(compression=3, degree=4)
FIGURES = ("sampled_mean", "sampled_max", "sampled_min", "sampled_std", "sampling_gap")


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, algorithm=ZAMPLING, max_epochs=2)


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    """Validation batches of 50, 50 and 20 examples."""
    return ls.FederatedDataModule(
        toy, ls.IIDPartitioner(num_clients=12), val=toy, test=toy, batch_size=4, eval_batch_size=50
    )


def networks(fitted: Fitted, num_samples: int) -> list[Any]:
    """Copies of the trained module, each with weights Qz computed from all entries of Q."""
    model, found = fitted.model, []
    weights = ZAMPLING.scheme().weights_of(model.module)
    columns, values = ZAMPLING.scheme().matrix(weights, model.seed).entries()
    for k in range(num_samples):
        generator = derived_generator(model.seed, "sampled networks", fitted.trainer.current_epoch - 1, k)
        bits = (torch.rand(len(model.state.probs), generator=generator) < model.state.probs).float()
        flat = (values * bits[columns]).sum(1)
        network, start = copy.deepcopy(model.module), 0
        for weight in weights:
            end = start + weight.num_values
            network.get_parameter(weight.name).data = flat[start:end].view(weight.shape).clone()
            start = end
        found.append(network.eval())
    return found


def test_figures_are_those_of_networks_evaluated_by_hand(lit: Any, data: Any, toy: TensorDataset, fit: Fit) -> None:
    fitted = fit(lit, data, callbacks=[SampledNetworks(num_samples=5)])
    row = fitted.rows[-1]
    by_hand = [metrics_by_hand(network, toy.tensors) for network in networks(fitted, 5)]
    assert len({metrics["val_acc"] for metrics in by_hand}) > 1
    for name, expected in metrics_by_hand(fitted.module, toy.tensors).items():
        values = torch.tensor([metrics[name] for metrics in by_hand], dtype=torch.float64)
        for figure, value in (("mean", values.mean()), ("max", values.max()), ("min", values.min())):
            assert row[f"{name}/sampled_{figure}"] == pytest.approx(float(value), rel=1e-5)
        assert row[f"{name}/sampled_std"] == pytest.approx(float(values.std()), rel=1e-4)
        assert row[name] == pytest.approx(expected, rel=1e-5)
        assert row[f"{name}/sampling_gap"] == row[name] - row[f"{name}/sampled_mean"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"num_sanity_val_steps": 2}], ids=["", "sanity check"])
def test_the_run_is_the_same_with_and_without(options: Any, toy: TensorDataset, data: Any, fit: Fit) -> None:
    data.val = DataLoader(Noisy(toy), batch_size=50)
    runs: list[Fitted] = []
    for callbacks in ([SampledNetworks(3)], []):
        torch.manual_seed(3)
        runs.append(fit(seeded(Stirring), data, callbacks=[*callbacks, Draws()], trainer=options))
    assert_only_adds("sampl", *runs)
    assert len(with_and_without(runs[0].rows, "sampl")[0][0]) == 2 * len(FIGURES)


def test_a_resumed_run_repeats_the_numbers(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    callback = partial(SampledNetworks, 3, every_n_validations=2)
    whole = fit(seeded(lit_mlp), data, max_epochs=4, callbacks=[callback()])
    assert ["val_loss/sampled_mean" in row for row in whole.rows] == [True, False, True, False]
    fit(seeded(lit_mlp), data, max_epochs=1, callbacks=[callback()]).trainer.save_checkpoint(tmp_path / "1.ckpt")
    resumed = fit(seeded(lit_mlp), data, max_epochs=4, callbacks=[callback()], ckpt_path=tmp_path / "1.ckpt")
    assert resumed.rows == whole.rows
    first, third = (row["val_loss/sampled_mean"] for row in (whole.rows[0], whole.rows[2]))
    assert first != third


def decide(trainer: pl.Trainer, model: Any, *_: Any) -> None:
    """Make all bits certain."""
    with torch.no_grad():
        model.state.probs.round_()
    model.engine.settle()


def test_a_network_of_certain_bits_is_the_expected_one(lit: Any, data: Any, fit: Fit) -> None:
    row = fit(lit, data, max_epochs=1, callbacks=[acting(on_round_end=decide), SampledNetworks(2)]).rows[0]
    for name in ("val_acc", "val_loss"):
        assert row[f"{name}/sampled_std"] == 0.0
        assert row[f"{name}/sampled_max"] == row[f"{name}/sampled_min"] == pytest.approx(row[name], rel=1e-6)
        assert row[f"{name}/sampling_gap"] == pytest.approx(0.0, abs=1e-6)


@needs_2_5_3
def test_dataloaders_and_limits_are_those_of_the_validation(lit_mlp: Any, data: Any, toy: Any, fit: Fit) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("loss", nn.functional.cross_entropy(logits, y), on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", float(batch_idx), add_dataloader_idx=False, batch_size=1)
        self.log("alone", 1.0, on_step=True, on_epoch=False)
        self.log("largest", x.max(), reduce_fx="max")

    data.val = [toy, TensorDataset(*(tensor[:70] for tensor in toy.tensors))]
    fitted = fit(
        seeded(variant(lit_mlp, validation_step=validation_step)),
        data,
        max_epochs=1,
        local_epochs=0,  # so bits stay certain, and every sampled network is the expected one
        callbacks=[acting(on_train_start=decide), SampledNetworks(2)],
        trainer={"limit_val_batches": 2},
        faults=ls.Faults(),
    )
    row = fitted.rows[0]
    names = ["val_acc", "loss"]
    for name in [f"{name}{{}}/dataloader_idx_{i}" for name in names for i in range(2)] + ["own_0{}", "own_1{}"]:
        assert row[name.format("/sampled_mean")] == pytest.approx(row[name.format("")], rel=1e-6), name
    assert row["own_0/sampled_mean"] == 0.5
    assert row["loss/sampled_mean/dataloader_idx_0"] != row["loss/sampled_mean/dataloader_idx_1"]
    assert not [name for name in row if "alone" in name or ("largest" in name and "sampl" in name)]


def test_validation_outside_of_a_fit_has_the_figures_too(lit: Any, data: Any, fit: Fit, quiet: Any) -> None:
    fitted = fit(lit, data)
    before = copy.deepcopy(fitted.state)
    trainer = pl.Trainer(callbacks=[SampledNetworks(3, every_n_validations=7)], **quiet)
    (first,), (again,) = (trainer.validate(fitted.model, data, verbose=False) for _ in range(2))
    assert first == again
    assert {f"val_loss/{figure}" for figure in FIGURES} <= first.keys()
    assert same_state(before, fitted.state)


def test_one_network_has_no_standard_deviation() -> None:
    assert sampling_figures([{"acc": 0.5}], {}) == {
        "acc/sampled_mean": 0.5,
        "acc/sampled_max": 0.5,
        "acc/sampled_min": 0.5,
    }


def test_a_step_that_logs_nothing_is_warned_about(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def update(self: Any, batch: Any, batch_idx: int) -> None:
        self.val_acc.update(self(batch[0]), batch[1])

    def log(self: Any) -> None:
        self.log("val_acc", self.val_acc.compute())
        self.val_acc.reset()

    lit = seeded(variant(lit_mlp, validation_step=update, on_validation_epoch_end=log))
    with pytest.warns(ls.SpectralWarning, match="`Lit.validation_step` logs no mean"):
        fit(lit, data, max_epochs=1, callbacks=[SampledNetworks(2)])


def test_what_cannot_be_sampled_is_refused_before_the_first_round(lit: Any, data: Any, fit: Fit, quiet: Any) -> None:
    with pytest.raises(TypeError, match="which FedAvg does not train; leave the callback out"):
        fit(lit, data, algorithm=ls.FedAvg(), callbacks=[SampledNetworks()])
    with pytest.raises(TypeError, match="which LitMLP does not train; leave"):
        SampledNetworks().setup(pl.Trainer(**quiet), lit, "validate")
    shared_out = pl.Trainer(strategy="ddp", devices=2, **quiet)
    model = ls.FederatedModule(lit, algorithm=ZAMPLING, clients_per_round=4)
    with pytest.raises(ValueError, match="DDPStrategy shares the data for validation out to 2 processes"):
        SampledNetworks().setup(shared_out, model, "validate")
