"""What a sampler needs of an algorithm and of the number of clients, checked before the first round."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from torch.utils.data import TensorDataset
from toy_models import LitMLP, Renamed

import lightning_spectral as ls
from lightning_spectral.algorithms import Promises
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide
from lightning_spectral.participation import cohorts
from lightning_spectral.plugin import federation
from lightning_spectral.plugin.checks import check_sampler
from lightning_spectral.protocol.records import Upload


class ChangeSide(DenseSide):
    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        return Upload(download.unit, {name: after[name] - download.tensors[name] for name in after})


class ChangeRound(DenseRound):
    def add(self, receipt: Any, upload: Any) -> None:
        sums = {name: before + upload.tensors[name] for name, before in self.mean.before.items()}
        self.mean.add(sums, receipt.unit.coefficient)


class SendsChanges(ls.FedAvg):
    """Uploads changes, and promises nothing else."""

    side, round = ChangeSide, ChangeRound


class AddsOtherwise(ls.FedAvg):
    """Uploads new values, as its class says, and adds them with other weights."""

    class round(DenseRound):
        def add(self, receipt: Any, upload: Any) -> None:
            self.mean.add(upload.tensors, receipt.unit.coefficient / 2)

    promises = Promises(new_values=True)


NORMS = ls.UpdateVarianceReduced(active=3, design=ls.ConditionalPoisson(), measure="last")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        *(
            (
                algorithm,
                rf"needs update norms, and {type(algorithm).__name__} does not promise .* use LossVarianceReduced",
            )
            for algorithm in (SendsChanges(), type("SaysNothing", (ls.FedAvg,), {})(), ls.Zampling(1, degree=2))
        ),
        (SendsChanges(), r"or say `promises = Promises\(new_values=True\)` in the class"),
    ],
)
def test_norms_of_uploads_that_may_be_changes_are_refused(algorithm: Any, message: str, data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitMLP), data, algorithm=algorithm, participation=NORMS, clients_per_round=None)  # type: ignore[arg-type]
    for sampler in (ls.Uniform(active=3), ls.LossVarianceReduced(active=3)):
        check_sampler(sampler, SimpleNamespace(name="", algorithm=algorithm, module=LitMLP()))


@pytest.mark.parametrize(
    "algorithm",
    [
        *(ls.FedAvg(), Renamed(), AddsOtherwise(), ls.StaleUpdates(), ls.FIARSE(0.5), ls.LoRA(2)),
        *(ls.WidthSharding(), ls.SpectralSharding(keep_ratio=0.5)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_norms_of_new_values_are_known(algorithm: Any) -> None:
    check_sampler(NORMS, SimpleNamespace(name="", algorithm=algorithm, module=LitMLP()))


def test_a_logged_variance_needs_no_matrix_of_all_clients(data: Any, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ls.Uniform(4, design=ls.ConditionalPoisson())

    def logged() -> dict[str, float]:
        return fit(seeded(LitMLP), data, participation=sampler, clients_per_round=None).rows[-1]  # type: ignore[arg-type]

    few = logged()
    monkeypatch.setattr(cohorts, "MOST_PROCESSORS", 11)  # of twelve clients
    many = logged()
    assert set(few) - set(many) == {"fl/step_size_variance"}
    assert all(many[name] == few[name] for name in many)


def test_a_cohort_that_no_sum_has_room_for_is_refused_before_the_first_round(fit: Fit, monkeypatch: Any) -> None:
    monkeypatch.setattr(federation, "MOST_TERMS", 64)
    many = 65
    data = ls.FederatedDataModule(
        TensorDataset(torch.zeros(many, 6), torch.zeros(many, dtype=torch.long)), ls.IIDPartitioner(num_clients=many)
    )
    for sampler in (ls.FullParticipation(), ls.Uniform(many, design=ls.ConditionalPoisson())):
        with pytest.raises(ValueError, match="at most 64 turns, so that its updates can be summed exactly, got 65"):
            fit(seeded(LitMLP), data, clients_per_round=None, participation=sampler)  # type: ignore[arg-type]
