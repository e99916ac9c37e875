"""Secure sums over a line: the simulation's bits, whoever is lost at which step, and devices that say no."""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from fake_line import FakeLine, Node, remote, toy_line
from federation import Fit, Fitted, said_during, same_state, seeded
from other_process import toy_data
from toy_models import LitMLP, LitSmall

pytest.importorskip("cryptography", reason="masks need the extra `secure`")

import lightning_spectral as ls
from lightning_spectral.network.line import Answer, Question
from lightning_spectral.network.messages import Kind, Part, handshake_of, handshake_parts, record_of, record_parts
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server import Faults, LeaveOut
from lightning_spectral.sums import masks

Parts = dict[str, bytes]
SETTINGS: dict[str, Any] = {"clients_per_round": 12, "seed": 3, "max_epochs": 2}
TOLERANT = Faults(on_error=LeaveOut())
FIRST = 101  # a node, with which something is wrong
STEPS = ("keys", "shares", "open", "train", "reveal")


def step_of(question: Question) -> str:
    return handshake_of(question.parts).step if question.kind == Kind.AGREE else question.kind


@dataclass
class Meddling(FakeLine):
    """Changes what one node is asked at some step, or what it answers.

    Attributes:
        at: The step.
        before: Changes the question.
        after: Changes the answer, or tells why there is none.
        heard: For each step, all answers.
    """

    at: str = ""
    before: Callable[[Parts], Parts] = lambda parts: parts
    after: Callable[[Parts], Answer | Parts] = lambda parts: parts
    node: int = FIRST
    heard: list[tuple[str, Parts]] = field(default_factory=list)

    def ask(self, question: Question) -> str | None:
        is_meant = question.node == self.node and step_of(question) == self.at
        asked = replace(question, parts=self.before(dict(question.parts))) if is_meant else question
        if (ticket := super().ask(asked)) is None:
            return None
        parts = dict(self._ready[ticket].parts)
        self.heard.append((step_of(asked), parts))
        if is_meant:
            told = self.after(parts)
            self._ready[ticket] = Answer(ticket, told) if isinstance(told, dict) else replace(told, ticket=ticket)
        return ticket


def meddling(**options: Any) -> Meddling:
    return Meddling(toy_line(LitMLP).there, **options)


def secure_fit(fit: Fit, line: FakeLine, lit: Any = LitMLP, threshold: float = 0.6, **options: Any) -> Fitted:
    return fit(seeded(lit), remote(line, deadline=0.2), filters=[ls.SecureSums(threshold)], **{**SETTINGS, **options})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lit", [LitMLP, LitSmall])
@pytest.mark.parametrize("hazards", [None, 1])
def test_the_network_gives_the_bits_of_the_simulation_without_masks(lit: Any, hazards: int | None, fit: Fit) -> None:
    ours = fit(seeded(lit), remote(toy_line(lit, hazards=hazards)), filters=[ls.SecureSums()], **SETTINGS)
    assert same_state(ours.tensors, fit(seeded(lit), toy_data(), **SETTINGS).tensors)


def lost(parts: Parts) -> Answer:
    return Answer("", reason="dropped_out")


def late(parts: Parts) -> Answer:
    return Answer("", reason="late")


def unread(parts: Parts) -> Parts:
    return {name: data[:-1] for name, data in parts.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [lost, late, unread])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.filterwarnings("ignore:.*is left out of the average", "ignore:.*is in the sum, although")
def test_a_client_that_is_lost_at_any_step_is_left_out_and_others_are_summed(step: str, after: Any, fit: Fit) -> None:
    """One that is lost only as masks are removed has reported: its update is in the sum."""
    secure = secure_fit(fit, meddling(at=step, after=after), faults=TOLERANT)
    spoilt = meddling(at="" if step == "reveal" else "train", after=after)
    plain = fit(seeded(LitMLP), remote(spoilt), faults=TOLERANT, **SETTINGS)
    assert same_state(secure.tensors, plain.tensors)
    reasons = [row["fl/clients_left_out"] for row in secure.rows]
    assert reasons == [row["fl/clients_left_out"] for row in plain.rows]
    assert sum(reasons) == (0 if step == "reveal" else 2)


