"""Five models on the same 120 clients, as in the slides: two of Fashion-MNIST, CIFAR-10, MNIST and Shakespeare.

The slides use EMNIST instead of MNIST. All models are small, so that a round in which every client trains every model
takes seconds on one core. The images are dealt as those of the three models, 12,000 for each model. The task of
Shakespeare is next-character prediction. Its clients are the 120 speakers with the most text, so both the text and the
amount of it are natural: the first speaker has five and a half times as much as the last. The first four fifths of a
speaker's text are for training, the rest for testing. A tenth of the clients have no examples of one model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import tasks
import torch
from photos import cifar10
from plays import SYMBOLS, most_text, shakespeare, windows
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "zampling"))  # for the digits
from digits import mnist

import lightning_spectral as ls

CONTEXT = 10  # characters from which the next one is predicted
TRAIN_EVERY, TEST_EVERY = 145, 43  # positions from one example to the next: 12,000 for training, 10,000 for testing
TRAIN_SHARE = 0.8  # of a speaker's text
Examples = tuple[Tensor, Tensor, Tensor, Tensor]  # training inputs and labels, test inputs and labels


def convolutions() -> nn.Module:
    """Return a network from 3 x 16 x 16 pixels to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def next_character() -> nn.Module:
    """Return a network from ten characters to the next, with an embedding and one hidden layer."""
    size = 8
    return nn.Sequential(
        nn.Embedding(len(SYMBOLS), size),
        nn.Flatten(),
        nn.Linear(CONTEXT * size, 100),
        nn.ReLU(),
        nn.Linear(100, len(SYMBOLS)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "fashion": tasks.perceptron,
    "fashion2": tasks.perceptron,
    "cifar10": convolutions,
    "mnist": tasks.perceptron,
    "shakespeare": next_character,
}
# Chosen by 8 to 12 rounds of full participation with one seed. CIFAR-10, with twice the channels: 0.1 was better than
# 0.03. Shakespeare: 0.1 and 0.5 were slower than 1; 2 was better still, but its accuracy fluctuated more. The
# perceptrons have the same rate as the three models.
RATES = {"fashion": 0.1, "fashion2": 0.1, "cifar10": 0.1, "mnist": 0.1, "shakespeare": 1.0}


@cache
def photos() -> Examples:
    return cifar10()


@cache
def digits() -> Examples:
    """Return all of MNIST at 14 x 14 pixels."""
    x, y, test_x, test_y = mnist()
    half = nn.AvgPool2d(2)
    return half(x.view(-1, 1, 28, 28)), y, half(test_x.view(-1, 1, 28, 28)), test_y


@cache
def texts() -> list[str]:
    """Return the text of each client."""
    return most_text(shakespeare(), tasks.NUM_CLIENTS)


def deal_five(seed: int) -> ls.MultiModelDataModule:
    """Return the data of all models, dealt to the clients."""
    generator = torch.Generator().manual_seed(seed)
    lacks = tasks.lacked_model(len(NETS), generator)
    sources = (tasks.images(), 2), (photos(), 1), (digits(), 1)
    examples = [part for images, number in sources for part in drawn(images, number, generator)]
    modules = {}
    *image_models, last = NETS
    for index, (name, (x, y, *tests)) in enumerate(zip(image_models, examples, strict=True)):
        owners = tasks.owners_of(y, lacks == index, generator)
        modules[name] = tasks.dealt(x, y, owners, TensorDataset(*tests))
    x, y, owners, *tests = spoken(texts())
    kept = (lacks != len(image_models))[owners]
    modules[last] = tasks.dealt(x[kept], y[kept], owners[kept], TensorDataset(*tests))
    return ls.MultiModelDataModule(modules)


def drawn(images: Examples, number: int, generator: torch.Generator) -> list[Examples]:
    """Return training images for some models, with no image in common, each with all the test images."""
    x, y, test_x, test_y = images
    order = torch.randperm(len(y), generator=generator)[: number * tasks.NUM_TRAIN]
    return [(x[own], y[own], test_x, test_y) for own in order.view(number, -1)]


def spoken(says: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return examples from the text of each client.

    Returns:
        For training: the preceding characters, of shape ``(n, CONTEXT)``, the characters to predict and the clients,
        both of shape ``(n,)``. For testing: the first two of these.
    """
    train, tests, owners = [], [], []
    for client, text in enumerate(says):
        end = int(TRAIN_SHARE * len(text))
        train.append(windows(text, range(CONTEXT, end, TRAIN_EVERY), CONTEXT))
        tests.append(windows(text, range(end + CONTEXT, len(text), TEST_EVERY), CONTEXT))
        owners.append(torch.full((len(train[-1][1]),), client))
    x, y = map(torch.cat, zip(*train, strict=True))
    test_x, test_y = map(torch.cat, zip(*tests, strict=True))
    return x, y, torch.cat(owners), test_x, test_y
