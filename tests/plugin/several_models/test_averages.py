"""What the server does with the updates of several models, and what it measures before a round."""

import copy
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded, without_seconds
from linear_models import ALGORITHMS, SIZES, WIDTHS, LitLine, lines, one_model, two_lines, update, vector
from observed_runs import acting
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.errors import SpectralWarning
from lightning_spectral.participation import Population, Sampler
from lightning_spectral.participation.cohorts import SampledCohorts
from lightning_spectral.plugin.checks import check_sampler
from lightning_spectral.server import round as server_round


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_model_trains_as_it_would_alone(name: str, toy: TensorDataset, lit_mlp: Any, fit: Fit, run: Any) -> None:
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
        drawn = [unit for unit in model.federation.cohorts.units(0) if unit.model == name]
        changes = [unit.coefficient * update(before[name], data.modules[name], unit.client_id) for unit in drawn]
        expected = vector(before[name]).double() + sum(changes)
        torch.testing.assert_close(vector(member.module).double(), expected, rtol=1e-6, atol=1e-6)
        assert all(SIZES[name][unit.client_id] for unit in drawn)
        if isinstance(sampler, ls.FullParticipation):  # the plain average of everybody
            assert [unit.client_id for unit in drawn] == [i for i, size in enumerate(SIZES[name]) if size]
            shares = [SIZES[name][unit.client_id] / sum(SIZES[name]) for unit in drawn]
            assert [unit.coefficient for unit in drawn] == pytest.approx(shares)


def test_a_model_that_nobody_drew_keeps_every_bit_and_says_so(run: Any) -> None:
    """One active processor, two models: in every round at least one model rests."""
    momentum = ls.FedAvgM(lr=1.0, momentum=0.9)
    modules = {n: ls.FederatedModule(seeded(LitLine, w), server_optimizer=momentum) for n, w in WIDTHS.items()}
    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    model = ls.MultiModelModule(modules, participation=ls.Uniform(active=1, design=ls.ConditionalPoisson()))
    states: list[dict[str, Any]] = []

    def watch(trainer: pl.Trainer, model: Any) -> None:
        states.append({n: copy.deepcopy(m.module.state_dict()) for n, m in model.members.items()})

    trainer, history, _ = run(model, data, 12, callbacks=[acting(on_validation_start=watch)])
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


def test_stale_updates_move_the_server_in_a_round_without_clients(run: Any) -> None:
    """Otherwise the average over rounds would miss them: FedVARP is unbiased for empty cohorts too."""
    part = ls.FederatedModule(seeded(LitLine), algorithm=ls.StaleUpdates())
    model = ls.MultiModelModule({"words": part}, participation=ls.Uniform(active=1.0))
    data = ls.MultiModelDataModule({"words": lines(3, (4, 9, 2))})
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(*_: Any) -> None:
        pieces = part.state.pieces()  # type: ignore[union-attr, operator]
        stale = torch.cat([pieces[name].flatten() for name, _ in part.module.named_parameters()])
        seen.append((vector(part.module).double(), stale.clone()))

    _, history, _ = run(model, data, 12, callbacks=[acting(on_validation_start=watch)])
    empty = [r for r in range(1, 12) if history.rows[r]["words/fl/clients"] == 0]
    assert any(float(seen[r - 1][1].norm()) > 0 for r in empty)
    for r in empty:
        (before, stale), (after, unchanged) = seen[r - 1], seen[r]
        torch.testing.assert_close(after, before + stale, rtol=1e-6, atol=1e-7)
        assert torch.equal(stale, unchanged)


@pytest.mark.parametrize("normalize", [True, False])
def test_over_selection_needs_an_average_that_is_divided(normalize: bool, run: Any) -> None:
    clock = ls.VirtualClock(ls.simulation.DeviceProfile(1e6, 1e6, 1e9), keep_first=1)
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
    """In such rounds no metric counts as missing, and that of an earlier round is not counted again."""
    modules = {name: ls.FederatedModule(seeded(LitPlateau, width)) for name, width in WIDTHS.items()}
    data = ls.MultiModelDataModule({name: lines(WIDTHS[name], SIZES[name]) for name in WIDTHS})
    model = ls.MultiModelModule(modules, participation=ls.Uniform(active=1, design=ls.ConditionalPoisson()))
    _, history, _ = run(model, data, 6)
    trained = {name: sum(f"{name}/fl/loss" in row for row in history.rows) for name in WIDTHS}
    assert sum(trained.values()) == 6
    assert {name: member.module.plateau.last_epoch for name, member in model.members.items()} == trained


