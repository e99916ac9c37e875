"""The settings of a run as plain nested dictionaries, by which loggers filter and group runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.parsing import is_picklable

from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.plugin.data.server_data import ServerData

MAX_ITEMS = 8  # of a sequence that is shown item by item
MAX_TEXT = 200


def config_of(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """The named attributes of an object, each by `as_config`."""
    return {name: as_config(getattr(owner, name)) for name in names}


def data_config(data: ServerData) -> dict[str, Any]:
    """The data settings of a run: how the data was dealt, and to how many clients."""
    return config_of(data, data.settings)


def shown_hparams(module: pl.LightningModule) -> dict[str, Any]:
    """The hyper-parameters of a user's module; those that cannot be pickled, which none keeps, as text."""
    return {name: value if is_picklable(value) else as_config(value) for name, value in module.hparams.items()}


def as_config(value: Any) -> Any:
    """A setting as numbers, strings, lists of these, and dictionaries that name every choice.

    - A dataclass becomes its class, under ``"name"``, and its fields.
    - A ``functools.partial`` becomes the name of its function and its keywords.
    - A mapping from names is converted value by value. A mapping from anything else, such as keep ratios, becomes a
      string: a single value to group by.
    - A sequence of choices becomes a dictionary by position; a long one becomes a truncated string.

    Example:
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> config = as_config(SpectralSharding(keep_ratio={0.2: 0.6, 0.4: 0.4}))
        >>> config["name"], config["strategy"], config["keep_ratio"]
        ('SpectralSharding', {'name': 'Collective', 'cohort': 'group'}, '{0.2: 0.6, 0.4: 0.4}')
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real):  # includes NumPy's scalars, which checkpoints cannot hold
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, ModulePlan):
        return as_config(value.choices)  # which determine the plan
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__, **config_of(value, [f.name for f in fields(value) if f.repr])}
    if isinstance(value, partial):
        return {"name": as_config(value.func), **{name: as_config(given) for name, given in value.keywords.items()}}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_config(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and len(value) <= MAX_ITEMS:
        return _short_sequence([as_config(entry) for entry in value])
    return _as_text(value)


def _short_sequence(entries: list[Any]) -> list[Any] | dict[str, Any]:
    """A list if the values are plain; otherwise a dictionary, since loggers do not flatten lists."""
    if any(isinstance(entry, dict) for entry in entries):
        return {str(position): entry for position, entry in enumerate(entries)}
    return entries


def _as_text(value: object) -> str:
    """The name of a class or function, the class of an object without a ``repr`` of its own, or the ``repr``."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(getattr(value, "__qualname__", value))
    if type(value).__repr__ is object.__repr__:  # contains an address, which differs from run to run
        return type(value).__qualname__
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
