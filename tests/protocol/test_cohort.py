"""What the server keeps of single clients, and which frozen tensors it knows that they have."""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import HARDLY_MOVED, Fit, Fitted, same_state, seeded
from observed_runs import acting, halving_first_weight
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.filters.own import FrozenBase
from lightning_spectral.protocol import client_store
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.codec import decode, encode
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import KeptTensors, frozen_parameters
from lightning_spectral.protocol.records import ClientOutcome, Download, WorkUnit


def filled() -> ClientStore:
    store = ClientStore()
    store[WorkUnit(7)] = {"loss": torch.tensor(0.5, dtype=torch.float64)}
    store[WorkUnit(3, "words")] = {"control": torch.ones(2, 3), "turns": torch.tensor([4])}
    store[WorkUnit(3)] = {}
    store.commit()
    return store


def same(one: Any, two: Any) -> bool:
    """Keys in the same order, and equal tensors."""
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.stride() == two.stride() and torch.equal(one, two)
    if isinstance(one, str):
        return bool(one == two)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return list(one) == list(two) and all(same(one[key], two[key]) for key in one)


def entries(saved: Any) -> dict[Any, Any]:
    """What a checkpoint has of each client and model."""
    return {
        (client, part["model"]): {name: tensor[row] for name, tensor in part["tensors"].items()}
        for part in saved
        for row, client in enumerate(part["clients"].tolist())
    }


def test_a_store_is_empty_until_it_is_written_to() -> None:
    store = Cohort(0, 0, {}).store
    assert (len(store), list(store), store.num_bytes, store.state_dict(), store.written()) == (0, [], 0, [], {})
    assert WorkUnit(0) not in store
    with pytest.raises(KeyError, match=r"\(0, ''\)"):
        store[WorkUnit(0)]
    assert Cohort(0, 0, {}).store is not store


def test_a_store_keeps_copies() -> None:
    store, given = ClientStore(), torch.ones(2, requires_grad=True)
    store[WorkUnit(0)] = {"control": given}
    with torch.no_grad():
        given.fill_(9.0)
    kept = store[WorkUnit(0)]["control"]
    assert kept.tolist() == [1.0, 1.0]
    assert not kept.requires_grad


def test_client_and_model_are_the_key_and_the_coefficient_is_not() -> None:
    store = filled()
    assert list(store) == [(3, ""), (3, "words"), (7, "")]
    assert WorkUnit(3, "words", coefficient=80.0) in store
    assert WorkUnit(7, "words") not in store
    store[WorkUnit(7, coefficient=2.0)] = {"turns": torch.tensor(1)}
    assert len(store) == 3
    assert list(store[WorkUnit(7)]) == ["turns"]  # replaces everything that was there


def test_bytes_are_those_of_all_tensors() -> None:
    assert filled().num_bytes == 8 + 4 * 6 + 8


def test_what_is_saved_is_loaded_and_later_writes_do_not_reach_it() -> None:
    store, loaded = filled(), ClientStore()
    saved = store.state_dict()
    store[WorkUnit(7)] = {"loss": torch.tensor(9.0)}
    store[WorkUnit(8)] = {}
    assert same(saved, filled().state_dict())
    loaded[WorkUnit(0)] = {"gone": torch.ones(1)}
    loaded.load_state_dict(saved)
    assert same(loaded.state_dict(), filled().state_dict())
    assert loaded.written() == {}
    loaded[WorkUnit(8)] = {}
    loaded.commit()
    assert same(saved, filled().state_dict())


def test_what_a_round_wrote_is_read_at_once_and_kept_when_it_ends() -> None:
    store, unit = filled(), WorkUnit(7)
    store[unit] = {"loss": torch.tensor(9.0)}
    assert store[unit]["loss"] == 9.0
    assert same(store.state_dict(), filled().state_dict())
    store.discard()  # the round failed
    assert store[unit]["loss"] == 0.5
    store[unit] = {"loss": torch.tensor(8.0)}
    store.commit()
    assert entries(store.state_dict())[unit.key]["loss"] == 8.0
    assert store.written() == {}


