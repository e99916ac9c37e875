"""Classes as people type them: ``spectral`` for ``SpectralSharding``."""

from __future__ import annotations

from lightning_spectral.public_names import NAMES

# The room whose classes a setting takes, by the last part of its key.
ROOMS = {
    "algorithm": "algorithms",
    "strategy": "sharding",
    "design": "designs",
    "partitioner": "partition",
    "participation": "participation",
}


def classes_meant(key: str, word: str) -> list[str]:
    """The package's classes that a word in lower case may name, whole or by how they begin.

    Args:
        key: Dotted key of a setting, whose last part says which classes it takes.
        word: Its value, as typed.

    Returns:
        Their names; none if the setting takes no classes, or if the word is something else.

    Example:
        >>> classes_meant("model.algorithm", "spectral"), classes_meant("model.algorithm.strategy", "topn")
        (['SpectralSharding'], ['TopN'])
        >>> classes_meant("model.algorithm", "fed"), classes_meant("model.algorithm", "FedAvg")
        (['FedAvg'], [])
    """
    if not word.isalnum() or word != word.lower():
        return []
    names = NAMES.get(ROOMS.get(key.rpartition(".")[2], ""), ())
    whole = [name for name in names if name.lower() == word]
    return whole or [name for name in names if name.lower().startswith(word)]
