"""Reads the ``hparams.yaml`` that Lightning's CSVLogger and TensorBoardLogger write next to their logs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from lightning_spectral.report.files import MALFORMED, SETTINGS_MEGABYTES, read_bytes, unreadable

HPARAMS_FILE = "hparams.yaml"
MAX_LETTERS = 4_000_000  # with aliases written out
MAX_DEPTH = 100
MAX_DIGITS = 1000  # Python converts up to 4300


def read_hparams(folder: Path) -> dict[str, Any]:
    """Read the settings of a run; there are none if the file does not exist."""
    path = folder / HPARAMS_FILE
    if not os.path.lexists(path):
        return {}
    content = read_bytes(path, SETTINGS_MEGABYTES, folder)
    try:
        found = _loaded(content.decode("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}, not a mapping")
    except (yaml.YAMLError, *MALFORMED) as error:
        raise unreadable(path, " ".join(str(error).split())) from error
    return found


def _loaded(text: str) -> Any:
    loader = _Lenient(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        _check_size(root)
        return loader.construct_document(root) or {}
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """Check the size of a document with its aliases written out: a few lines of nested ones can stand for gigabytes."""
    letters, waiting = 0, [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        letters += 1
        if isinstance(node, yaml.ScalarNode):
            letters += len(node.value)
            if len(node.value) > MAX_DIGITS and node.tag.endswith((":int", ":float")):
                raise ValueError(f"it has a number of {len(node.value)} digits")
        elif isinstance(node, yaml.MappingNode):
            waiting += [(inner, depth + 1) for pair in node.value for inner in pair]
        else:
            waiting += [(inner, depth + 1) for inner in node.value]
        if letters > MAX_LETTERS or depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply, or its aliases expand to too much")


class _Lenient(yaml.SafeLoader):  # type: ignore[misc]
    """Reads objects of any custom class as the name of the class: nothing in a file is executed."""


def _as_name(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
    return suffix.rpartition(":")[2]


_Lenient.add_multi_constructor("", _as_name)  # for all tags that YAML itself does not know
