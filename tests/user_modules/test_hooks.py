"""Where each hook of a user's module runs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit
from torch import nn

import lightning_spectral as ls


@pytest.mark.parametrize("client_engine", ["loop", "trainer"])
@pytest.mark.filterwarnings("ignore:You have overridden `on_")
def test_hooks_of_local_steps_run_on_the_clients_copy_in_lightnings_order(
    client_engine: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    calls: list[str] = []

    def spy(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            assert self is not server
            calls.append(name)
            return args[0] if name.endswith("transfer") else None

        return hook

    names = [
        *("on_train_epoch_start", "on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start"),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
        *("on_train_batch_end", "on_train_epoch_end"),
    ]
    data.val = None
    data.batch_size = 100
    server = type("LitSpied", (lit_mlp,), {name: spy(name) for name in names})()
    options: dict[str, Any] = {"clients_per_round": 2, "local_epochs": 2, "client_engine": client_engine}
    fit(server, data, algorithm=ls.FedAvg(), max_epochs=1, **options)
    assert calls == 4 * names


def test_hooks_of_the_run_run_on_the_server(lit_mlp: Any, data: Any, toy: Any, fit: Fit) -> None:
    calls: list[str] = []

    def spy(name: str) -> Any:
        def hook(self: Any, *args: Any) -> None:
            assert self is server
            calls.append(name)

        return hook

    names = [
        *(
            "prepare_data",
            "setup",
            "on_fit_start",
            "on_train_start",
            "on_validation_start",
            "on_validation_epoch_start",
        ),
        *("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
        *("on_train_end", "on_fit_end", "teardown"),
    ]
    server = type("LitSpied", (lit_mlp,), {name: spy(name) for name in names})()
    fit(server, data, max_epochs=1)
    assert calls == names


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")  # as Lightning says of any module
def test_batch_hooks_act_on_evaluation_data_with_and_without_a_data_module(
    lit_mlp: Any, data: Any, toy: Any, quiet: Any
) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [torch.zeros_like(batch[0]), batch[1]]

    model = ls.FederatedModule(module := Lit(), clients_per_round=2)
    loader = torch.utils.data.DataLoader(toy, batch_size=120, num_workers=0)
    x, y = toy.tensors
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(module.eval()(torch.zeros_like(x)), y))
    trainer = pl.Trainer(**quiet)
    for arguments in ({"dataloaders": loader}, {"datamodule": data}, {"dataloaders": loader}):
        (scores,) = trainer.validate(model, verbose=False, **arguments)
        assert scores["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_logging_in_evaluation_hooks_reaches_the_trainer(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def on_validation_epoch_end(self) -> None:
            self.log("own", 3.0)
            self.log_dict({"one": 1.0, "two": 2.0})

    history = fit(Lit(), data).history
    assert [history.column(name) for name in ("own", "one", "two")] == [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]


def test_minus_one_at_a_batch_ends_the_local_epoch(lit_mlp: Any, data: Any, fit: Fit) -> None:
    trained: list[int] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)

    data.val = None
    fit(Lit(), data, max_epochs=1, clients_per_round=2, local_epochs=2)  # three batches a client
    assert trained == [0] * 4


def test_state_made_in_hooks_is_there_when_it_is_used(lit_mlp: Any, data: Any, fit: Fit) -> None:
    num_outs: list[int] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_fit_start(self) -> None:
            self.scale = 0.0

        def on_train_epoch_start(self) -> None:
            self.outs: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) * self.scale
            self.outs.append(float(loss.detach()))
            return loss

        def on_train_epoch_end(self) -> None:
            num_outs.append(len(self.outs))

    assert fit(Lit(), data).history.column("fl/loss") == [0.0, 0.0]  # by the scale that the server's hook set
    assert num_outs == [3] * 6  # two rounds of three clients that begin with an empty list


def test_hooks_on_a_sharded_layer_still_run(lit_mlp: Any, data: Any, fit: Fit) -> None:
    calls: list[bool] = []
    lit = lit_mlp()
    lit.net[2].register_forward_hook(lambda module, args, output: calls.append(module.training))
    data.val, data.batch_size = None, 100
    fit(lit, data, max_epochs=1, clients_per_round=3)
    assert calls == [True] * 3


def test_the_users_callbacks_are_installed(lit_mlp: Any, data: Any, fit: Fit) -> None:
    started: list[int] = []

    class Mine(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            started.append(trainer.current_epoch)

    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return Mine()

    fit(Lit(), data)
    assert started == [0, 1]


def test_checkpoint_hooks_are_the_users(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        note = "new"

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["note"] = "old"

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.note = checkpoint["note"]

    fit(Lit(), data, max_epochs=1).trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = fit(Lit(), data, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert resumed.module.note == "old"
