"""Who is there: names and numbers, who comes and goes, who is rejected, and what the server waits for."""

import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from fake_line import FakeLine, Node, in_kit, line_of, remote, toy_client_data, toy_line
from federation import Fit, same_state, seeded
from msgspec import msgpack
from other_process import toy_data
from torch.utils.data import TensorDataset
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.errors import DeviceError, RoundError
from lightning_spectral.network import ClientData, status
from lightning_spectral.network import roster as roster_module
from lightning_spectral.network.command import main
from lightning_spectral.network.device import answered
from lightning_spectral.network.line import Answer, Question
from lightning_spectral.network.messages import Holding, Identity, Kind, Part, identity_parts
from lightning_spectral.network.roster import Roster

DATA = ClientData(TensorDataset(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)))
FIRST = 100  # a node
MIXED = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, layers=ls.LayerChoices(keep_first_and_last_dense=False))
EVERYBODY: dict[str, Any] = {"clients_per_round": 12, "seed": 3}


def line_with(*names: str) -> FakeLine:
    """Nodes in the order of their names' arguments."""

    def named(node: Node, name: str) -> Node:
        def make() -> Any:
            service = node.make()
            service.client = name
            return service

        return Node(make)

    line = line_of([{"": LitMLP}] * len(names), [{"": DATA}] * len(names))
    line.there = {node: named(line.there[node], name) for node, name in zip(sorted(line.there), names, strict=True)}
    return line


def roster_with(*names: str, trust_names: bool = False) -> Roster:
    roster = Roster(line_with(*names), patience=0.0, trust_names=trust_names)
    roster.look()
    return roster


def test_clients_are_numbered_by_name_and_keep_their_numbers() -> None:
    roster = roster_with("ward", "10", "9")
    assert roster.names == ["9", "10", "ward"]
    roster.line.there[200] = line_with("1").there[100]  # type: ignore[attr-defined]
    roster.look()
    assert roster.names == ["9", "10", "ward", "1"]
    assert roster.node_of(3) == 200


def test_a_resumed_run_gives_the_numbers_of_the_earlier_one() -> None:
    roster = roster_with("a", "b", "c")
    roster.load_state_dict({"names": ["c", "gone", "a"], "nodes": {}})
    assert roster.names == ["c", "gone", "a", "b"]
    assert roster.present() == [0, 2, 3]


def test_names_stay_with_their_nodes_when_a_run_is_resumed() -> None:
    """One has taken another's name meanwhile, and one has a new name; `trust_names` believes both."""
    saved = roster_with("a", "b", "c").state_dict()
    for trust_names, present in ((False, [2]), (True, [0, 2, 3, 4])):
        roster = roster_with("other b", "new", "c", "a", trust_names=trust_names)  # of nodes 100 to 103
        roster.load_state_dict(saved)
        assert (roster.names[:3], sorted(roster.names[3:])) == (["a", "b", "c"], ["new", "other b"])
        assert roster.present() == present
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*(client 'a' was node 100|it was client '[ab]') when it first")
            roster.look()
        assert roster.present() == present


@pytest.mark.parametrize("trust_names", [False, True])
def test_a_name_belongs_to_the_key_that_is_enrolled_for_it(trust_names: bool, tmp_path: Path) -> None:
    """Of three that say that they are b, the second is; in an earlier run it had the key of another node."""
    line = line_with("b", "b", "b", "c")
    line.status = in_kit(tmp_path, {"a": 100, "b": 101})
    roster = Roster(line, 0.0, trust_names)
    roster.load_state_dict({"names": ["b"], "nodes": {"b": 90}})
    not_its_own, not_enrolled = "its key is that of 'a'; give", "another key is enrolled for that name; give"
    with (
        pytest.warns(UserWarning, match=f"Node 100 was rejected: it says that it is client 'b', and {not_its_own}"),
        pytest.warns(UserWarning, match=f"Node 102 was rejected: it says that it is client 'b', and {not_enrolled}"),
    ):
        roster.look()
    assert (roster.names, roster.node_of(0), roster.node_of(1)) == (["b", "c"], 101, 103)


def test_a_client_whose_name_is_trusted_may_come_back_as_another_node() -> None:
    roster = roster_with("a", trust_names=True)
    roster.line.there = {300: roster.line.there[100]}  # type: ignore[attr-defined]
    roster.look()
    assert (roster.names, roster.node_of(0)) == (["a"], 300)


