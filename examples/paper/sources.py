"""Training and test examples of each data set, by name.

Packages are downloaded once and their hashes are checked: see ``studies/fetch.py``. CIFAR-100, TinyImageNet and FEMNIST
cannot be downloaded: they are read from the standard files in the folder given by the environment variable ``DATA``,
and skipped if these are missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[2] / "studies"))  # code that the examples and the studies share
from images import mnist, whole_fashion_mnist
from photos import cifar10
from plays import SYMBOLS, most_text, shakespeare, windows
from reviews import imdb, vocabulary, word_ids

import lightning_spectral as ls

TOY_EXAMPLES, TOY_CLASSES = 60, 4
MNIST_TRAIN = 4_000  # of 5,000 images
IMDB_TRAIN, IMDB_WORDS = 37_500, 1_000  # of 50,000 reviews, as in PriSM; number of words with an id
CIFAR100_ROW = 2 + 3 * 32 * 32  # coarse label, fine label, pixels
SHORTEST_TEXT, TEST_SHARE = 500, 0.2  # characters that a speaker must have; share of them used for testing
TINY = "tiny-imagenet-200"
FEMNIST_USERS, USERS_OF_CLIENT = 1_000, 10  # the writers whose images are dealt, as in PriSM
FEMNIST_CLASSES = 62
FOLDERS = {"cifar100": "cifar-100-binary", "tinyimagenet": TINY, "femnist": "femnist/train"}  # not downloaded


class MissingDataError(Exception):
    """Data that are not available on this machine, with the reason."""


@dataclass(frozen=True)
class Source:
    """Examples of one data set.

    Attributes:
        train: Training inputs and labels.
        test: Test inputs and labels.
        num_classes: Number of classes.
        owners: The client of each training example, if the data set has natural clients.
        superclasses: The superclass of each class, if the data set has superclasses.
    """

    train: TensorDataset
    test: TensorDataset
    num_classes: int
    owners: Tensor | None = None
    superclasses: tuple[int, ...] | None = None


def noise() -> Source:
    """Random images, to check that everything runs."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, TOY_EXAMPLES, 1, 8, 8, generator=generator)
    labels = torch.arange(TOY_EXAMPLES) % TOY_CLASSES
    return Source(*(TensorDataset(part, labels) for part in images), TOY_CLASSES)


def digits() -> Source:
    """5,000 images of MNIST at 14 x 14 pixels; the last 1,000 in a fixed random order are the test set."""
    images, labels = mnist()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return of_images(images[order], labels[order], num_train=MNIST_TRAIN)


def clothes() -> Source:
    """Fashion-MNIST at 14 x 14 pixels."""
    images, labels, test_images, test_labels = whole_fashion_mnist()
    return of_images(torch.cat([images, test_images]), torch.cat([labels, test_labels]), num_train=len(labels))


def small_photos() -> Source:
    """CIFAR-10 at 16 x 16 pixels."""
    return of_photos(cifar10())


def photos() -> Source:
    """CIFAR-10."""
    return of_photos(cifar10(sheets=range(1, 6), side=32))


def cifar100() -> Source:
    """CIFAR-100 from ``cifar-100-binary``, the format without pickles."""
    parts = [read_cifar100(existing(FOLDERS["cifar100"]) / f"{part}.bin") for part in ("train", "test")]
    (images, labels, coarse), (test_images, test_labels, _) = parts
    of_class = dict(zip(labels.tolist(), coarse.tolist(), strict=True))
    superclasses = tuple(of_class[label] for label in range(100))
    return Source(TensorDataset(images, labels), TensorDataset(test_images, test_labels), 100, None, superclasses)


def tiny_imagenet() -> Source:
    """TinyImageNet from its folders of JPEG files; its validation images are the test set."""
    folder = existing(TINY)
    classes = {name: label for label, name in enumerate((folder / "wnids.txt").read_text().split())}
    train = [(path, classes[path.parents[1].name]) for path in sorted(folder.glob("train/*/images/*.JPEG"))]
    lines = map(str.split, (folder / "val/val_annotations.txt").read_text().splitlines())
    test = [(folder / "val/images" / name, classes[wnid]) for name, wnid, *_ in lines]
    return Source(read_jpegs(train), read_jpegs(test), len(classes))


