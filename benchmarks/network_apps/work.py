"""What both apps train, on what."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_spectral.models import FEMNISTCNN, MLP, ResNet18

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), MLP(784, [16, 16], num_classes=10)),
    "cnn": lambda: FEMNISTCNN(10, hidden_features=512),
    "resnet": lambda: ResNet18(num_classes=10),
}


def make_model():
    return MODELS[os.environ["BENCHMARK_MODEL"]]()


def client_examples(client):
    generator = torch.Generator().manual_seed(client)
    size = 32 if os.environ["BENCHMARK_MODEL"] == "resnet" else 28
    channels = 3 if size == 32 else 1
    x = torch.randn(64, channels, size, size, generator=generator)
    return TensorDataset(x, torch.randint(10, (64,), generator=generator))
