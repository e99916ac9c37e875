"""Updates that are too long are shortened, by a number or by what is usual."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, check_resumes, seeded
from hypothesis import given
from hypothesis import strategies as st
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.filters.bounds import BOUNDED
from lightning_spectral.protocol.exchange import update_norm
from lightning_spectral.protocol.records import Download, Upload, WorkUnit

UNIT = WorkUnit(0)


def shortened(bound: float, sent: dict[str, torch.Tensor], returned: dict[str, torch.Tensor]) -> Any:
    download, upload, norm = Download(UNIT, 1.0, sent), Upload(UNIT, returned), update_norm(sent, returned)
    return ls.MaxUpdateNorm(bound).shortened(download, upload, norm, usual=math.nan).tensors


@given(st.floats(0.01, 100), st.integers(0, 2**16))
def test_the_norm_is_at_most_the_bound_and_the_direction_stays(bound: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = {"u": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)}
    returned = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in sent.items()}
    norm = update_norm(sent, returned)
    found = shortened(bound, sent, returned)
    factor = min(1.0, bound / norm)
    for name in sent:
        expected = sent[name].double() + factor * (returned[name].double() - sent[name].double())
        size = float(max(sent[name].abs().max(), returned[name].abs().max()))
        assert torch.allclose(found[name].double(), expected, rtol=0, atol=4 * size * torch.finfo(torch.float32).eps)


def test_the_norm_of_a_half_precision_change_does_not_overflow() -> None:
    assert update_norm({"w": torch.zeros(2).half()}, {"w": torch.tensor([300.0, -400.0]).half()}) == 500.0
    low, high = {"w": torch.full((4,), -6e4).half()}, {"w": torch.full((4,), 6e4).half()}
    assert update_norm(low, high) == 240_000.0
    assert shortened(60_000.0, low, high)["w"].tolist() == [-30_000.0] * 4  # a quarter of the way


class Seen(ls.RoundCallback):
    def __init__(self) -> None:
        self.summaries: list[Any] = []

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        self.summaries.append(summary)


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5), ls.Scaffold()])
def test_a_round_counts_the_clients_that_were_shortened(algorithm: Any, fit: Fit, data: Any) -> None:
    lit = seeded(LitMLP, momentum=0.0) if isinstance(algorithm, ls.Scaffold) else seeded(LitMLP)
    before = torch.nn.utils.parameters_to_vector(lit.parameters()).detach().clone()
    fitted = fit(lit, data, algorithm=algorithm, filters=[ls.MaxUpdateNorm(1e-3)], callbacks=[seen := Seen()])
    assert fitted.rows[0]["fl/clients_bounded"] == 4
    if isinstance(algorithm, ls.FedAvg):
        assert 0 < float((fitted.weights - before).norm()) <= 1.001e-3
    (outcome, *_) = seen.summaries[0].clients
    assert outcome.figures[BOUNDED] == 1.0
    assert outcome.update_norm > 1e-3
    free = fit(seeded(LitMLP), data, algorithm=ls.FedAvg(), filters=[ls.MaxUpdateNorm(1e6)])
    assert free.rows[0]["fl/clients_bounded"] == 0


def test_what_is_usual_is_the_median_of_the_round_before_also_after_resuming(
    fit: Fit, data: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"filters": [ls.UsualUpdateNorm(times=0.9)], "seed": 3}
    fit(seeded(LitMLP), data, max_epochs=4, callbacks=[seen := Seen()], **options)
    median = math.inf  # in the first round, no client comes near the norm of its weights
    for summary in seen.summaries:
        norms = [client.update_norm for client in summary.clients]
        assert [bool(client.figures[BOUNDED]) for client in summary.clients] == [norm > 0.9 * median for norm in norms]
        median = statistics.median(norms)
    assert 0 < sum(bool(client.figures[BOUNDED]) for summary in seen.summaries for client in summary.clients) < 12
    check_resumes(fit, LitMLP, data, tmp_path, **options)


def test_a_bound_that_is_not_reached_changes_no_bit(fit: Fit, data: Any) -> None:
    ours, theirs = (fit(seeded(LitMLP), data, filters=filters) for filters in ([ls.MaxUpdateNorm(1e6)], []))
    assert torch.equal(ours.weights, theirs.weights)