def test_losses_are_measured_of_everybody_and_paid_for(run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    _, history, ledger = run(model, data)

    assert model.federation.cohorts.sampled is not None
    for index, (name, module) in enumerate(before.items()):
        tensors: Any = data.modules[name].train
        able = [client for client, size in enumerate(SIZES[name]) if size]
        examples = {i: [tensor[data.modules[name].partition[i]] for tensor in tensors.tensors] for i in able}
        measured = [row for row in ledger.rows if row.measured and row.model == name]
        assert [row.client_id for row in measured] == able
        assert {(row.downlink_bytes, row.uplink_bytes) for row in measured} == {(4 * (WIDTHS[name] + 1), 4)}
        assert history.rows[0][f"{name}/fl/measured_examples"] == sum(SIZES[name])
        trained = {unit.client_id for unit in model.federation.cohorts.units(0) if unit.model == name}
        for client in set(able) - trained:  # clients that trained have reported a later loss
            loss = float(module.training_step(examples[client], 0).detach())
            assert float(model.federation.cohorts.sampled.figures[client, index]) == pytest.approx(loss, rel=1e-6)


def test_norms_are_those_of_the_updates(run: Any) -> None:
    model, data = two_lines(ls.UpdateVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    run(model, data)
    assert model.federation.cohorts.sampled is not None
    for index, (name, module) in enumerate(before.items()):
        for client, size in enumerate(SIZES[name]):
            known = float(model.federation.cohorts.sampled.figures[client, index])
            if size:
                assert known == pytest.approx(float(update(module, data.modules[name], client).norm()), rel=1e-5)
            else:
                assert known != known  # NaN: a client without data is not asked


@pytest.mark.parametrize(("measure", "expected"), [("last", 0), (2, 2)])
def test_fewer_may_be_measured(measure: Any, expected: int, run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3, measure=measure))
    _, history, _ = run(model, data, 3)
    assert [row.get("words/fl/measured_clients", 0) for row in history.rows] == [expected] * 3


def test_of_many_clients_a_thousand_are_measured_by_default_and_of_few_all() -> None:
    def due(num_clients: int, round_idx: int = 0, **options: Any) -> list[int]:
        population = Population(torch.ones(num_clients, 1, dtype=torch.int64), torch.ones(num_clients).long())
        cohorts = SampledCohorts(ls.UpdateVarianceReduced(active=3, **options), population, [""], seed=0)
        return [unit.client_id for unit in cohorts.due(round_idx, 0)]

    assert due(1000) == due(1000, measure="all") == list(range(1000))
    assert len(due(1001)) == 1000
    assert due(5000) != due(5000, round_idx=1)
    assert len(due(5000, measure="all")) == 5000


def test_a_measurement_that_will_take_long_is_said_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_round, "TIMED", 2)
    run(*two_lines(ls.LossVarianceReduced(active=3)), 2)  # says nothing: it takes no minute
    monkeypatch.setattr(server_round, "LONG", 0.0)
    with pytest.warns(SpectralWarning) as said:
        run(*two_lines(ls.LossVarianceReduced(active=3)), 2)
    pattern = r"Measuring 4 clients for model '(\w*)' takes about 0.0 minutes before every round. Measure fewer, "
    assert re.findall(pattern, "".join(str(one.message) for one in said)) == ["words", "images"]


def test_losses_of_manual_optimisation_are_not_measured() -> None:
    model, _ = two_lines(ls.LossVarianceReduced(active=2))
    model.models["words"].module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"LitLine.training_step \('words'\) uses manual optimisation and would train"):
        check_sampler(model.participation, model.models["words"])
