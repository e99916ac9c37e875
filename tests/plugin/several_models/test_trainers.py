"""Several models under Lightning's own Trainer: metrics, evaluation, estimates."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import seeded
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_versions import needs_2_5_3
from linear_models import LitLine, lines, one_model, two, two_lines
from torch.utils.data import DataLoader, TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.participation import FullParticipation


@needs_2_5_3
def test_metrics_of_every_model_can_be_monitored(toy: TensorDataset, lit_mlp: Any, run: Any, tmp_path: Path) -> None:
    both = ls.MultiModelDataModule({name: one_model(toy).modules["words"] for name in ("words", "images")})
    both.modules["images"].val = [toy, toy]  # with several evaluation sets, each has its own name
    models = {name: ls.FederatedModule(seeded(lit_mlp)) for name in both.modules}
    saver = ModelCheckpoint(tmp_path, "best", monitor="words/val_acc", mode="max")
    trainer, history, _ = run(
        ls.MultiModelModule(models, participation=ls.FullParticipation()),
        both,
        2,
        callbacks=[saver, EarlyStopping("images/val_loss/dataloader_idx_1", patience=10)],
        enable_checkpointing=True,
    )
    assert (tmp_path / "best.ckpt").exists()
    names = {"words/val_acc", "words/train_loss", "words/fl/loss", "images/val_loss/dataloader_idx_0"}
    assert names <= set(history.rows[-1])
    assert "images/val_loss" not in history.rows[-1]
    found = trainer.validate(ls.MultiModelModule(models, participation=ls.FullParticipation()), both, verbose=False)
    assert found[0]["words/val_acc"] == pytest.approx(history.rows[-1]["words/val_acc"])


def test_a_model_may_be_used_alone_and_in_another_federation(run: Any, quiet: dict[str, Any]) -> None:
    """Metrics are named by the federation being fitted or evaluated, whichever one was made last."""
    model, data = two_lines(ls.Uniform(active=3))
    words = model.models["words"]
    other = ls.MultiModelModule({"other": words}, participation=ls.Uniform(active=2))
    trainer, _, _ = run(model, data)
    assert {"words/loss", "images/loss"} <= set(trainer.callback_metrics)
    alone = pl.Trainer(**quiet).validate(words, data.modules["words"], verbose=False)
    assert [set(found) for found in alone] == [{"loss"}]
    trainer, _, _ = run(other, ls.MultiModelDataModule({"other": data.modules["words"]}))
    assert "other/loss" in trainer.callback_metrics
    trainer, _, _ = run(model, data)
    assert {"words/loss", "images/loss"} <= set(trainer.callback_metrics)


def test_a_quick_try_trains_one_client(run: Any) -> None:
    model, data = two_lines(ls.Uniform(active=5))
    _, history, ledger = run(model, data, fast_dev_run=True)
    (row,) = ledger.rows
    assert history.rows[0][f"{row.model}/fl/clients"] == 1


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_a_data_module_may_have_loaders_of_its_own(run: Any) -> None:
    """Each model is validated on its own data, even where the models' widths would not tell them apart."""
    own = variant(ls.FederatedDataModule, val_dataloader=lambda self: DataLoader(self.train, 100))
    data = {"words": own(lines(3, (4, 5)).train, ls.IIDPartitioner(2)), "images": lines(3, (4, 5), seed=1)}
    model = ls.MultiModelModule(two(), participation=ls.Uniform(active=1))
    trainer, _, _ = run(model, ls.MultiModelDataModule(data))
    for name, member in model.members.items():
        examples: Any = data[name].train
        loss = float(member.module.training_step(examples.tensors, 0).detach())
        assert float(trainer.callback_metrics[f"{name}/loss"]) == pytest.approx(loss, rel=1e-5)
    trainer, _, _ = run(ls.FederatedModule(LitLine(), clients_per_round=1), data["words"])
    assert "loss" in trainer.callback_metrics


class Doubled(ls.FederatedDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [2.0 * x, y]


@pytest.mark.filterwarnings("ignore:You have overridden `")
def test_batch_hooks_of_a_models_data_act_on_its_batches_alone(run: Any) -> None:
    model, data = two_lines(FullParticipation())
    start = copy.deepcopy(model.models["words"].module)
    words, images = data.modules.values()
    doubled = Doubled(words.train, words.partitioner, val=words.val, batch_size=1000)
    trainer, history, _ = run(model, ls.MultiModelDataModule({"words": doubled, "images": images}))
    for name, factor in (("words", 2.0), ("images", 1.0)):
        x, y = data.modules[name].train.tensors  # type: ignore[attr-defined]
        expected = float(model.models[name].module.training_step([factor * x, y], 0).detach())
        assert float(trainer.callback_metrics[f"{name}/loss"]) == pytest.approx(expected, rel=1e-5)
    x, y = words.train.tensors  # type: ignore[attr-defined]
    assert history.rows[0]["words/fl/loss"] == pytest.approx(
        float(start.training_step([2.0 * x, y], 0).detach()), rel=1e-5
    )
