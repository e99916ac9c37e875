"""Several models in one federation: each as it would be alone, drawn by one sampler, in one Trainer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, resume, same_state, seeded, without_seconds
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_spectral as ls
from lightning_spectral.participation import FullParticipation, Sampler

NUM_CLIENTS = 12
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)
SPECTRAL = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, layers=EVERY_LAYER)
ALGORITHMS = {"dense": ls.FedAvg(), "spectral": SPECTRAL, "bits": ls.Zampling(4, degree=3)}


class LitLine(pl.LightningModule):
    """One linear layer, one plain step on all of a client's data: its update can be written down."""

    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        super().__init__()
        self.line = nn.Linear(width, 1)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.line(x).squeeze(1) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def lines(width: int, sizes: Sequence[int], seed: int = 0, **options: Any) -> ls.FederatedDataModule:
    """Regression data of clients of given sizes; a client may have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), width, generator=generator)
    data = TensorDataset(x, x @ torch.randn(width, generator=generator))
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    partitioner = ls.NaturalPartitioner(owners, names=range(len(sizes)))
    return ls.FederatedDataModule(data, partitioner, val=data, batch_size=1000, **options)


@pytest.fixture
def run(quiet: dict[str, Any]) -> Callable[..., tuple[pl.Trainer, ls.RoundHistory, ls.CommunicationLedger]]:
    def run(
        model: ls.MultiModelModule, data: Any, rounds: int = 1, ckpt: Path | None = None, **options: Any
    ) -> tuple[pl.Trainer, ls.RoundHistory, ls.CommunicationLedger]:
        history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
        callbacks = [history, ledger, *options.pop("callbacks", [])]
        trainer = pl.Trainer(**{**quiet, "num_sanity_val_steps": 0, **options}, max_epochs=rounds, callbacks=callbacks)
        resume(trainer, model, data, ckpt)
        return trainer, history, ledger

    return run


def one_model(toy: TensorDataset) -> ls.MultiModelDataModule:
    partitioner = ls.DirichletPartitioner(num_clients=NUM_CLIENTS, alpha=10.0)
    return ls.MultiModelDataModule({"words": ls.FederatedDataModule(toy, partitioner, val=toy, batch_size=4)})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_model_is_the_federation_that_it_would_be_alone(
    name: str, toy: TensorDataset, lit_mlp: Any, fit: Fit, run: Any
) -> None:
    """Uniform, one processor, a fixed number of clients: the same bits, ledger and metrics."""
    both = one_model(toy)
    alone = fit(
        seeded(lit_mlp), both.modules["words"], algorithm=ALGORITHMS[name], clients_per_round=5, max_epochs=3, seed=7
    )

    uniform = ls.Uniform(active=5, design=ls.Systematic(), normalize=True)
    part = ls.FederatedModule(seeded(lit_mlp), algorithm=ALGORITHMS[name], seed=7)
    trainer, history, ledger = run(ls.MultiModelModule({"words": part}, participation=uniform, seed=7), both, 3)

    assert same_state(part.module.state_dict(), alone.state)
    assert ledger.rows == alone.ledger.rows
    assert trainer.global_step == 3
    own = [{n.removeprefix("words/"): v for n, v in without_seconds(row).items()} for row in history.rows]
    assert [row.pop("fl/active_processors") for row in own] == [5.0] * 3
    assert own == alone.rows


def test_a_sampler_serves_a_single_model_too(toy: TensorDataset, lit_mlp: Any, fit: Fit) -> None:
    data = one_model(toy).modules["words"]
    uniform = ls.Uniform(active=5, design=ls.Systematic(), normalize=True)
    drawn, plain = (
        fit(ls.FederatedModule(seeded(lit_mlp), **how), data, max_epochs=2)
        for how in ({"participation": uniform}, {"clients_per_round": 5})
    )
    assert same_state(drawn.state, plain.state)


def update(module: LitLine, data: ls.FederatedDataModule, client: int) -> Tensor:
    """The change that one client makes, in one plain step on all of its data."""
    local = copy.deepcopy(module)
    tensors: Any = data.train
    local.training_step([tensor[data.partition[client]] for tensor in tensors.tensors], 0).backward()
    local.configure_optimizers().step()
    return (vector(local) - vector(module)).double()


def vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


SIZES = {"words": (4, 9, 0, 2, 5), "images": (3, 0, 8, 6, 1)}
WIDTHS = {"words": 3, "images": 4}


def two_lines(participation: Sampler, **options: Any) -> tuple[ls.MultiModelModule, ls.MultiModelDataModule]:
    modules = {name: ls.FederatedModule(seeded(LitLine, width)) for name, width in WIDTHS.items()}
    data = {name: lines(WIDTHS[name], SIZES[name], seed=index) for index, name in enumerate(WIDTHS)}
    processors = options.pop("processors", [1, 2, 1, 2, 1])
    model = ls.MultiModelModule(modules, participation=participation, processors=processors, **options)
    return model, ls.MultiModelDataModule(data)


SAMPLERS = [
    ls.Uniform(active=3),
    ls.Uniform(active=3, design=ls.ConditionalPoisson()),
    ls.RoundRobin(active=3),
    ls.LossVarianceReduced(active=3),
    ls.UpdateVarianceReduced(active=3),
    ls.FullParticipation(),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_the_server_adds_coefficients_times_updates(sampler: Sampler, run: Any) -> None:
    """w + sum of c Delta, written out from the cohort that was drawn; never divided by the sum of c."""
    model, data = two_lines(sampler)
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    run(model, data)

    for name, member in model.members.items():
        drawn = [unit for unit in model.cohort(0) if unit.model == name]
        changes = [unit.coefficient * update(before[name], data.modules[name], unit.client_id) for unit in drawn]
        expected = vector(before[name]).double() + sum(changes)
        torch.testing.assert_close(vector(member.module).double(), expected, rtol=1e-6, atol=1e-6)
        assert all(SIZES[name][unit.client_id] for unit in drawn)


def test_full_participation_is_the_plain_average_of_everybody(run: Any) -> None:
    model, data = two_lines(FullParticipation())
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    run(model, data)
    for name, member in model.members.items():
        total = sum(SIZES[name])
        changes = [
            size / total * update(before[name], data.modules[name], i) for i, size in enumerate(SIZES[name]) if size
        ]
        expected = vector(before[name]).double() + sum(changes)
        torch.testing.assert_close(vector(member.module).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_model_that_nobody_drew_keeps_every_bit_and_says_so(run: Any) -> None:
    """One active processor, two models: in every round at least one of them rests."""
    momentum = ls.FedAvgM(lr=1.0, momentum=0.9)
    modules = {n: ls.FederatedModule(seeded(LitLine, w), server_optimizer=momentum) for n, w in WIDTHS.items()}
    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    model = ls.MultiModelModule(modules, participation=ls.Uniform(active=1, design=ls.ConditionalPoisson()))
    states: list[dict[str, Any]] = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            states.append({n: copy.deepcopy(m.module.state_dict()) for n, m in pl_module.members.items()})

    trainer, history, _ = run(model, data, 12, callbacks=[Watch()])

    rested = [
        (row, name)
        for row, name in ((r, n) for r in range(1, 12) for n in WIDTHS)
        if history.rows[row][f"{name}/fl/clients"] == 0
    ]
    assert len(rested) >= 11
    assert {name for _, name in rested} == set(WIDTHS)
    assert all(same_state(states[row][name], states[row - 1][name]) for row, name in rested)
    assert all(f"{name}/fl/loss" not in history.rows[row] for row, name in rested)
    assert all(
        not same_state(states[r]["words"], states[r - 1]["words"]) for r in range(1, 12) if (r, "words") not in rested
    )
    assert trainer.global_step == 12


def test_the_seed_is_an_integer() -> None:
    models = {name: ls.FederatedModule(LitLine(width)) for name, width in WIDTHS.items()}
    with pytest.raises(TypeError, match=r"`seed` must be a whole number, got 1\.5"):
        ls.MultiModelModule(models, participation=ls.Uniform(active=1), seed=1.5)  # type: ignore[arg-type]


def test_losses_are_measured_of_everybody_and_paid_for(run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    _, history, ledger = run(model, data)

    assert model._sampled is not None
    for index, (name, module) in enumerate(before.items()):
        tensors: Any = data.modules[name].train
        able = [client for client, size in enumerate(SIZES[name]) if size]
        examples = {i: [tensor[data.modules[name].partition[i]] for tensor in tensors.tensors] for i in able}
        measured = [row for row in ledger.rows if row.measured and row.model == name]
        assert [row.client_id for row in measured] == able
        assert {(row.downlink_bytes, row.uplink_bytes) for row in measured} == {(4 * (WIDTHS[name] + 1), 4)}
        assert history.rows[0][f"{name}/fl/measured_examples"] == sum(SIZES[name])
        trained = {unit.client_id for unit in model.cohort(0) if unit.model == name}
        for client in set(able) - trained:  # whoever trained has reported a later loss
            loss = float(module.training_step(examples[client], 0).detach())
            assert float(model._sampled.figures[client, index]) == pytest.approx(loss, rel=1e-6)


def test_norms_are_those_of_the_updates(run: Any) -> None:
    model, data = two_lines(ls.UpdateVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    run(model, data)
    assert model._sampled is not None
    for index, (name, module) in enumerate(before.items()):
        for client, size in enumerate(SIZES[name]):
            known = float(model._sampled.figures[client, index])
            if size:
                assert known == pytest.approx(float(update(module, data.modules[name], client).norm()), rel=1e-5)
            else:
                assert known != known  # NaN: nobody asks a client without data


@pytest.mark.parametrize(("measure", "expected"), [("last", 0), (2, 2)])
def test_fewer_may_be_measured(measure: Any, expected: int, run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3, measure=measure))
    _, history, _ = run(model, data, 3)
    assert [row.get("words/fl/measured_clients", 0) for row in history.rows] == [expected] * 3


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


def test_another_configuration_is_not_resumed(run: Any, tmp_path: Path) -> None:
    model, data = two_lines(ls.Uniform(active=3))
    trainer, _, _ = run(model, data, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other, data = two_lines(ls.Uniform(active=2))
    with pytest.raises(ValueError, match=r"participation: 'Uniform\(active=3"):
        run(other, data, 2, ckpt=tmp_path / "one.ckpt")


def test_metrics_of_every_model_can_be_monitored(toy: TensorDataset, lit_mlp: Any, run: Any, tmp_path: Path) -> None:
    both = ls.MultiModelDataModule({name: one_model(toy).modules["words"] for name in ("words", "images")})
    both.modules["images"].val = [toy, toy]  # of several evaluation sets each has its own name
    models = {name: ls.FederatedModule(seeded(lit_mlp)) for name in both.modules}
    saver = ModelCheckpoint(tmp_path, "best", monitor="words/val_acc", mode="max")
    stopper = EarlyStopping("images/val_loss/dataloader_idx_1", patience=10)
    trainer, history, _ = run(
        ls.MultiModelModule(models, participation=ls.FullParticipation()),
        both,
        2,
        callbacks=[saver, stopper],
        enable_checkpointing=True,
    )
    assert (tmp_path / "best.ckpt").exists()
    names = {"words/val_acc", "words/train_loss", "words/fl/loss", "images/val_loss/dataloader_idx_0"}
    assert names <= set(history.rows[-1])
    assert "images/val_loss" not in history.rows[-1]
    found = trainer.validate(ls.MultiModelModule(models, participation=ls.FullParticipation()), both, verbose=False)
    assert found[0]["words/val_acc"] == pytest.approx(history.rows[-1]["words/val_acc"])


def test_each_hook_of_a_user_sees_its_own_part_of_the_checkpoint(run: Any, tmp_path: Path) -> None:
    class Noted(LitLine):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["width"] = next(iter(checkpoint["state_dict"].values())).numel()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["width"]

    def fresh() -> ls.MultiModelModule:
        models = {name: ls.FederatedModule(seeded(Noted, width)) for name, width in WIDTHS.items()}
        return ls.MultiModelModule(models, participation=ls.Uniform(active=3))

    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    trainer, _, _ = run(fresh(), data, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = fresh()
    run(again, data, 2, ckpt=tmp_path / "one.ckpt")
    assert {name: member.module.seen for name, member in again.members.items()} == WIDTHS


def two(**options: Any) -> Mapping[str, ls.FederatedModule]:
    return {"words": ls.FederatedModule(LitLine(), **options), "images": ls.FederatedModule(LitLine())}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.MultiModelModule({}, participation=ls.Uniform(active=1)), "`models` is empty"),
        (lambda: ls.MultiModelModule({"a": LitLine()}, participation=ls.Uniform(active=1)), "FederatedModule"),
        (lambda: ls.MultiModelModule(two(clients_per_round=3), participation=ls.Uniform(active=1)), "of its own"),
        (lambda: ls.MultiModelModule({"a.b": two()["words"]}, participation=ls.Uniform(active=1)), "identifier"),
        (lambda: ls.MultiModelModule(two(), participation=3), "participation"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), processors=0), "at least 1"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), processors={2: 0.5}), "1"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), unavailable={0: ["c"]}), "unavailable"),
        (lambda: ls.MultiModelModule({"keys": two()["words"]}, participation=ls.Uniform(active=1)), "named 'keys'"),
        (lambda: ls.MultiModelModule({"training": two()["words"]}, participation=ls.Uniform(active=1)), "another name"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), unavailable=[0]), "unavailable"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), unavailable={-1: ["a"]}), "least 0"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), unavailable={"1": ["words"]}), "whole"),
        (lambda: ls.MultiModelModule(two(), participation=ls.Uniform(active=1), unavailable={0: "words"}), "lists"),
        (lambda: ls.MultiModelDataModule({}), "is empty"),
        (lambda: ls.MultiModelDataModule({"a": 3}), "FederatedDataModule"),
        (lambda: ls.FederatedModule(LitLine(), clients_per_round=2, participation=ls.Uniform(active=1)), "both say"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("part", ["module", "layer"])
def test_models_cannot_share_weights(part: str) -> None:
    modules = {"words": LitLine(), "images": LitLine()}
    modules["images"].line = modules["words"].line
    if part == "module":
        modules["images"] = modules["words"]
    shared = {name: ls.FederatedModule(module) for name, module in modules.items()}
    with pytest.raises(ValueError, match="'words' and 'images' share weights"):
        ls.MultiModelModule(shared, participation=ls.Uniform(active=1))


def test_a_checkpoint_of_more_models_is_not_resumed(run: Any, tmp_path: Path) -> None:
    model, data = two_lines(ls.Uniform(active=3))
    trainer, _, _ = run(model, data)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    words = {"words": two()["words"]}
    part = ls.MultiModelModule(words, participation=ls.Uniform(active=3), processors=model.processors)
    with pytest.raises(ValueError, match=r"images: algorithm: 'FedAvg\(.*in the checkpoint, None now"):
        run(part, ls.MultiModelDataModule({"words": data.modules["words"]}), 2, ckpt=tmp_path / "two.ckpt")


def test_predicting_asks_for_one_model(quiet: dict[str, Any]) -> None:
    model, data = two_lines(ls.Uniform(active=3))
    with pytest.raises(NotImplementedError, match=r"predict\(model.models\['words'\], loader\)"):
        pl.Trainer(**quiet).predict(model, data)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"participation": ls.Uniform(active=9)}, SIZES, "`active` must be at most 5"),
        ({"participation": ls.Uniform(active=2), "processors": [1, 2]}, SIZES, "lists 2 values for 5 clients"),
        (
            {"participation": ls.Uniform(active=2)},
            {"words": (4, 1), "images": (1, 2, 3)},
            "different numbers of clients",
        ),
        ({"participation": ls.Uniform(active=2)}, {"words": (4, 1), "pictures": (1, 2)}, "under its own name"),
        (
            {"participation": ls.Uniform(active=1), "unavailable": {0: ["words"], 1: ["words"]}},
            {"words": (4, 1), "images": (1, 2)},
            "no client can train",
        ),
        ({"participation": ls.StaleUpdateVarianceReduced(active=2)}, SIZES, "StaleUpdates"),
        ({"participation": ls.Uniform(active=2), "unavailable": {5: ["words"]}}, SIZES, r"clients \[5\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(
    options: dict[str, Any], sizes: Mapping[str, Sequence[int]], message: str, run: Any
) -> None:
    model = ls.MultiModelModule(two(), **options)
    data = ls.MultiModelDataModule({name: lines(3, of) for name, of in sizes.items()})
    with pytest.raises(ValueError, match=message):
        run(model, data)


def test_norms_of_bits_are_refused(run: Any) -> None:
    model = ls.MultiModelModule(
        {"bits": ls.FederatedModule(LitLine(8), algorithm=ls.Zampling(1, degree=2))},
        participation=ls.UpdateVarianceReduced(active=2),
    )
    with pytest.raises(ValueError, match="LossVarianceReduced"):
        run(model, ls.MultiModelDataModule({"bits": lines(8, (3, 4, 5))}))


def test_data_of_one_model_is_not_enough(run: Any) -> None:
    with pytest.raises(TypeError, match="MultiModelModule needs clients"):
        run(ls.MultiModelModule(two(), participation=ls.Uniform(active=1)), lines(3, (4, 5)))


def test_stale_updates_move_the_server_in_a_round_without_clients(run: Any) -> None:
    """Otherwise the average over rounds would miss them: FedVARP is unbiased for empty cohorts too."""
    part = ls.FederatedModule(seeded(LitLine), algorithm=ls.StaleUpdates())
    model = ls.MultiModelModule({"words": part}, participation=ls.Uniform(active=1.0))
    data = ls.MultiModelDataModule({"words": lines(3, (4, 9, 2))})
    seen: list[tuple[Tensor, Tensor]] = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pieces = part.state.pieces()  # type: ignore[union-attr, operator]
            stale = torch.cat([pieces[name].flatten() for name, _ in part.module.named_parameters()])
            seen.append((vector(part.module).double(), stale.clone()))

    _, history, _ = run(model, data, 12, callbacks=[Watch()])
    empty = [r for r in range(1, 12) if history.rows[r]["words/fl/clients"] == 0]
    assert any(float(seen[r - 1][1].norm()) > 0 for r in empty)
    for r in empty:
        (before, stale), (after, unchanged) = seen[r - 1], seen[r]
        torch.testing.assert_close(after, before + stale, rtol=1e-6, atol=1e-7)
        assert torch.equal(stale, unchanged)


def test_a_model_may_be_used_alone_and_in_another_federation(run: Any, quiet: dict[str, Any]) -> None:
    """Whoever is fitted or evaluated has the models: names are its own, whichever federation was made last."""
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


def test_rounds_of_another_fit_are_rows_of_their_own(quiet: dict[str, Any]) -> None:
    history = ls.RoundHistory()
    for _ in range(2):
        pl.Trainer(**quiet, max_epochs=1, callbacks=[history]).fit(*two_lines(FullParticipation()))
    assert [row["fl/round"] for row in history.rows] == [0, 0]


def test_a_quick_try_trains_one_client(run: Any) -> None:
    model, data = two_lines(ls.Uniform(active=5))
    _, history, ledger = run(model, data, fast_dev_run=True)
    (row,) = ledger.rows
    assert history.rows[0][f"{row.model}/fl/clients"] == 1


class LitPlateau(LitLine):
    """Waits for a metric that clients log."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        self.optimizer = super().configure_optimizers()
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=100)
        return {"optimizer": self.optimizer, "lr_scheduler": self.plateau, "monitor": "train_loss"}