def femnist() -> Source:
    """FEMNIST from LEAF's files, with its pixels as they are; a client has the images of ten users.

    Raises:
        MissingDataError: If files are missing or hold too few users.
    """
    users = read_users("train", at_most=FEMNIST_USERS)
    if len(users) < FEMNIST_USERS:
        raise MissingDataError(
            f"femnist/train must hold at least {FEMNIST_USERS} users, got {len(users)}; have LEAF write all: --sf 1.0"
        )
    sizes = torch.tensor([len(images) for images, _ in users])
    owners = (torch.arange(len(users)) // USERS_OF_CLIENT).repeat_interleave(sizes)
    parts = (TensorDataset(*map(torch.cat, zip(*part, strict=True))) for part in (users, read_users("test")))
    return Source(*parts, FEMNIST_CLASSES, owners)


def small_speech() -> Source:
    """The text of 100 of Shakespeare's speakers in sequences of 20 characters, at most 50 of a speaker for training."""
    return speech(num_speakers=100, length=20, at_most=50)


def speech(num_speakers: int = 715, length: int = 80, at_most: int | None = None) -> Source:
    """The speakers with the most text in Shakespeare's plays: sequences and, at each position, the next character.

    The paper has 715 clients from another edition, with capitals and all punctuation.

    Args:
        num_speakers: Number of clients.
        length: Number of characters in a sequence.
        at_most: Maximum number of a client's training sequences, with a fifth as many for testing; ``None`` for all.
    """
    train, test, owners = [], [], []
    tested = None if at_most is None else int(TEST_SHARE * at_most)
    texts = [text for text in most_text(shakespeare(), num_speakers) if len(text) >= SHORTEST_TEXT]
    for client, text in enumerate(texts):
        end = int((1 - TEST_SHARE) * len(text))
        train.append(sequences(text[:end], length)[:at_most])
        test.append(sequences(text[end:], length)[:tested])
        owners.append(torch.full((len(train[-1]),), client))
    pairs = (TensorDataset(joined[:, :-1], joined[:, 1:]) for joined in map(torch.cat, (train, test)))
    return Source(*pairs, len(SYMBOLS), torch.cat(owners))


def sequences(text: str, length: int) -> Tensor:
    """Return consecutive pieces of ``length + 1`` characters; each begins with the last character of the one before."""
    before, last = windows(text, range(length, len(text), length), length)
    return torch.cat([before, last[:, None]], 1)


def short_reviews() -> Source:
    """IMDB's reviews, each cut to its first 40 frequent words."""
    return reviews(length=40)


def reviews(length: int = 500) -> Source:
    """IMDB's reviews as ids of frequent words, in a fixed random order; the last quarter is the test set.

    Args:
        length: Number of words to which a review is cut or padded.
    """
    texts, good = imdb()
    order = torch.randperm(len(good), generator=torch.Generator().manual_seed(0))
    texts = [texts[index] for index in order.tolist()]
    ids = word_ids(texts, vocabulary(texts[:IMDB_TRAIN], IMDB_WORDS), length)
    parts = (slice(IMDB_TRAIN), slice(IMDB_TRAIN, None))
    return Source(*(TensorDataset(ids[part], good[order][part]) for part in parts), num_classes=2)


def of_photos(parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> Source:
    """Return CIFAR-10 with standardised images."""
    images, labels, test_images, test_labels = parts
    return of_images(torch.cat([images, test_images]), torch.cat([labels, test_labels]), num_train=len(labels))


def of_images(images: Tensor, labels: Tensor, num_train: int) -> Source:
    """Return standardised images: the first ones for training, the others for testing."""
    images = ls.functional.standardize_images(images)
    parts = (slice(num_train), slice(num_train, None))
    return Source(*(TensorDataset(images[part], labels[part]) for part in parts), num_classes=10)


def missing(data: str) -> str:
    """Return why a data set cannot be read, empty if its folder exists or it is downloaded."""
    try:
        if data in FOLDERS:
            existing(FOLDERS[data])
    except MissingDataError as error:
        return str(error)
    return ""


def existing(name: str) -> Path:
    """Return the path of a folder of the user's data.

    Raises:
        MissingDataError: If the folder does not exist.
    """
    folder = Path(os.environ.get("DATA", "data")) / name
    if not folder.is_dir():
        raise MissingDataError(f"there is no folder {folder}; set DATA to the folder that holds {name}")
    return folder


def read_cifar100(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return the standardised images of one file, their classes and their superclasses."""
    rows = torch.from_numpy(np.fromfile(path, np.uint8).reshape(-1, CIFAR100_ROW))
    return (
        ls.functional.standardize_images(rows[:, 2:].view(-1, 3, 32, 32).float() / 255),
        rows[:, 1].long(),
        rows[:, 0].long(),
    )


def read_jpegs(files: list[tuple[Path, int]]) -> TensorDataset:
    """Return standardised images of 64 x 64 pixels, and labels."""
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return TensorDataset(ls.functional.standardize_images(images), torch.tensor([label for _, label in files]))


def read_users(part: str, at_most: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the images and labels of each user of FEMNIST, the users in sorted order.

    Args:
        part: ``train`` or ``test``.
        at_most: Maximum number of users, the first ones; ``None`` for all.
    """
    users: dict[str, tuple[Tensor, Tensor]] = {}
    for path in sorted(existing(f"femnist/{part}").glob("*.json")):
        users |= {name: of_user(**found) for name, found in json.loads(path.read_text())["user_data"].items()}
        users = dict(sorted(users.items())[:at_most])  # here already, because all users take gigabytes
    return list(users.values())


def of_user(x: list[list[float]], y: list[int]) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one user."""
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 28, 28), torch.tensor(y, dtype=torch.int64)


SOURCES: dict[str, Callable[[], Source]] = {
    "noise": noise,
    "mnist-14": digits,
    "fashion-14": clothes,
    "cifar10-16": small_photos,
    "cifar10": photos,
    "cifar100": cifar100,
    "tinyimagenet": tiny_imagenet,
    "femnist": femnist,
    "shakespeare-small": small_speech,
    "shakespeare": speech,
    "imdb-short": short_reviews,
    "imdb": reviews,
}


@cache
def source(name: str) -> Source:
    """Return a data set, which is read only once."""
    return SOURCES[name]()
