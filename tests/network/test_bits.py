"""A federation over a network gives the bits of the simulation, whatever the line does to messages."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from client_parallel_runs import WithLimits
from fake_line import FakeLine, held_out_data, held_out_line, remote, toy_line
from federation import Fit, Fitted, said_during, same_state, seeded
from mixed_federation import EVERY_SYSTEM
from other_process import LitPlain, toy_data
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network import own_model
from lightning_spectral.network.command import main
from lightning_spectral.network.device import KeptStates
from lightning_spectral.network.roster import Roster
from lightning_spectral.protocol.codec import read_tensors
from lightning_spectral.protocol.records import Download, Upload, WorkUnit

SYSTEMS: dict[str, dict[str, Any]] = {
    **EVERY_SYSTEM,
    "packed": {"algorithm": ls.LoRA(2, aggregation=ls.algorithms.AlternatingFactors()), "filters": [ls.TopK(0.1)]},
    "buffered": {"algorithm": ls.FedBuff(concurrency=6, durations={1.0: 0.5, 3.0: 0.5})},
    "limits of buffers": {"buffers": {"has_begun": "max", "num_steps": "max"}},
}
SETTINGS: dict[str, Any] = {"clients_per_round": 4, "local_epochs": 2, "seed": 3}


# counted where clients may really be absent, and updates are bounded
ONLY_HERE = {"fl/left_out_dropped_out": 0.0, "fl/left_out_late": 0.0, "fl/clients_bounded": 0.0}


def as_simulated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a network by the names that a simulation gives them."""
    own = {name: metrics[name] for name in ONLY_HERE if name in metrics}
    assert own.items() <= ONLY_HERE.items()
    return {name.removeprefix("clients/"): value for name, value in metrics.items() if name not in own}


def nameless(rows: Sequence[Any]) -> list[Any]:
    """A ledger without the names that clients only have in a network."""
    assert all(row.name for row in rows)
    return [row._replace(name="") for row in rows]


def assert_same(ours: Fitted, theirs: Fitted) -> None:
    assert same_state(ours.tensors, theirs.tensors)
    assert nameless(ours.ledger.rows) == theirs.ledger.rows
    assert [as_simulated(row) for row in ours.rows] == theirs.rows
    assert as_simulated(ours.logged) == theirs.logged


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.filterwarnings("ignore:.*clients move their probabilities by only")
def test_the_network_gives_the_bits_of_the_simulation(name: str, fit: Fit, tmp_path: Path) -> None:
    lit: Callable[[], Any] = {"SCAFFOLD": LitPlain, "limits of buffers": WithLimits}.get(name, LitMLP)
    theirs = fit(seeded(lit), toy_data(), max_epochs=2, **SYSTEMS[name], **SETTINGS)
    for hazards, forgets in ((1, False), (2, True)):
        line = toy_line(lit, hazards=hazards, forgets=forgets, folder=tmp_path / "states" if forgets else None)
        ours = fit(seeded(lit), remote(line), max_epochs=2, **SYSTEMS[name], **SETTINGS)
        if not forgets:
            assert_same(ours, theirs)
        assert same_state(ours.tensors, theirs.tensors)
        assert not any(ours.model.own_model(client) for client in range(12))  # the server has none of it


