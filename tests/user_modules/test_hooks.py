"""Where each hook of a user's module runs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from observed_runs import acting
from torch import nn
from toy_models import variant

import lightning_spectral as ls


def spied_on(lit_mlp: Any, names: list[str]) -> tuple[Any, list[str]]:
    """A module, and the calls of its hooks, all of which run on the module itself."""
    calls: list[str] = []

    def spy(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            assert self is server
            calls.append(name)
            return args[0] if name.endswith("transfer") else None

        return hook

    server = variant(lit_mlp, **{name: spy(name) for name in names})()
    return server, calls


@pytest.mark.filterwarnings("ignore:You have overridden `on_")
def test_hooks_of_local_steps_run_on_the_module_itself_in_lightnings_order(lit_mlp: Any, data: Any, fit: Fit) -> None:
    names = [
        *("on_train_epoch_start", "on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start"),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
        *("on_train_batch_end", "on_train_epoch_end"),
    ]
    data.val = None
    data.batch_size = 100
    server, calls = spied_on(lit_mlp, names)
    fit(server, data, algorithm=ls.FedAvg(), max_epochs=1, clients_per_round=2, local_epochs=2)
    assert calls == 4 * names


def test_hooks_of_the_run_run_on_the_server(lit_mlp: Any, data: Any, toy: Any, fit: Fit) -> None:
    names = [
        *("prepare_data", "setup", "on_fit_start", "on_train_start"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
        *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
        *("on_train_end", "on_fit_end", "teardown"),
    ]
    server, calls = spied_on(lit_mlp, names)
    fit(server, data, max_epochs=1)
    assert calls == names


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")  # as Lightning says of any module
def test_batch_hooks_act_on_evaluation_data_with_and_without_a_data_module(
    lit_mlp: Any, data: Any, toy: Any, quiet: Any
) -> None:
    kind = variant(lit_mlp, on_after_batch_transfer=lambda self, batch, _: [torch.zeros_like(batch[0]), batch[1]])
    model = ls.FederatedModule(module := kind(), clients_per_round=2)
    loader = torch.utils.data.DataLoader(toy, batch_size=120, num_workers=0)
    x, y = toy.tensors
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(module.eval()(torch.zeros_like(x)), y))
    trainer = pl.Trainer(**quiet)
    for arguments in ({"dataloaders": loader}, {"datamodule": data}, {"dataloaders": loader}):
        (scores,) = trainer.validate(model, verbose=False, **arguments)
        assert scores["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_logging_in_evaluation_hooks_reaches_the_trainer(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def log(self: Any) -> None:
        self.log("own", 3.0)
        self.log_dict({"one": 1.0, "two": 2.0})

    history = fit(variant(lit_mlp, on_validation_epoch_end=log)(), data).history
    assert [history.column(name) for name in ("own", "one", "two")] == [[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("log", ["log", "log_dict"])
def test_a_name_of_the_rounds_own_metrics_is_refused_in_evaluation(log: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    def log_both(self: Any) -> None:
        self.log("fl/mine", 1.0)  # is nobody else's
        getattr(self, log)(*(("fl/loss", 3.0) if log == "log" else ({"fl/loss": 3.0},)))

    with pytest.raises(ValueError, match="An evaluation hook logs fl/loss, under which the federation logs a metric"):
        fit(variant(lit_mlp, on_validation_epoch_end=log_both)(), data)


def test_a_modules_own_log_acts_on_clients_and_in_evaluation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(f"own/{name}", value, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"one": 1.0, "two": 2.0})
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            self.log("after", 3.0)

    module = Lit()
    history = fit(module, data).history
    assert [history.column(name) for name in ("own/one", "own/two", "own/after")] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert not {"one", "two", "after"} & history.rows[0].keys()
    assert type(module) is Lit
    assert not {"log", "log_dict"} & vars(module).keys()


def test_minus_one_at_a_batch_ends_the_local_epoch(lit_mlp: Any, data: Any, fit: Fit) -> None:
    trained: list[int] = []
    kind = variant(
        lit_mlp,
        on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 1 else None,
        on_train_batch_end=lambda self, outputs, batch, batch_idx: trained.append(batch_idx),
    )
    data.val = None
    fit(kind(), data, max_epochs=1, clients_per_round=2, local_epochs=2)  # three batches a client
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

    losses = fit(Lit(), data).history.column("fl/loss")  # without a warning: the list is made anew in every turn
    assert losses == [0.0, 0.0]  # by the scale that the server's hook set
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
    mine = acting(on_train_epoch_start=lambda trainer, model: started.append(trainer.current_epoch))
    fit(variant(lit_mlp, configure_callbacks=lambda self: mine)(), data)
    assert started == [0, 1]


def test_checkpoint_hooks_are_the_users(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    kind = variant(
        lit_mlp,
        note="new",
        on_save_checkpoint=lambda self, checkpoint: checkpoint.update(note="old"),
        on_load_checkpoint=lambda self, checkpoint: setattr(self, "note", checkpoint["note"]),
    )
    fit(kind(), data, max_epochs=1).trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert fit(kind(), data, max_epochs=2, ckpt_path=tmp_path / "run.ckpt").module.note == "old"


class MovesBatches:
    """Batch hooks of a module or of a data module, which see no slot."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x + 1.0, y]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        x, y = batch
        return [3.0 * x.to(device), y.to(device)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x - 2.0 if self.trainer.training else x, y]  # type: ignore[attr-defined]


