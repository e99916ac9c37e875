"""Five models on the same 120 clients, as the slides have it: two of Fashion-MNIST, CIFAR-10, MNIST and Shakespeare.

The slides have EMNIST where we have MNIST. All models are small, so that a round in which everybody trains everything
takes seconds on one core. The images are dealt as those of the three models, 12,000 for each model. Shakespeare is
next-character prediction; its clients are the 120 speakers with most text, so what a client has, and how much, is
natural: the first of them has five and a half times as much as the last. The first four fifths of what a speaker says
are for training, the rest for tests. A tenth of the clients have no examples of one model.
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

sys.path.append(str(Path(__file__).parents[1] / "zampling"))  # which has the digits
from digits import mnist

import lightning_spectral as ls

CONTEXT = 10  # characters that the next one is predicted from
TRAIN_EVERY, TEST_EVERY = 145, 43  # positions of a text: 12,000 examples, and 10,000 for tests
TRAIN_SHARE = 0.8  # of what a speaker says
Examples = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs and labels to train, inputs and labels to test


def convolutions() -> nn.Module:
    """3 x 16 x 16 pixels to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def next_character() -> nn.Module:
    """Ten characters to the next, by an embedding and one hidden layer."""
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
# By 8 to 12 rounds in which everybody trained, one seed. CIFAR-10, with twice the channels: 0.1 was better than 0.03.
# Shakespeare: 0.1 and 0.5 were slower than 1; 2 was better still, but its accuracy rose and fell more. The perceptrons
# have the rate of the three models.
RATES = {"fashion": 0.1, "fashion2": 0.1, "cifar10": 0.1, "mnist": 0.1, "shakespeare": 1.0}


@cache
def photos() -> Examples:
    return cifar10()


@cache
def digits() -> Examples:
    """All of MNIST, at 14 x 14 pixels."""
    x, y, test_x, test_y = mnist()
    half = nn.AvgPool2d(2)
    return half(x.view(-1, 1, 28, 28)), y, half(test_x.view(-1, 1, 28, 28)), test_y


@cache
def texts() -> list[str]:
    """What the clients say."""
    return most_text(shakespeare(), tasks.NUM_CLIENTS)


def deal_five(seed: int) -> ls.MultiModelDataModule:
    """The data of all models, dealt to the clients."""
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
    """Images to train some models, no image for two of them; all images for tests with each."""
    x, y, test_x, test_y = images
    order = torch.randperm(len(y), generator=generator)[: number * tasks.NUM_TRAIN]
    return [(x[own], y[own], test_x, test_y) for own in order.view(number, -1)]


def spoken(says: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Examples from what each client says.

    Returns:
        To train: the characters before, of shape ``(n, CONTEXT)``, those to predict and the clients, of shape ``(n,)``;
        for tests: the first two.
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
