"""Two executors against the sequential one: a device in another process, and one over a bad line.

The bits, the ledger and what is logged must be the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from other_process import (
    LitFails,
    LitFrozen,
    LitPlain,
    OtherProcess,
    Worker,
    data_of_clients,
    sorted_data,
    sorted_data_of_clients,
    toy_data,
)
from toy_models import LitMLP, LitSmall
from unreliable_executor import Unreliable

import lightning_spectral as ls
from lightning_spectral.protocol.codec import decode
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.round import Engine

PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))
FitAs = Callable[..., Fitted]
ALGORITHMS = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(
        ls.Unbiased(),
        keep_ratio={0.3: 0.5, 0.6: 0.5},
        clip_tau=2.0,
        layers=ls.LayerChoices(keep_first_and_last_dense=False),
    ),
    "outputs cut": ls.SpectralSharding(keep_ratio=0.5, output_ratio=0.4),
    "FIARSE": ls.FIARSE({0.25: 0.5, 1.0: 0.5}),
    "Zampling": ls.Zampling(4, degree=3),
    "stale updates": ls.StaleUpdates(beta=0.7, num_terms=1),
    "SCAFFOLD": ls.Scaffold(),
    "LoRA": ls.LoRA({1: 0.5, 3: 0.5}),
    "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio={0.25: 0.5, 0.5: 0.5}, scaler=True, plan=PLAN),
    "width of each step": ls.WidthSharding(keep_ratio={0.25: 0.5, 0.5: 0.5}, step_widths=(0.25, 0.5), plan=PLAN),
    "averages of each width": ls.WidthSharding(
        keep_ratio={0.25: 0.5, 0.75: 0.5}, step_widths=(0.25, 0.5, 0.75), averages_per_width=True
    ),
    "LoRA, alternating": ls.LoRA(2, aggregation=ls.AlternatingFactors()),
}


class Elsewhere(ls.FederatedModule):
    """A federation whose clients train in another process."""

    worker: Worker
    executor: OtherProcess
    keeps = True

    def make_executor(self, engine: Engine) -> Executor:
        trainer, self.module.trainer = self.module._trainer, None
        data = sorted_data_of_clients if self.local_hooks else data_of_clients
        half = engine.half.device_half, self.module, self.templates()
        self.executor = OtherProcess(self.worker, *half, data, self.local_hooks, self.keeps)
        self.module.trainer = trainer
        return self.executor


class OverABadLine(ls.FederatedModule):
    """A federation whose uploads are shuffled and sometimes lost."""

    executor: Unreliable

    def make_executor(self, engine: Engine) -> Executor:
        in_order = super().make_executor(engine)
        assert isinstance(in_order, SequentialExecutor)
        self.executor = Unreliable(in_order.device)
        return self.executor


@contextmanager
def closing(model: ls.FederatedModule) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(model, Elsewhere):
            model.executor.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def fit_as(fit: Fit, worker: Worker) -> FitAs:
    """Fits of three rounds with the given class of federation."""

    def fit_as(
        federated: type[ls.FederatedModule],
        algorithm: Any,
        lit: type[LitMLP] = LitMLP,
        callbacks: Sequence[pl.Callback] = (),
        local_hooks: Sequence[ls.client.LocalHook] = (),
    ) -> Fitted:
        options: dict[str, Any] = {"clients_per_round": 4, "local_epochs": 2, "seed": 3}
        model = federated(seeded(lit), algorithm=algorithm, local_hooks=local_hooks, **options)
        if isinstance(model, Elsewhere):
            model.worker = worker
        with closing(model):
            return fit(model, sorted_data() if local_hooks else toy_data(), max_epochs=3, callbacks=callbacks)

    return fit_as


@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_executors_give_the_same_bits(name: str, fit_as: FitAs) -> None:
    lit = {"SCAFFOLD": LitPlain, "averages of each width": LitSmall}.get(name, LitMLP)
    theirs = fit_as(ls.FederatedModule, ALGORITHMS[name], lit)
    assert all(row["train_loss"] > 0 and row["train_acc"] > 0 for row in theirs.rows)
    elsewhere, over_a_bad_line = (fit_as(federated, ALGORITHMS[name], lit) for federated in (Elsewhere, OverABadLine))
    for ours in elsewhere, over_a_bad_line:
        assert same_state(ours.tensors, theirs.tensors)
        assert ours.ledger.rows == theirs.ledger.rows
        assert ours.rows == theirs.rows
        assert ours.logged == theirs.logged
    executor = over_a_bad_line.model.executor
    assert (executor.num_calls, executor.num_lost) == (3, 3)  # a call for each round; 12 of 15 uploads arrived


class WritesFrozenWeight(pl.Callback):
    """Writes before round 1, so that the weight the other process was given at the start is out of date."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.module.net[0].weight.data.mul_(0.5)


