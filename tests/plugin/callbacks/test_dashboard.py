"""What the dashboard shows, read back from the record of the run, wandb and TensorBoard."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from observed_runs import acting

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import SpectralDiagnostics, diagnostics
from lightning_spectral.plugin.callbacks.dashboard import client_table, histogram, keep_ratio_table
from lightning_spectral.plugin.callbacks.progress import round_bytes
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary, WorkUnit
from lightning_spectral.report.runs import NAME, Histogram, Table, read_run

SPECTRAL = ls.SpectralSharding(keep_ratio={0.25: 0.5, 0.5: 0.5})
NAN = float("nan")


@pytest.fixture
def fit(fit: Fit, tmp_path: Path) -> Fit:
    return partial(fit, trainer={"logger": CSVLogger(tmp_path, name=None, version="csv")})


def shown(folder: Path, name: str, round_idx: int) -> list[dict[str, Any]]:
    """The rows of one of the dashboard's tables."""
    table = read_run(folder / "csv" / NAME).shown[f"tables/{name}"][round_idx]
    assert isinstance(table, Table)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def recorded(folder: Path) -> dict[str, list[int]]:
    """The rounds of each table and histogram."""
    return {name: sorted(by_round) for name, by_round in read_run(folder / "csv" / NAME).shown.items()}


def counts(folder: Path, round_idx: int) -> dict[str, float]:
    """The number of values in each histogram of a round."""
    found = {name: by_round.get(round_idx) for name, by_round in read_run(folder / "csv" / NAME).shown.items()}
    return {name: sum(one.counts) for name, one in found.items() if isinstance(one, Histogram)}


def summary() -> RoundSummary:
    """Two clients in the average, one that failed, and one that only measured its loss beforehand."""
    clients = (
        ClientOutcome(4, WorkUnit(7), 0.5, 10, 3, 1.0, 200, 100, seconds=0.5),
        ClientOutcome(4, WorkUnit(2), 0.25, 30, 9, 2.0, 80, 40),
        ClientOutcome(4, WorkUnit(5), 0.5, 20, 6, NAN, 200, 0, left_out="error"),
    )
    return RoundSummary(4, clients, {}, {}, {}, measured=(ClientOutcome(4, WorkUnit(1), 0.5, 10, 0, 1.0, 200, 4),))


def test_the_table_of_clients_has_what_is_known_of_each() -> None:
    made = client_table(summary(), [{"val_acc": {7: 0.75}}, {}])
    assert made.columns[-2:] == ("left_out", "val_acc")
    rows = [dict(zip(made.columns, row, strict=True)) for row in made.rows]
    assert [row["client"] for row in rows] == [7, 2, 5]
    assert [row["loss"] for row in rows] == [1.0, 2.0, None]
    assert [row["seconds"] for row in rows] == [0.5, None, None]
    assert [row["left_out"] for row in rows] == ["", "", "error"]
    assert [row["val_acc"] for row in rows] == [0.75, None, None]


def test_the_table_of_keep_ratios_adds_up_their_clients() -> None:
    made = keep_ratio_table(summary())
    assert " ".join(made.columns[1:]) == "keep_ratio clients clients_left_out examples loss bytes_down bytes_up"
    assert made.rows == ((4, 0.25, 1, 0, 30, 2.0, 80, 40), (4, 0.5, 1, 1, 10, 1.0, 400, 100))
    assert round_bytes(summary()) == (200 + 80 + 200 + 200, 100 + 40 + 4)


@pytest.mark.parametrize("values", [[0.0, 0.1, 0.9, 1.0], [2.0], [3.0, 3.0, NAN]])
def test_a_histogram_counts_every_finite_value_between_its_edges(values: list[float]) -> None:
    made = histogram(torch.tensor(values), num_bins=4)
    finite = [value for value in values if value == value]
    assert sum(made.counts) == len(finite)
    assert list(made.edges) == sorted(set(made.edges))
    assert len(made.edges) == 5
    assert made.edges[0] <= min(finite) <= max(finite) <= made.edges[-1]


