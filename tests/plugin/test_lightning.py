"""Lightning for real: hooks, checkpoints, loggers and callbacks of a real Trainer on a tiny federation."""

import copy
import csv
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

import lightning_spectral as ls
from lightning_spectral.plugin.checkpoints import TRAINER_SETTINGS

FitAndSave = Callable[..., Fitted]
MIXED = ls.SpectralSharding(ls.Collective(), keep_ratio={0.3: 0.5, 0.6: 0.5})


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits with two keep ratios."""
    return partial(fit, algorithm=MIXED)


def federate(module: pl.LightningModule, **options: Any) -> ls.FederatedModule:
    """The same federation, for tests that have a Trainer of their own."""
    settings: dict[str, Any] = {"algorithm": MIXED, "clients_per_round": 4, **options}
    return ls.FederatedModule(module, **settings)


def momentum_server(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


class Augmented(torch.utils.data.Dataset[Any]):
    """Not in memory, and with noise."""

    def __init__(self, inner: torch.utils.data.TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(x.shape), y


def test_workers_change_nothing_and_end_with_the_fit(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    runs = []
    for num_workers in (0, 2):
        data = ls.FederatedDataModule(Augmented(toy), ls.IIDPartitioner(12), batch_size=4, num_workers=num_workers)
        runs.append(fit(seeded(lit_mlp), data, clients_per_round=3, max_epochs=2).state)
        assert not multiprocessing.active_children()
    assert same_state(*runs)


class Table(torch.utils.data.Dataset[Any]):
    """Rows that are dictionaries, and columns by name, as those of Hugging Face's data sets."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {n: column[key] for n, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_table_trains_as_its_columns_do(num_workers: int, lit_mlp: Any, toy: Any, fit: Fit) -> None:
    class LitTable(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["label"]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((batch["x"], batch["label"]), batch_idx)

    rows, split = Table(x=toy.tensors[0], label=toy.tensors[1]), ls.DirichletPartitioner(num_clients=6, alpha=1.0)
    by_row = ls.FederatedDataModule(
        rows, split, val=rows, labels=rows["label"].tolist(), batch_size=4, num_workers=num_workers
    )
    in_memory = ls.FederatedDataModule(toy, split, val=toy, batch_size=4)
    assert same_state(fit(seeded(LitTable), by_row).state, fit(seeded(lit_mlp), in_memory).state)


class TestRounds:
    def test_an_epoch_is_a_round_and_a_batch_a_client(self, lit: Any, data: Any, fit: Fit) -> None:
        calls: list[str] = []

        class Spy(ls.RoundCallback):
            def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
                calls.append(f"round {trainer.current_epoch}")

            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                calls.append("client")

            def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
                calls.append(f"aggregated {summary.round_idx}")

            def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
                calls.append(f"step {trainer.global_step}")

            def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
                calls.append("validate")

        fitted = fit(lit, data, clients_per_round=2, max_epochs=2, callbacks=[Spy()])
        assert calls == [
            *("round 0", "client", "step 0", "client", "aggregated 0", "step 1", "validate"),
            *("round 1", "client", "step 1", "client", "aggregated 1", "step 2", "validate"),
        ]
        assert fitted.trainer.global_step == 2

    def test_a_round_takes_each_client_once_and_rounds_differ(self, lit: Any, data: Any, fit: Fit) -> None:
        ledger = fit(lit, data, clients_per_round=5, max_epochs=4).ledger
        cohorts = [tuple(row.client_id for row in ledger.rows if row.round_idx == r) for r in range(4)]
        assert all(len(set(cohort)) == 5 for cohort in cohorts)
        assert len(set(cohorts)) == 4

    def test_the_model_learns(self, lit: Any, data: Any, fit: Fit) -> None:
        history = fit(lit, data, clients_per_round=6, local_epochs=2, max_epochs=12).history
        losses = history.column("val_loss")
        assert losses[-1] < 0.7 * losses[0]
        assert history.column("val_acc")[-1] > 0.75  # a third of the examples is in the largest class

    def test_own_boundary_callbacks_replace_ours(self, lit: Any, data: Any, fit: Fit) -> None:
        class Counting(ls.SVDRefresh):
            count = 0

            def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
                Counting.count += 1
                super().on_train_epoch_start(trainer, pl_module)

        trainer = fit(lit, data, max_epochs=2, callbacks=[Counting(), ls.Aggregation()]).trainer
        kinds = [type(callback) for callback in trainer.callbacks]
        assert Counting.count == 2
        assert ls.SVDRefresh not in kinds
        assert kinds.count(ls.Aggregation) == kinds.count(ls.SubmodelSampling) == 1

    @pytest.mark.parametrize("place", [None, 0, 1, 2])
    def test_aggregation_acts_after_all_others_wherever_it_is_listed(
        self, place: int | None, lit: Any, data: Any, fit: Fit
    ) -> None:
        calls: list[tuple[Any, ...]] = []

        class Spy(ls.RoundCallback):
            def __init__(self, name: str) -> None:
                self.name = name

            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                calls.append(("client end", self.name, turn.unit.client_id, num_received(pl_module)))

            def on_cohort_end(self, trainer: pl.Trainer, pl_module: Any, round_idx: int) -> None:
                calls.append(("cohort end", self.name, round_idx, num_received(pl_module), trainer.global_step))

            def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
                assert not pl_module.engine.round_is_open
                calls.append(("round end", self.name, summary.round_idx, trainer.global_step))

        def num_received(pl_module: Any) -> int:
            return len(pl_module.engine.round.outcomes)

        callbacks: list[pl.Callback] = [Spy("A"), Spy("B")]
        if place is not None:
            callbacks.insert(place, ls.Aggregation())
        fitted = fit(lit, data, clients_per_round=2, max_epochs=2, callbacks=callbacks)
        assert sum(isinstance(callback, ls.Aggregation) for callback in fitted.trainer.callbacks) == 1
        expected: list[tuple[Any, ...]] = []
        for round_idx in (0, 1):
            ids = [row.client_id for row in fitted.ledger.rows if row.round_idx == round_idx]
            for received, client_id in enumerate(ids):
                expected += [("client end", name, client_id, received) for name in "AB"]
            expected += [("cohort end", name, round_idx, 2, round_idx) for name in "AB"]
            expected += [("round end", name, round_idx, round_idx + 1) for name in "AB"]
        assert calls == expected


class TestResume:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        """Fits with momentum at the server."""
        return partial(fit, server_optimizer=momentum_server)

    @pytest.fixture
    def fit_and_save(self, fit: Fit, lit_mlp: Any, data: Any) -> FitAndSave:
        """A fit with a logger that leaves a checkpoint of every round in ``folder / "ckpt"``."""

        def fit_and_save(folder: Path, max_epochs: int, ckpt_path: Path | None = None) -> Fitted:
            checkpoint = ModelCheckpoint(
                folder / "ckpt", "{epoch}", save_top_k=-1, enable_version_counter=False, auto_insert_metric_name=False
            )
            logger = CSVLogger(folder, version=f"{max_epochs}-{ckpt_path and ckpt_path.stem}")
            options: dict[str, Any] = {"logger": logger, "enable_checkpointing": True}
            rounds: dict[str, Any] = {"max_epochs": max_epochs, "ckpt_path": ckpt_path}
            return fit(seeded(lit_mlp), data, callbacks=[checkpoint], trainer=options, **rounds)

        return fit_and_save

    @pytest.mark.filterwarnings("ignore:.*exists and is not empty")
    @pytest.mark.parametrize("stop_after", [1, 3, 4])
    def test_resumed_run_equals_the_uninterrupted_one(
        self, stop_after: int, fit_and_save: FitAndSave, tmp_path: Path
    ) -> None:
        whole = fit_and_save(tmp_path / "whole", 5)
        fit_and_save(tmp_path / "parts", stop_after)
        resumed = fit_and_save(tmp_path / "parts", 5, tmp_path / "parts" / "ckpt" / f"{stop_after - 1}.ckpt")
        assert same_state(whole.state, resumed.state)
        assert whole.ledger.rows == resumed.ledger.rows
        assert resumed.trainer.global_step == 5
        assert whole.rows == resumed.rows

    def test_there_is_a_checkpoint_for_each_round(self, fit_and_save: FitAndSave, tmp_path: Path) -> None:
        fit_and_save(tmp_path, 3)
        assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["0.ckpt", "1.ckpt", "2.ckpt"]

    def test_checkpoint_loads_into_the_users_plain_module(
        self, lit_mlp: Any, fit_and_save: FitAndSave, tmp_path: Path
    ) -> None:
        fitted = fit_and_save(tmp_path, 2)
        state = torch.load(tmp_path / "ckpt" / "1.ckpt", weights_only=True)["state_dict"]
        plain = lit_mlp()
        plain.load_state_dict({name.removeprefix("module."): value for name, value in state.items()}, strict=True)
        assert same_state(plain.state_dict(), fitted.state)

    def test_a_run_stopped_within_a_round_begins_that_round_again(
        self, lit_mlp: Any, data: Any, fit: Fit, fit_and_save: FitAndSave, tmp_path: Path
    ) -> None:
        whole = fit_and_save(tmp_path / "whole", 3)

        class StopWithin(ls.RoundCallback):
            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                if turn.round_idx == 1 and not trainer.is_last_batch:
                    trainer.save_checkpoint(tmp_path / "within.ckpt")

        fit(seeded(lit_mlp), data, max_epochs=2, callbacks=[StopWithin()])
        resumed = fit_and_save(tmp_path / "resumed", 3, tmp_path / "within.ckpt")
        assert resumed.trainer.global_step == 3
        assert same_state(whole.state, resumed.state)

    @pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, callbacks",
        "ignore:Using ModelCheckpoint with manual optimization",  # the state after the server's step is what we want
    )
    def test_a_checkpoint_at_the_end_of_the_last_batch_resumes_with_the_next_round(
        self, lit_mlp: Any, data: Any, fit: Fit, fit_and_save: FitAndSave, tmp_path: Path
    ) -> None:
        whole = fit_and_save(tmp_path / "whole", 4)
        every_step = ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=1, save_top_k=-1)
        saving: dict[str, Any] = {"callbacks": [every_step], "trainer": {"enable_checkpointing": True}}
        fit(seeded(lit_mlp), data, max_epochs=2, **saving)
        assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
        for step in (1, 2):
            resumed = fit_and_save(tmp_path / f"resumed{step}", 4, tmp_path / "steps" / f"step={step}.ckpt")
            assert resumed.trainer.global_step == resumed.trainer.current_epoch == 4
            assert same_state(whole.state, resumed.state)

    def test_a_request_to_stop_takes_effect_at_the_end_of_the_round(
        self, lit_mlp: Any, data: Any, fit: Fit, fit_and_save: FitAndSave, tmp_path: Path
    ) -> None:
        whole = fit_and_save(tmp_path / "whole", 4)

        class StopEarly(ls.RoundCallback):
            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                trainer.should_stop |= turn.round_idx == 1

        stopped = fit(seeded(lit_mlp), data, max_epochs=4, callbacks=[StopEarly()])
        assert stopped.trainer.global_step == 2
        stopped.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        resumed = fit_and_save(tmp_path / "resumed", 4, tmp_path / "stopped.ckpt")
        assert resumed.trainer.global_step == 4
        assert same_state(whole.state, resumed.state)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"seed": 1}, "seed: 0 in the checkpoint, 1 now"),
            ({"local_epochs": 3}, "local_epochs: 1 in the checkpoint, 3 now"),
            ({"algorithm": ls.FedAvg()}, "algorithm: .SpectralSharding"),
            ({"clients_per_round": 2}, "participation: .*clients_per_round=4"),
        ],
    )
    def test_checkpoint_of_another_configuration_is_refused(
        self, change: dict[str, Any], named: str, lit: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fit(lit, data).trainer.save_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(ValueError, match=f"(?s)another configuration.*{named}"):
            fit(lit, data, max_epochs=2, ckpt_path=tmp_path / "1.ckpt", **change)

    @pytest.mark.parametrize(
        ("saved", "now", "named"),
        [
            ({}, {"limit_train_batches": 2}, "limit_train_batches: '1.0' in the checkpoint, '2' now"),
            ({"limit_train_batches": 1}, {}, "limit_train_batches: '1' in the checkpoint, '1.0' now"),
            ({}, {"overfit_batches": 0.5}, "overfit_batches: '0.0' in the checkpoint, '0.5' now"),
            ({"precision": "bf16-mixed"}, {}, "precision: 'bf16-mixed' in the checkpoint, '32-true' now"),
        ],
    )
    def test_checkpoint_of_another_trainer_is_refused(
        self, saved: Any, now: Any, named: str, lit: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        data.val = None
        fit(lit, data, trainer=saved).trainer.save_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(ValueError, match=f"(?s)another configuration.*{named}"):
            fit(lit, data, max_epochs=2, trainer=now, ckpt_path=tmp_path / "1.ckpt")
        assert fit(lit, data, max_epochs=2, trainer=saved, ckpt_path=tmp_path / "1.ckpt").trainer.global_step == 2

    def test_checkpoint_that_names_no_settings_of_the_trainer_is_resumed(
        self, lit: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fit(lit, data).trainer.save_checkpoint(tmp_path / "1.ckpt")
        older = torch.load(tmp_path / "1.ckpt", weights_only=True)
        for name in TRAINER_SETTINGS:
            del older["federation"][name]
        torch.save(older, tmp_path / "older.ckpt")
        resumed = fit(lit, data, max_epochs=2, trainer={"limit_train_batches": 2}, ckpt_path=tmp_path / "older.ckpt")
        assert resumed.trainer.global_step == 2

    def test_checkpoint_of_another_split_is_refused(
        self, lit: Any, toy: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fit(lit, data).trainer.save_checkpoint(tmp_path / "1.ckpt")
        other = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), val=toy, batch_size=4, seed=1)
        with pytest.raises(ValueError, match="partition: "):
            fit(lit, other, max_epochs=2, ckpt_path=tmp_path / "1.ckpt")

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
    def test_checkpoint_evaluates_whatever_the_configuration(
        self, lit: Any, lit_mlp: Any, data: Any, quiet: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fitted = fit(lit, data)
        fitted.trainer.save_checkpoint(tmp_path / "1.ckpt")
        model = federate(lit_mlp(), seed=9)
        (scores,) = pl.Trainer(**quiet).validate(model, data, ckpt_path=str(tmp_path / "1.ckpt"), verbose=False)
        assert scores["val_acc"] == pytest.approx(fitted.rows[0]["val_acc"])


class TestTrainerOptions:
    def test_early_stopping_on_a_round_metric(self, lit: Any, data: Any, fit: Fit) -> None:
        stop = EarlyStopping("fl/loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
        assert fit(lit, data, max_epochs=20, callbacks=[stop]).trainer.current_epoch == 2

    def test_early_stopping_on_what_clients_log(self, lit: Any, data: Any, fit: Fit) -> None:
        stop = EarlyStopping("train_loss", patience=0, min_delta=1e9, check_on_train_epoch_end=True)
        assert fit(lit, data, max_epochs=20, callbacks=[stop]).trainer.current_epoch == 2

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true", "32-true"])
    def test_precision(self, precision: Any, lit: Any, data: Any, fit: Fit) -> None:
        seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
        lit.net[0].register_forward_hook(lambda module, args, output: seen[module.training].add(output.dtype))
        fit(lit, data, max_epochs=2, trainer={"precision": precision})
        expected = {"bf16": torch.bfloat16, "64": torch.float64, "32": torch.float32}
        assert seen[True] == seen[False] == {expected[precision.split("-")[0]]}  # clients train, the server evaluates

    @pytest.mark.parametrize("fast", [True, 2])
    def test_fast_dev_run(self, fast: Any, lit: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        trainer = pl.Trainer(fast_dev_run=fast, accelerator="cpu", enable_progress_bar=False)
        trainer.fit(federate(lit), data)
        assert trainer.current_epoch == 1
        assert list(tmp_path.iterdir()) == []

    def test_limited_cohort_is_what_strategies_are_told(self, lit: Any, data: Any, fit: Fit) -> None:
        sizes: list[float] = []

        class Spy(ls.Collective):
            def __call__(self, singular_values: Any, num_terms: int, cohort_size: float) -> Any:
                sizes.append(cohort_size)
                return super().__call__(singular_values, num_terms, cohort_size)

        limits = {"limit_train_batches": 3, "limit_val_batches": 1}
        fit(lit, data, algorithm=ls.SpectralSharding(Spy(), 0.3), clients_per_round=6, trainer=limits)
        assert sizes[-1] == 3

    def test_pseudo_gradients_do_not_stay(self, lit: Any, data: Any, fit: Fit) -> None:
        fit(lit, data)
        assert all(parameter.grad is None for parameter in lit.parameters())

    def test_trainer_gets_its_settings_back(self, lit: Any, data: Any, quiet: Any) -> None:
        data.val = None
        trainer = pl.Trainer(max_epochs=1, **quiet)
        before = trainer.accumulate_grad_batches, trainer.log_every_n_steps, trainer.limit_val_batches
        trainer.fit(federate(lit), data)
        assert (trainer.accumulate_grad_batches, trainer.log_every_n_steps, trainer.limit_val_batches) == before

    def test_trainer_gets_its_settings_back_after_an_error(self, lit: Any, data: Any, quiet: Any) -> None:
        class Fails(ls.RoundCallback):
            def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
                raise RuntimeError("enough")

        trainer = pl.Trainer(max_epochs=1, callbacks=[fails := Fails()], **quiet)
        with pytest.raises(RuntimeError, match="enough"):
            trainer.fit(federate(lit), data)
        assert trainer.accumulate_grad_batches == 1
        trainer.callbacks.remove(fails)
        trainer.fit(federate(lit), data)
        assert trainer.current_epoch == 1

    def test_timer_stops_between_whole_rounds(self, lit: Any, data: Any, fit: Fit) -> None:
        before = copy.deepcopy(lit.state_dict())
        algorithm = replace(MIXED, spectral_start=None)
        none = fit(lit, data, algorithm=algorithm, max_epochs=-1, callbacks=[Timer({"seconds": 0}, interval="epoch")])
        assert none.trainer.global_step == 0
        assert same_state(none.state, before)
        some = fit(lit, data, max_epochs=-1, callbacks=[Timer({"milliseconds": 30})])
        assert some.trainer.global_step == len(some.rows) >= 1
        assert {row["fl/clients"] for row in some.rows} == {4.0}

    def test_test_and_predict_run_the_aggregated_model(self, lit: Any, data: Any, toy: Any, fit: Fit) -> None:
        fitted = fit(lit, data)
        (scores,) = fitted.trainer.test(fitted.model, data, verbose=False)
        x, y = toy.tensors
        with torch.no_grad():
            expected = nn.functional.cross_entropy(lit.eval()(x), y)
        assert scores["test_loss"] == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(fitted.model(x), lit(x))

    def test_two_fits_of_one_module_go_on_from_its_weights(self, lit: Any, data: Any, fit: Fit) -> None:
        model = federate(lit)
        middle = copy.deepcopy(fit(model, data).state)
        fit(model, data)
        assert not torch.equal(middle["net.2.weight"], lit.net[2].weight)


class TestLoggers:
    def test_x_axis_counts_rounds(self, lit: Any, data: Any, tmp_path: Path) -> None:
        trainer = pl.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=[CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="tb", version=0)],
            callbacks=[LearningRateMonitor()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(federate(lit, local_epochs=2), data)
        with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        for name in ("fl/loss", "fl/bytes_up", "fl/terms_visited", "train_loss", "train_acc", "val_acc", "lr-SGD"):
            assert [row["step"] for row in rows if row.get(name)] == ["0", "1", "2"], name
        for row in rows:
            assert not row["fl/round"] or float(row["fl/round"]) == float(row["step"])
        lrs = [float(row["fl/lr"]) for row in rows if row["fl/lr"]]
        assert lrs[0] == pytest.approx(0.1)
        assert lrs[0] > lrs[1] > lrs[2]

    def test_logged_values_are_what_clients_saw(self, lit: Any, data: Any, fit: Fit) -> None:
        (row,) = fit(lit, data).rows
        assert row["train_loss"] == pytest.approx(row["fl/loss"], rel=1e-6)
        assert row["fl/examples"] == 40
        assert row["fl/clients"] == 4
        assert 0 < row["fl/terms_visited"] <= 1
        assert 0 < row["fl/inclusion_entropy"] <= 1
        assert row["fl/largest_multiplier"] >= 1

    def test_ledger_counts_what_travels(self, lit: Any, data: Any, fit: Fit) -> None:
        fitted = fit(lit, data, max_epochs=2)
        ledger, history = fitted.ledger, fitted.history
        dense = 6 * 12 + 12 + 12 + 12 * 3 + 3
        for ratio, (down, up) in ledger.bytes_per_client().items():
            n = {0.3: 4, 0.6: 8}[ratio]
            assert up == 4 * (dense + n * 24)
            assert down == up + 4 * n
        assert sum(row.uplink_bytes for row in ledger.rows if row.round_idx == 0) == history.rows[0]["fl/bytes_up"]
        assert ledger.total_bytes == sum(row["fl/bytes_up"] + row["fl/bytes_down"] for row in history.rows)

    def test_history_draws_a_picture(self, lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        fit(lit, data, max_epochs=2).history.plot("val_acc", tmp_path / "acc.png")
        assert (tmp_path / "acc.png").read_bytes().startswith(b"\x89PNG")


QUIET_RUN = """
    import warnings
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    import sys
    sys.path.insert(0, {tests!r})
    import lightning.pytorch as pl, torch
    from torch.utils.data import TensorDataset
    import lightning_spectral as ls
    from conftest import LitMLP
    x = torch.randn(120, 6)
    toy = TensorDataset(x, x[:, :3].argmax(1))
    data = ls.FederatedDataModule(toy, ls.DirichletPartitioner(12, alpha=1.0), val=toy, batch_size=4)
    sharding = ls.SpectralSharding(keep_ratio={{0.3: 0.5, 0.6: 0.5}})
    model = ls.FederatedModule(LitMLP(), algorithm=sharding, clients_per_round=4)
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    print("---", flush=True); print("---", file=sys.stderr, flush=True)
    trainer.fit(model, data)
    print("---", flush=True); print("---", file=sys.stderr, flush=True)
"""


def test_a_run_says_one_sentence_of_its_own_and_leaves_no_file(tmp_path: Path) -> None:
    script = textwrap.dedent(QUIET_RUN).format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    said = [line for text in (done.stdout, done.stderr) for line in text.split("---")[1].splitlines() if line.strip()]
    lightning_says = (
        "weights_only",
        "GPU available",
        "TPU available",
        "HPU available",
        "`Trainer.fit` stopped",
        "Tip:",
        "💡",
    )
    ours = [line for line in said if not any(words in line for words in lightning_says)]
    assert ours == ["Spectral start: the energy of 1 of 1 sharded matrices is now in 30% of the terms."]
    assert list(tmp_path.iterdir()) == []


def test_import_changes_nothing_in_the_process(tmp_path: Path) -> None:
    script = (
        "import lightning.pytorch, torchmetrics, scipy.optimize, sys, random, torch, warnings\n"
        "known = set(lightning.pytorch.strategies.StrategyRegistry)\n"
        "before = (torch.get_rng_state().sum(), random.getstate(), list(warnings.filters), torch.get_num_threads())\n"
        "heavy = {'wandb', 'matplotlib', 'mlxtend'} - sys.modules.keys()\n"
        "import lightning_spectral\n"
        "after = (torch.get_rng_state().sum(), random.getstate(), list(warnings.filters), torch.get_num_threads())\n"
        "assert before == after\n"
        "names = lightning.pytorch.strategies.StrategyRegistry  # the one table that importing adds to\n"
        "assert all(name.startswith('client_parallel') for name in names.keys() - known)\n"
        "assert heavy.isdisjoint(sys.modules), heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
