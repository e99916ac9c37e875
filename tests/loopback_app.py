"""The app of `test_loopback`: made-up data, and an algorithm by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ternary import Ternary
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

import lightning_spectral as ls
import lightning_spectral.network as net

CLIENTS = 3


class LitNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        self.example_input_array = torch.zeros(2, 20)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaysWhoIsLeftOut(ls.RoundCallback):
    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        outcomes = sorted(client.left_out or "in" for client in summary.clients)
        print(f"round {summary.round_idx}: {', '.join(outcomes)}", flush=True)


def examples(seed: int, number: int = 60) -> TensorDataset:
    x = torch.randn(number, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ torch.randn(20, 4, generator=torch.Generator().manual_seed(0))).argmax(1))


def algorithm(name: str) -> Any:
    return {
        "fedavg": ls.FedAvg(),
        "secure sums": ls.FedAvg(),
        "a stranger's filter": ls.FedAvg(),
        "spectral": ls.SpectralSharding(ls.Unbiased(), keep_ratio=[0.3, 0.6, 0.3]),
        "scaffold": ls.Scaffold(),
        "lora": ls.LoRA(2),
        "zampling": ls.Zampling(4, degree=3),
        "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio=[0.5, 1.0, 0.5]),
        "fiarse": ls.FIARSE([0.25, 1.0, 0.5]),
        "stale": ls.StaleUpdates(beta=0.7),
    }[name]


MODELS = "dense", "sharded"


def federation(config: Any) -> ls.FederatedModule | ls.MultiModelModule:
    if config["algorithm"] == "two models":
        models = {
            "dense": ls.FederatedModule(LitNet(), seed=1),
            "sharded": ls.FederatedModule(LitNet(), algorithm=algorithm("spectral"), seed=2),
        }
        return ls.MultiModelModule(models, participation=ls.UpdateVarianceReduced(active=2, measure="last"), seed=3)
    chosen = algorithm(config["algorithm"])
    clients_per_round = 2 if isinstance(chosen, ls.StaleUpdates) else 3  # those who stay at home count in its sums
    filters = {"secure sums": [ls.SecureSums()], "a stranger's filter": [Ternary()]}.get(config["algorithm"], [])
    options: dict[str, Any] = {"algorithm": chosen, "clients_per_round": clients_per_round, "filters": filters}
    return ls.FederatedModule(LitNet(), **options, seed=1)


def trainer(config: Any) -> pl.Trainer:
    saving = pl.callbacks.ModelCheckpoint(config["folder"], save_last=True)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(max_epochs=config["rounds"], accelerator="cpu", callbacks=[saving, SaysWhoIsLeftOut()], **options)


def for_models(config: Any, value: Any) -> Any:
    """A value for the only model, or for each of two."""
    return dict.fromkeys(MODELS, value) if config["algorithm"] == "two models" else value


def client(config: Any) -> Any:
    kept = None if config["algorithm"] == "two models" else str(Path(config["folder"]) / f"state of {config['client']}")
    return for_models(config, net.ClientData(examples(1 + int(config["client"])), batch_size=10, state_folder=kept))


def held_out(config: Any) -> Any:
    return for_models(config, examples(1000))


def gathered(examples_of: Callable[[int], TensorDataset], batch_size: int) -> ls.FederatedDataModule:
    """What the devices and the server have, in one place for a simulation."""
    parts = [examples_of(1 + client) for client in range(CLIENTS)]
    owners = [client for client, part in enumerate(parts) for _ in range(len(part))]
    held_out, split = examples_of(1000), ls.NaturalPartitioner(owners)
    return ls.FederatedDataModule(ConcatDataset(parts), split, val=held_out, batch_size=batch_size)


def weights_after(config: Any, model: pl.LightningModule, data: pl.LightningDataModule) -> dict[str, torch.Tensor]:
    """Train in a simulation."""
    trainer({**config, "folder": Path(config["folder"]) / "simulated"}).fit(model, data)
    return model.state_dict()


def simulated(config: Any) -> dict[str, torch.Tensor]:
    """The weights that the same federation has after its rounds in a simulation."""
    data = gathered(examples, batch_size=10)
    several = config["algorithm"] == "two models"
    everything = ls.MultiModelDataModule(dict.fromkeys(MODELS, data)) if several else data
    return weights_after(config, federation(config), everything)


server = net.server_app(federation, trainer, val=held_out, wait_for=CLIENTS)
