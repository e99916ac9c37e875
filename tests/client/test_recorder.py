from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_spectral.client.local_loop import Recorder, isolate_metrics
from lightning_spectral.protocol.records import LoggedValue


def test_a_clients_value_is_the_mean_over_its_examples() -> None:
    recorder = Recorder(nn.Linear(1, 1))
    finished = []
    for batches in ([(1.0, 3), (5.0, 1)], [(7.0, 6)]):
        recorder.start_client()
        for value, batch_size in batches:
            recorder.num_examples = batch_size
            recorder.log("loss", torch.tensor(value))
        finished.append(recorder.finish_client()["loss"].value)
    assert finished == [2.0, 7.0]
    recorder.start_client()
    assert recorder.finish_client() == {}


def test_metric_is_computed_once_per_client_and_starts_empty() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

    module = Module()
    recorder = Recorder(module)
    module.mean.update(1e6)
    for value in (1.0, 4.0):
        recorder.start_client()
        module.mean.update(value)
        recorder.log_dict({"mean": module.mean}, prog_bar=True, logger=False)
        assert recorder.finish_client() == {"mean": LoggedValue(value, prog_bar=True, logger=False)}


def test_names_and_weights_follow_lightning() -> None:
    recorder = Recorder(nn.Linear(1, 1))
    recorder.start_client()
    recorder.log("both", 1.0, on_step=True, on_epoch=True)
    recorder.log("own", 1.0, batch_size=3)
    recorder.log("own", 5.0, batch_size=1, sync_dist=True)
    finished = recorder.finish_client()
    assert set(finished) == {"both_epoch", "own"}
    assert finished["own"].value == pytest.approx(2.0)


def test_metrics_of_clients_never_sync() -> None:
    module = nn.ModuleList([torchmetrics.MeanMetric()])
    isolate_metrics(module)
    assert not module[0].distributed_available_fn()


@pytest.mark.parametrize("value", ["text", [1.0, 2.0], None])
def test_what_is_no_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^`self\.log\('x', \.\.\.\)` takes a number, a tensor or a metric.*, got "):
        Recorder().log("x", value)


def test_numbers_of_numpy_are_numbers() -> None:
    recorder = Recorder()
    recorder.log("x", np.float32(0.5))  # type: ignore[arg-type]
    assert recorder.finish_client()["x"].value == 0.5