def test_processes_that_exchange_what_they_wrote_end_with_the_same() -> None:
    one, two = filled(), filled()
    one[WorkUnit(1)] = {"loss": torch.tensor(1.0)}
    one[WorkUnit(7)] = {"loss": torch.tensor(7.0)}
    two[WorkUnit(2, "words")] = {"loss": torch.tensor(2.0)}
    ours, theirs = one.written(), two.written()
    assert (list(ours), list(theirs)) == ([(1, ""), (7, "")], [(2, "words")])
    one.merge(theirs)
    two.merge(ours)
    one.commit(), two.commit()
    assert same(one.state_dict(), two.state_dict())
    assert list(one) == [(1, ""), (2, "words"), (3, ""), (3, "words"), (7, "")]


@pytest.mark.parametrize("most_bytes", [1, 64, client_store.MOST_BYTES])
def test_a_store_is_a_dictionary_of_copies(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written, dropped and saved: of several models, types, shapes and strides, over many chunks."""
    monkeypatch.setattr(client_store, "MOST_BYTES", most_bytes)
    generator, store = torch.Generator().manual_seed(0), ClientStore()
    expected: dict[Any, dict[str, Tensor]] = {}
    for round_idx in range(30):
        written: dict[Any, dict[str, Tensor]] = {}
        for client in torch.randint(40, (6,), generator=generator).tolist():
            unit, kind = WorkUnit(client, ("", "words")[client % 2]), (client + round_idx) % 5
            w = torch.randn(3, 2, generator=generator)
            entry = ({"w": w}, {"w": w.T}, {"w": w.double()}, {}, {"w": w, "b": w[0].clone(), "n": w[0, 0].clone()})[
                kind
            ]
            store[unit] = written[unit.key] = entry
        if round_idx % 7 == 3:
            store.discard()
            continue
        expected |= written
        store.commit()
        if round_idx % 5 == 4:
            file = io.BytesIO()
            torch.save(store.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            (store := ClientStore()).load_state_dict(saved)
            assert same(store.state_dict(), saved)
            assert (
                sum(t.untyped_storage().nbytes() for part in saved for t in part["tensors"].values()) == store.num_bytes
            )
        assert len(store) == len(expected)
        assert list(store) == sorted(expected)
        assert same({key: store.kept(WorkUnit(*key)) for key in expected}, expected)
        assert same(dict(sorted(entries(store.state_dict()).items())), dict(sorted(expected.items())))
    assert len(expected) > 30


def test_tables_do_not_depend_on_the_order_within_a_round() -> None:
    one, two = ClientStore(), ClientStore()
    for store, order in ((one, (3, 1, 2)), (two, (2, 3, 1))):
        for client in order:
            store[WorkUnit(client)] = {"loss": torch.tensor(float(client))}
        store.commit()
    assert same(one.state_dict(), two.state_dict())


@pytest.mark.slow
def test_a_small_entry_takes_little_more_than_its_values() -> None:
    store, count = ClientStore(), 20_000
    for client in range(count):
        store[WorkUnit(client)] = {"weight": torch.ones(2, 5), "bias": torch.ones(5)}
        if client % 10 == 9:
            store.commit()
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    assert file.tell() < count * (60 + 8) * 1.01  # one tensor of each client alone has 100 bytes of framing


STORED, FROZEN = "stored clients", "frozen tensors"  # parts of what lasts


def lasting(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What the only model keeps from round to round besides its weights, by part."""
    found: dict[str, Any] = checkpoint["federation_lasting"]["models"][""]
    return found


class TestInARun:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        return partial(fit, clients_per_round=5)

    def saved(self, trainer: pl.Trainer, path: Path) -> Any:
        trainer.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    def test_what_an_algorithm_writes_is_in_the_checkpoint(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        losses: dict[int, float] = {}
        note = acting(
            on_round_end=lambda trainer, model, summary: losses.update(
                {client.client_id: client.loss for client in summary.clients}
            )
        )
        fitted = fit(seeded(lit_mlp), data, algorithm=remembering(), max_epochs=3, callbacks=[note])
        stored = fitted.history.column("fl/store_bytes")
        kept = entries(lasting(self.saved(fitted.trainer, tmp_path / "3.ckpt"))[STORED]["entries"])
        assert {key: float(entry["loss"]) for key, entry in kept.items()} == {(c, ""): x for c, x in losses.items()}
        assert sum(int(entry["turns"]) for entry in kept.values()) == 3 * 5
        assert max(int(entry["turns"]) for entry in kept.values()) > 1
        assert stored[0] == 5 * 16
        assert stored[2] == len(losses) * 16
        assert fitted.trainer.callback_metrics["fl/store_bytes"] == len(losses) * 16

    def test_a_run_that_keeps_nothing_says_nothing(self, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        fitted = fit(seeded(lit_mlp), data)
        assert STORED not in lasting(self.saved(fitted.trainer, tmp_path / "1.ckpt"))
        assert fitted.history.column("fl/store_bytes") == []

    def test_a_resumed_run_remembers_its_clients(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        remember = partial(fit, algorithm=remembering())
        whole = remember(seeded(lit_mlp), data, max_epochs=4)
        expected = lasting(self.saved(whole.trainer, tmp_path / "whole.ckpt"))[STORED]
        checkpoint = self.saved(remember(seeded(lit_mlp), data, max_epochs=2).trainer, tmp_path / "2.ckpt")
        resumed = remember(seeded(lit_mlp), data, max_epochs=4, ckpt_path=tmp_path / "2.ckpt")
        assert same(resumed.state, whole.state)
        assert same(lasting(self.saved(resumed.trainer, tmp_path / "resumed.ckpt"))[STORED], expected)
        del lasting(checkpoint)[STORED], checkpoint["federation_digest"]
        torch.save(checkpoint, tmp_path / "forgetful.ckpt")
        forgetful = remember(seeded(lit_mlp), data, max_epochs=4, ckpt_path=tmp_path / "forgetful.ckpt")
        assert not same(forgetful.state, whole.state)  # or the test would show nothing

    def test_a_checkpoint_within_a_round_remembers_nothing_of_that_round(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        """The resumed run restarts the round, weights included, so no client has trained twice."""
        remember = partial(fit, algorithm=remembering())
        whole = remember(seeded(lit_mlp), data, max_epochs=3)

        def save_within(trainer: pl.Trainer, model: Any, turn: Any) -> None:
            if turn.round_idx == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

        remember(seeded(lit_mlp), data, max_epochs=2, callbacks=[acting(on_client_end=save_within)])
        kept = lasting(torch.load(tmp_path / "within.ckpt", weights_only=True))[STORED]["entries"]
        assert [int(entry["turns"]) for entry in entries(kept).values()] == [1] * 5  # of the first round alone
        resumed = remember(seeded(lit_mlp), data, max_epochs=3, ckpt_path=tmp_path / "within.ckpt")
        assert same(resumed.state, whole.state)


Travel = Callable[[Download], Download]
BASE = 4 * (6 * 12 + 12)


def first_layer_frozen() -> LitMLP:
    lit = LitMLP(momentum=0.0)
    lit.net[0].requires_grad_(False)
    return lit


def first_turns(fitted: Fitted) -> list[bool]:
    """For each row of the ledger whether its client got the frozen base."""
    return [row.frozen_bytes > 0 for row in fitted.ledger.rows]


def expected(fitted: Fitted) -> list[bool]:
    """The same by the rule: the base is sent until an update has come back."""
    have: set[int] = set()
    sent = []
    for row in fitted.ledger.rows:
        sent.append(row.client_id not in have and row.left_out != "no_data")
        have |= {row.client_id} if row.left_out in (None, "not_finite", "no_update") else set()
    return sent


ALGORITHMS: list[ls.Algorithm] = [
    ls.FedAvg(),
    ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}),
    ls.Zampling(4, degree=3),
    ls.Scaffold(),
]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_each_client_gets_it_in_its_first_turn(algorithm: Any, data: Any, fit: Fit, monkeypatch: Any) -> None:
    fitted = fit(seeded(first_layer_frozen), data, algorithm=algorithm, max_epochs=4)
    rows = fitted.ledger.rows
    assert first_turns(fitted) == expected(fitted)
    assert {row.frozen_bytes for row in rows} == {0, BASE}
    assert len({(row.downlink_bytes - row.frozen_bytes, row.keep_ratio) for row in rows}) == len(
        {row.keep_ratio for row in rows}
    )
    monkeypatch.setattr(FrozenBase, "held_by", lambda self, unit: frozenset())
    always = fit(seeded(first_layer_frozen), data, algorithm=algorithm, max_epochs=4)
    assert same_state(fitted.state, always.state)
    assert sum(r.downlink_bytes for r in always.ledger.rows) - sum(r.downlink_bytes for r in rows) == BASE * (
        first_turns(fitted).count(False)
    )


def test_it_is_sent_again_until_an_update_comes_back(data: Any, fit: Fit) -> None:
    fast, slow = (ls.simulation.DeviceProfile(speed, uplink=1e4, macs_per_second=1e6) for speed in (1e4, 1e2))
    conditions = {"clock": ls.VirtualClock({fast: 0.5, slow: 0.5}, deadline=11.0), "dropout": ls.ClientDropout(0.3)}
    fitted = fit(seeded(first_layer_frozen), data, max_epochs=6, clients_per_round=8, **conditions)
    rows = fitted.ledger.rows
    assert {"dropped_out", "late"} <= {row.left_out for row in rows}
    assert first_turns(fitted) == expected(fitted)
    work = 3 * sum(p.numel() for p in first_layer_frozen().parameters()) * 10 / 1e6
    for row in rows:
        if row.left_out is None:  # the clock agrees with the ledger, on the fast link
            seconds = row.downlink_bytes / 1e4 + work + row.uplink_bytes / 1e4
            assert row.virtual_seconds == pytest.approx(seconds, rel=1e-12)


def test_what_a_callback_writes_travels_once_more_to_everybody(data: Any, fit: Fit) -> None:
    writes = halving_first_weight(round_idx=2)
    fitted = fit(seeded(first_layer_frozen), data, clients_per_round=12, max_epochs=4, callbacks=[writes])
    sent = [{row.frozen_bytes for row in fitted.ledger.rows if row.round_idx == t} for t in range(4)]
    assert sent == [{BASE}, {0}, {4 * 6 * 12}, {0}]  # the bias was not written


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["between rounds", "before the save", "within a round"])
def test_a_resumed_run_sends_what_the_uninterrupted_one_sends(kind: str, data: Any, fit: Fit, tmp_path: Path) -> None:
    class Saves(ls.RoundCallback):
        """Saves at the end of round 1, or within it, when some of its clients have the base and it may not end."""

        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            if kind == "within a round" and turn.round_idx == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch != 1:
                return
            if kind == "before the save":
                pl_module.module.net[0].weight.data.mul_(0.5)
            if kind != "within a round":
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    sampler = ls.UpdateVarianceReduced(active=3, measure=4)  # measured clients have it before the round is over
    ours, theirs = (ls.FederatedModule(seeded(first_layer_frozen), participation=sampler) for _ in range(2))
    whole = fit(ours, data, max_epochs=4, callbacks=[Saves()])
    resumed = fit(theirs, data, max_epochs=4, ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.ledger.rows == whole.ledger.rows
    assert same_state(resumed.state, whole.state)
    assert any(row.round_idx > 1 and row.frozen_bytes < BASE for row in resumed.ledger.rows)


def test_a_measured_client_has_it_when_its_turn_comes(data: Any, fit: Fit) -> None:
    model = ls.FederatedModule(seeded(first_layer_frozen), participation=ls.UpdateVarianceReduced(active=4))
    rows = fit(model, data, max_epochs=2).ledger.rows
    assert {row.frozen_bytes for row in rows if row.measured and row.round_idx == 0} == {BASE}
    assert {row.frozen_bytes for row in rows if not row.measured or row.round_idx == 1} == {0}


def test_layers_are_unfrozen_between_fits_and_not_within_one(data: Any, fit: Fit) -> None:
    unfreezes = lambda trainer, model: model.module.net[0].weight.requires_grad_(trainer.current_epoch == 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"`requires_grad` of net\.0\.weight changed during the fit"):
        fit(seeded(first_layer_frozen), data, max_epochs=2, callbacks=[acting(on_train_epoch_start=unfreezes)])
    model = ls.FederatedModule(seeded(first_layer_frozen), clients_per_round=12)
    fit(model, data, max_epochs=1)
    before = model.module.net[0].weight.clone()
    model.module.net[0].weight.requires_grad_(True)
    rows = fit(model, data, max_epochs=2).ledger.rows
    assert not torch.equal(model.module.net[0].weight, before)
    assert [row.frozen_bytes for row in rows] == 12 * [4 * 12] + 12 * [0]


def test_a_new_fit_begins_anew_and_a_module_without_frozen_parameters_saves_nothing(
    data: Any, fit: Fit, tmp_path: Path
) -> None:
    model = ls.FederatedModule(seeded(first_layer_frozen), clients_per_round=12)
    assert {row.frozen_bytes for _ in range(2) for row in fit(model, data).ledger.rows} == {BASE}
    fit(LitMLP(), data).trainer.save_checkpoint(tmp_path / "all.ckpt")
    assert FROZEN not in lasting(torch.load(tmp_path / "all.ckpt", weights_only=True))
    fit(model, data).trainer.save_checkpoint(tmp_path / "frozen.ckpt")
    assert FROZEN in lasting(torch.load(tmp_path / "frozen.ckpt", weights_only=True))  # or the name is another


def download(net: nn.Linear, travel: Travel, held: frozenset[str] = frozenset()) -> Download:
    """The download of a layer whose weight is frozen, after it has travelled."""
    base = FrozenBase(lambda: frozen_parameters(net))
    base.refresh()
    tensors = {name: parameter.detach() for name, parameter in net.named_parameters()}
    sent = Download(WorkUnit(0), 1.0, tensors, frozen=base.digests, held=held)
    received = travel(sent)
    assert received.num_bytes == sent.num_bytes
    return received


@pytest.mark.parametrize(
    "travel",
    [lambda sent: decode(*encode(sent), Download), lambda sent: pickle.loads(pickle.dumps(sent))],
    ids=["coded", "pickled"],
)
def test_a_device_completes_what_came_without_the_base(travel: Travel) -> None:
    net, kept, held = nn.Linear(3, 2), KeptTensors(), frozenset({"weight"})
    net.weight.requires_grad_(False)
    first = kept.complete(download(net, travel))
    later = download(net, travel, held)
    assert (first.num_bytes, first.frozen_bytes) == (4 * 8, 4 * 6)
    assert (later.num_bytes, later.frozen_bytes, set(later.tensors)) == (4 * 2, 0, {"bias"})
    assert kept.missing(later) == ()
    assert torch.equal(kept.complete(later).tensors["weight"], net.weight)
    assert KeptTensors().missing(later) == ("weight",)
    net.weight.data.add_(1.0)
    assert kept.missing(download(net, travel, held)) == ("weight",)  # it has another value
    assert torch.equal(kept.complete(download(net, travel)).tensors["weight"], net.weight)
    assert kept.missing(download(net, travel, held)) == ()


def outcome(client_id: int, **more: Any) -> ClientOutcome:
    return ClientOutcome(0, WorkUnit(client_id), 1.0, 10, 1, 0.5, 8, 8, **more)


def test_a_client_whose_device_lost_something_is_sent_everything_until_its_next_update() -> None:
    net, names = nn.Linear(3, 2).requires_grad_(False), ("bias",)
    base = FrozenBase(lambda: frozen_parameters(net))
    base.refresh()
    base.received(map(WorkUnit, range(4)))
    base.close([])
    lost_and_failed = outcome(1, missing=names, left_out="error")
    base.note([outcome(0, missing=names), lost_and_failed, outcome(2, left_out="error"), outcome(3)])
    base.close([])
    assert [len(base.held_by(unit)) for unit in map(WorkUnit, range(4))] == [2, 0, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_change_of_a_frozen_tensor_is_seen(dtype: torch.dtype) -> None:
    net = nn.Module()
    net.base = nn.Parameter(torch.zeros(4, 3, dtype=dtype).T, requires_grad=False)  # not contiguous
    net.empty = nn.Parameter(torch.zeros(0, dtype=dtype), requires_grad=False)
    net.scalar = nn.Parameter(torch.zeros((), dtype=dtype), requires_grad=False)
    base, unit = FrozenBase(lambda: frozen_parameters(net)), WorkUnit(1)
    base.refresh()
    base.received([unit])
    assert base.saved_bytes(unit) == 13 * net.base.element_size()
    net.base.data[2, 3] = 1
    base.refresh()
    assert base.held_by(unit) == {"empty", "scalar"}
