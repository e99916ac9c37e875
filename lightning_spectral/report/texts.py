"""Texts from other people's files, made fit for a line, a label and a page."""

from __future__ import annotations

import re
from textwrap import wrap

# Line and control characters, halves of surrogate pairs, and those that reverse the order of the text after them.
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST_LABEL = 100  # letters of the label of an axis
MAX_LINES = 8  # of a label
STANDS_IN = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    r"""The text in one line, with a replacement for every character that a page, a figure or a terminal cannot show.

    Example:
        >>> printable("a\tb\nc \x1b[31m é")
        'a b c �[31m é'
    """
    return UNFIT.sub(STANDS_IN, re.sub(r"[\t\n\r]+", " ", text))


def as_label(text: str) -> str:
    r"""A text for a figure, in which matplotlib finds no formula: `$` is a letter like any other.

    Example:
        >>> print(as_label(r"x^$\frac{$"))
        x^\$\frac{\$
    """
    return shortened(text, LONGEST_LABEL).replace("$", r"\$")


def in_lines(text: str, width: int) -> list[str]:
    """A text for a figure, in a few lines of at most ``width`` letters.

    Example:
        >>> in_lines("FedAvg, keep_ratio=0.5, seed=1", 16)
        ['FedAvg,', 'keep_ratio=0.5,', 'seed=1']
    """
    return [as_label(line) for line in wrap(text, width, max_lines=MAX_LINES, placeholder=" …")]


def shortened(text: str, letters: int) -> str:
    """The text if it is short enough, otherwise its beginning.

    Example:
        >>> shortened("keep_ratio", 10), shortened("participation_rate", 10)
        ('keep_ratio', 'participa…')
    """
    return text if len(text) <= letters else f"{text[: letters - 1]}…"
