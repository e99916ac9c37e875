"""The settings of a run: fixed once it is built from them, shown to loggers, and compared when it is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities.parsing import is_picklable

from lightning_spectral.errors import refuse_moved
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.server.processes import Processes

TRAINER_SETTINGS = ("limit_train_batches", "overfit_batches", "precision")
MAX_ITEMS = 8  # of a sequence that is shown item by item
MAX_TEXT = 200


class FixedArguments:
    """A base class that says where misplaced arguments belong, and refuses new values for those that it has used."""

    moved: ClassVar[Mapping[str, str]] = MappingProxyType({})  # arguments that belong elsewhere, or have other names
    _fixed: frozenset[str] = frozenset()

    def __new__(cls, *args: Any, **options: Any) -> FixedArguments:
        refuse_moved(cls, options, cls.moved)
        return super().__new__(cls)

    def _fix(self, names: Iterable[str]) -> None:
        """Refuse new values for these arguments from now on."""
        self._fixed = self._fixed.union(names)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed:
            kind = type(self).__name__
            raise AttributeError(
                f"`{name}` cannot be changed in a {kind} that is already built from it; make a new one: "
                f"{kind}(..., {name}=...)."
            )
        super().__setattr__(name, value)


class Hparams(AttributeDict):
    """The hyper-parameters of a federation, which say where those of the user's module are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"The federation has no hyper-parameter {name!r}; those of your own module are "
                "`pl_module.module.hparams`."
            ) from None


def config_of(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """The named attributes of an object, each by `as_config`."""
    return {name: as_config(getattr(owner, name)) for name in names}


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
        entries = [as_config(entry) for entry in value]
        is_plain = not any(isinstance(entry, dict) for entry in entries)  # loggers do not flatten lists
        return entries if is_plain else {str(position): entry for position, entry in enumerate(entries)}
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(getattr(value, "__qualname__", value))
    kind: Any = type(value)
    if kind.__repr__ is object.__repr__:  # contains an address, which differs from run to run
        return str(kind.__qualname__)
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def check_checkpoint(checkpoint: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written by a run of the same configuration.

    Settings of the Trainer are compared if both have them: quick tries (``fast_dev_run``) do not.
    """
    if (saved := checkpoint.get("federation")) is None:
        raise ValueError(
            "The checkpoint was not written by a FederatedModule; to start from its weights, load them into your "
            "module first: module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])."
        )
    uncompared = set(TRAINER_SETTINGS) - (saved.keys() & configuration.keys())
    changed = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {configuration.get(name)!r} now"
        for name in {**configuration, **saved}
        if name not in uncompared and saved.get(name) != configuration.get(name)
    ]
    if changed:
        raise ValueError(
            "The checkpoint was written with another configuration, so this run would not continue it; "
            "change it back, or start a new run from the weights:\n  - " + "\n  - ".join(changed)
        )


def check_same_everywhere(processes: Processes, configuration: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, in every process, unless all of them have the same configuration."""
    gathered = processes.gather(dict(configuration))
    different = [
        f"{name}: {value!r} in process 0, {other[name]!r} in process {rank}"
        for rank, other in enumerate(gathered)
        for name, value in gathered[0].items()
        if other[name] != value
    ]
    if different:
        raise ValueError(
            "The processes are set up for different runs; give them the same arguments, data and seeds:\n  - "
            + "\n  - ".join(different)
        )
