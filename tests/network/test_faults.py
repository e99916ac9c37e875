"""What devices can do wrong: a client that cannot be used is left out, counted and named, and never averaged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, Fitted, same_state, seeded
from other_process import LitFails, toy_data
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.errors import RoundError
from lightning_spectral.network.messages import record_of, record_parts
from lightning_spectral.network.server.line import Answer, Question
from lightning_spectral.protocol.records import Upload
from lightning_spectral.server import Faults, LeaveOut

Parts = dict[str, bytes]
FIRST = 100  # the node that misbehaves, whenever it is asked
SETTINGS: dict[str, Any] = {"clients_per_round": 12, "seed": 3, "max_epochs": 2}
TOLERANT = Faults(on_error=LeaveOut(), on_not_finite=LeaveOut())


def changed(**changes: Any) -> Callable[[Parts], Parts]:
    """A device whose upload has other fields; a function among them maps the tensors."""

    def change(parts: Parts) -> Parts:
        upload = record_of(parts, Upload)
        new = {name: value(upload.tensors) if callable(value) else value for name, value in changes.items()}
        return record_parts(replace(upload, **new))

    return change


def cut(tensors: Any) -> Any:
    return {name: tensor[:1] for name, tensor in tensors.items()}


def doubled(tensors: Any) -> Any:
    return {name: tensor.double() for name, tensor in tensors.items()}


def some(tensors: Any) -> Any:
    return dict(list(tensors.items())[1:])


def more(tensors: Any) -> Any:
    return {**tensors, "backdoor": torch.zeros(3)}


def broken(tensors: Any) -> Any:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}


def fit_with(fit: Fit, spoil: Callable[[Parts], Any], **options: Any) -> Fitted:
    def act(question: Question, answer: Parts) -> Any:
        return spoil(answer) if question.node == FIRST else answer

    line = toy_line(LitMLP, spoil=act)
    return fit(seeded(LitMLP), remote(line, wait_for=12), **{**SETTINGS, "faults": TOLERANT, **options})


def outcomes(fitted: Fitted) -> set[str]:
    return {row.left_out for row in fitted.ledger.rows if row.left_out is not None}


@pytest.mark.parametrize(
    ("spoil", "reason", "message"),
    [
        (changed(tensors=cut), "error", "of shape"),
        (changed(tensors=doubled), "error", "float64"),
        (changed(tensors=some), "error", "it lacks net"),
        (changed(tensors=more), "error", "backdoor, which was not asked for"),
        (changed(tensors=broken), "not_finite", "not finite"),
        (
            changed(untrained_rows={"net.0.weight": torch.tensor([10**6])}),
            "error",
            "rows of net.0.weight that it has not",
        ),
        (
            changed(untrained_rows={"net.0.weight": torch.tensor([0.5])}),
            "error",
            "rows of net.0.weight that it has not",
        ),
        (changed(untrained_rows={"other": torch.tensor([0])}), "error", "rows of other that"),
        (lambda parts: {**parts, "head": parts["head"][:-1]}, "error", "truncated"),
        (lambda parts: {"head": parts["head"]}, "error", "holds no Upload"),
        (lambda parts: {"refused": b"no memory left"}, "error", "no memory left"),
    ],
)
def test_an_answer_that_cannot_be_used_is_left_out(fit: Fit, spoil: Any, reason: str, message: str) -> None:
    with pytest.warns(ls.SpectralWarning, match=message):
        fitted = fit_with(fit, spoil)
    assert outcomes(fitted) == {reason}
    assert [row.left_out for row in fitted.ledger.rows].count(reason) == 2
    assert torch.isfinite(fitted.weights).all()


def test_by_default_such_an_answer_ends_the_run(fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, network: .* cannot be used: .* of shape"):
        fit_with(fit, changed(tensors=cut), faults=Faults())


def test_a_failure_on_a_device_has_its_address(fit: Fit) -> None:
    line = toy_line(LitFails)
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: Unpicklable: the sensor is broken"):
        fit(seeded(LitFails), remote(line), **SETTINGS)


def test_a_node_that_vanishes_has_dropped_out(fit: Fit) -> None:
    line = toy_line(LitMLP)

    def vanish(question: Question, answer: Parts) -> Any:
        if question.node == FIRST and question.round_idx == 1:
            del line.there[FIRST]
            return Answer("a ticket that nobody has")
        return answer

    line.spoil = vanish
    fitted = fit(seeded(LitMLP), remote(line), **{**SETTINGS, "max_epochs": 3})
    left_out = [(row.round_idx, row.left_out) for row in fitted.ledger.rows if row.left_out]
    assert left_out == [(1, "dropped_out"), (2, "dropped_out")]


def test_a_late_answer_is_not_used(fit: Fit) -> None:
    line = toy_line(LitMLP, spoil=lambda question, answer: Answer("lost") if question.node == FIRST else answer)
    fitted = fit(seeded(LitMLP), remote(line, deadline=0.3), **{**SETTINGS, "max_epochs": 1})
    assert outcomes(fitted) == {"late"}
    assert fitted.rows[0]["fl/left_out_late"] == 1


def test_nodes_that_appear_later_join(fit: Fit) -> None:
    line = toy_line(LitMLP)
    later = {node: line.there.pop(node) for node in list(line.there)[4:]}

    def appear(question: Question, answer: Parts) -> Parts:
        if question.round_idx == 0:
            line.there.update(later)
        return answer

    line.spoil = appear
    data = remote(line, wait_for=4)
    fit(seeded(LitMLP), data, clients_per_round=4, max_epochs=1, seed=3)
    assert data.num_clients == 4
    data = remote(line, wait_for=4)
    fitted = fit(seeded(LitMLP), data, clients_per_round=4, max_epochs=3, seed=3)
    assert data.num_clients == 12
    assert len({row.client_id for row in fitted.ledger.rows}) > 4


def test_too_few_clients_are_an_error_that_says_so(fit: Fit) -> None:
    line = toy_line(LitMLP)
    for node in list(line.there)[3:]:
        del line.there[node]
    with pytest.raises(RoundError, match=r"Only 3 of 4 clients were there after 0.2 s; start more devices"):
        fit(seeded(LitMLP), remote(line, wait_for=None), clients_per_round=4)


def test_how_many_are_everybody_has_to_be_said(quiet: Any) -> None:
    model = ls.MultiModelModule({"one": ls.FederatedModule(seeded(LitMLP))}, participation=ls.FullParticipation())
    data = ls.MultiModelDataModule({"one": remote(toy_line({"one": LitMLP}), model="one", wait_for=None)})
    with pytest.raises(ValueError, match=r"say with how many a run begins, such as `wait_for=3`"):
        pl.Trainer(**quiet, max_epochs=1).fit(model, data)


def test_a_callback_that_needs_examples_is_refused(fit: Fit) -> None:
    callbacks = [ls.plugin.callbacks.BatchNormEstimation()]
    with pytest.raises(ValueError, match=r"BatchNormEstimation needs clients' examples at the server"):
        fit(seeded(LitMLP), remote(toy_line(LitMLP)), callbacks=callbacks, **SETTINGS)


class NeedsTrainer(LitMLP):
    """As many modules do, it reads from its Trainer how long the learning rate is to fall."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def test_a_device_needs_no_trainer_to_make_optimizers(fit: Fit) -> None:
    options = {**SETTINGS, "max_epochs": 3}
    ours, theirs = (fit(seeded(NeedsTrainer), data, **options) for data in (remote(toy_line(NeedsTrainer)), toy_data()))
    assert same_state(ours.state, theirs.state)