KEYS = "sent keys, and secure sums need 12 \\(1 dropped out\\)"
DONE = KEYS, "sent shares", "opened shares", "reported", "revealed shares"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("step", "done"), [*zip(STEPS, DONE, strict=True)])
def test_a_round_with_fewer_clients_than_the_threshold_fails_at_every_step(step: str, done: str, fit: Fit) -> None:
    module, words = seeded(LitMLP), f"Round 0: 11 of 12 clients have {done}.*; the server's weights are unchanged"
    with pytest.raises(ls.errors.RoundError, match=words):
        fit(module, remote(meddling(at=step, after=lost)), filters=[ls.SecureSums(1.0)], **SETTINGS)
    assert same_state(module.state_dict(), seeded(LitMLP).state_dict())


def test_surplus_clients_are_recovered(fit: Fit) -> None:
    """Whose updates come first depends on the line; that of no other is in the sum."""
    data = remote(toy_line(LitMLP), keep_first=9)
    secure = fit(seeded(LitMLP), data, filters=[ls.SecureSums()], **{**SETTINGS, "max_epochs": 1})
    assert secure.rows[0]["fl/left_out_surplus"] == 3
    plain = fit(seeded(LitMLP), remote(toy_line(LitMLP), keep_first=9), **{**SETTINGS, "max_epochs": 1})
    assert same_state(secure.tensors, plain.tensors)


def test_devices_that_forget_between_messages_cannot_take_part(fit: Fit) -> None:
    with pytest.raises(ls.errors.RoundError, match=r"0 of 12 .* sent shares, .* need 8 \(12 dropped out\)"):
        secure_fit(fit, toy_line(LitMLP, forgets=True))


def test_nothing_of_single_clients_but_masked_numbers_reaches_the_server(fit: Fit) -> None:
    line = meddling()
    secure_fit(fit, line)
    uploads = [record_of(parts, Upload) for step, parts in line.heard if step == "train"]
    assert len(uploads) == 24
    for upload in uploads:
        assert {tensor.dtype for tensor in upload.tensors.values()} == {torch.int64}
        assert (upload.logged, upload.untrained_rows) == ({}, {})
        assert upload.loss != upload.loss
    assert {step for step, parts in line.heard if Part.HEAD in parts} == {"train"}