def test_a_name_stays_with_the_node_that_had_it_first_and_a_node_with_its_name() -> None:
    roster = roster_with("a")
    line: Any = roster.line
    true, thief = line.there, {300: line.there[100]}
    line.there = thief
    with pytest.warns(UserWarning, match="client 'a' was node 100 when it first appeared in this run, and names stay"):
        roster.look()
    assert roster.node_of(0) is None
    for there in ({**true, **thief}, {}):
        line.there = there
        roster.look()
        assert roster.node_of(0) == (100 if there else None)
    line.there = {100: line_with("b").there[100]}
    with pytest.warns(UserWarning, match="it was client 'a' when it first appeared in this run"):
        roster.look()
    assert roster.names == ["a"]


def test_two_nodes_cannot_be_the_same_client() -> None:
    with pytest.warns(UserWarning, match="another node says that it is client 'a'; give each a name of its own"):
        roster = roster_with("a", "a")
    assert roster.names == ["a"]
    roster.look()  # said once


def test_a_closed_roster_admits_nobody() -> None:
    roster = roster_with("a")
    roster.is_closed = True
    roster.line.there[200] = line_with("b").there[100]  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="client 'b' is new, and this run counts on the clients of its start"):
        roster.look()
    assert roster.names == ["a"]


@pytest.mark.parametrize(
    "options",
    [{"algorithm": ls.Scaffold()}, {"participation": ls.Uniform(active=2), "clients_per_round": None}],
    ids=["SCAFFOLD", "a sampler"],
)
def test_what_counts_all_clients_closes_the_roster(options: Any, fit: Fit) -> None:
    data = remote(toy_line(LitMLP))
    fit(seeded(LitMLP, momentum=0.0), data, **options)
    assert data.roster.is_closed


def test_devices_say_what_they_can_hold(fit: Fit) -> None:
    said = {client: (0.3, 0.6)[client % 2] for client in range(12)}
    fitted = fit(seeded(LitMLP), remote(toy_line(LitMLP, keep_ratios=said)), algorithm=MIXED, max_epochs=2)
    assert all(row.keep_ratio == said[row.client_id] for row in fitted.ledger.rows)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [MIXED, ls.LoRA({1: 0.5, 3: 0.5})], ids=["spectral", "LoRA"])
def test_a_device_with_a_budget_gets_the_largest_sub_model_that_fits(algorithm: Any, fit: Fit) -> None:
    plain = fit(seeded(LitMLP), remote(toy_line(LitMLP)), algorithm=algorithm, **EVERYBODY)
    used: dict[float, int] = {}
    for row in plain.ledger.rows:
        size = row.downlink_bytes + row.uplink_bytes - row.frozen_bytes
        assert used.setdefault(row.keep_ratio, size) == size
    (small, little), (large, much) = sorted(used.items())
    line = toy_line(LitMLP, budgets=dict(enumerate([little, much - 1, much, 10 * much])))
    fitted = fit(seeded(LitMLP), remote(line), algorithm=algorithm, **EVERYBODY)
    got = {row.client_id: row.keep_ratio for row in fitted.ledger.rows}
    assert [got[client] for client in range(4)] == [small, small, large, large]


def without(line: FakeLine, kept: int) -> FakeLine:
    for node in list(line.there)[kept:]:
        del line.there[node]
    return line


def with_data(**own: Any) -> FakeLine:
    """Twelve clients, the last of which has other data."""
    datas = [ClientData(examples, batch_size=4) for examples in toy_client_data()]
    return line_of([{"": LitMLP}] * 12, [{"": data} for data in datas[:11]] + [own])


