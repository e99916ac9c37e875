"""FedLab's rounds: ``SGDSerialClientTrainer`` and ``SyncServerHandler`` in a ``StandalonePipeline``, one process."""

import sys
import time
from collections.abc import Iterable
from types import ModuleType

import torch
from torch.utils.data import DataLoader, TensorDataset
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, main, make_model, tensors

# FedLab imports torchvision for its image data sets, which are not used here; torchvision only loads with the PyTorch
# it was built for.
sys.modules["torchvision"] = stand_in = ModuleType("torchvision")
stand_in.transforms = stand_in.datasets = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from fedlab.utils import Aggregators, SerializationTool  # noqa: E402


class Clients(FedDataset):
    def __init__(self) -> None:
        x, y = tensors()
        pairs = zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)
        self.num, self.datasets = NUM_CLIENTS, [TensorDataset(*pair) for pair in pairs]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.datasets[id], batch_size=batch_size, shuffle=True)


class Trainer(SGDSerialClientTrainer):
    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader) -> list[torch.Tensor]:
        """Train as FedLab does, but start with fresh momentum and also return the number of examples."""
        self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, momentum=MOMENTUM)
        return [*super().train(model_parameters, train_loader), torch.tensor([float(len(train_loader.dataset))])]


class Server(SyncServerHandler):
    def global_update(self, buffer: list[list[torch.Tensor]]) -> None:
        """Average as FedLab does, but weighted by the number of examples."""
        parameters, weights = zip(*buffer, strict=True)
        merged = Aggregators.fedavg_aggregate(list(parameters), torch.cat(weights))
        SerializationTool.deserialize_model(self._model, merged)


class Pipeline(StandalonePipeline):
    def __init__(self, handler: Server, trainer: Trainer) -> None:
        super().__init__(handler, trainer)
        self.ticks = [time.perf_counter()]

    def evaluate(self) -> None:
        """Record the time; ``main`` calls this last in each round."""
        self.ticks.append(time.perf_counter())


def run(model: str, rounds: int) -> Iterable[float]:
    net = make_model(model)
    trainer = Trainer(net, NUM_CLIENTS)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(epochs=1, batch_size=BATCH_SIZE, lr=LR)
    pipeline = Pipeline(Server(net, global_round=rounds, sample_ratio=COHORT / NUM_CLIENTS), trainer)
    pipeline.main()
    return [end - start for start, end in zip(pipeline.ticks, pipeline.ticks[1:], strict=False)]


if __name__ == "__main__":
    main(run, ["fedlab"])
