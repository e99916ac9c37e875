"""What a module sees of its trainer: on a client, what plain Lightning shows it on that client's data."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import fit, seeded
from lightning.pytorch.loggers import CSVLogger
from programs import Lit, Manual
from torch.utils.data import DataLoader, Dataset
from toy_models import toy_examples, variant

import lightning_spectral as ls

NUM_ROUNDS, BATCH_SIZE = 3, 16  # four batches, of which the last is smaller
QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
HALF = ls.SpectralSharding(keep_ratio=0.5, clip_tau=float("inf"))

# Every attribute that modules and callbacks read, as something that can be compared
ROWS: dict[str, Callable[[Any], Any]] = {
    "num_training_batches": lambda module: module.trainer.num_training_batches,
    "is_last_batch": lambda module: module.trainer.is_last_batch,
    "train_dataloader": lambda module: (len(own := module.trainer.train_dataloader), len(next(iter(own)))),
    "examples": lambda module: len(module.trainer.train_dataloader.dataset),
    "val_dataloaders": lambda module: len(module.trainer.val_dataloaders),
    "datamodule": lambda module: sum(len(y) for *_, y in module.trainer.datamodule.train_dataloader()),
    "optimizers": lambda module: [(type(one), one.param_groups[0]["lr"]) for one in module.trainer.optimizers],
    "lr_scheduler_configs": lambda module: [type(one.scheduler) for one in module.trainer.lr_scheduler_configs],
    "current_epoch": lambda module: (module.trainer.current_epoch, module.current_epoch),
    "global_step": lambda module: (module.trainer.global_step, module.global_step),
    "max_epochs": lambda module: (module.trainer.max_epochs, module.trainer.min_epochs),
    "max_steps": lambda module: (module.trainer.max_steps, module.trainer.min_steps),
    "estimated_stepping_batches": lambda module: module.trainer.estimated_stepping_batches,
    "batch_idx": lambda module: (module.trainer.fit_loop.batch_idx, module.trainer.fit_loop.epoch_loop.batch_idx),
    "accumulate_grad_batches": lambda module: module.trainer.accumulate_grad_batches,
    "logger": lambda module: (type(module.logger), len(module.trainer.loggers), module.logger is module.trainer.logger),
    "metrics": lambda module: [
        isinstance(found, dict)
        for found in attrgetter("callback_metrics", "logged_metrics", "progress_bar_metrics")(module.trainer)
    ],
    "should_stop": lambda module: module.trainer.should_stop,
    "state": attrgetter("trainer.state.fn", "trainer.training", "trainer.sanity_checking", "trainer.validating"),
    "training": lambda module: module.training,
    "ranks": attrgetter("trainer.global_rank", "trainer.local_rank", "trainer.node_rank", "global_rank", "local_rank"),
    "is_global_zero": lambda module: module.trainer.is_global_zero,
    "world_size": lambda module: (module.trainer.world_size, module.trainer.num_devices, module.trainer.num_nodes),
    "strategy": lambda module: (
        type(module.trainer.strategy),
        module.trainer.strategy.broadcast("one"),
        module.trainer.strategy.reduce(torch.ones(())).item(),
        module.trainer.strategy.barrier(),
        module.trainer.strategy.root_device,
    ),
    "all_gather": lambda module: module.all_gather(torch.ones(3)).shape,
    "torch.distributed": lambda module: torch.distributed.is_initialized(),
    "precision": lambda module: module.trainer.precision,
    "checkpoint_callback": lambda module: len(module.trainer.checkpoint_callbacks),
    "default_root_dir": lambda module: module.trainer.default_root_dir,
    "log_dir": lambda module: Path(module.trainer.log_dir).name,
    "lightning_module": lambda module: module.trainer.lightning_module is module,
    "is a Trainer": lambda module: isinstance(module.trainer, pl.Trainer),
    "optimizers()": lambda module: lr_of(module.optimizers()),
    "lr_schedulers()": lambda module: module.lr_schedulers().get_last_lr(),
    "device": lambda module: module.device,
    "fabric": lambda module: module.fabric,
}

RATES = ("optimizers", "optimizers()", "lr_schedulers()")  # schedules step before the last batch has ended; here, after


def lr_of(optimizers: Any) -> Any:
    found = optimizers if isinstance(optimizers, list) else [optimizers]
    return isinstance(optimizers, list), [(isinstance(o, torch.optim.SGD), o.param_groups[0]["lr"]) for o in found]


class Scheduled:
    """A schedule that steps once an epoch, and validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is logged."""

    def on_train_epoch_end(self) -> None:
        """As manual optimisation has to in plain Lightning; here the server steps."""
        if not self.automatic_optimization:  # type: ignore[attr-defined]
            self.lr_schedulers().step()  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plain(pl.LightningDataModule):
    """All examples, as one client has them."""

    def __init__(self, examples: Dataset[Any]) -> None:
        super().__init__()
        self.examples = examples

    def train_dataloader(self) -> Any:
        return DataLoader(self.examples, BATCH_SIZE)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.examples, BATCH_SIZE)]


def watched(base: type[Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A module that notes what all rows show before and after every step."""
    found: list[dict[str, Any]] = []

    class Watched(Scheduled, base):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            found.append({row: look(self) for row, look in ROWS.items()})

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append({row: look(self) for row, look in ROWS.items()})

    return seeded(Watched), found