class LitCounts(LitMLP):
    """Its loss depends on what it has counted, in a buffer that is in no checkpoint, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.steps += 1
        return super().training_step(batch, batch_idx) / (self.seen * self.steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["FedAvg", "spectral"])
@pytest.mark.filterwarnings("ignore:.*clients change `steps`, which are neither parameters nor buffers")
def test_a_device_begins_each_round_as_in_a_simulation(name: str, fit: Fit) -> None:
    options: dict[str, Any] = {**SYSTEMS[name], "max_epochs": 2, **SETTINGS}
    theirs = fit(seeded(LitCounts), toy_data(), **options)
    assert_same(fit(seeded(LitCounts), remote(toy_line(LitCounts)), **options), theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.algorithms.FoldedTerms()], ids=repr)
def test_a_device_is_sent_the_frozen_base_once(aggregation: Any, fit: Fit) -> None:
    algorithm = ls.LoRA({1: 0.5, 3: 0.5}, aggregation=aggregation)
    options: dict[str, Any] = {"algorithm": algorithm, "max_epochs": 3, **SETTINGS}
    theirs = fit(seeded(LitMLP), toy_data(), **options)
    assert_same(fit(seeded(LitMLP), remote(toy_line(LitMLP)), **options), theirs)
    assert {row.frozen_bytes > 0 for row in theirs.ledger.rows} == {True, False}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(ls.TopN(), keep_ratio=0.4)], ids=repr)
def test_a_private_round_is_that_of_the_simulation(algorithm: Any, fit: Fit) -> None:
    """Clipped and noised at the server, which shortens nothing else and says nothing of clients."""
    pytest.importorskip("dp_accounting", reason="of the extra `privacy`")
    privacy = ls.ClientPrivacy(clip=0.1, noise_multiplier=1.0, delta=1e-3, noise_seed=1)
    options: dict[str, Any] = {"algorithm": algorithm, "filters": [privacy], "participation": ls.Uniform(active=4)}
    settings = {**SETTINGS, "clients_per_round": None, "max_epochs": 2, **options}
    theirs = fit(seeded(LitMLP), toy_data(), **settings)
    assert_same(fit(seeded(LitMLP), remote(toy_line(LitMLP)), **settings), theirs)


def test_a_resumed_run_gives_the_bits_of_one_that_was_not_interrupted(fit: Fit, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SYSTEMS["SCAFFOLD"], **SETTINGS}
    theirs = fit(seeded(LitPlain), toy_data(), max_epochs=3, **options)
    first = fit(seeded(LitPlain), remote(toy_line(LitPlain, folder=tmp_path / "states")), max_epochs=2, **options)
    first.trainer.save_checkpoint(path := tmp_path / "two.ckpt")
    line = toy_line(LitPlain, folder=tmp_path / "states")  # other processes, which have lost all that is not on disk
    ours = fit(seeded(LitPlain), remote(line), max_epochs=3, ckpt_path=path, **options)
    assert same_state(ours.tensors, theirs.tensors)
    assert nameless(ours.ledger.rows) == theirs.ledger.rows


@pytest.mark.slow
def test_a_resumed_run_draws_from_the_clients_that_it_finds(fit: Fit, tmp_path: Path) -> None:
    """Not from those that were numbered before the checkpoint was read; and epsilon counts both populations."""
    privacy_of = pytest.importorskip("lightning_spectral.filters.privacy")
    pytest.importorskip("dp_accounting", reason="of the extra `privacy`")
    privacy = ls.ClientPrivacy(clip=0.1, noise_multiplier=1.0, delta=1e-3, noise_seed=1)
    options: dict[str, Any] = {"clients_per_round": None, "participation": ls.Uniform(active=2), "filters": [privacy]}
    drawn, present = set[int](), set[int]()

    class Watch(ls.RoundCallback):
        def on_client_start(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            drawn.add(turn.unit.client_id)
            present.update(pl_module.engine.clients.sizes.nonzero().flatten().tolist())

    def line_of(*clients: int) -> Any:
        return FakeLine({100 + client: toy_line(LitMLP).there[100 + client] for client in clients})

    first = fit(seeded(LitMLP), remote(line_of(0, 1, 2, 3), wait_for=4), max_epochs=3, **options)
    first.trainer.save_checkpoint(path := tmp_path / "three.ckpt")
    again = remote(line_of(1, 2, 3), wait_for=3)
    resumed = fit(seeded(LitMLP), again, max_epochs=9, ckpt_path=path, callbacks=[Watch()], **options)
    assert drawn == present == {0, 1, 3}, "the first one of the line is the third of the checkpoint"
    before = ((2 / 4, 1.0, 3),)
    assert resumed.rows[-1]["fl/epsilon"] == privacy_of.epsilon(2 / 3, 1.0, 6, 1e-3, before)


SAMPLERS = {
    "update norms": ls.UpdateVarianceReduced(active=5, measure="last"),
    "losses, measured": ls.LossVarianceReduced(active=5, measure="all"),
    "everybody": ls.FullParticipation(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_several_models_with_a_sampler(name: str, quiet: Any) -> None:
    def run(data: Any) -> tuple[Any, Any, Any]:
        models = {
            "dense": ls.FederatedModule(seeded(LitMLP), seed=3),
            "sharded": ls.FederatedModule(seeded(LitMLP), **SYSTEMS["spectral"], seed=4),
        }
        model = ls.MultiModelModule(models, participation=SAMPLERS[name], seed=5)
        ledger = ls.CommunicationLedger()
        trainer = pl.Trainer(**quiet, max_epochs=3, callbacks=[ledger], num_sanity_val_steps=0)
        trainer.fit(model, data)
        return model.state_dict(), ledger.rows, trainer

    roster = Roster(toy_line({"dense": LitMLP, "sharded": LitMLP}, hazards=4), patience=1.0)
    names = ("dense", "sharded")
    ours = run(ls.MultiModelDataModule({n: remote(roster, model=n) for n in names}))
    theirs = run(ls.MultiModelDataModule({n: toy_data() for n in names}))
    assert nameless(ours[1]) == theirs[1]
    assert same_state(ours[0], theirs[0])


class LitAsksItsStage(LitMLP):
    """Its steps depend on what its Trainer does, as those of pytorch-forecasting's models do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fits = self.trainer.training and self.trainer.state.fn == "fit"
        return super().training_step(batch, batch_idx) * (2.0 if fits else 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("validates", float(self.trainer.validating and self.trainer.state.fn == "fit"))


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("name", ["FedAvg", "personal head"])
def test_clients_are_evaluated_on_devices_as_simulated(name: str, forgets: bool, fit: Fit, tmp_path: Path) -> None:
    """Also by a process that has just been started, which finds the client's own model on disk."""
    tables = []
    line = held_out_line(LitAsksItsStage, tmp_path if forgets else None, forgets=forgets)
    for data in (held_out_data(), remote(line)):
        evaluation, options = ls.ClientEvaluation(), {**SYSTEMS[name], **SETTINGS}
        fitted = fit(seeded(LitAsksItsStage), data, max_epochs=3, callbacks=[evaluation], **options)
        tables.append((evaluation.table, {n: v for n, v in fitted.logged.items() if n.startswith("fl/clients/")}))
    assert tables[0][1].keys() == tables[1][1].keys() != set()
    for ours, theirs in zip(tables[1][0].rows, tables[0][0].rows, strict=True):
        assert (ours.client_id, ours.num_examples) == (theirs.client_id, theirs.num_examples)
        assert ours.metrics == theirs.metrics
        assert ours.metrics["validates"] == 1.0
        assert ("own/val_loss" in ours.metrics) == (name == "personal head")


def test_a_device_that_lost_its_clients_state_says_so_and_begins_anew(fit: Fit, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SYSTEMS["personal head"], "max_epochs": 3, **SETTINGS}
    line = toy_line(LitMLP, forgets=True)
    said = said_during(lambda: fit(seeded(LitMLP), remote(line), **options))
    rows = fit(seeded(LitMLP), toy_data(), **options).ledger.rows
    last: dict[int, int] = {}
    expected = []
    for row in rows:
        if row.client_id in last:
            what = f"the device of client {row.client_id} no longer has what it kept in round {last[row.client_id]},"
            expected.append(f"Round {row.round_idx}: {what}")
        last[row.client_id] = row.round_idx
    assert expected
    assert sorted(message.partition(" so it")[0] for message in said) == sorted(expected)


@pytest.mark.slow
def test_a_server_that_ended_before_it_had_a_round_finds_the_states_before_it(fit: Fit, tmp_path: Path) -> None:
    """Devices have trained for a third round, which the resumed server asks for once more."""
    options: dict[str, Any] = {**SYSTEMS["personal head"], **SETTINGS, "clients_per_round": 12}
    whole = fit(seeded(LitMLP), toy_data(), max_epochs=4, **options)
    line = toy_line(LitMLP)
    fit(seeded(LitMLP), remote(line), max_epochs=2, **options).trainer.save_checkpoint(tmp_path / "2.ckpt")
    fit(seeded(LitMLP), remote(line), max_epochs=3, ckpt_path=tmp_path / "2.ckpt", **options)
    resumed = fit(seeded(LitMLP), remote(line), max_epochs=4, ckpt_path=tmp_path / "2.ckpt", **options)
    assert same_state(resumed.tensors, whole.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["personal head", "Ditto"])
def test_a_device_gives_its_own_model(name: str, fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**SYSTEMS[name], **SETTINGS, "clients_per_round": 12}
    fit(seeded(LitMLP), remote(toy_line(LitMLP, folder=tmp_path)), max_epochs=2, **options)
    simulated = fit(seeded(LitMLP), toy_data(), max_epochs=2, **options).model.own_model(3)
    module = LitMLP()
    shared = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    own = own_model(tmp_path / "3", module)
    assert same_state(own.module.state_dict(), {**shared, **simulated})
    assert len(simulated) == (len(shared) if name == "Ditto" else 2)
    assert (own.seed, own.round_idx) == (options["seed"], 1)
    assert own_model(str(tmp_path / "3"), LitMLP(), seed=3)[1:] == own[1:]
    torch.save(shared, tmp_path / "shared.pt")
    command = ["own", str(tmp_path / "3"), "toy_models:LitMLP", "-o", str(tmp_path / "own.pt")]
    assert main(command) == bool(own.shared) == (name != "Ditto")
    assert main([*command, "--weights", str(tmp_path / "shared.pt")]) == 0
    assert "own.pt, of the run with seed 3, after the client's turn in round 1" in capsys.readouterr().out
    assert same_state(torch.load(tmp_path / "own.pt"), own.module.state_dict())
    with pytest.raises(FileNotFoundError, match="3 has no state of such a run; name the `state_folder`"):
        own_model(tmp_path / "3", module, seed=7)
    with pytest.raises(ValueError, match=r"own model|is of another module: this one lacks net\."):
        own_model(tmp_path / "3", torch.nn.Linear(2, 2))


def test_a_client_without_a_model_of_its_own_has_the_servers(fit: Fit, tmp_path: Path) -> None:
    options = {**SYSTEMS["SCAFFOLD"], **SETTINGS, "clients_per_round": 12}
    fit(seeded(LitPlain), remote(toy_line(LitPlain, folder=tmp_path)), max_epochs=1, **options)
    with pytest.raises(ValueError, match=r"The client's model in .*seed-3-round-0.safetensors is the server's\."):
        own_model(tmp_path / "5", LitPlain())


def turn(states: KeptStates, round_idx: int, last_turn: int | None, seed: int = 3) -> bool:
    """Whether a client's turn begins with the state of its last, whose number is its only value."""
    download = Download(WorkUnit(0), 1.0, {}, round_idx, seed=seed, last_turn=last_turn)
    found = states.complete(download)
    state = {"w": torch.tensor(float(round_idx))}
    states.keep(download, Upload(WorkUnit(0), {}, client_state=state), state)
    return found is not None and found.client_state == ({} if last_turn is None else {"w": last_turn})


def test_a_device_deletes_only_what_a_later_turn_of_the_run_replaces(tmp_path: Path) -> None:
    def kept() -> dict[str, float]:
        return {p.name[:-12]: float(read_tensors(p.read_bytes())["own/w"]) for p in tmp_path.glob("*.safetensors")}

    states = KeptStates(tmp_path)
    assert all([turn(states, 0, None), turn(states, 4, 0), turn(states, 7, 4)])
    finished = {"seed-3-round-4": 4.0, "seed-3-round-7": 7.0}
    assert kept() == finished
    assert all([turn(states, 0, None, seed=33), turn(states, 1, 0, seed=33), turn(states, 2, 1, seed=33)])
    assert kept() == finished | {"seed-33-round-1": 1.0, "seed-33-round-2": 2.0}  # another run deletes nothing of it
    assert not turn(states, 9, 8, seed=33)  # a turn of another in this client's name
    assert turn(states, 10, 9, seed=33)
    aside = {"aside-seed-33-round-1": 1.0, "aside-seed-33-round-2": 2.0}
    assert kept() == finished | aside | {"seed-33-round-9": 9.0, "seed-33-round-10": 10.0}
    assert turn(states, 1, None)  # another run with the seed of the first
    assert turn(states, 2, 1)
    aside |= {"aside-seed-3-round-4": 4.0, "aside-seed-3-round-7": 7.0}
    later = {"seed-33-round-9": 9.0, "seed-33-round-10": 10.0, "seed-3-round-1": 1.0, "seed-3-round-2": 2.0}
    assert kept() == aside | later
