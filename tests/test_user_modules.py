"""What users' modules do, and where each hook runs."""

from collections import UserDict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import lightning_spectral as ls


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, each with three clients that hold half the terms."""
    return partial(fit, algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=3, max_epochs=2)


def optimizer_forms(module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    return {
        "optimizer": optimizer,
        "list": [optimizer],
        "lists": ([optimizer], [schedule]),
        "list and scheduler": ([optimizer], schedule),
        "dict": {"optimizer": optimizer},
        "dict and scheduler": {"optimizer": optimizer, "lr_scheduler": schedule},
        "nested": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}},
        "dicts": [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}],
        "lists of dicts": ([optimizer], [{"scheduler": schedule, "frequency": 2}]),
    }


@pytest.mark.parametrize("form", optimizer_forms(nn.Linear(1, 1)).keys())
def test_every_form_of_configure_optimizers(form: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return optimizer_forms(self)[form]

    expected = [1.0, 1.0, 1.0]
    if "lists" in form or "scheduler" in form or form in ("nested", "dicts"):
        expected = [1.0, 1.0, 0.5] if form == "lists of dicts" else [1.0, 0.5, 0.25]
    assert fit(Lit(), data, max_epochs=3).history.column("fl/lr") == expected


def test_learning_rate_of_a_round_reaches_the_clients(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[float] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])
            assert self.optimizers() is optimizer

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]

    fit(Lit(), data, max_epochs=2)
    assert seen == [1.0] * (len(seen) // 2) + [0.5] * (len(seen) // 2)


def test_plateau_scheduler_waits_for_its_metric(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    assert fit(Lit(), data, max_epochs=3).history.column("fl/lr") == [1.0, 1.0, pytest.approx(0.1)]
    data.val = None
    with pytest.raises(ValueError, match="monitors 'val_loss', which was not logged in round 0"):
        fit(Lit(), data)


def test_a_metric_that_may_be_missing_is_waited_for(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "never", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    assert fit(Lit(), data).history.column("fl/lr") == [1.0, 1.0]


def test_what_clients_log_is_weighted_by_their_examples(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("size", float(len(batch[0])))
            return super().training_step(batch, batch_idx)

    data = ls.FederatedDataModule(toy, ls.NaturalPartitioner([0] * 90 + [1] * 30), batch_size=1000)
    history = fit(Lit(), data, max_epochs=1, clients_per_round=2).history
    assert history.column("size") == [pytest.approx((90 * 90 + 30 * 30) / 120)]


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


def test_estimated_steps_are_rounds(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 4
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    expected = []
    for _ in range(4):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        if len(expected) < 4:
            schedule.step()
    assert fit(Lit(), data, max_epochs=4).history.column("fl/lr") == expected


def test_parameters_left_out_of_the_optimizer_stay(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            chosen = [p for name, p in self.named_parameters() if name.endswith("weight")]
            return torch.optim.Adam(chosen, lr=0.1)

    module = Lit()
    ls.spectral_start(module, 0.5)  # now, so that only training changes the weights
    bias, weight = module.net[2].bias.detach().clone(), module.net[2].weight.detach().clone()
    sharding = ls.SpectralSharding(keep_ratio=0.5, clip_tau=float("inf"))  # which Adam would undo
    fit(module, data, algorithm=sharding)
    assert torch.equal(module.net[2].bias, bias)
    assert not torch.equal(module.net[2].weight, weight)


def test_frozen_parameters_stay_and_travel_down_only(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    ledger = fit(module, data, algorithm=ls.FedAvg(), max_epochs=1).ledger
    assert torch.equal(module.net[0].weight, before)
    assert ledger.rows[0].downlink_bytes - ledger.rows[0].uplink_bytes == 4 * (6 * 12 + 12)


@pytest.mark.filterwarnings("ignore:You have overridden `on_")
def test_hooks_of_local_steps_run_on_the_clients_copy_in_lightnings_order(lit_mlp: Any, data: Any, fit: Fit) -> None:
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
    fit(server, data, algorithm=ls.FedAvg(), max_epochs=1, clients_per_round=2, local_epochs=2)
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

    assert fit(Lit(), data).history.column("fl/loss") == [0.0, 0.0]  # by the scale that the server's hook made
    assert num_outs == [3] * 6  # two rounds of three clients, who begin with an empty list


def test_a_layer_that_the_first_batch_skips_still_takes_part(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        batch_of_all_layers = 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                return None
            layers = self.net if batch_idx == self.batch_of_all_layers else nn.Sequential(self.net[0], self.net[5])
            return nn.functional.cross_entropy(layers(batch[0]), batch[1])

    class Never(Lit):
        batch_of_all_layers = -1

    ls.spectral_start(lit := Lit(), 0.5)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    assert not torch.equal(fit(lit, data).module.net[2].weight, before)
    with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient to these sharded layers: net\.2\."):
        fit(Never(), data)


def test_outputs_of_a_step_are_what_lightning_gives(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[dict[str, Any]] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx).reshape(1)
            return [loss, UserDict(loss=loss, more=7), None][batch_idx]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    fit(Lit(), data, max_epochs=1, clients_per_round=1)  # batches of 4, 4 and 2
    assert [sorted(outputs) for outputs in seen] == [["loss"], ["loss", "more"], []]
    assert not any(outputs["loss"].requires_grad for outputs in seen[:2])


@pytest.mark.parametrize(
    ("output", "message"),
    [({"train_loss": 1.0}, r"mapping without 'loss' \(keys: train_loss\)"), (3.0, "must return a tensor.*got float")],
)
def test_an_output_without_a_loss_is_refused(output: Any, message: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(ls.ClientError, match=message):
        fit(Lit(), data)


def test_a_step_that_reaches_the_servers_weights_is_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.apply_net = lambda x: self.net(x)  # copies keep calling the module it was made in

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.apply_net(batch[0]), batch[1])

    with pytest.raises(ValueError, match=r"reaches the server's own weights \(net.0.weight"):
        fit(Lit(), data, algorithm=ls.FedAvg())


@pytest.mark.parametrize("form", ["args", "keyword only", "keywords"])
def test_signatures_of_steps(form: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    def step(self: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    kinds: dict[str, Any] = {
        "args": lambda self, *args: step(self, args[0]),
        "keyword only": lambda self, batch, *, extra=None: step(self, batch),
        "keywords": lambda self, batch, **more: step(self, batch),
    }
    lit = type("Lit", (lit_mlp,), {"training_step": kinds[form], "validation_step": kinds[form]})
    assert fit(lit(), data, max_epochs=1).history.column("fl/loss")[0] > 0


def test_hooks_on_a_sharded_layer_still_run(lit_mlp: Any, data: Any, fit: Fit) -> None:
    calls: list[bool] = []
    lit = lit_mlp()
    lit.net[2].register_forward_hook(lambda module, args, output: calls.append(module.training))
    data.val, data.batch_size = None, 100
    fit(lit, data, max_epochs=1, clients_per_round=3)
    assert calls == [True] * 3


def test_hooks_on_the_users_optimizer_are_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *args: None)
            return optimizer

    with pytest.raises(ValueError, match="SGD has step hooks, which are not copied to the optimizers of clients"):
        fit(Lit(), data)


def test_a_parameter_left_out_is_left_alone_by_the_server_too(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net[2].weight], lr=0.1)

    module = Lit()
    before = module.net[0].weight.detach().clone()
    fit(module, data, server_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    assert torch.equal(module.net[0].weight, before)


def test_gradients_from_before_the_fit_are_not_mistaken_for_a_leak(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net[2].weight], lr=0.1)

    module = Lit()
    data.val = None  # Lightning clears gradients before it validates
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    for _ in range(2):
        fit(module, data, max_epochs=1)
        assert all(parameter.grad is None for parameter in module.parameters())


def test_evaluation_data_of_any_kind(lit_mlp: Any, data: Any, toy: Any, quiet: Any) -> None:
    class Plain:
        def __len__(self) -> int:
            return len(toy)

        def __getitem__(self, index: int) -> Any:
            return toy[index]

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    kind = type("Lit", (lit_mlp,), {"validation_step": validation_step})
    scores = []
    for val in (toy, Plain(), torch.utils.data.DataLoader(toy, batch_size=64), [toy, Plain()]):
        data.val = val
        model = ls.FederatedModule(seeded(kind), clients_per_round=2)
        (*_, last) = pl.Trainer(**quiet).validate(model, data, verbose=False)
        scores.append(next(value for name, value in last.items() if name.startswith("val_loss")))
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-5)


def test_loading_a_checkpoint_takes_the_module_again(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    module = lit_mlp()
    fit(module, data, max_epochs=1).trainer.save_checkpoint(tmp_path / "run.ckpt")
    path = str(tmp_path / "run.ckpt")
    loaded = ls.FederatedModule.load_from_checkpoint(path, module=lit_mlp(), clients_per_round=3, weights_only=True)
    assert torch.equal(loaded.module.net[2].weight, module.net[2].weight)


def test_metrics_of_a_clients_copy_never_sync_over_processes(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[bool] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.train_acc.distributed_available_fn = lambda: True

        def on_train_epoch_end(self) -> None:
            seen.append(self.train_acc.distributed_available_fn())

    fit(Lit(), data, max_epochs=1)
    assert seen == [False] * 3


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


@pytest.mark.parametrize("output", ["dict", "none"])
def test_what_a_training_step_may_return(output: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            return {"loss": loss, "more": 1} if output == "dict" or len(batch[0]) == 4 else None

    data.batch_size = 4  # ten examples a client: batches of 4, 4 and 2
    assert fit(Lit(), data).history.column("fl/loss")[0] > 0


def test_batch_norm_statistics_are_the_mean_of_clients_and_counters_the_servers(
    lit_mlp: Any, data: Any, fit: Fit
) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(12))

    module = Lit()
    means: list[torch.Tensor] = []

    class Keep(ls.RoundCallback):
        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            means.append(pl_module.engine._executor.device.sub_model(0.5).module.net[1].running_mean.clone())

    fit(module, data, max_epochs=1, callbacks=[Keep()])
    torch.testing.assert_close(module.net[1].running_mean, torch.stack(means).mean(0))
    assert module.net[1].num_batches_tracked == 0


def test_dropout_draws_do_not_touch_the_global_generators(lit: Any, data: Any, fit: Fit) -> None:
    state = torch.get_rng_state()
    data.val = None
    fit(lit, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_runs_with_one_seed_agree_and_with_two_do_not(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(0)
        module = lit_mlp(dropout=0.5)
        torch.manual_seed(noise)  # the global state outside must not matter
        return fit(module, data, seed=seed).weights

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


def test_one_algorithm_object_serves_two_runs(lit_mlp: Any, data: Any, fit: Fit) -> None:
    used = ls.SpectralSharding(keep_ratio=0.5)
    fit(seeded(lit_mlp, width=12), data, algorithm=used)
    again, fresh, other = (
        fit(seeded(lit_mlp, width=20), data, algorithm=algorithm).state
        for algorithm in (used, ls.SpectralSharding(keep_ratio=0.5), ls.SpectralSharding(keep_ratio=0.3))
    )
    assert same_state(again, fresh)
    assert not same_state(again, other)


@pytest.mark.parametrize("design", [None, ls.ConditionalPoisson(), ls.SuccessiveSampling()], ids=repr)
@pytest.mark.parametrize("strategy", [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()], ids=repr)
def test_every_strategy_trains_with_every_design(strategy: Any, design: Any, lit: Any, data: Any, fit: Fit) -> None:
    ls.spectral_start(lit, 0.3)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    fitted = fit(lit, data, algorithm=ls.SpectralSharding(strategy, {0.3: 0.5, 0.6: 0.5}, design=design))
    assert len(fitted.rows) == 2
    assert not torch.equal(before, lit.net[2].weight)
    assert bool(torch.isfinite(lit.net[2].weight).all())


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5)])
def test_a_spectral_norm_has_unit_vectors_after_a_run(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = seeded(lit_mlp, lr=0.3, width=16)
    module.net[0] = seeded(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)))
    module.net.insert(1, seeded(nn.Linear, 16, 16))
    normed = fit(module, data, algorithm=algorithm, max_epochs=5).module.eval().net[0]
    for vector in normed.parametrizations.weight[0].buffers():
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)


def test_clipping_the_weight_of_a_sharded_layer_is_an_error_that_names_it(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Critic(lit_mlp):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for layer in self.net:
                if hasattr(layer, "weight"):
                    layer.weight.data.clamp_(-0.01, 0.01)

    with pytest.raises(ls.ClientError, match=r"`net.2.weight` cannot be written.*exclude=\['net.2'\]"):
        fit(Critic(), data)
    excluded = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False, exclude=["net.2"]))
    with pytest.raises(ls.ClientError, match=r"`net.0.weight` cannot be written"):
        fit(Critic(), data, algorithm=excluded)
    clipped = fit(Critic(), data, algorithm=ls.FedAvg()).module.net[2].weight
    assert float(clipped.detach().abs().max()) <= 0.0101
