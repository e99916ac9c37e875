"""Lightning's own callbacks in a federation: they work, or are refused by name."""

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from toy_models import plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral.plugin.checks import REFUSED_CALLBACKS, check_callbacks

WORKS: dict[str, Callable[[Path], pl.Callback]] = {
    "DeviceStatsMonitor": lambda folder: theirs.DeviceStatsMonitor(),
    "LambdaCallback": lambda folder: theirs.LambdaCallback(on_train_epoch_end=lambda *args: None),
    "LearningRateMonitor": lambda folder: theirs.LearningRateMonitor(),
    "ModelSummary": lambda folder: theirs.ModelSummary(max_depth=2),
    "OnExceptionCheckpoint": lambda folder: theirs.OnExceptionCheckpoint(folder),
    "Timer": lambda folder: theirs.Timer("00:01:00:00"),
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")  # OnExceptionCheckpoint looks for a checkpoint to resume
@pytest.mark.parametrize("name", WORKS)
def test_these_callbacks_change_nothing(name: str, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    if name == "DeviceStatsMonitor":
        pytest.importorskip("psutil", reason="DeviceStatsMonitor reads the CPU's figures with it")
    options = {"logger": CSVLogger(tmp_path), "enable_checkpointing": name == "OnExceptionCheckpoint"}
    watched = fit(seeded(lit_mlp), data, max_epochs=2, callbacks=[WORKS[name](tmp_path)], trainer=options)
    assert same_state(watched.state, fit(seeded(lit_mlp), data, max_epochs=2).state)


def refused() -> list[type[pl.Callback]]:
    from lightning.pytorch.callbacks.spike import SpikeDetection

    return [
        theirs.BackboneFinetuning,
        theirs.BatchSizeFinder,
        theirs.GradientAccumulationScheduler,
        theirs.LearningRateFinder,
        theirs.ModelPruning,
        SpikeDetection,
        theirs.StochasticWeightAveraging,
    ]


@pytest.mark.parametrize("kind", refused(), ids=lambda kind: kind.__name__)
def test_these_are_refused_by_name(kind: type[pl.Callback]) -> None:
    callback = object.__new__(kind)  # whatever its arguments
    with pytest.raises(ValueError, match=f"^{kind.__name__} cannot act on a federation: .*; "):
        check_callbacks([callback])


def test_they_are_refused_before_anything_happens(lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"^BackboneFinetuning cannot act on a federation"):
        fit(lit, data, callbacks=[object.__new__(theirs.BackboneFinetuning)])
    assert all(parameter.requires_grad for parameter in lit.parameters())


def test_every_refusal_is_of_a_class_that_there_is() -> None:
    assert {base.__name__ for kind in refused() for base in kind.__mro__} >= set(REFUSED_CALLBACKS)


def test_a_class_of_the_users_own_of_such_a_name_is_not_refused() -> None:
    class ModelPruning(pl.Callback):
        pass

    check_callbacks([ModelPruning()])


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_learning_rates_come_once_a_round(interval: Any, lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    monitor = theirs.LearningRateMonitor(logging_interval=interval)
    rows = fit(lit, data, max_epochs=3, callbacks=[monitor], trainer={"logger": CSVLogger(tmp_path)}).rows
    assert monitor.lrs == {"lr-SGD": [row["fl/lr"] for row in rows]}  # and not that of the server's step
    assert monitor.logging_interval == interval  # restored after the fit


@pytest.mark.parametrize("scheduled", [True, False])
def test_learning_rates_have_their_models_names(
    scheduled: bool, lit_mlp: Any, data: Any, quiet: Any, tmp_path: Path
) -> None:
    plain = variant(lit_mlp, configure_optimizers=plain_sgd())
    names = ("words", "images")
    models = {name: ls.FederatedModule((lit_mlp if scheduled else plain)()) for name in names}
    model = ls.MultiModelModule(models, participation=ls.Uniform(active=6))
    datas = {name: ls.FederatedDataModule(data.train, ls.IIDPartitioner(12), batch_size=4) for name in names}
    monitor = theirs.LearningRateMonitor()
    trainer = pl.Trainer(max_epochs=1, callbacks=[monitor], **{**quiet, "logger": CSVLogger(tmp_path)})
    trainer.fit(model, ls.MultiModelDataModule(datas))
    own = ["words/lr", "images/lr"] if scheduled else ["lr-SGD/words", "lr-SGD-1/images"]
    assert monitor.lrs.keys() == set(own)


class Weights(pl.Callback):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.found.append(nn.utils.parameters_to_vector(pl_module.module.parameters()).detach().clone())


@pytest.mark.skipif(not hasattr(theirs, "WeightAveraging"), reason="this Lightning has none")
def test_averaged_weights_are_those_of_the_rounds_and_resume(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    weights = Weights()
    plain = fit(seeded(lit_mlp), data, max_epochs=3, callbacks=[weights])
    averaged = fit(seeded(lit_mlp), data, max_epochs=3, callbacks=[theirs.WeightAveraging()])
    torch.testing.assert_close(averaged.weights, torch.stack(weights.found).mean(0))
    assert averaged.rows[-1]["val_loss"] != plain.rows[-1]["val_loss"]  # what is validated is the average
    assert averaged.rows[-1]["fl/loss"] == plain.rows[-1]["fl/loss"]  # what clients train is not
    saver = theirs.LambdaCallback(on_validation_end=lambda trainer, *args: trainer.save_checkpoint(tmp_path / "1.ckpt"))
    fit(seeded(lit_mlp), data, max_epochs=2, callbacks=[theirs.WeightAveraging(), saver])
    resumed = fit(
        seeded(lit_mlp), data, max_epochs=3, callbacks=[theirs.WeightAveraging()], ckpt_path=tmp_path / "1.ckpt"
    )
    assert same_state(resumed.state, averaged.state)


def test_an_attribute_of_the_users_module_is_where_the_error_says(lit: Any) -> None:
    model = ls.FederatedModule(lit, clients_per_round=2)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not hasattr(one, "val_acc")  # a callback that could read it could not set it
        with pytest.raises(AttributeError, match=r"no attribute 'val_acc'; that of your LitMLP is `\.module\.val_acc`"):
            one.val_acc  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'neither'$"):
            one.neither  # noqa: B018


def test_the_hooks_page_names_every_callback() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    kinds = [*WORKS, "WeightAveraging", *(kind.__name__ for kind in refused())]
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("monitor", [None, "fl/loss"])
def test_checkpoints_by_the_clock_hold_whole_rounds(monitor: Any, lit: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    save = theirs.ModelCheckpoint(
        tmp_path / "often", filename="{epoch}", train_time_interval=timedelta(0), save_top_k=-1, monitor=monitor
    )
    rarely = theirs.ModelCheckpoint(tmp_path / "rarely", train_time_interval=timedelta(hours=1))
    options = {"enable_checkpointing": True}
    whole = fit(copy.deepcopy(lit), data, max_epochs=3, callbacks=[save, rarely], trainer=options)
    written = sorted(path.name for path in (tmp_path / "often").iterdir())
    assert written == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    assert not (tmp_path / "rarely").exists()
    resumed = fit(copy.deepcopy(lit), data, max_epochs=3, ckpt_path=tmp_path / "often" / "epoch=1.ckpt")
    assert same_state(resumed.state, whole.state)
