"""A client's own Trainer: hooks and counters, silence, and one Trainer for all clients."""

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_engines import DENSE, assert_same_run
from federation import Fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_spectral as ls


def test_refused_hooks_run_and_clipping_is_what_it_is_in_the_loop(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class InLoop(lit_mlp):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # in the order in which the Trainer adds their norms up
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

    class InTrainer(lit_mlp):  # type: ignore[misc]
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            self.clip_gradients(optimizer, 0.05, "norm")

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            calls.append("optimizer_step")
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            calls.append("optimizer_zero_grad")
            optimizer.zero_grad()

        def backward(self, loss: Tensor) -> None:
            calls.append("backward")
            loss.backward()

    calls: list[str] = []
    torch.manual_seed(0)
    one = InLoop()
    two = InTrainer()
    two.load_state_dict(one.state_dict())
    assert_same_run(fit(one, data, client_engine="loop"), fit(two, data, client_engine="trainer"))
    assert calls[:3] == ["optimizer_step", "optimizer_zero_grad", "backward"]
    with pytest.raises(ValueError, match=r'`optimizer_step`: local steps are plain.*client_engine="trainer"'):
        ls.FederatedModule(two, clients_per_round=2)


def test_hooks_of_the_run_run_once_on_the_server(lit_mlp: Any, data: Any, fit: Fit) -> None:
    calls: list[str] = []

    def spy(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            assert self is server
            calls.append(name)
            return [] if name == "configure_callbacks" else None

        return hook

    names = ["configure_callbacks", "prepare_data", "setup", "on_fit_start", "on_train_start", "on_train_end"]
    names += ["on_fit_end", "teardown"]
    server = type("LitSpied", (lit_mlp,), {name: spy(name) for name in names})()
    fit(server, data)
    assert calls == names


def test_what_no_engine_can_honour_is_still_refused(lit_mlp: Any) -> None:
    module = type("Lit", (lit_mlp,), {"configure_model": lambda self: None})()
    with pytest.raises(ValueError, match="`configure_model`"):
        ls.FederatedModule(module, clients_per_round=2, client_engine="trainer")
    with pytest.raises(ValueError, match="must be 'loop' or 'trainer', got 'Trainer'"):
        ls.FederatedModule(lit_mlp(), clients_per_round=2, client_engine="Trainer")  # type: ignore[arg-type]


def test_every_client_counts_as_if_it_had_been_in_all_rounds(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[tuple[int, int, int]] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.current_epoch, self.global_step, self.trainer.max_epochs))

    data.val, data.batch_size = None, 5  # ten examples a client: two batches
    fit(Lit(), data, clients_per_round=2, local_epochs=3)
    of_round_0 = [(0, 0, 6), (0, 1, 6), (1, 2, 6), (1, 3, 6), (2, 4, 6), (2, 5, 6)]
    of_round_1 = [(epoch + 3, step, total) for epoch, step, total in of_round_0]
    assert seen == 2 * of_round_0 + 2 * of_round_1


@pytest.mark.parametrize(("max_steps", "seen"), [(2, 4), (-1, -1)])
def test_runs_that_end_by_steps_or_never(max_steps: int, seen: int, lit_mlp: Any, data: Any, fit: Fit) -> None:
    totals: list[int] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            totals.append(self.trainer.max_epochs)

    class Stop(ls.RoundCallback):
        def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
            trainer.should_stop = summary.round_idx == 1

    data.val = None
    options: dict[str, Any] = {"max_epochs": -1, "trainer": {"max_steps": max_steps}, "callbacks": [Stop()]}
    fit(Lit(), data, algorithm=DENSE, clients_per_round=2, local_epochs=2, **options)
    assert totals == [seen] * 8


def test_clients_write_no_line_and_no_file(
    lit: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    watched = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in watched]
    for logger in watched:
        logger.addHandler(handler)
    try:
        said = []
        for engine in ("loop", "trainer"):
            records.clear()
            fit(copy.deepcopy(lit), data, client_engine=engine)  # a spectral start is announced once for a module
            said.append(([record.getMessage() for record in records], capfd.readouterr()))
    finally:
        for logger in watched:
            logger.removeHandler(handler)
    assert said[0] == said[1]  # only what the Trainer of the rounds says
    assert list(tmp_path.iterdir()) == []
    assert [logger.level for logger in watched] == levels


def test_one_trainer_serves_all_clients_until_one_fails(lit_mlp: Any, data: Any, quiet: Any) -> None:
    trainers: list[pl.Trainer] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            assert self.trainer is not federation
            trainers.append(self.trainer)

    data.val = None
    federation = pl.Trainer(max_epochs=2, **quiet)
    federation.fit(ls.FederatedModule(Lit(), clients_per_round=3, client_engine="trainer"), data)
    assert len(trainers) == 6
    assert len({id(trainer) for trainer in trainers}) == 1

    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("no")

    federation = pl.Trainer(max_epochs=1, **quiet)
    model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer")
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: KeyError: 'no'"):
        federation.fit(model, data)

    trainers.clear()
    leaving_out = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
    model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer", faults=leaving_out)
    federation = pl.Trainer(max_epochs=1, **quiet)
    with pytest.warns(ls.SpectralWarning, match=r"left out|no client is left"):
        federation.fit(model, data)
    assert len({id(trainer) for trainer in trainers}) == 3  # one that failed is not used again


def test_global_generators_stay_as_they_are(lit: Any, data: Any, fit: Fit) -> None:
    state = torch.get_rng_state()
    data.val = None
    fit(lit, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_data_may_be_a_loader(lit: Any, data: Any, toy: Any, fit: Fit) -> None:
    data.val = DataLoader(toy, batch_size=60)
    assert len(fit(lit, data).history.column("val_acc")) == 2