@pytest.fixture(scope="module", params=[Lit, Manual], ids=["automatic", "manual"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What a module sees in plain Lightning, and as the only client of two algorithms."""
    settings = {**QUIET, "logger": CSVLogger(tmp_path_factory.mktemp("seen")), "log_every_n_steps": 1}
    module, plain = watched(request.param)
    toy = toy_examples()
    pl.Trainer(max_epochs=NUM_ROUNDS, num_sanity_val_steps=0, **settings).fit(module, Plain(toy))
    seen = {"plain": plain}
    one = ls.FederatedDataModule(toy, ls.IIDPartitioner(1), val=toy, batch_size=BATCH_SIZE)
    for name, algorithm in (("whole", ls.FedAvg()), ("half", HALF)):
        module, seen[name] = watched(request.param)
        fit(settings, module, one, algorithm=algorithm, clients_per_round=1, max_epochs=NUM_ROUNDS)
    return seen


@pytest.mark.filterwarnings("ignore:.*does not have many workers|.*num_workers")
@pytest.mark.parametrize("row", ROWS)
def test_a_client_sees_what_plain_lightning_shows_it_alone(row, seen):
    """One client with all the data, whose round is an epoch."""
    step = 2 if row in RATES else 1
    plain, *others = ([one[row] for one in found] for found in seen.values())
    assert len(plain) == 2 * NUM_ROUNDS * -(-len(toy_examples()) // BATCH_SIZE)
    for found in others:
        assert found[::step] == plain[::step]


# What is of rounds at the server, and of batches in plain Lightning
OF_ROUNDS = {
    *("num_training_batches", "is_last_batch", "train_dataloader", "examples", "global_step", "batch_idx"),
    *("estimated_stepping_batches", "lightning_module"),
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers|.*num_workers")
def test_at_the_server_a_module_and_callbacks_see_what_plain_lightning_shows_but_for_rounds(tmp_path):
    """After each round and epoch, with all the data at one client, when validation begins."""

    class Looks(pl.Callback):
        def __init__(self) -> None:
            self.found: list[dict[str, Any]] = []

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.found.append({row: look(pl_module) for row, look in ROWS.items() if row not in OF_ROUNDS})

    class Watched(Scheduled, Lit):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[dict[str, Any]] = []

        def on_validation_epoch_start(self) -> None:
            self.found.append({row: look(self) for row, look in ROWS.items() if row not in OF_ROUNDS})

    settings = {**QUIET, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    toy, plain, expected = toy_examples(), seeded(Watched), Looks()
    pl.Trainer(max_epochs=NUM_ROUNDS, callbacks=[expected], **settings).fit(plain, Plain(toy))
    one, looks = ls.FederatedDataModule(toy, ls.IIDPartitioner(1), val=toy, batch_size=BATCH_SIZE), Looks()
    fitted = fit(settings, seeded(Watched), one, clients_per_round=1, max_epochs=NUM_ROUNDS, callbacks=[looks])
    assert len(plain.found) == NUM_ROUNDS
    for theirs, ours in ((plain.found, fitted.module.found), (expected.found, looks.found)):
        for epoch, (wanted, got) in enumerate(zip(theirs, ours, strict=True)):
            assert got == wanted, epoch


class Pair(Manual):
    """Two optimizers, whose rates the server's hooks can change."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        one, two = self.optimizers()
        for optimizer in (one, two):
            optimizer.zero_grad()
        self.manual_backward(Lit.training_step(self, batch, batch_idx))
        one.step()
        two.step()
        self.log_dict({"one": one.param_groups[0]["lr"], "two": two.param_groups[0]["lr"]})

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:], lr=0.2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is logged."""


def test_at_the_server_optimizers_are_the_users_own_in_their_order(data, fit):
    """What is written to their groups is what clients train with from the next round on."""
    kinds: list[Any] = []

    class Halving(Pair):
        def on_validation_end(self) -> None:
            one, two = self.optimizers()
            kinds.append((one.optimizer, two.optimizer))
            two.param_groups[0]["lr"] /= 2

    class Looking(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            assert [type(one) for one in trainer.optimizers] == [torch.optim.SGD, torch.optim.Adam]
            assert [one.optimizer for one in pl_module.optimizers()] == trainer.optimizers

    fitted = fit(seeded(Halving), data, max_epochs=3, callbacks=[Looking()])
    assert [type(one) for one in kinds[0]] == [torch.optim.SGD, torch.optim.Adam]
    assert fitted.history.column("two") == pytest.approx([0.2, 0.1, 0.05])
    assert fitted.history.column("one") == pytest.approx([0.1, 0.1, 0.1])


def test_a_step_on_the_last_batch_and_on_every_fifth(fit, toy):
    """The usual accumulation: after batches 4, 9 and 11 of twelve."""
    stepped: list[int] = []

    class Accumulates(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(Lit.training_step(self, batch, batch_idx))
            if (batch_idx + 1) % 5 == 0 or self.trainer.is_last_batch:
                stepped.append(batch_idx)
                self.optimizers().step()
                self.optimizers().zero_grad()

    clients = ls.FederatedDataModule(toy, ls.IIDPartitioner(1), batch_size=-(-len(toy) // 12))
    fit(seeded(Accumulates), clients, clients_per_round=1)
    assert stepped == [4, 9, 11]


def test_class_weights_can_be_counted_in_setup(data, lit_mlp, fit):
    """From all clients' examples, as in plain Lightning; in a step, from the client's own."""
    counts: list[int] = []

    class Counts(lit_mlp):  # type: ignore[misc, valid-type]
        def setup(self, stage: str) -> None:
            counts.append(sum(len(y) for _, y in self.trainer.datamodule.train_dataloader()))

        def on_train_start(self) -> None:
            self.setup("fit")

        def on_train_epoch_start(self) -> None:
            self.setup("fit")

    fit(seeded(Counts), data, clients_per_round=2)
    assert counts == [len(data.train), len(data.train), len(data.partition[0]), len(data.partition[0])]


def test_a_client_saves_no_checkpoint(data, lit_mlp, fit, tmp_path):
    saves = variant(lit_mlp, on_train_epoch_end=lambda self: self.trainer.save_checkpoint(tmp_path / "mine.ckpt"))
    with pytest.raises(ls.ClientError, match="would save the client's weights in place of the server's"):
        fit(seeded(saves), data)
    assert not list(tmp_path.glob("*.ckpt"))


class ScheduleFree(torch.optim.Optimizer):
    """Steps at one point and evaluates at the mean of the others, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "is_training": False, "k": 0})

    @torch.no_grad()
    def _exchange(self, is_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["is_training"] != is_training else ():
                if "mean" in self.state[p]:
                    now = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = now
            group["is_training"] = is_training

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            assert group["is_training"], "it steps in training mode alone"
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                self.state[p].setdefault("mean", p.clone()).lerp_(p, 1 / group["k"])
        return loss


class LitScheduleFree(Lit):
    """Puts its optimizer into the mode that each stage needs, as its authors ask."""

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is logged."""


def test_what_a_client_uploads_is_what_its_optimizer_evaluates(fit, toy):
    """One client whose only epoch plain Lightning trains, and evaluates, with the same batches."""
    one = ls.FederatedDataModule(toy, ls.IIDPartitioner(1), val=toy, batch_size=len(toy))
    fitted = fit(seeded(LitScheduleFree), one, clients_per_round=1, local_epochs=3)
    plain, (x, y) = seeded(LitScheduleFree), toy[torch.arange(len(toy))]
    optimizer = plain.configure_optimizers()
    optimizer.train()
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    trained = [p.detach().clone() for p in plain.parameters()]
    optimizer.eval()
    for found, evaluated, last in zip(fitted.module.parameters(), plain.parameters(), trained, strict=True):
        torch.testing.assert_close(found, evaluated, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, last, rtol=1e-4, atol=1e-5)


def test_each_of_several_models_sees_its_own_optimizers_schedules_and_data(data, quiet):
    found: list[Any] = []

    class Looks(Scheduled, Lit):  # type: ignore[misc]
        def on_train_start(self) -> None:
            trainer = self.trainer
            own = {id(parameter) for parameter in self.parameters()}
            (mine,) = trainer.optimizers
            assert {id(p) for group in mine.param_groups for p in group["params"]} == own
            assert self.optimizers().optimizer is mine
            assert self.lr_schedulers().optimizer is mine
            found.append(len(list(trainer.datamodule.train_dataloader())))

        def on_validation_end(self) -> None:
            self.trainer.should_stop = True

    models = {name: ls.FederatedModule(Looks()) for name in ("one", "two")}
    parts = {
        "one": ls.FederatedDataModule(data.train, ls.IIDPartitioner(12), val=data.train, batch_size=4),
        "two": ls.FederatedDataModule(data.train, ls.IIDPartitioner(12), val=data.train, batch_size=8),
    }
    trainer = pl.Trainer(max_epochs=5, num_sanity_val_steps=0, **quiet)
    trainer.fit(ls.MultiModelModule(models, participation=ls.Uniform(active=6)), ls.MultiModelDataModule(parts))
    assert found == [len(data.train) // 4, len(data.train) // 8]
    assert trainer.current_epoch == 1


class SharpnessAware(torch.optim.SGD):
    """Steps by two methods of its own, as SAM does; nobody calls `step`."""

    @torch.no_grad()
    def ascend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"]).sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_may_step_by_other_methods(fit, data):
    data.val = data.test = None

    class Sharp(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            for step in (optimizer.ascend, optimizer.descend):
                optimizer.zero_grad()
                self.manual_backward(Lit.training_step(self, batch, batch_idx))
                step()

        def configure_optimizers(self) -> Any:
            return SharpnessAware(self.parameters(), lr=0.1)

    fitted = fit(seeded(Sharp), data, local_epochs=2, max_epochs=2)
    assert fitted.history.column("fl/clients") == [4.0, 4.0]
    assert not torch.equal(fitted.weights, torch.nn.utils.parameters_to_vector(seeded(Sharp).parameters()))


@pytest.mark.filterwarnings("ignore:Round 0, client .* is left out|Round 0. client .* is left out")
def test_a_step_that_only_returns_is_no_update(fit, data):
    """The control: nothing has changed, so there is nothing to average."""
    data.val = data.test = None

    class Rests(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.optimizers()

    with pytest.raises(ls.errors.RoundError, match="no step taken"):
        fit(seeded(Rests), data)


class Irregular(tuple[int, ...]):
    """A tuple whose length says something else, as that of e3nn's representations does."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_buffers_that_no_checkpoint_holds_may_change_their_shape(fit, data, lit_mlp):
    """As the state of spiking neurons does; and attributes may be of odd classes."""

    class Remembers(lit_mlp):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(0), persistent=False)
            self.kinds = Irregular((1, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.memory = torch.zeros(len(batch[0]), 3)
            return super().training_step(batch, batch_idx)

    assert fit(seeded(Remembers), data, max_epochs=2).module.memory.shape == (0,)
