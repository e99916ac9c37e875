"""Runs of several models resume bit for bit, or say why not."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import HARDLY_MOVED, same_state, seeded, without_seconds
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from linear_models import ALGORITHMS, SIZES, WIDTHS, LitLine, lines, one_model, two, two_lines
from torch.utils.data import TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.plugin.settings import check_checkpoint


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize("measure", ["all", "last", 2])
def test_resuming_changes_no_bit(measure: Any, toy: TensorDataset, lit_mlp: Any, run: Any, tmp_path: Path) -> None:
    """Three algorithms with server optimizers of their own; the sampler remembers what it knew."""

    def fresh() -> tuple[ls.MultiModelModule, ls.MultiModelDataModule]:
        models = {
            name: ls.FederatedModule(seeded(lit_mlp), algorithm=algorithm, server_optimizer=ls.FedAdam(lr=0.01))
            for name, algorithm in ALGORITHMS.items()
        }
        sampler = ls.LossVarianceReduced(active=4, measure=measure)
        data = {name: one_model(toy).modules["words"] for name in models}
        return ls.MultiModelModule(models, participation=sampler, processors={2: 0.5, 1: 0.5}), ls.MultiModelDataModule(
            data
        )

    whole, data = fresh()
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    _, history, ledger = run(whole, data, 4, callbacks=[saver], enable_checkpointing=True)
    again, data = fresh()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ModelCheckpoint")  # the resumed run saves nothing
        _, resumed, ledger_again = run(again, data, 4, tmp_path / "1.ckpt")

    assert same_state(again.state_dict(), whole.state_dict())
    assert list(map(without_seconds, resumed.rows)) == list(map(without_seconds, history.rows))
    assert ledger_again.rows == ledger.rows


class FailsInValidation(pl.Callback):
    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("in user code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")  # OnExceptionCheckpoint looks for a checkpoint to resume
def test_a_round_that_was_interrupted_after_the_servers_step_is_neither_measured_nor_drawn_again(
    toy: TensorDataset, lit_mlp: Any, run: Any, tmp_path: Path
) -> None:
    """Nor if the resumed run saves: the sampler would learn from weights of after the step."""

    def fresh() -> tuple[ls.MultiModelModule, ls.MultiModelDataModule]:
        models = {name: ls.FederatedModule(seeded(lit_mlp), algorithm=ls.FedAvg()) for name in ("one", "two")}
        data = one_model(toy).modules["words"]
        model = ls.MultiModelModule(models, participation=ls.LossVarianceReduced(active=4, measure=3))
        return model, ls.MultiModelDataModule(dict.fromkeys(models, data))

    whole, data = fresh()
    _, history, ledger = run(whole, data, 4)
    failing, data = fresh()
    callbacks = [FailsInValidation(), OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError, match="in user code"):
        run(failing, data, 4, callbacks=callbacks, enable_checkpointing=True)
    again, data = fresh()
    savers = [OnExceptionCheckpoint(tmp_path)]
    ckpt = ls.latest_checkpoint(tmp_path)
    _, resumed, ledger_again = run(again, data, 4, ckpt, callbacks=savers, enable_checkpointing=True)
    assert same_state(again.state_dict(), whole.state_dict())
    assert list(map(without_seconds, resumed.rows)) == list(map(without_seconds, history.rows))
    assert ledger_again.rows == ledger.rows


def test_another_configuration_is_not_resumed() -> None:
    saved = {"federation": two_lines(ls.Uniform(active=3))[0].configuration()}
    with pytest.raises(ValueError, match=r"participation: 'Uniform\(active=3"):
        check_checkpoint(saved, two_lines(ls.Uniform(active=2))[0].configuration())
    fewer = ls.MultiModelModule({"words": two()["words"]}, participation=ls.Uniform(active=3))
    with pytest.raises(ValueError, match=r"images: algorithm: 'FedAvg\(.*in the checkpoint, None now"):
        check_checkpoint(saved, fewer.configuration())


def test_each_hook_of_a_user_sees_its_own_part_of_the_checkpoint(run: Any, tmp_path: Path) -> None:
    def save(self: LitLine, checkpoint: dict[str, Any]) -> None:
        checkpoint["width"] = next(iter(checkpoint["state_dict"].values())).numel()

    def load(self: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["width"]

    noted = variant(LitLine, on_save_checkpoint=save, on_load_checkpoint=load)

    def fresh() -> ls.MultiModelModule:
        models = {name: ls.FederatedModule(seeded(noted, width)) for name, width in WIDTHS.items()}
        return ls.MultiModelModule(models, participation=ls.Uniform(active=3))

    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    trainer, _, _ = run(fresh(), data, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = fresh()
    run(again, data, 2, ckpt=tmp_path / "one.ckpt")
    assert {name: member.module.seen for name, member in again.members.items()} == WIDTHS