IMPOSSIBLE: dict[str, tuple[FakeLine, type[Exception], str]] = {
    "a keep ratio": (
        toy_line(LitMLP, keep_ratios=dict.fromkeys(range(12), 0.2)),
        ValueError,
        r"Client '0' says a keep ratio of 0.2, and the algorithm has 0.3, 0.6; write",
    ),
    "a model": (toy_line({"words": LitMLP}), RoundError, "Only 0 of 12 .* devices, see to those that were rejected"),
    "few": (without(toy_line(LitMLP), 3), RoundError, "Only 3 of 12 clients were there after 0.2 s; start more"),
}
REJECTED: dict[str, tuple[Callable[[], FakeLine], str]] = {
    "a keep ratio": (lambda: toy_line(LitMLP, keep_ratios={11: 0.2}), r"Client '11' says a keep ratio of 0.2, and"),
    "a budget": (lambda: toy_line(LitMLP, budgets={11: 1}), r"Client '11' says `budget_bytes=1`, and the smallest"),
    "no examples": (lambda: with_data(**{"": ClientData([])}), "client '11' has no examples, and the server trains a"),
    "another model": (lambda: with_data(words=DATA), "client '11' has examples for the models 'words', and the server"),
    "nothing": (lambda: with_data(), "client '11' has no examples, and the server trains a single model; let"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.parametrize("later", [False, True], ids=["at the start", "later"])
def test_a_client_that_cannot_take_part_does_not_and_the_run_says_so(name: str, later: bool, fit: Fit) -> None:
    make, message = REJECTED[name]
    line = make()
    (odd,) = (node for node, device in line.there.items() if device.make().client == "11")
    newcomers = {odd: line.there.pop(odd)} if later else {}

    def appear(question: Question, answer: Any) -> Any:
        line.there.update(newcomers)
        return answer

    line.spoil = appear
    with pytest.warns(UserWarning, match=f"Node {odd} was rejected: {message}"):
        fitted = fit(seeded(LitMLP), remote(line, wait_for=11), algorithm=MIXED, max_epochs=3, clients_per_round=11)
    assert {row.client_id for row in fitted.ledger.rows if row.left_out is None} <= set(range(11))
    assert {row.left_out for row in fitted.ledger.rows if row.client_id == 11} <= {"dropped_out"}
    assert not any(q.node == odd and q.kind != Kind.WHO for q in line.asked)


@pytest.mark.filterwarnings("ignore:Node .* was rejected")
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_run_that_cannot_begin_says_why(name: str, fit: Fit) -> None:
    line, kind, message = IMPOSSIBLE[name]
    with pytest.raises(kind, match=message):
        fit(seeded(LitMLP), remote(line, wait_for=None), algorithm=MIXED, **EVERYBODY)


def test_how_many_are_everybody_has_to_be_said(quiet: Any) -> None:
    model = ls.MultiModelModule({"one": ls.FederatedModule(seeded(LitMLP))}, participation=ls.FullParticipation())
    data = ls.MultiModelDataModule({"one": remote(toy_line({"one": LitMLP}), model="one", wait_for=None)})
    with pytest.raises(ValueError, match=r"say with how many a run begins, such as `wait_for=3`"):
        pl.Trainer(**quiet, max_epochs=1).fit(model, data)


def test_a_device_says_a_keep_ratio_or_a_budget() -> None:
    with pytest.raises(ValueError, match=r"`keep_ratio=0.5` and `budget_bytes=1,000` both say what the device can"):
        ClientData(DATA.train, keep_ratio=0.5, budget_bytes=1000)


def test_nodes_that_appear_later_join(fit: Fit) -> None:
    line = toy_line(LitMLP)
    later = {node: line.there.pop(node) for node in list(line.there)[4:]}
    numbers = []

    def appear(question: Question, answer: Any) -> Any:
        numbers.append(data.num_clients)
        line.there.update(later)
        return answer

    line.spoil, data = appear, remote(line, wait_for=4)
    fitted = fit(seeded(LitMLP), data, max_epochs=3, seed=3)
    assert (numbers[0], numbers[-1]) == (4, 12)
    assert len({row.client_id for row in fitted.ledger.rows}) > 4


def test_a_share_is_one_of_the_clients_that_a_round_begins_with(fit: Fit) -> None:
    line = toy_line(LitMLP)
    later = {node: line.there.pop(node) for node in list(line.there)[4:]}

    def appear(question: Question, answer: Any) -> Any:
        line.there.update(later)
        return answer

    line.spoil = appear
    fitted = fit(seeded(LitMLP), remote(line, wait_for=4), max_epochs=3, clients_per_round=0.5)
    assert [sum(row.round_idx == round_idx for row in fitted.ledger.rows) for round_idx in range(3)] == [2, 6, 6]
    with pytest.raises(ValueError, match=r"or a share: say with how many a run begins, such as `wait_for=3`"):
        fit(seeded(LitMLP), remote(line, wait_for=None), clients_per_round=0.5)


def test_a_node_that_vanishes_has_dropped_out(fit: Fit) -> None:
    line = toy_line(LitMLP)

    def vanish(question: Question, answer: Any) -> Any:
        if question.node == FIRST and question.round_idx == 1:
            del line.there[FIRST]
            return Answer("a ticket that nobody has")
        return answer

    line.spoil = vanish
    fitted = fit(seeded(LitMLP), remote(line), max_epochs=3, **EVERYBODY)
    left_out = [(row.round_idx, row.left_out) for row in fitted.ledger.rows if row.left_out]
    assert left_out == [(1, "dropped_out"), (2, "dropped_out")]


def test_a_device_that_comes_back_without_a_model_has_dropped_out_of_that(quiet: Any) -> None:
    lits = {"a": LitMLP, "b": LitMLP}
    line = toy_line(lits, spoilt=(Kind.WHO, Kind.TRAIN))
    leaver = line.there[FIRST]

    def leave(question: Question, parts: Any) -> Any:
        if question.kind == Kind.TRAIN and question.node == FIRST + 1 and question.round_idx < 3:
            line.there.pop(FIRST, None) if question.round_idx == 1 else line.there.update({FIRST: leaver})
        if question.kind == Kind.WHO and question.node == FIRST and any(one.round_idx for one in line.asked):
            identity = msgpack.decode(parts[Part.IDENTITY])
            del identity["holdings"]["b"]
            return {Part.IDENTITY: msgpack.encode(identity)}
        return parts

    line.spoil, ledger = leave, ls.CommunicationLedger()
    first = remote(line, model="a")
    data = ls.MultiModelDataModule({"a": first, "b": remote(first.roster, model="b")})
    members = {name: ls.FederatedModule(seeded(LitMLP)) for name in lits}
    model = ls.MultiModelModule(members, participation=ls.FullParticipation())
    pl.Trainer(max_epochs=5, callbacks=[ledger], **quiet).fit(model, data)
    leavers = first.roster.names.index(leaver.make().client)
    last = {row.model: row.left_out for row in ledger.rows if row.client_id == leavers and row.round_idx == 4}
    assert last == {"a": None, "b": "dropped_out"}


class Changing(Node):
    """A device whose data is made anew whenever it is asked who it is."""

    holdings: ClassVar[Callable[[], Any]]

    def answer(self, question: Question) -> dict[str, bytes]:
        if question.kind == Kind.WHO:
            return answered(lambda: identity_parts(Identity("a", {"": type(self).holdings()})))
        return super().answer(question)


def test_a_node_that_was_refused_is_asked_again_after_a_pause_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now[0])
    tries: list[float] = []

    class Mounting(Changing):
        def holdings() -> Holding:  # type: ignore[misc]
            tries.append(now[0])
            if now[0] < 200.0:
                raise DeviceError("/data is not mounted")
            return Holding(5, 5)

    line = line_with("a")
    line.there[100] = Mounting(line.there[100].make)
    roster = Roster(line, patience=0.0)

    def until_it_is_there() -> None:
        while not roster.names:
            roster.look()
            now[0] += 1.0

    with pytest.warns(UserWarning, match=r"Node 100 was rejected: /data is not mounted \(The next try is in") as said:
        until_it_is_there()
    assert tries == [0.0, 30.0, 90.0, 210.0]
    assert len(said) == 1
    assert roster.present() == [0]


def test_a_node_that_comes_back_says_anew_what_it_has() -> None:
    class Growing(Changing):
        size: ClassVar[int] = 5

        def holdings() -> Holding:  # type: ignore[misc]
            return Holding(Growing.size, Growing.size)

    line = line_with("a")
    line.there[100] = Growing(line.there[100].make)
    roster = Roster(line, patience=0.0)
    roster.look()
    assert roster.holding(0, "").num_examples == 5
    Growing.size, gone = 8, line.there.pop(100)
    roster.look()
    assert roster.present() == []
    line.there[100] = gone
    roster.look()
    assert roster.holding(0, "").num_examples == 8


def test_a_device_has_as_long_to_import_as_the_server_is_patient() -> None:
    line: Any = line_with("a")
    for patience in (0.0, 300.0):
        Roster(line, patience).look()
    assert [question.seconds for question in line.asked] == [120.0, 300.0]


def test_a_client_that_is_gone_is_waited_for_once() -> None:
    roster = roster_with("a", "b", "c")
    line: Any = roster.line
    roster.patience, gone = 0.3, line.there.pop(100)
    waits = []
    for _ in range(3):
        begun = time.monotonic()
        roster.wait_for(roster.num_expected(), "A round")
        waits.append(time.monotonic() - begun)
    assert waits[0] >= 0.3 > 0.1 > max(waits[1:])
    others, line.there = line.there, {}
    for _ in range(3):  # nobody is there: it waits in every round
        begun = time.monotonic()
        assert roster.wait_for(roster.num_expected(), "A round") == 0
        assert time.monotonic() - begun >= 0.3
    line.there = {100: gone, **others}
    roster.look()
    assert roster.num_expected() == 3


ARRIVE = [2, 3, 5, 7, 8, 11]  # clients whose updates come first


def test_a_round_closes_when_enough_updates_are_in(fit: Fit) -> None:
    """The first updates are those that a simulation's clock lets arrive first, and give the same bits."""
    fast, slow = (ls.simulation.DeviceProfile(speed, speed, speed) for speed in (1e9, 1.0))
    clock = ls.VirtualClock([fast if client in ARRIVE else slow for client in range(12)], keep_first=len(ARRIVE))
    options: dict[str, Any] = {"algorithm": MIXED, "max_epochs": 2, **EVERYBODY}
    theirs = fit(seeded(LitMLP), toy_data(), clock=clock, **options)
    line = toy_line(LitMLP)
    own = {node: int(line.there[node].make().client) for node in line.there}
    line.spoil = lambda question, answer: answer if own[question.node] in ARRIVE else Answer("on its way for ever")
    begun = time.monotonic()
    ours = fit(seeded(LitMLP), remote(line, keep_first=len(ARRIVE), at_once=10, deadline=60.0), **options)
    assert time.monotonic() - begun < 30.0
    assert same_state(ours.tensors, theirs.tensors)
    assert [(row.client_id, row.left_out) for row in ours.ledger.rows] == [
        (row.client_id, row.left_out) for row in theirs.ledger.rows
    ]
    assert ours.rows[0]["fl/left_out_surplus"] == 6


@pytest.mark.parametrize("options", [{"keep_first": 13}, {"keep_first": 2, "sampler": ls.Uniform(active=3)}])
def test_enough_is_at_most_all_and_with_a_sampler_all(options: dict[str, Any], fit: Fit) -> None:
    sampler = options.pop("sampler", None)
    chosen = {"participation": sampler, "clients_per_round": None} if sampler else EVERYBODY
    with pytest.raises(ValueError, match=r"`keep_first=\d+` needs at least as many `clients_per_round`, and no"):
        fit(seeded(LitMLP), remote(toy_line(LitMLP), **options), **chosen)


@pytest.mark.filterwarnings("ignore:Node 900 was rejected")
def test_the_status_tells_each_client_by_name(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fails, one is late, one leaves after the run, and one that is enrolled takes the name of another."""
    spoilt = {FIRST: {"refused": b"the disk is full"}, FIRST + 1: Answer("lost")}
    line = toy_line(LitMLP, spoil=lambda question, answer: spoilt.get(question.node, answer))
    line.there[900] = line.there[FIRST]
    line.status = in_kit(tmp_path, {"odd": 900})
    listed = [{"node-id": str(node), "status": "online"} for node in line.there if node != FIRST + 2]
    monkeypatch.setattr(status, "asked_flower", lambda folder, *words: {"nodes": listed})
    faults = ls.Faults(on_error=ls.LeaveOut())
    with pytest.warns(ls.SpectralWarning, match=r"client \d+ is left out .*device '\d+': .* the disk is full"):
        fit(seeded(LitMLP), remote(line, deadline=0.3), faults=faults, max_epochs=2, **EVERYBODY)
    name_of = {node: device.make().client for node, device in line.there.items()} | {900: "odd"}
    assert main(["status", "--kit", str(tmp_path)]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert main(["status", "--kit", str(tmp_path), "--prometheus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [one.partition("{")[0] for one in lines] == sorted(one.partition("{")[0] for one in lines)
    figures = {said: float(value) for said, value in (one.rsplit(" ", 1) for one in lines)}
    for node, why in (
        (FIRST, "error 2 .* the disk is full"),
        (FIRST + 1, "late 2 .* no answer in time"),
        (900, r"rejected: it says that it is client '\d+', and its key is that of 'odd'"),
    ):
        assert re.search(rf"{node}.*{why}", rows[name_of[node]])
    for node, name in name_of.items():
        assert figures[f'federation_connected{{client="{name}"}}'] == (node != FIRST + 2)
        sent = [question.parts for question in line.asked if question.node == node and question.kind == Kind.TRAIN]
        told = sum(len(part) for parts in sent for part in parts.values())
        assert figures[f'federation_sent_bytes{{client="{name}"}}'] == told
        assert (figures[f'federation_answered{{client="{name}"}}'] > 0.0) == (node not in (FIRST + 1, 900))
    assert figures[f'federation_left_out{{client="{name_of[FIRST]}",reason="error"}}'] == 2.0


def test_a_late_answer_is_not_used(fit: Fit) -> None:
    line = toy_line(LitMLP, spoil=lambda question, answer: Answer("lost") if question.node == FIRST else answer)
    fitted = fit(seeded(LitMLP), remote(line, deadline=0.3), **EVERYBODY)
    assert {row.left_out for row in fitted.ledger.rows} == {"late", None}
    assert fitted.rows[0]["fl/left_out_late"] == 1
