"""Sampled networks are validated like the expected one, and the run is unaffected."""

import copy
import random
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning_versions import needs_2_5_3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks.sampled_networks import sampling_figures
from lightning_spectral.protocol.rng import derived_generator

ZAMPLING = ls.Zampling(compression=3, degree=4)
FIGURES = ("sampled_mean", "sampled_max", "sampled_min", "sampled_std", "sampling_gap")


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds of Zampling."""
    return partial(fit, algorithm=ZAMPLING, max_epochs=2)


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    """Validation batches of 50, 50 and 20 examples."""
    return ls.FederatedDataModule(
        toy, ls.IIDPartitioner(num_clients=12), val=toy, test=toy, batch_size=4, eval_batch_size=50
    )


def without_sampled(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if "sampl" not in name} for row in rows]


def sampled(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if "sampl" in name} for row in rows]


def networks(fitted: Fitted, num_samples: int) -> list[Any]:
    """Copies of the trained module, each with weights Qz computed from all entries of Q."""
    model, found = fitted.model, []
    weights = ZAMPLING.weights_of(model.module)
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


@torch.no_grad()
def accuracy_and_loss(network: Any, toy: TensorDataset) -> tuple[float, float]:
    x, y = toy.tensors
    logits = network(x)
    picked = logits.double().log_softmax(1)[torch.arange(len(y)), y]
    return float((logits.argmax(1) == y).double().mean()), float(-picked.mean())


def test_figures_are_those_of_networks_made_and_evaluated_by_hand(
    lit: Any, data: Any, toy: TensorDataset, fit: Fit
) -> None:
    fitted = fit(lit, data, callbacks=[ls.plugin.callbacks.SampledNetworks(num_samples=5)])
    row = fitted.rows[-1]
    by_hand = torch.tensor([accuracy_and_loss(network, toy) for network in networks(fitted, 5)]).double()
    assert len(set(by_hand[:, 0].tolist())) > 1
    for i, name in enumerate(("val_acc", "val_loss")):
        values = by_hand[:, i]
        assert row[f"{name}/sampled_mean"] == pytest.approx(float(values.mean()), rel=1e-5)
        assert row[f"{name}/sampled_max"] == pytest.approx(float(values.max()), rel=1e-5)
        assert row[f"{name}/sampled_min"] == pytest.approx(float(values.min()), rel=1e-5)
        assert row[f"{name}/sampled_std"] == pytest.approx(float(values.std()), rel=1e-4)
        expected = accuracy_and_loss(fitted.module.eval(), toy)[i]
        assert row[name] == pytest.approx(expected, rel=1e-5)
        assert row[f"{name}/sampling_gap"] == row[name] - row[f"{name}/sampled_mean"]


class Draws(pl.Callback):
    """The states of the global generators after each validation."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numpys = np.random.get_state()[1]
        self.states.append((torch.get_rng_state().tolist(), random.getstate(), numpys.tolist()))  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"num_sanity_val_steps": 2}], ids=["", "sanity check"])
def test_the_run_is_the_same_with_and_without(options: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Stirring(lit_mlp):  # type: ignore[misc]
        """Has a buffer that its steps change, takes entries out of its batch and draws from the global generator."""

        def __init__(self) -> None:
            super().__init__(dropout=0.3)
            self.net.insert(1, nn.BatchNorm1d(12))
            self.register_buffer("num_validated", torch.zeros(()))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            y, x = batch.pop(), batch[0]
            self.num_validated += 1
            x.add_(0.1 * torch.randn_like(x))
            super().validation_step((x, y), batch_idx)

    torch.manual_seed(3)
    plain = fit(seeded(Stirring), _as_lists(data), callbacks=[drawn := Draws()], trainer=options)
    torch.manual_seed(3)
    watchers = [ls.plugin.callbacks.SampledNetworks(3), again := Draws()]
    watched = fit(seeded(Stirring), _as_lists(data), callbacks=watchers, trainer=options)
    assert same_state(plain.state, watched.state)
    assert torch.equal(plain.model.state.probs, watched.model.state.probs)
    assert repr(plain.rows) == repr(without_sampled(watched.rows))
    assert plain.ledger.rows == watched.ledger.rows
    assert drawn.states == again.states
    assert len(sampled(watched.rows)[0]) == 2 * len(FIGURES)


class _Lists(Dataset[Any]):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def _as_lists(data: ls.FederatedDataModule) -> ls.FederatedDataModule:
    """The same data with validation batches that are lists."""
    data.val = DataLoader(_Lists(data.train), batch_size=50, collate_fn=lambda examples: [*_stacked(examples)])
    return data


def _stacked(examples: list[Any]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*examples, strict=True)]


