"""The server's model on each client's held-out examples: the figures, and that the run is unaffected."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, Fitted, seeded
from observed_runs import Draws, Stirring, assert_only_adds, metrics_by_hand
from one_by_one import Noisy
from scipy.stats import binomtest
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.partition import Partition
from lightning_spectral.plugin.callbacks import ClientRow, ClientTable
from lightning_spectral.protocol.rng import derived_generator

SIZES = (1, 2, 7, 9, 11, 13, 14, 15, 20, 28)  # client 0 has none to spare


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=2)


def with_held_out(train: Dataset[Any]) -> ls.FederatedDataModule:
    """Ten clients of several sizes, a quarter of whose examples is held out, in batches of 3."""
    partitioner = ls.NaturalPartitioner([client for client, size in enumerate(SIZES) for _ in range(size)])
    return ls.FederatedDataModule(train, partitioner, batch_size=4, eval_batch_size=3, client_val_fraction=0.25)


def table_of(evaluation: ls.ClientEvaluation) -> ClientTable:
    assert evaluation.table is not None
    return evaluation.table


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    return with_held_out(toy)


def test_the_table_is_of_the_final_model_on_examples_nobody_trained_on(
    lit_mlp: Any, toy: TensorDataset, data: ls.FederatedDataModule, fit: Fit
) -> None:
    trained_on: list[Tensor] = []
    watched = seeded(variant(lit_mlp, before_step=lambda lit, batch: trained_on.append(batch[0])))
    evaluation = ls.ClientEvaluation()
    fitted = fit(watched, data, clients_per_round=10, callbacks=[evaluation])
    table = table_of(evaluation)
    assert table.round_idx == 1
    assert [row.client_id for row in table.rows] == list(range(1, 10))
    for row in table.rows:
        held_out = data.held_out[row.client_id]
        assert row.num_examples == len(held_out)
        assert row.metrics == pytest.approx(metrics_by_hand(fitted.module, toy[held_out]), rel=1e-5)
    seen = {tuple(x.tolist()) for x in torch.cat(trained_on)}
    assert not seen & {tuple(x.tolist()) for x in toy.tensors[0][data.held_out.indices]}
    assert len(seen) == 120 - data.held_out.num_assigned


def test_figures_are_logged_for_callbacks_and_in_the_history(lit: Any, data: Any, fit: Fit) -> None:
    evaluation = ls.ClientEvaluation()
    fitted = fit(lit, data, callbacks=[evaluation])
    values = np.array(list(table_of(evaluation).column("val_loss").values()))
    sizes = np.array([row.num_examples for row in table_of(evaluation).rows])
    figures = {
        "mean": values.mean(),
        "weighted_mean": np.average(values, weights=sizes),
        "median": sorted(values)[4],
        "trimmed_mean": np.mean(sorted(values)[1:-1]),  # a tenth of nine clients is one
        "std": np.sqrt(np.mean((values - values.mean()) ** 2)),
        "lowest_decile": values.min(),
        "highest_decile": values.max(),
        "jain": values.sum() ** 2 / (9 * (values**2).sum()),
        "gini": np.abs(values[:, None] - values).mean() / (2 * values.mean()),
    }
    assert figures["mean"] != pytest.approx(figures["weighted_mean"], rel=1e-3)
    expected = {f"fl/clients/val_loss/{name}": pytest.approx(value, rel=1e-9) for name, value in figures.items()}
    for found in (fitted.rows[-1], fitted.logged):
        assert {name: value for name, value in found.items() if "/val_loss/" in name} == expected
    assert fitted.rows[0]["fl/clients/val_loss/mean"] != fitted.rows[1]["fl/clients/val_loss/mean"]


def test_names_of_clients_are_in_table_ledger_and_checkpoint(lit: Any, toy: Any, fit: Fit, tmp_path: Path) -> None:
    owners = ls.NaturalPartitioner(["Ulm"] * 40 + ["Graz"] * 80)
    data, evaluation = ls.FederatedDataModule(toy, owners, client_val_fraction=0.25), ls.ClientEvaluation()
    run = fit(lit, data, clients_per_round=2, callbacks=[evaluation])
    run.history.save(tmp_path / "rounds.jsonl")
    history = ls.RoundHistory()
    history.load_state_dict(run.history.state_dict())
    for turns in (run.history.turns, ls.RoundHistory.load(tmp_path / "rounds.jsonl").turns, history.turns):
        assert {(row.client_id, row.name) for row in turns[0]} == {(0, "Ulm"), (1, "Graz")}
    head, *rows, _, few = (row.split() for row in str(evaluation.table).splitlines())
    assert few[-2:] == ["as", "10."]
    assert head[:3] == ["client", "name", "examples"]
    assert [row[:3] for row in rows] == [["0", "Ulm", "10"], ["1", "Graz", "20"]]
    shown: Any = SimpleNamespace(model="", round_idx=table_of(evaluation).round_idx)
    assert evaluation.client_columns(shown)["held_out_examples"] == {0: 10.0, 1: 20.0}
    resumed = ls.ClientEvaluation()
    resumed.load_state_dict(evaluation.state_dict())
    assert resumed.table == evaluation.table


@pytest.mark.parametrize("spoilt", [None, 0.5, -0.1, 2.0, float("nan")])
def test_shares_of_examples_have_the_intervals_of_wilson(spoilt: float | None) -> None:
    sizes, hits = (1, 6, 40, 40, 5_000), (1, 2, 0, 40, 4_321)
    values = [float(np.float32(k) / np.float32(n)) for k, n in zip(hits, sizes, strict=True)]
    rows = [ClientRow(i, n, {"acc": p}) for i, (n, p) in enumerate(zip(sizes, values, strict=True))]
    table = ClientTable(0, tuple([*rows, ClientRow(5, 1, {} if spoilt is None else {"acc": spoilt})]))
    tests = (binomtest(k, n).proportion_ci(method="wilson") for k, n in zip(hits, sizes, strict=True))
    oracle = {i: pytest.approx((one.low, one.high), abs=1e-7) for i, one in enumerate(tests)}
    assert table.intervals("acc") == (oracle if spoilt is None else {})
    assert all(0 <= low < high <= 1 for low, high in table.intervals("acc").values())
    assert str(table).endswith("Deciles may be of as few examples as 1.")
    assert all((cell in str(table)) is (spoilt is None) for cell in ("0.3333 (0.10-0.70)", "0 (0.00-0.09)"))
    recall = ClientTable(0, (ClientRow(0, 30, {"recall": 1.0}),))  # of the few that are ill
    assert str(recall).split()[-1] == "1"


def test_a_value_that_may_be_negative_has_no_share() -> None:
    rows = tuple(ClientRow(client, 1, {"score": score}) for client, score in enumerate((-1.0, 2.0)))
    names = "mean", "weighted_mean", "median", "trimmed_mean", "std", "lowest_decile", "highest_decile"
    assert set(ClientTable(0, rows).figures()) == {f"score/{figure}" for figure in names}


def test_one_client_that_lies_hardly_moves_the_robust_figures() -> None:
    def figures(last: float) -> dict[str, float]:
        values = [*range(10), last]
        return ClientTable(0, tuple(ClientRow(i, 1, {"loss": value}) for i, value in enumerate(values))).figures()

    honest, lied = figures(10.0), figures(1e300)
    for name in ("loss/median", "loss/trimmed_mean"):
        assert honest[name] == lied[name] == 5.0
    assert lied["loss/mean"] > 1e298


def test_the_run_is_the_same_with_and_without(toy: TensorDataset, fit: Fit) -> None:
    runs: list[Fitted] = []
    for callbacks in ([ls.ClientEvaluation()], []):
        torch.manual_seed(3)
        data = ls.FederatedDataModule(
            Noisy(toy), ls.IIDPartitioner(12), val=Noisy(toy), batch_size=4, client_val_fraction=0.2
        )
        runs.append(fit(seeded(Stirring), data, callbacks=[*callbacks, Draws()]))
    assert_only_adds("fl/clients/", *runs)


def test_without_held_out_examples_the_partition_is_the_partitioners_own(toy: TensorDataset) -> None:
    partitioner = ls.IIDPartitioner(10)
    plain = ls.FederatedDataModule(toy, partitioner)
    with_some = ls.FederatedDataModule(toy, partitioner, client_val_fraction=0.5)
    whole = [sorted([*with_some.partition[c].tolist(), *with_some.held_out[c].tolist()]) for c in range(10)]
    own = partitioner(120, None, derived_generator(0, "partition"))
    assert whole == [examples.tolist() for examples in plain.partition] == [examples.tolist() for examples in own]
    assert plain.held_out.num_assigned == 0


class Tables(ls.RoundCallback):
    """The tables of an evaluation after each round; the evaluation is listed before this callback."""

    def __init__(self, evaluation: ls.ClientEvaluation) -> None:
        self.evaluation = evaluation
        self.found: list[tuple[int, int, list[int], list[int]]] = []

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        table = table_of(self.evaluation)
        trained = sorted(client.client_id for client in summary.averaged)
        self.found.append((summary.round_idx, table.round_idx, [row.client_id for row in table.rows], trained))


def test_rounds_and_clients_are_chosen(lit: Any, data: Any, fit: Fit) -> None:
    found = {}
    for clients in ("all", "participants", 3):
        evaluation = ls.ClientEvaluation(every_n_rounds=2, clients=clients)  # type: ignore[arg-type]
        tables = Tables(evaluation)
        fit(lit, data, max_epochs=4, callbacks=[evaluation, tables])
        assert [last for _, last, _, _ in tables.found] == [0, 0, 2, 3]
        found[clients] = [(chosen, trained) for round_idx, last, chosen, trained in tables.found if round_idx == last]
    everybody = list(range(1, 10))
    assert [chosen for chosen, _ in found["all"]] == [everybody] * 3
    for chosen, trained in found["participants"]:
        assert chosen == [client for client in trained if client != 0]
    drawn = [tuple(chosen) for chosen, _ in found[3]]
    assert len(set(drawn)) > 1
    assert all(len(set(chosen)) == 3 and set(chosen) <= set(everybody) for chosen in drawn)


def test_several_models_have_tables_and_resume_with_them(lit_mlp: Any, toy: Any, quiet: Any, tmp_path: Any) -> None:
    def run(max_epochs: int, **options: Any) -> tuple[Fitted, ls.ClientEvaluation]:
        models = {name: ls.FederatedModule(seeded(lit_mlp, width=width)) for name, width in {"a": 8, "b": 12}.items()}
        model: Any = ls.MultiModelModule(models, participation=ls.Uniform(active=6))
        datas = {"a": with_held_out(toy), "b": ls.FederatedDataModule(toy, ls.IIDPartitioner(10), batch_size=4)}
        evaluation = ls.ClientEvaluation(every_n_rounds=2)
        history = ls.RoundHistory()
        trainer = pl.Trainer(max_epochs=max_epochs, callbacks=[history, evaluation], **quiet)
        trainer.fit(model, ls.MultiModelDataModule(datas), **options)
        return Fitted(model, trainer, history, ls.CommunicationLedger()), evaluation

    whole, evaluation = run(4)
    assert list(evaluation.tables) == ["a"]  # the other has no held-out examples
    assert evaluation.tables["a"].model == "a"
    assert evaluation.table is None
    mean = np.mean(list(evaluation.tables["a"].column("val_acc").values()))
    assert whole.rows[-1]["a/fl/clients/val_acc/mean"] == pytest.approx(mean)
    run(2)[0].trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, again = run(4, ckpt_path=tmp_path / "two.ckpt")
    assert again.tables == evaluation.tables
    assert [row for row in resumed.rows if row["fl/round"] != 1] == [row for row in whole.rows if row["fl/round"] != 1]


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_batches_come_through_the_users_hooks(lit_mlp: Any, toy: TensorDataset, data: Any, fit: Fit) -> None:
    doubling = variant(lit_mlp, on_after_batch_transfer=lambda self, batch, _: [2 * batch[0], batch[1]])
    evaluation = ls.ClientEvaluation()
    fitted = fit(seeded(doubling), data, callbacks=[evaluation])
    row = table_of(evaluation).rows[-1]
    x, y = toy[data.held_out[row.client_id]]
    assert row.metrics == pytest.approx(metrics_by_hand(fitted.module, (2 * x, y)), rel=1e-5)


def test_a_data_module_may_bring_test_examples_of_its_own(lit: Any, toy: TensorDataset, fit: Fit) -> None:
    class WithTests(ls.FederatedDataModule):
        held_out = Partition.from_lists([[], [3, 4], [5]])  # type: ignore[assignment]

        def client_val_batches(self, client_id: int) -> Any:
            yield [tensor[self.held_out[client_id]] for tensor in toy.tensors]

    evaluation = ls.ClientEvaluation()
    fitted = fit(lit, WithTests(toy, ls.IIDPartitioner(3)), clients_per_round=2, callbacks=[evaluation])
    expected = metrics_by_hand(fitted.module, toy[[3, 4]])
    assert table_of(evaluation).rows[0] == ClientRow(1, 2, pytest.approx(expected, rel=1e-5))
    assert table_of(evaluation).rows[1].num_examples == 1


def test_a_failing_step_says_where(lit: Any, data: Any, fit: Fit) -> None:
    lit.validation_step = lambda batch, batch_idx: [][0]
    with pytest.raises(ls.ClientError, match="Round 0, client 9, evaluation: IndexError: list index out of range"):
        fit(lit, data, callbacks=[ls.ClientEvaluation()])


def test_a_step_that_logs_nothing_is_warned_about(lit: Any, data: Any, fit: Fit) -> None:
    lit.validation_step = lambda batch, batch_idx: None
    with pytest.warns(ls.SpectralWarning, match="`LitMLP.validation_step` logs no mean"):
        fit(lit, data, max_epochs=1, callbacks=[ls.ClientEvaluation()])


def test_what_cannot_be_evaluated_is_refused_before_the_first_round(
    lit: Any, lit_mlp: Any, toy: TensorDataset, data: Any, fit: Fit, quiet: Any
) -> None:
    callback = ls.ClientEvaluation()
    with pytest.raises(ValueError, match=r"no held-out examples; give .*client_val_fraction=0\.1"):
        fit(lit, ls.FederatedDataModule(toy, ls.IIDPartitioner(4)), callbacks=[callback])
    with pytest.raises(TypeError, match="ClientEvaluation needs federated clients, but LitMLP trains on batches"):
        callback.setup(pl.Trainer(**quiet), lit, "fit")
    without_step = variant(lit_mlp, validation_step=pl.LightningModule.validation_step)
    with pytest.raises(ValueError, match=r"needs `Lit\.validation_step`; define it"):
        fit(seeded(without_step), data, callbacks=[callback])
    for clients in ("some", True, 0.5):
        with pytest.raises(TypeError, match=f"`clients` must be a whole number, got {clients!r}; "):
            ls.ClientEvaluation(clients=clients)  # type: ignore[arg-type]
    for fraction, error in ((1.0, ValueError), ("0.1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"`client_val_fraction` must be"):
            ls.FederatedDataModule(toy, ls.IIDPartitioner(4), client_val_fraction=fraction)  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_fresh_trainer_evaluates_clients_after_the_fit(stage: str, lit: Any, data: Any, fit: Fit, quiet: Any) -> None:
    data.val = data.test = data.train
    inside, after = ls.ClientEvaluation(), ls.ClientEvaluation()
    fitted = fit(lit, data, callbacks=[inside])
    (logged,) = getattr(pl.Trainer(callbacks=[after], **quiet), stage)(fitted.model, datamodule=data)
    assert table_of(after).column("val_loss") == pytest.approx(table_of(inside).column("val_loss"), rel=1e-6)
    assert logged["fl/clients/val_loss/mean"] == pytest.approx(fitted.logged["fl/clients/val_loss/mean"], rel=1e-6)


def test_a_client_is_tested_on_examples_of_their_own(lit: Any, toy: Any, fit: Fit, quiet: Any) -> None:
    shares = {"client_val_fraction": 0.25, "client_test_fraction": 0.5}
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=toy, test=toy, batch_size=4, **shares)
    after = ls.ClientEvaluation()
    fitted = fit(lit, data, clients_per_round=4, callbacks=[inside := ls.ClientEvaluation()])
    parts = [data.partition.indices, data.held_out.indices]
    with pytest.raises(ValueError, match="with client_val_fraction, less than all"):
        ls.FederatedDataModule(toy, ls.IIDPartitioner(4), client_val_fraction=0.7, client_test_fraction=0.3)
    pl.Trainer(callbacks=[after], **quiet).test(fitted.model, data)
    parts.append(data.held_out.indices)
    assert [row.num_examples for table in (inside, after) for row in table_of(table).rows] == [8] * 4 + [15] * 4
    assert sorted(torch.cat(parts).tolist()) == list(range(len(toy)))
    for row in table_of(after).rows:
        own = metrics_by_hand(fitted.module, toy[data.held_out[row.client_id]])
        assert row.metrics == pytest.approx(own, rel=1e-5)


def test_without_data_of_the_server_that_of_clients_is_evaluated(lit: Any, toy: Any, fit: Fit, quiet: Any) -> None:
    shares = {"client_val_fraction": 0.25, "client_test_fraction": 0.5}
    data, after = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), batch_size=4, **shares), ls.ClientEvaluation()
    fitted = fit(lit, data, clients_per_round=4)
    for stage, part in (("validate", 1), ("test", 2)):
        trainer = pl.Trainer(callbacks=[after], **quiet)
        (logged,) = getattr(trainer, stage)(fitted.model, data)
        own = metrics_by_hand(fitted.module, toy[data.parts[part].indices])
        assert logged[f"{stage[:4].removesuffix('i')}_loss"] == pytest.approx(own["val_loss"], rel=1e-5)
        assert [row.num_examples for row in table_of(after).rows] == data.parts[part].sizes.tolist()
    others = variant(ls.FederatedDataModule, held_out=property(lambda own: own.partition))
    for callbacks, made in (([], data), ([after], others(toy, ls.IIDPartitioner(4), **shares))):
        with pytest.raises(ValueError, match="validate` needs data"):  # nobody asks for it, or it is of other data
            pl.Trainer(callbacks=callbacks, **quiet).validate(fitted.model, made)


def test_a_fresh_trainer_without_held_out_examples_says_so(lit: Any, toy: Any, fit: Fit, quiet: Any) -> None:
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=toy, batch_size=4)
    fitted = fit(lit, data)
    with pytest.raises(ValueError, match="finds no held-out examples"):
        pl.Trainer(callbacks=[ls.ClientEvaluation()], **quiet).validate(fitted.model, data)


def test_a_step_that_needs_the_index_of_a_dataloader_gets_that_of_the_first(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("index", float(dataloader_idx), batch_size=len(batch[1]))

    evaluation = ls.ClientEvaluation()
    fit(seeded(variant(lit_mlp, validation_step=step)), data, callbacks=[evaluation])
    assert set(table_of(evaluation).column("index").values()) == {0.0}