@pytest.mark.filterwarnings("ignore:.*without an optimizer")  # what clients write is meant to be lost
def test_a_device_keeps_the_frozen_base_that_is_not_sent_again(fit_as: FitAs) -> None:
    ours, theirs = (
        fit_as(federated, ALGORITHMS["spectral"], LitFrozen, [WritesFrozenWeight()])
        for federated in (Elsewhere, ls.FederatedModule)
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.ledger.rows == theirs.ledger.rows
    assert {4 * 6 * 12, 0} <= {row.frozen_bytes for row in ours.ledger.rows if row.round_idx > 0}


@pytest.mark.parametrize("name", ["FedAvg", "spectral", "width"])
def test_a_device_knows_the_classes_that_it_lacks_from_its_own_data(name: str, fit_as: FitAs) -> None:
    hooks = [ls.client.MaskedLogits("net.5")]
    ours, theirs = (
        fit_as(federated, ALGORITHMS[name], local_hooks=hooks) for federated in (Elsewhere, ls.FederatedModule)
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.rows == theirs.rows
    unmasked = fit_as(ls.FederatedModule, ALGORITHMS[name], local_hooks=[ls.client.GradientClip(float("inf"))])
    assert not same_state(ours.state, unmasked.state)


def test_only_downloads_and_uploads_travel(fit_as: FitAs) -> None:
    executor = fit_as(Elsewhere, ls.FedAvg()).model.executor
    sent = [decode(*parts, Download) for parts in executor.sent]
    assert [download.unit for download in sent] == [decode(*parts, Upload).unit for parts in executor.received]
    assert [download.round_idx for download in sent] == 4 * [0] + 4 * [1] + 4 * [2]


class Forgetting(Elsewhere):
    """Every client has a device that has just been switched on."""

    keeps = False


@pytest.mark.filterwarnings("ignore:.*without an optimizer")  # what clients write is meant to be lost
def test_a_device_that_lost_the_frozen_base_is_sent_it_again(fit_as: FitAs) -> None:
    ours, theirs = (
        fit_as(federated, ALGORITHMS["spectral"], LitFrozen) for federated in (Forgetting, ls.FederatedModule)
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.rows[0] == theirs.rows[0]  # all without the base
    base, again = 4 * (6 * 12 + 12), 0
    for row, expected in zip(ours.ledger.rows, theirs.ledger.rows, strict=True):
        if not expected.frozen_bytes:  # the download came twice, the second time with the base
            twice = 2 * expected.downlink_bytes + base
            expected = expected._replace(downlink_bytes=twice, frozen_bytes=base)
            again += 1
        assert row == expected
    assert again > 0
    assert len(ours.model.executor.sent) == len(ours.ledger.rows) + again


def test_a_failure_in_another_process_has_its_address(fit_as: FitAs) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: Unpicklable: the sensor is broken"):
        fit_as(Elsewhere, ls.FedAvg(), LitFails)