def test_the_module_on_the_device_must_be_that_of_the_server(fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, loading: "):
        fit(seeded(LitMLP), remote(toy_line(LitSmall)), **SETTINGS)


def test_a_local_hook_travels_and_a_function_does_not(fit: Fit) -> None:
    options = {**SETTINGS, "local_hooks": [ls.client.ProximalTerm(0.5)]}
    ours = fit(seeded(LitMLP), remote(toy_line(LitMLP)), **options)
    theirs = fit(seeded(LitMLP), toy_data(), **options)
    assert same_state(ours.state, theirs.state)
    assert not same_state(ours.state, fit(seeded(LitMLP), toy_data(), **SETTINGS).state)


def test_weights_that_a_device_does_not_hold_take_no_memory(fit: Fit) -> None:
    modules = []

    def make() -> LitMLP:
        modules.append(LitMLP())
        return modules[-1]

    options = {**SETTINGS, "algorithm": ls.SpectralSharding(keep_ratio=0.5)}
    fit(seeded(LitMLP), remote(toy_line(make)), **options)
    assert modules
    for module in modules:
        for name, parameter in module.named_parameters():
            is_whole = not name.startswith("net.2.")  # it holds terms of this layer
            assert parameter.untyped_storage().nbytes() == 4 * (parameter.numel() if is_whole else 1), name
