"""Who is there: names and numbers, who is refused, and who has to wait."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_line import FakeLine, Node, line_of, remote, toy_line
from federation import Fit, seeded
from torch.utils.data import TensorDataset
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network import ClientData
from lightning_spectral.network.messages import identity_of, identity_parts
from lightning_spectral.network.server.roster import Roster
from lightning_spectral.protocol.codec import VERSION

DATA = ClientData(TensorDataset(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)))


def roster_of(line: FakeLine) -> Roster:
    return Roster(line, patience=0.0)


def line_with(*names: str) -> FakeLine:
    """Nodes in the order of their names' arguments."""
    line = line_of([{"": LitMLP}] * len(names), [{"": DATA}] * len(names))
    line.there = {node: Node(_named(line.there[node].make, name)) for node, name in zip(sorted(line.there), names)}  # noqa: B905
    return line


def _named(make: Any, name: str) -> Any:
    def named() -> Any:
        service = make()
        service.client = name
        return service

    return named


def test_clients_are_numbered_by_name_and_keep_their_numbers() -> None:
    line = line_with("ward", "10", "9")
    roster = roster_of(line)
    roster.look()
    assert roster.names == ["9", "10", "ward"]
    line.there[200] = line_with("1").there[100]
    roster.look()
    assert roster.names == ["9", "10", "ward", "1"]
    assert roster.node_of(3) == 200


def test_a_resumed_run_gives_the_numbers_of_the_earlier_one() -> None:
    roster = roster_of(line_with("a", "b", "c"))
    roster.look()
    roster.rename(["c", "gone", "a"])
    assert roster.names == ["c", "gone", "a", "b"]
    assert roster.node_of(0) is not None
    assert roster.node_of(1) is None
    assert roster.present() == [0, 2, 3]


def test_a_client_that_was_restarted_has_a_new_node() -> None:
    line = line_with("a")
    roster = roster_of(line)
    roster.look()
    line.there = {300: line.there.pop(100)}
    roster.look()
    assert roster.names == ["a"]
    assert roster.node_of(0) == 300


def test_two_nodes_cannot_be_the_same_client() -> None:
    roster = roster_of(line_with("a", "a"))
    with pytest.warns(UserWarning, match="another node says that it is client 'a'; give each a name of its own"):
        roster.look()
    assert roster.names == ["a"]
    roster.look()  # said once


class OfAnotherVersion(FakeLine):
    def _ask(self, question: Any) -> Any:
        ticket = super()._ask(question)
        answer = self._ready[str(ticket)]
        identity = identity_of(answer.parts)
        parts = identity_parts(replace(identity, version=identity.version + 1))
        self._ready[str(ticket)] = replace(answer, parts=parts)
        return ticket


def test_another_version_is_refused() -> None:
    roster = roster_of(OfAnotherVersion(line_with("a").there))
    versions = f"it has version {VERSION + 1} of the format of records, and here is {VERSION}"
    with pytest.warns(UserWarning, match=f"takes no part: {versions}"):
        roster.look()
    assert roster.names == []


def test_a_closed_roster_admits_nobody() -> None:
    line = line_with("a")
    roster = roster_of(line)
    roster.look()
    roster.is_closed = True
    line.there[200] = line_with("b").there[100]
    with pytest.warns(UserWarning, match="client 'b' is new, and this run counts on the clients of its start"):
        roster.look()
    assert roster.names == ["a"]


@pytest.mark.parametrize("closes", [ls.Scaffold(), None])
def test_what_counts_all_clients_closes_the_roster(closes: Any, fit: Fit) -> None:
    data = remote(toy_line(LitMLP))
    options: dict[str, Any] = {"algorithm": closes, "clients_per_round": 2}
    if closes is None:
        options = {"participation": ls.Uniform(active=2), "clients_per_round": None}
    fit(seeded(LitMLP, momentum=0.0), data, **options)
    assert data.roster.is_closed