def changed(change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    """What is asked, or answered, in another handshake."""
    return lambda parts: {**parts, **handshake_parts(change(handshake_of(parts)))} if Part.HANDSHAKE in parts else parts


def other_members(parts: Parts) -> Parts:
    download = record_of(parts, Download)
    members = (*download.masking.members[1:], 99)
    return {**parts, **record_parts(replace(download, masking=replace(download.masking, members=members)))}


def earlier_round(parts: Parts) -> Parts:
    return {**parts, **record_parts(replace(record_of(parts, Download), round_idx=7))}


def said(said: Any) -> Callable[[Parts], Parts]:
    return changed(lambda handshake: replace(handshake, said=said(handshake.said)))


def first(number: int) -> Callable[[Parts], Parts]:
    return said(lambda by_client: dict(list(by_client.items())[:number]))


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "strangers": ("train", {"before": other_members}, "needs 12 parties, this one among them"),
    "another round": ("train", {"before": earlier_round}, "11 of 12 clients have reported, .*1 dropped out"),
    "keys of others only": ("shares", {"before": first(2)}, "of different parties|above all of them, got 12 of 2"),
    "too few arrived": ("reveal", {"before": first(11)}, "of 12 of the"),
    "keys without end": ("keys", {"after": said(lambda keys: {n: k + k for n, k in keys.items()})}, "not sent keys"),
    "keys of others": ("keys", {"after": said(lambda keys: {n + 1: k for n, k in keys.items()})}, "not sent keys"),
    "a share less": ("shares", {"after": said(lambda boxes: dict(list(boxes.items())[1:]))}, "not sent shares as the"),
    "a long answer": ("shares", {"after": said(lambda boxes: {n: bytes(10**5) for n in boxes})}, "handshake takes"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_uncover_a_client_or_break_the_sum_is_refused(name: str, fit: Fit) -> None:
    step, options, words = REFUSALS[name]
    line = meddling(at=step, **options)

    def run() -> None:
        with pytest.raises(ls.errors.RoundError, match="secure sums need 12") as error:
            secure_fit(fit, line, threshold=1.0, faults=TOLERANT)
        warnings.warn(str(error.value), ls.SpectralWarning, stacklevel=2)

    assert re.search(words, " ".join(said_during(run)))


def test_an_update_in_the_clear_is_refused(fit: Fit) -> None:
    def unmasked(parts: Parts) -> Parts:
        upload = record_of(parts, Upload)
        return record_parts(replace(upload, tensors={name: t.float() for name, t in upload.tensors.items()}))

    with pytest.raises(ls.ClientError, match=r"net.0.bias is torch.float32 of shape .*, and must be torch.int64"):
        secure_fit(fit, meddling(at="train", after=unmasked))


class Repeating(Meddling):
    """Asks everything twice of the devices behind the server's back, and keeps the second answers, by the step."""

    def ask(self, question: Question) -> str | None:
        ticket = super().ask(question)
        if step_of(question) in STEPS[1:]:
            self.heard.append((f"{step_of(question)} again", self.there[question.node].answer(question)))
        return ticket


def test_a_device_takes_each_step_once(fit: Fit) -> None:
    line = Repeating(toy_line(LitMLP).there)
    assert same_state(secure_fit(fit, line).tensors, fit(seeded(LitMLP), toy_data(), **SETTINGS).tensors)
    again = {step: [parts for one, parts in line.heard if one == f"{step} again"] for step in STEPS}
    assert [len(again[step]) for step in STEPS] == [0, 24, 24, 24, 24]
    for parts in again["shares"] + again["open"] + again["train"]:
        assert b"takes each step once" in parts[Part.REFUSED]
    assert {len(handshake_of(parts).said) for parts in again["reveal"]} == {0}  # the secrets are gone
    last = [question for question in line.asked if question.kind == "train"][-1]
    upload = record_of(line.there[last.node].answer(last), Upload)
    assert (upload.left_out, dict(upload.tensors)) == ("dropped_out", {})


def test_a_device_that_is_restarted_in_a_round_has_dropped_out(fit: Fit) -> None:
    """Its update cannot be masked; the others' masks with it are removed."""

    class Restarting(Meddling):
        def ask(self, question: Question) -> str | None:
            if question.node == FIRST and step_of(question) == "train":
                self.there[FIRST] = Node(self.there[FIRST].make)
            return super().ask(question)

    secure = secure_fit(fit, Restarting(toy_line(LitMLP).there))
    assert [row["fl/left_out_dropped_out"] for row in secure.rows] == [1, 1]
    assert same_state(secure.tensors, fit(seeded(LitMLP), remote(meddling(at="train", after=lost)), **SETTINGS).tensors)


def node_of(client: int) -> int:
    return next(number for number, node in toy_line(LitMLP).there.items() if node._service.client == str(client))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def on_all(change: Callable[[bytes], bytes]) -> Callable[[Parts], Parts]:
    return said(lambda by_client: {client: change(data) for client, data in by_client.items()})


def on_client(client: int, change: Callable[[bytes], bytes]) -> Callable[[Parts], Parts]:
    return said(lambda by_client: {**by_client, client: change(by_client[client])})


nothing_from = {c: said(lambda opened, c=c: {n: b"" for n in opened if n != c}) for c in (3, 5)}
# at which step a device lies, and how; whether its update is then in the sum; what is said of it
LIES: dict[str, tuple[str, Callable[[Parts], Parts], bool, str]] = {
    "no key": ("keys", on_all(lambda keys: bytes(32) + keys[32:]), False, "it has not sent keys"),
    "no masking key": ("keys", on_all(lambda keys: keys[:32] + bytes(32) + keys[64:]), False, "it has not sent keys"),
    "boxes that do not open": ("shares", on_all(lambda box: flipped(box, 5)), False, "publishes once, before it masks"),
    "digests of other shares": ("shares", on_all(lambda box: flipped(box, 90)), False, "publishes once"),
    "one such digest": ("shares", on_client(5, lambda box: flipped(box, 90)), False, "has not shown the shares"),
    "one such box": ("shares", on_client(5, lambda box: flipped(box, 5)), True, ""),  # it shows what is in it
    "a complaint about an honest one": ("open", nothing_from[3], True, ""),
    "complaints about all": ("open", first(1), True, ""),
    "wrong shares": ("reveal", on_all(lambda share: flipped(share, 32)), True, "although it has not revealed"),
    "one wrong share": ("reveal", on_client(5, lambda share: flipped(share, 32)), True, "although it has not revealed"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("client", [0, 11])
@pytest.mark.parametrize("name", LIES)
def test_a_device_that_lies_is_named_and_the_round_ends_without_it(name: str, client: int, fit: Fit) -> None:
    """Honest devices are neither named nor left out, and the sum is that of a plain round."""
    step, lie, is_in, words = LIES[name]
    options = {**SETTINGS, "max_epochs": 1}

    def run() -> None:
        secure = secure_fit(fit, meddling(at=step, after=lie, node=node_of(client)), faults=TOLERANT, **options)
        spoilt = meddling(at="" if is_in else "train", after=lost, node=node_of(client))
        assert same_state(secure.tensors, fit(seeded(LitMLP), remote(spoilt), faults=TOLERANT, **options).tensors)

    about = [text for text in said_during(run) if re.search(r"client \d+ is", text)]
    assert len(about) == bool(words)
    assert all(re.search(rf"client {client} is .*{words}", text) for text in about)


@pytest.mark.parametrize(("step", "name"), [("keys", "no key"), ("reveal", "wrong shares")])
def test_a_round_that_fails_for_a_lie_names_who_lied(step: str, name: str, fit: Fit) -> None:
    module, line = seeded(LitMLP), meddling(at=step, after=LIES[name][1], node=node_of(4))
    with pytest.raises(ls.errors.RoundError, match=r"11 of 12 .* unchanged\. Client 4: it has not .* Ask more"):
        fit(module, remote(line), filters=[ls.SecureSums(1.0)], **SETTINGS)
    assert same_state(module.state_dict(), seeded(LitMLP).state_dict())


@pytest.mark.filterwarnings("ignore:.*client [27] is left out of the average")
def test_two_devices_with_the_same_keys_harm_nobody_else(fit: Fit) -> None:
    class Copying(Meddling):
        def ask(self, question: Question) -> str | None:
            ticket = super().ask(question)
            if step_of(question) == "keys" and question.node in (node_of(2), node_of(7)):
                change = on_all(lambda keys: bytes([9]).ljust(32, bytes(1)) * 3)
                self._ready[ticket] = Answer(ticket, change(dict(self._ready[ticket].parts)))
            return ticket

    fitted = secure_fit(fit, Copying(toy_line(LitMLP).there), faults=TOLERANT, **{**SETTINGS, "max_epochs": 1})
    assert fitted.rows[0]["fl/left_out_error"] == 2


def test_a_device_that_deals_shares_of_no_secret_is_named(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    deal, calls = masks.split, list[int]()

    def dealt(secret: bytes, places: Any, threshold: int) -> dict[int, bytes]:
        calls.append(len(calls))
        return {x: bytes([0]) + os.urandom(32) for x in places} if calls[-1] == 6 else deal(secret, places, threshold)

    monkeypatch.setattr(masks, "split", dealt)
    module, line = seeded(LitMLP), toy_line(LitMLP)
    with pytest.raises(ls.errors.RoundError, match=r"cannot be removed, .*do not give its secret\.") as error:
        fit(module, remote(line), filters=[ls.SecureSums()], **SETTINGS)
    dealer = [handshake_of(asked.parts).unit for asked in line.asked if step_of(asked) == "shares"][3]
    assert f"The shares that party {dealer.client_id} dealt do not" in str(error.value)  # each splits two secrets
    assert same_state(module.state_dict(), seeded(LitMLP).state_dict())
