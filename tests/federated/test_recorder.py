import pytest
import torch
import torchmetrics
from torch import nn

from lightning_spectral.federated.recorder import Recorder, isolate_metrics


def test_round_value_is_the_example_weighted_mean_of_clients() -> None:
    recorder, module = Recorder(), nn.Linear(1, 1)
    for size, batches in {4: [(1.0, 3), (5.0, 1)], 6: [(7.0, 6)]}.items():
        recorder.start_client(module)
        for value, batch_size in batches:
            recorder.num_examples = batch_size
            recorder.log("loss", torch.tensor(value))
        recorder.keep_client(size)
    finished = recorder.finish_round()
    assert finished["loss"].value == pytest.approx((4 * 2.0 + 6 * 7.0) / 10)
    assert recorder.finish_round() == {}


def test_a_client_that_is_not_kept_leaves_no_trace() -> None:
    recorder, module = Recorder(), nn.Linear(1, 1)
    recorder.log("loss", float("nan"))
    recorder.start_client(module)
    recorder.log("loss", 2.0)
    recorder.keep_client(5)
    assert recorder.finish_round()["loss"].value == 2.0


def test_metric_is_computed_once_per_client_and_starts_empty() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

    recorder, module = Recorder(), Module()
    module.mean.update(1e6)
    for value, size in [(1.0, 1), (4.0, 3)]:
        recorder.start_client(module)
        module.mean.update(value)
        recorder.log_dict({"mean": module.mean}, prog_bar=True, logger=False)
        recorder.keep_client(size)
    entry = recorder.finish_round()["mean"]
    assert (entry.value, entry.prog_bar, entry.logger) == (pytest.approx(3.25), True, False)


def test_names_and_weights_follow_lightning() -> None:
    recorder = Recorder()
    recorder.start_client(nn.Linear(1, 1))
    recorder.log("both", 1.0, on_step=True, on_epoch=True)
    recorder.log("own", 1.0, batch_size=3)
    recorder.log("own", 5.0, batch_size=1, sync_dist=True)
    recorder.keep_client(1)
    finished = recorder.finish_round()
    assert set(finished) == {"both_epoch", "own"}
    assert finished["own"].value == pytest.approx(2.0)


def test_metrics_of_clients_never_sync() -> None:
    module = nn.ModuleList([torchmetrics.MeanMetric()])
    isolate_metrics(module)
    assert not module[0].distributed_available_fn()
