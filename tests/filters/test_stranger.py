"""A filter of another package, in a simulation, resumed, and over a network; in two processes it is in `RUNS`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_line
import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, check_resumes, same_state, seeded
from ternary import Ternary
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.errors import SpectralWarning


@pytest.fixture
def lit() -> Any:
    return seeded(LitMLP)


def test_it_packs_uploads_and_changes_what_is_averaged(lit: Any, data: Any, fit: Fit) -> None:
    plain, packed = (fit(seeded(LitMLP), data, filters=filters) for filters in ([], [Ternary(0.5)]))
    assert not torch.equal(plain.weights, packed.weights)
    whole, small = (fitted.ledger.rows[0].uplink_bytes for fitted in (plain, packed))
    tensors = dict(lit.named_parameters())
    assert whole == 4 * sum(p.numel() for p in tensors.values())
    assert small == sum(p.numel() for p in tensors.values()) + 4 * len(tensors)


def test_a_resumed_run_is_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, data, tmp_path, filters=[ls.UsualUpdateNorm(0.9), Ternary(0.5)])


def test_clients_over_a_network_send_the_same(lit: Any, data: Any, fit: Fit, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake_line, "TRUSTED", [*fake_line.TRUSTED, "ternary"])
    here = fit(lit, data, filters=[Ternary(0.5)], max_epochs=2)
    there = fit(seeded(LitMLP), remote(toy_line(LitMLP), update_bound=None), filters=[Ternary(0.5)], max_epochs=2)
    assert same_state(here.state, there.state)


def test_a_device_that_sends_something_else_is_left_out(lit: Any, fit: Fit, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake_line, "TRUSTED", [*fake_line.TRUSTED, "ternary"])
    from lightning_spectral.network.messages import record_of, record_parts
    from lightning_spectral.protocol.records import Upload

    def spoil(question: Any, answer: Any) -> Any:
        if question.node % 2:
            return answer
        upload = record_of(answer, Upload)
        return record_parts(replace(upload, tensors={name: t.float() for name, t in upload.tensors.items()}))

    data = remote(toy_line(LitMLP, spoil=spoil), update_bound=None)
    faults = ls.Faults(on_error=ls.LeaveOut(max_share=1.0))
    with pytest.warns(SpectralWarning, match=r"is torch\.float32 of shape .*, and must be torch\.int8"):
        fitted = fit(lit, data, filters=[Ternary(0.5)], faults=faults, clients_per_round=12)
    assert fitted.history.rows[-1]["fl/left_out_error"] == 6
    assert not same_state(fitted.state, seeded(LitMLP).state_dict())
