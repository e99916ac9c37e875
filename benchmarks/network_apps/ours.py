"""The network benchmark's federation: FedAvg or spectral sharding of a CNN or ResNet-18, over our network."""

import lightning.pytorch as pl
from work import client_examples, make_model

import lightning_spectral as ls
import lightning_spectral.network as net
from lightning_spectral.models import LitClassifier


def module(config=None):
    return LitClassifier(make_model(), num_classes=10, lr=0.01)


def federation(config):
    algorithm = ls.FedAvg() if config["algorithm"] == "fedavg" else ls.SpectralSharding(keep_ratio=0.2)
    return ls.FederatedModule(module(), algorithm=algorithm, clients_per_round=config["clients"])


def trainer(config):
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=config["rounds"], accelerator="cpu", enable_checkpointing=False, **options)


def client(config):
    return net.ClientData(client_examples(int(config["client"])), batch_size=32)


server = net.server_app(federation, trainer)