def test_a_plateau_of_training_skips_rounds_in_which_nobody_trains(run: Any) -> None:
    """Neither is a metric missing then, nor is that of an earlier round counted again."""
    modules = {name: ls.FederatedModule(seeded(LitPlateau, width)) for name, width in WIDTHS.items()}
    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    model = ls.MultiModelModule(modules, participation=ls.Uniform(active=1, design=ls.ConditionalPoisson()))
    _, history, _ = run(model, data, 6)
    trained = {name: sum(f"{name}/fl/loss" in row for row in history.rows) for name in WIDTHS}
    assert sum(trained.values()) == 6
    assert {name: member.module.plateau.last_epoch for name, member in model.members.items()} == trained


def test_losses_of_manual_optimisation_are_not_measured(run: Any) -> None:
    class Manual(LitLine):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    part = ls.FederatedModule(Manual(), client_engine="trainer")
    model = ls.MultiModelModule({"words": part}, participation=ls.LossVarianceReduced(active=2))
    with pytest.raises(ValueError, match=r"Manual \('words'\) trains, by manual optimisation"):
        run(model, ls.MultiModelDataModule({"words": lines(3, (3, 4, 5))}))


class OwnLoaders(ls.FederatedDataModule):
    """Data that says how it is validated by a method, as LightningDataModules do."""

    def val_dataloader(self) -> Any:
        return DataLoader(self.train, 100)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_a_data_module_may_have_loaders_of_its_own(run: Any) -> None:
    """Each model is validated on its own data, also where the widths of the models would not tell them apart."""
    data = {"words": OwnLoaders(lines(3, (4, 5)).train, ls.IIDPartitioner(2)), "images": lines(3, (4, 5), seed=1)}
    model = ls.MultiModelModule(two(), participation=ls.Uniform(active=1))
    trainer, _, _ = run(model, ls.MultiModelDataModule(data))
    for name, member in model.members.items():
        examples: Any = data[name].train
        loss = float(member.module.training_step(examples.tensors, 0).detach())
        assert float(trainer.callback_metrics[f"{name}/loss"]) == pytest.approx(loss, rel=1e-5)
    trainer, _, _ = run(ls.FederatedModule(LitLine(), clients_per_round=1), data["words"])
    assert "loss" in trainer.callback_metrics