class DataMovesBatches(MovesBatches, ls.FederatedDataModule):
    """Has all batch hooks."""


@pytest.mark.filterwarnings("ignore:You have overridden `")
def test_batch_hooks_of_the_data_module_do_what_those_of_the_module_do(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    def run(make: Any, data: Any) -> Any:
        return fit(seeded(make), data, callbacks=[ls.ClientEvaluation()])

    still, moving = (
        kind(toy, ls.IIDPartitioner(12), val=toy, batch_size=4, client_val_fraction=0.2)
        for kind in (ls.FederatedDataModule, DataMovesBatches)
    )
    plain, in_module = run(lit_mlp, still), run(type("Lit", (MovesBatches, lit_mlp), {}), still)
    in_data = run(lit_mlp, moving)
    in_both = run(variant(lit_mlp, on_after_batch_transfer=lambda *args: args[1]), moving)
    assert in_module.rows == in_data.rows == in_both.rows
    assert same_state(in_module.state, in_data.state)
    assert not same_state(plain.state, in_data.state)


def test_batch_norm_is_estimated_on_batches_that_the_data_module_moved(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    lit = lit_mlp()
    lit.net.insert(0, nn.BatchNorm1d(6))
    data = DataMovesBatches(toy, ls.IIDPartitioner(12), batch_size=4)
    mean = fit(lit, data, callbacks=[ls.plugin.callbacks.BatchNormEstimation()]).state["net.0.running_mean"]
    assert mean == pytest.approx((3.0 * (toy.tensors[0] + 1.0) - 2.0).mean(0), abs=1e-5)


REPLACING = {
    "on_fit_start": ValueError,
    "on_validation_epoch_end": ValueError,
    "on_train_epoch_start": ls.ClientError,
    "on_before_optimizer_step": ls.ClientError,
}


@pytest.mark.parametrize("hook", REPLACING)
def test_a_layer_replaced_in_a_hook_is_an_error(hook: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    def replace_layer(self: Any, *args: Any) -> None:
        self.net[2] = nn.Linear(12, 12)

    lit = variant(lit_mlp, **{hook: replace_layer})()
    with pytest.raises(REPLACING[hook], match=r"Lit no longer has what its SGD trains \(parameter 2 of group 0"):
        fit(lit, data, algorithm=ls.FedAvg())


def test_a_layer_may_be_replaced_in_setup_and_its_values_at_any_time(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def setup(self: Any, stage: str) -> None:
        self.net[2] = nn.Linear(12, 12)

    fit(variant(lit_mlp, setup=setup, on_train_start=lambda self: nn.init.zeros_(self.net[2].bias))(), data)