def test_a_keep_ratio_that_the_algorithm_lacks_is_named(fit: Fit) -> None:
    line = toy_line(LitMLP, keep_ratios=dict.fromkeys(range(12), 0.2))
    with pytest.raises(ValueError, match=r"Client '0' says a keep ratio of 0.2, and the algorithm has 0.3, 0.6; write"):
        fit(seeded(LitMLP), remote(line), algorithm=ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}))


def test_devices_say_what_they_can_hold(fit: Fit) -> None:
    said = {client: (0.3, 0.6)[client % 2] for client in range(12)}
    algorithm = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})
    fitted = fit(seeded(LitMLP), remote(toy_line(LitMLP, keep_ratios=said)), algorithm=algorithm, max_epochs=2)
    assert all(row.keep_ratio == said[row.client_id] for row in fitted.ledger.rows)


MIXED = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, layers=ls.LayerChoices(keep_first_and_last_dense=False))


@pytest.mark.parametrize("algorithm", [MIXED, ls.LoRA({1: 0.5, 3: 0.5})], ids=["spectral", "LoRA"])
def test_a_device_with_a_budget_gets_the_largest_sub_model_that_fits(algorithm: Any, fit: Fit) -> None:
    plain = fit(seeded(LitMLP), remote(toy_line(LitMLP)), algorithm=algorithm, clients_per_round=12)
    used: dict[float, int] = {}
    for row in plain.ledger.rows:
        size = row.downlink_bytes + row.uplink_bytes - row.frozen_bytes
        assert used.setdefault(row.keep_ratio, size) == size
    (small, little), (large, much) = sorted(used.items())
    budgets = dict(enumerate([little, much - 1, much, 10 * much]))
    line = toy_line(LitMLP, budgets=budgets)
    fitted = fit(seeded(LitMLP), remote(line), algorithm=algorithm, clients_per_round=12)
    got = {row.client_id: row.keep_ratio for row in fitted.ledger.rows}
    assert [got[client] for client in range(4)] == [small, small, large, large]


def test_a_budget_that_nothing_fits_is_named(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"Client '3' says `budget_bytes=9`, and the smallest sub-model takes [\d,]+ "):
        fit(seeded(LitMLP), remote(toy_line(LitMLP, budgets={3: 9})), algorithm=MIXED)


def test_a_device_says_a_keep_ratio_or_a_budget() -> None:
    with pytest.raises(ValueError, match=r"`keep_ratio=0.5` and `budget_bytes=1,000` both say what the device can"):
        ClientData(DATA.train, keep_ratio=0.5, budget_bytes=1000)


def test_a_newcomer_that_cannot_take_part_ends_no_run(fit: Fit) -> None:
    line = toy_line(LitMLP, keep_ratios={client: 0.3 for client in range(11)} | {11: 0.2})
    odd = next(node for node in sorted(line.there) if line.there[node].make().client == "11")
    later = line.there.pop(odd)

    def appear(question: Any, answer: Any) -> Any:
        line.there[odd] = later
        return answer

    line.spoil = appear
    data = remote(line, wait_for=11)
    with pytest.warns(UserWarning, match=f"Node {odd} takes no part: Client '11' says a keep ratio of 0.2, and"):
        fitted = fit(seeded(LitMLP), data, algorithm=MIXED, max_epochs=3, clients_per_round=11)
    assert 11 not in {row.client_id for row in fitted.ledger.rows}


def test_a_client_of_other_models_is_named(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"Client '0' has data for the models 'words', and the server trains an only"):
        fit(seeded(LitMLP), remote(toy_line({"words": LitMLP})))


def test_clients_without_examples_are_named(fit: Fit) -> None:
    line = line_of([{"": LitMLP}] * 3, [{"": data} for data in (DATA, ClientData([]), DATA)])
    with pytest.raises(ValueError, match=r"1 of 3 clients have no examples \(1\); switch them off"):
        fit(seeded(LitMLP), remote(line, wait_for=3), clients_per_round=2)
