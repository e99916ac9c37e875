"""MaxUpdateNorm: what one client can change is bounded, and those that were shortened are counted."""

from typing import Any

import pytest
import torch
from federation import Fit, seeded
from hypothesis import given
from hypothesis import strategies as st
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.server import MaxUpdateNorm
from lightning_spectral.server.fault_policy import update_norm

UNIT = WorkUnit(0)


@given(st.floats(0.01, 100), st.integers(0, 2**16))
def test_the_norm_is_at_most_the_bound_and_the_direction_stays(bound: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = {"u": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)}
    returned = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in sent.items()}
    norm = update_norm(sent, returned)
    found = MaxUpdateNorm(bound).applied(Download(UNIT, 1.0, sent), Upload(UNIT, returned)).tensors
    factor = min(1.0, bound / norm)
    for name in sent:
        expected = sent[name].double() + factor * (returned[name].double() - sent[name].double())
        size = float(max(sent[name].abs().max(), returned[name].abs().max()))
        assert torch.allclose(found[name].double(), expected, rtol=0, atol=4 * size * torch.finfo(torch.float32).eps)


class Seen(ls.RoundCallback):
    def __init__(self) -> None:
        self.summaries: list[Any] = []

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        self.summaries.append(summary)


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5), ls.Scaffold()])
def test_a_round_counts_the_clients_that_were_shortened(algorithm: Any, fit: Fit, data: Any) -> None:
    lit = seeded(LitMLP, momentum=0.0) if isinstance(algorithm, ls.Scaffold) else seeded(LitMLP)
    before = torch.nn.utils.parameters_to_vector(lit.parameters()).detach().clone()
    fitted = fit(lit, data, algorithm=algorithm, update_bound=MaxUpdateNorm(1e-3), callbacks=[seen := Seen()])
    assert fitted.rows[0]["fl/clients_bounded"] == 4
    if isinstance(algorithm, ls.FedAvg):
        assert 0 < float((fitted.weights - before).norm()) <= 1.001e-3
    (outcome, *_) = seen.summaries[0].clients
    assert outcome.is_bounded
    assert outcome.update_norm > 1e-3
    free = fit(seeded(LitMLP), data, algorithm=ls.FedAvg(), update_bound=MaxUpdateNorm(1e6))
    assert free.rows[0]["fl/clients_bounded"] == 0


def test_a_bound_that_is_not_reached_changes_no_bit(fit: Fit, data: Any) -> None:
    ours, theirs = (fit(seeded(LitMLP), data, update_bound=bound) for bound in (MaxUpdateNorm(1e6), None))
    assert torch.equal(ours.weights, theirs.weights)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="`norm` must be"):
        MaxUpdateNorm(0.0)
    with pytest.raises(ValueError, match="needs update norms, which Zampling does not provide"):
        ls.FederatedModule(LitMLP(), algorithm=ls.Zampling(4), update_bound=MaxUpdateNorm(1.0))
    with pytest.raises(TypeError, match="`update_bound` must be an instance of MaxUpdateNorm"):
        ls.FederatedModule(LitMLP(), update_bound=1.0)  # type: ignore[arg-type]