def test_a_resumed_run_repeats_the_numbers(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    callback = partial(ls.plugin.callbacks.SampledNetworks, 3, every_n_validations=2)
    whole = fit(seeded(lit_mlp), data, max_epochs=4, callbacks=[callback()])
    assert [bool(row) for row in sampled(whole.rows)] == [True, False, True, False]
    fit(seeded(lit_mlp), data, max_epochs=1, callbacks=[callback()]).trainer.save_checkpoint(tmp_path / "1.ckpt")
    resumed = fit(seeded(lit_mlp), data, max_epochs=4, callbacks=[callback()], ckpt_path=tmp_path / "1.ckpt")
    assert resumed.rows == whole.rows
    first, third = (row["val_loss/sampled_mean"] for row in (whole.rows[0], whole.rows[2]))
    assert first != third


def test_a_network_of_certain_bits_is_the_expected_one(lit: Any, data: Any, fit: Fit) -> None:
    class Decides(ls.RoundCallback):
        """Makes all bits certain before validation starts."""

        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            with torch.no_grad():
                pl_module.state.probs.round_()
            pl_module.engine.settle()

    row = fit(lit, data, max_epochs=1, callbacks=[Decides(), ls.plugin.callbacks.SampledNetworks(2)]).rows[0]
    for name in ("val_acc", "val_loss"):
        assert row[f"{name}/sampled_std"] == 0.0
        assert row[f"{name}/sampled_max"] == row[f"{name}/sampled_min"] == pytest.approx(row[name], rel=1e-6)
        assert row[f"{name}/sampling_gap"] == pytest.approx(0.0, abs=1e-6)


@needs_2_5_3
def test_several_dataloaders_and_limits_are_those_of_the_validation(
    lit_mlp: Any, data: Any, toy: TensorDataset, fit: Fit
) -> None:
    class Several(lit_mlp):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            logits = self(x)
            self.val_acc(logits, y)
            self.log("val_acc", self.val_acc)
            self.log("loss", nn.functional.cross_entropy(logits, y), on_step=True, on_epoch=True)
            self.log(f"own_{dataloader_idx}", float(batch_idx), add_dataloader_idx=False, batch_size=1)
            self.log("alone", 1.0, on_step=True, on_epoch=False)
            self.log("largest", x.max(), reduce_fx="max")

    class Decides(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                pl_module.state.probs.round_()
            pl_module.engine.settle()

    data.val = [toy, TensorDataset(*(tensor[:70] for tensor in toy.tensors))]
    fitted = fit(
        seeded(Several),
        data,
        max_epochs=1,
        local_epochs=0,  # so bits stay certain, and every sampled network is the expected one
        callbacks=[Decides(), ls.plugin.callbacks.SampledNetworks(2)],
        trainer={"limit_val_batches": 2},
        faults=ls.server.Faults(),
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
    trainer = pl.Trainer(callbacks=[ls.plugin.callbacks.SampledNetworks(3, every_n_validations=7)], **quiet)
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
    class AtTheEnd(lit_mlp):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_acc.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("val_acc", self.val_acc.compute())
            self.val_acc.reset()

    with pytest.warns(ls.SpectralWarning, match="`AtTheEnd.validation_step` logs no mean"):
        fit(seeded(AtTheEnd), data, max_epochs=1, callbacks=[ls.plugin.callbacks.SampledNetworks(2)])


def test_what_cannot_be_sampled_is_refused_before_the_first_round(lit: Any, data: Any, fit: Fit, quiet: Any) -> None:
    with pytest.raises(TypeError, match="and there are none in FedAvg; leave the callback out"):
        fit(lit, data, algorithm=ls.FedAvg(), callbacks=[ls.plugin.callbacks.SampledNetworks()])
    with pytest.raises(TypeError, match="and there are none in LitMLP; leave"):
        pl.Trainer(max_epochs=1, callbacks=[ls.plugin.callbacks.SampledNetworks()], **quiet).validate(
            lit, DataLoader(data.val)
        )
    shared_out = pl.Trainer(strategy="ddp", devices=2, **quiet)
    model = ls.FederatedModule(lit, algorithm=ZAMPLING, clients_per_round=4)
    with pytest.raises(ValueError, match="DDPStrategy shares the data for validation out to 2 processes"):
        ls.plugin.callbacks.SampledNetworks().setup(shared_out, model, "validate")
    for options in ({"num_samples": 0}, {"every_n_validations": 0}):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
            ls.plugin.callbacks.SampledNetworks(**options)
