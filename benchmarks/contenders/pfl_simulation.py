"""pfl-research's rounds: ``FederatedAveraging`` on a ``SimulatedBackend`` in one process.

Its in-memory data sets keep their batches, so examples come in the same order in every round. The first round, which
is left out, also evaluates.
"""

import functools
import time
from collections.abc import Iterable
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, main, make_model, tensors


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(nn.functional.cross_entropy(self.net(x), y, reduction="sum").item(), len(y))}


class RoundClock(TrainingProcessCallback[PyTorchModel]):
    def __init__(self) -> None:
        self.ticks: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.ticks.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.ticks.append(time.perf_counter())
        return False, Metrics()


def run(model: str, rounds: int) -> Iterable[float]:
    net = Classifier(make_model(model))
    x, y = tensors()
    users = [PyTorchTensorDataset(pair) for pair in zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(NUM_CLIENTS)))
    clock = RoundClock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds, train_cohort_size=COHORT, val_cohort_size=None
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            net,
            local_optimizer_create=functools.partial(torch.optim.SGD, momentum=MOMENTUM),
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_batch_size=BATCH_SIZE, local_num_epochs=1, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=EXAMPLES),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return [end - start for start, end in zip(clock.ticks, clock.ticks[1:], strict=False)]


if __name__ == "__main__":
    main(run, ["pfl"])
