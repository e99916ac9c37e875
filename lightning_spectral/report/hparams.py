"""Reads the ``hparams.yaml`` that Lightning's CSVLogger and TensorBoardLogger write next to their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_spectral.errors import ReportError

HPARAMS_FILE = "hparams.yaml"


def read_hparams(folder: Path) -> dict[str, Any]:
    """Read the settings of a run; there are none if the file does not exist.

    Raises:
        ReportError: If it is not YAML.
    """
    path = folder / HPARAMS_FILE
    try:
        return (yaml.load(path.read_text(encoding="utf-8"), _Lenient) or {}) if path.exists() else {}
    except yaml.YAMLError as error:
        raise ReportError(f"{path} cannot be read: {error}. Correct or remove it.") from error


class _Lenient(yaml.SafeLoader):  # type: ignore[misc]
    """Reads objects of any custom class as the name of the class: nothing in a file is executed."""


def _as_name(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
    return suffix.rpartition(":")[2]


_Lenient.add_multi_constructor("", _as_name)  # for all tags that YAML itself does not know