def test_a_run_of_several_models_is_estimated(quiet: dict[str, Any]) -> None:
    model, data = two_lines(FullParticipation())
    trainer = pl.Trainer(**quiet, max_epochs=2)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # before a fit, and after one
        found = ls.estimate(trainer, model, data)
        assert found.total_seconds > 0
        assert found.num_rounds == found.num_validations == 2
        assert same_state(model.state_dict(), before)
        trainer.fit(model, data)
        before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="MultiModelDataModule"):
        ls.estimate(trainer, model, data.modules["words"])


def test_a_cohort_that_a_sampler_drew_is_not_cut(run: Any) -> None:
    with pytest.raises(ValueError, match="lower its `active` instead"):
        run(*two_lines(ls.Uniform(active=3)), limit_train_batches=2)


@pytest.mark.parametrize("normalize", [True, False])
def test_over_selection_needs_an_average_that_is_divided(normalize: bool, run: Any) -> None:
    clock = ls.VirtualClock(ls.DeviceProfile(1e6, 1e6, 1e9), keep_first=1)
    model = ls.MultiModelModule(
        {"words": ls.FederatedModule(seeded(LitLine), clock=clock)},
        participation=ls.Uniform(active=2, normalize=normalize),
    )
    data = ls.MultiModelDataModule({"words": lines(3, (4, 9, 2))})
    if normalize:
        run(model, data)
    else:
        with pytest.raises(ValueError, match="every step would be too short"):
            run(model, data)


def test_the_logged_step_is_that_of_those_who_reported(run: Any) -> None:
    model = ls.MultiModelModule(
        {"words": ls.FederatedModule(seeded(LitLine), dropout=ls.ClientDropout([0.0, 0.999999, 0.0]))},
        participation=ls.FullParticipation(),
    )
    _, history, _ = run(model, ls.MultiModelDataModule({"words": lines(3, (4, 9, 2))}))
    assert history.rows[0]["words/fl/step_size"] == pytest.approx(6 / 15)