def test_the_record_holds_the_rounds_that_are_due(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    dashboard, watcher = ls.RoundDashboard(every_n_rounds=2), SpectralDiagnostics()
    ages = acting(
        client_columns=lambda made: {"age": {own.client_id: 40.0 + own.client_id for own in made.clients[1:]}}
    )
    fitted = fit(lit, data, algorithm=SPECTRAL, max_epochs=3, callbacks=[dashboard, watcher, ages])
    assert set(map(tuple, recorded(tmp_path).values())) <= {(0, 2), (0,), (2,)}
    assert all(recorded(tmp_path)[f"tables/{kind}"] == [0, 2] for kind in ("clients", "keep_ratios", "layers"))
    assert not (tmp_path / "csv/dashboard").exists()
    clients = shown(tmp_path, "clients", 2)
    ledger = [row for row in fitted.ledger.rows if row.round_idx == 2]
    assert [row["client"] for row in clients] == [row.client_id for row in ledger]
    assert [row["keep_ratio"] for row in clients] == [row.keep_ratio for row in ledger]
    assert [row["bytes_down"] for row in clients] == [row.downlink_bytes for row in ledger]
    assert [row["age"] for row in clients] == [None, *(40.0 + row.client_id for row in ledger[1:])]
    assert all(0 < row["seconds"] < 60 for row in clients)
    (layer,) = shown(tmp_path, "layers", 2)
    assert layer["layer"] == "net.2"
    assert layer["terms"] == 12
    assert layer["terms_visited"] == fitted.history.rows[2]["fl/terms_visited"]
    assert layer["discrepancy"] == pytest.approx(fitted.logged["fl/discrepancy"], rel=1e-12)
    assert layer["stable_rank"] == pytest.approx(fitted.logged["fl/stable_rank"], rel=1e-12)
    found = counts(tmp_path, 2)
    assert found["singular_values/net.2"] == 12
    ratios = {f"{row.keep_ratio:g}" for row in ledger}
    assert all(found[f"inclusion_probs/net.2/{ratio}"] == 12 for ratio in ratios)
    assert all(12 >= found[f"multipliers/net.2/{ratio}"] >= 12 * float(ratio) for ratio in ratios)


@pytest.mark.parametrize("view", [ls.RoundDashboard, ls.CommunicationLedger])
def test_without_a_history_the_trainer_gets_one(view: Any, lit: Any, data: Any, quiet: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="csv")
    trainer = pl.Trainer(max_epochs=2, callbacks=[view()], **{**quiet, "logger": logger})
    trainer.fit(ls.FederatedModule(lit, clients_per_round=2), data)
    (history,) = [callback for callback in trainer.callbacks if isinstance(callback, ls.RoundHistory)]
    assert [*read_run(tmp_path / "csv" / NAME).rows] == history.rows
    assert len(history.rows) == 2


def test_the_table_of_clients_shows_how_the_model_serves_them(lit: Any, toy: Any, fit: Fit, tmp_path: Path) -> None:
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=8), batch_size=4, client_val_fraction=0.4)
    evaluation = ls.ClientEvaluation(every_n_rounds=2, clients="participants")
    fit(lit, data, algorithm=SPECTRAL, max_epochs=4, callbacks=[evaluation, ls.RoundDashboard(1)])
    for round_idx in (1, 3):
        found = {row["client"]: row.get("val_acc") for row in shown(tmp_path, "clients", round_idx)}
        assert found == (evaluation.table.column("val_acc") if round_idx == 3 else dict.fromkeys(found))


