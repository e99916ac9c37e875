"""What the command line makes of ``--ckpt_path``: the checkpoint says what the model is, and the config must agree."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

from lightning_spectral.errors import SpectralWarning

CHOSEN_BY_LIGHTNING = ("best", "last", "hpc", "registry")


def check_path(path: str | None) -> None:
    """Raise ``ValueError`` if a checkpoint is not there, before anything is built from the config."""
    if path and "://" not in path and not path.startswith(CHOSEN_BY_LIGHTNING) and not os.path.exists(path):
        raise ValueError(f"`ckpt_path`: there is no file {path}.")


def report_differences(saved: Any, given: Any, command: str) -> None:
    """Compare the arguments of a checkpoint, which are used, with those in the config and on the command line.

    A fit is refused, like one from Python, because it would continue neither run. For other commands the model is that
    of the checkpoint, with a warning.
    """
    before, now = _flat(saved), _flat(given)
    names = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    if not names:
        return
    outermost = sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))
    changed = [f"{name}: {before.get(name)!r} in the checkpoint, {now.get(name)!r} now" for name in outermost]
    listed = "\n  - ".join(["", *changed])
    if command == "fit":
        raise ValueError(
            "The checkpoint was written with another configuration, so resuming would continue neither run; "
            f"change it back, or start a new run without `ckpt_path`:{listed}"
        )
    warnings.warn(f"The checkpoint's model is used, not the one given, which differs:{listed}", SpectralWarning, 2)


def _flat(arguments: Namespace | Mapping[str, Any], name: str = "model") -> dict[str, Any]:
    """Arguments by the names that they have on the command line, where nothing needs ``init_args``."""
    found: dict[str, Any] = {}
    for key, value in (vars(arguments) if isinstance(arguments, Namespace) else arguments).items():
        inner = name if key in ("init_args", "class_path") else f"{name}.{key}"
        found |= _flat(value, inner) if _has_names(value) else {inner: value}
    return found


def _has_names(value: object) -> bool:
    """Whether a value is an object with its arguments, or objects by name."""
    inner = value.values() if isinstance(value, Mapping) else ()
    return isinstance(value, Namespace) or any(isinstance(one, Namespace) for one in inner)
