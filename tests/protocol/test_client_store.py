"""What the server keeps about single clients, on its own and in a run."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, seeded
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import ClientStore, Cohort
from lightning_spectral.protocol.records import WorkUnit


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
        return one.dtype == two.dtype and torch.equal(one, two)
    return list(one) == list(two) and all(same(one[key], two[key]) for key in one)


def test_a_store_is_empty_until_it_is_written_to() -> None:
    store = Cohort(0, 0, {}).store
    assert (len(store), list(store), store.num_bytes, store.state_dict(), store.written()) == (0, [], 0, {}, {})
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
    assert (8, "") not in saved


def test_what_a_round_wrote_is_read_at_once_and_kept_when_it_ends() -> None:
    store, unit = filled(), WorkUnit(7)
    store[unit] = {"loss": torch.tensor(9.0)}
    assert store[unit]["loss"] == 9.0
    assert same(store.state_dict(), filled().state_dict())
    store.discard()  # the round failed
    assert store[unit]["loss"] == 0.5
    store[unit] = {"loss": torch.tensor(8.0)}
    store.commit()
    assert store.state_dict()[unit.key]["loss"] == 8.0
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


class TestInARun:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        """Fits with five clients per round."""
        return partial(fit, clients_per_round=5)

    def saved(self, trainer: pl.Trainer, path: Path) -> Any:
        trainer.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    def test_what_an_algorithm_writes_is_in_the_checkpoint(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        losses: dict[int, float] = {}

        class Losses(ls.RoundCallback):
            def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
                losses.update({client.client_id: client.loss for client in summary.clients})

        fitted = fit(seeded(lit_mlp), data, algorithm=remembering(), max_epochs=3, callbacks=[Losses()])
        stored = fitted.history.column("fl/store_bytes")
        kept = self.saved(fitted.trainer, tmp_path / "3.ckpt")["federation_clients"]
        assert {key: float(entry["loss"]) for key, entry in kept.items()} == {(c, ""): x for c, x in losses.items()}
        assert sum(int(entry["turns"]) for entry in kept.values()) == 3 * 5
        assert max(int(entry["turns"]) for entry in kept.values()) > 1
        assert stored[0] == 5 * 16
        assert stored[2] == len(losses) * 16
        assert fitted.trainer.callback_metrics["fl/store_bytes"] == len(losses) * 16

    def test_a_run_that_keeps_nothing_says_nothing(self, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        fitted = fit(seeded(lit_mlp), data)
        assert "federation_clients" not in self.saved(fitted.trainer, tmp_path / "1.ckpt")
        assert fitted.history.column("fl/store_bytes") == []

    def test_a_resumed_run_remembers_its_clients(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        remember = partial(fit, algorithm=remembering())
        whole = remember(seeded(lit_mlp), data, max_epochs=4)
        expected = self.saved(whole.trainer, tmp_path / "whole.ckpt")["federation_clients"]
        part = remember(seeded(lit_mlp), data, max_epochs=2)
        checkpoint = self.saved(part.trainer, tmp_path / "2.ckpt")
        resumed = remember(seeded(lit_mlp), data, max_epochs=4, ckpt_path=tmp_path / "2.ckpt")
        assert same(resumed.state, whole.state)
        assert same(self.saved(resumed.trainer, tmp_path / "resumed.ckpt")["federation_clients"], expected)
        del checkpoint["federation_clients"], checkpoint["federation_digest"]
        torch.save(checkpoint, tmp_path / "forgetful.ckpt")
        forgetful = remember(seeded(lit_mlp), data, max_epochs=4, ckpt_path=tmp_path / "forgetful.ckpt")
        assert not same(forgetful.state, whole.state)  # or the test would show nothing

    def test_a_checkpoint_within_a_round_remembers_nothing_of_that_round(
        self, remembering: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        """The resumed run restarts the round, weights included, so no client has trained twice."""
        remember = partial(fit, algorithm=remembering())
        whole = remember(seeded(lit_mlp), data, max_epochs=3)

        class SaveWithin(ls.RoundCallback):
            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                if turn.round_idx == 1:
                    trainer.save_checkpoint(tmp_path / "within.ckpt")

        remember(seeded(lit_mlp), data, max_epochs=2, callbacks=[SaveWithin()])
        kept = torch.load(tmp_path / "within.ckpt", weights_only=True)["federation_clients"]
        assert [int(entry["turns"]) for entry in kept.values()] == [1] * 5  # of the first round alone
        resumed = remember(seeded(lit_mlp), data, max_epochs=3, ckpt_path=tmp_path / "within.ckpt")
        assert same(resumed.state, whole.state)