def test_validation_stands_beside_the_bytes_so_far(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    fitted = fit(lit, data, algorithm=SPECTRAL, max_epochs=3, callbacks=[dashboard := ls.RoundDashboard()])
    spent = [sum(row[f"fl/bytes_{way}"] for way in ("down", "up")) for row in fitted.history.rows]
    logged = (tmp_path / "csv/metrics.csv").read_text().splitlines()  # by Lightning's own `CSVLogger`
    validated = [row for row in csv.DictReader(logged) if row["val_acc"]]
    assert [float(row["fl/bytes_total"]) for row in validated] == [sum(spent[: n + 1]) for n in range(3)]
    assert fitted.trainer.callback_metrics["fl/bytes_total"] == fitted.ledger.total_bytes == dashboard.total_bytes
    assert fitted.history.column("fl/bytes_total") == [sum(spent[: n + 1]) for n in range(3)]


@pytest.mark.parametrize("interval", [1, 2, None])
def test_figures_are_computed_once_a_round(
    interval: int | None, lit: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    own = diagnostics.layer_figures
    monkeypatch.setattr(diagnostics, "layer_figures", lambda draws: calls.append(1) or own(draws))
    watchers = [] if interval is None else [SpectralDiagnostics(interval)]
    fit(lit, data, algorithm=SPECTRAL, max_epochs=4, callbacks=[ls.RoundDashboard(3), *watchers])
    assert len(calls) == {1: 4, 2: 3, None: 2}[interval]  # the dashboard needs those of rounds 0 and 3
    assert all(shown(tmp_path, "layers", round_idx)[0]["discrepancy"] for round_idx in (0, 3))


@pytest.mark.parametrize(
    ("algorithm", "histograms"), [(ls.FedAvg(), set()), (ls.Zampling(4, degree=3), {"probs"})], ids=["dense", "bits"]
)
def test_algorithms_without_a_spectrum_show_what_they_have(
    algorithm: Any, histograms: set[str], lit: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    fitted = fit(lit, data, algorithm=algorithm, callbacks=[ls.RoundDashboard()])
    assert counts(tmp_path, 0).keys() == histograms
    assert {*recorded(tmp_path)} - histograms == {"tables/clients", "tables/keep_ratios"}
    if histograms:
        assert sum(counts(tmp_path, 0).values()) == len(fitted.model.state.probs)


def test_names_of_several_models_begin_with_the_models(lit_mlp: Any, toy: Any, quiet: Any, tmp_path: Path) -> None:
    models = {"dense": ls.FedAvg(), "spectral": SPECTRAL}
    members = {name: ls.FederatedModule(seeded(lit_mlp), algorithm=algorithm) for name, algorithm in models.items()}
    model = ls.MultiModelModule(members, participation=ls.LossVarianceReduced(active=6, measure=8), processors=2)
    data = {name: ls.FederatedDataModule(toy, ls.IIDPartitioner(8), val=toy, batch_size=8) for name in models}
    logger, ledger = CSVLogger(tmp_path, name=None, version="csv"), ls.CommunicationLedger()
    callbacks = [dashboard := ls.RoundDashboard(), ledger]
    trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, **{**quiet, "logger": logger})
    trainer.fit(model, ls.MultiModelDataModule(data))
    own = {name: sum(r.downlink_bytes + r.uplink_bytes for r in ledger.rows if r.model == name) for name in models}
    assert {name: trainer.callback_metrics[f"{name}/fl/bytes_total"] for name in models} == own
    assert (
        trainer.callback_metrics["fl/bytes_total"] == dashboard.total_bytes == sum(own.values()) == ledger.total_bytes
    )
    for name in models:
        first = [row.client_id for row in ledger.rows if row.round_idx == 0 and row.model == name and not row.measured]
        table = read_run(tmp_path / "csv" / NAME).shown[f"{name}/tables/clients"][0]
        assert isinstance(table, Table)
        assert [row[table.columns.index("client")] for row in table.rows] == first
    assert recorded(tmp_path)["spectral/tables/layers"] == [0]
    assert {name.split("/")[0] for name in counts(tmp_path, 0)} == {"spectral"}


@pytest.mark.filterwarnings("ignore:RoundDashboard shows:lightning_spectral.SpectralWarning")
def test_bytes_go_on_when_a_run_is_resumed_and_not_in_another(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    fit = partial(fit, data=data, trainer={"logger": False})
    ckpt, dashboard = tmp_path / "first.ckpt", ls.RoundDashboard()
    fit(seeded(lit_mlp), callbacks=[ls.RoundDashboard()]).trainer.save_checkpoint(ckpt)
    whole = fit(seeded(lit_mlp), max_epochs=3)
    resumed = fit(seeded(lit_mlp), max_epochs=3, callbacks=[dashboard], ckpt_path=ckpt)
    assert dashboard.total_bytes == whole.ledger.total_bytes == resumed.trainer.callback_metrics["fl/bytes_total"]
    again = fit(seeded(lit_mlp), callbacks=[dashboard])
    assert dashboard.total_bytes == again.ledger.total_bytes < whole.ledger.total_bytes


def test_the_run_is_the_same_with_and_without(lit_mlp: Any, data: Any, fit: Fit) -> None:
    plain = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=2, trainer={"logger": False})
    watched = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=2, callbacks=[ls.RoundDashboard(1)])
    assert same_state(plain.state, watched.state)


def test_tensorboard_holds_histograms_pictures_and_curves(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="comes with the `test` extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = {"logger": TensorBoardLogger(tmp_path, name=None, version="tb")}
    fitted = fit(lit, data, algorithm=SPECTRAL, max_epochs=2, callbacks=[ls.RoundDashboard()], trainer=trainer)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    (spectrum,) = events.Histograms("singular_values/net.2")
    assert spectrum.step == 0
    assert sum(spectrum.histogram_value.bucket) == spectrum.histogram_value.num == 12
    assert not [tag for tag in events.Tags()["tensors"] if "tables" in tag or "custom_scalars" in tag]
    assert {"pictures/spectra", "pictures/partition"} == set(events.Tags()["images"])
    points = [(event.step, event.value) for event in events.Scalars("over_bytes/val_acc")]
    spent = [sum(r.downlink_bytes + r.uplink_bytes for r in fitted.ledger.rows if r.round_idx <= n) for n in (0, 1)]
    assert [step for step, _ in points] == spent
    assert [value for _, value in points] == pytest.approx(fitted.history.column("val_acc"))
    assert [event.step for event in events.Scalars("over_bytes/fl/loss")] == spent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_wandb_run_holds_config_tables_histograms_and_curves_over_bytes(
    lit: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")
    from offline_wandb import axes_of, configs_of, logged_table, offline_logger, run_records
    from offline_wandb import rows_of as offline_rows_of

    trainer = {"logger": offline_logger(tmp_path, monkeypatch, prefix="run")}
    callbacks = [ls.RoundDashboard(every_n_rounds=2)]
    fitted = fit(lit, data, algorithm=SPECTRAL, max_epochs=2, callbacks=callbacks, trainer=trainer)
    wandb.finish()
    (path,) = tmp_path.rglob(NAME)
    assert path.parent == tmp_path / "test" / str(fitted.trainer.logger.version)
    records = run_records(tmp_path)
    config = {name: value for update in configs_of(records) for name, value in update.items()}
    assert config["federation"]["algorithm"]["strategy"]["name"] == "Collective"
    assert config["data"]["num_clients"] == 12
    clients = logged_table(tmp_path, "run-tables/clients")
    ledger = [(row.round_idx, row.client_id) for row in fitted.ledger.rows if row.round_idx == 0]
    assert [(row["round"], row["client"]) for row in clients] == ledger
    rows = offline_rows_of(records)
    for name in ("fl/loss", "fl/seconds_train", "fl/terms_visited", "train_loss", "val_acc"):
        assert [row["run-fl/round"] for row in rows if f"run-{name}" in row] == [0, 1], name
    spectra = [row for row in rows if "run-singular_values/net.2._type" in row]
    assert [row["run-fl/round"] for row in spectra] == [0]
    assert all(sum(row["run-singular_values/net.2.values"]) == 12 for row in spectra)
    axes = axes_of(records)
    assert (axes["*"], axes["run-over_bytes/val_acc"]) == ("run-fl/round", "run-fl/bytes_total")
    points = [
        (row["run-fl/bytes_total"], row["run-over_bytes/val_acc"]) for row in rows if "run-over_bytes/val_acc" in row
    ]
    assert points == list(zip(fitted.history.column("fl/bytes_total"), fitted.history.column("val_acc"), strict=True))
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    defined = [metric["name"] for metric in metrics if "name" in metric]  # the others are patterns
    assert len(defined) == len(set(defined))  # once, whatever the number of rounds
    assert config["run"] == {"version": ls.__version__, "rounds": 2, "devices": 1}
    for name in ("spectra", "partition"):
        (picture,) = [row for row in rows if row.get(f"run-pictures/{name}._type") == "image-file"]
        assert picture["run-fl/round"] == 0
        width, height = picture[f"run-pictures/{name}.width"], picture[f"run-pictures/{name}.height"]
        assert (width, height) == ((800, 400) if name == "spectra" else (800, 300))
    last: dict[str, Any] = {}
    for record in records:
        last |= record["summary"]["update"] if record["type"] == "summary" else {}
    for name in ("val_acc", "fl/loss"):
        column = fitted.history.column(name)
        assert last[f"run-{name}"] == pytest.approx(column[-1])
        assert [last[f"run-{name}/{end}"] for end in ("min", "max")] == pytest.approx([min(column), max(column)])


def test_best_values_go_on_when_a_run_is_resumed(
    lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")
    from offline_wandb import offline_logger

    logger = offline_logger(tmp_path, monkeypatch, mode="disabled")
    fit = partial(fit, data=data, trainer={"logger": logger})
    first = fit(seeded(lit_mlp), max_epochs=2, callbacks=[ls.RoundDashboard()])
    first.trainer.save_checkpoint(tmp_path / "first.ckpt")
    resumed = fit(seeded(lit_mlp), max_epochs=3, callbacks=[ls.RoundDashboard()], ckpt_path=tmp_path / "first.ckpt")
    losses = resumed.history.column("val_loss")
    assert max(losses) == losses[0] == first.history.column("val_loss")[0] > losses[2]
    assert logger.experiment.summary["val_loss/max"] == max(losses)
    assert logger.experiment.summary["val_loss/min"] == min(losses)
    wandb.finish()  # or the next logger of this process continues the run
