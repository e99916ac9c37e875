"""The command line: fit, validate and test from YAML, with each mistake reported in one line."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import lightning
import lightning.pytorch as pl
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_spectral import (
    algorithms,
    client,
    designs,
    filters,
    participation,
    partition,
    server,
    sharding,
    simulation,
)
from lightning_spectral.arguments import MOST_NAMES
from lightning_spectral.errors import warn
from lightning_spectral.plugin import callbacks
from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.checkpoint_files import ARGUMENTS, check_loadable
from lightning_spectral.plugin.data import FederatedDataModule, MultiModelDataModule
from lightning_spectral.plugin.hooks import FederatedHooks
from lightning_spectral.plugin.module import MOVED, FederatedModule, MultiModelModule

# How lines of jsonargparse's messages begin that only say what it has tried.
TRIED = (
    *("Subtypes: ", "Errors:", "Given value", "Does not validate", "Problem with given class_path"),
    *("Expected a path but", "Expected a <class 'NoneType'>", "Option 'models.", "Option 'modules."),
)
TYPE, GIVEN = "Expected a ", "Given value: "  # a line for each type that would do, and for what was given
OWN = str(Path(__file__).parents[1]) + os.sep
LIGHTNING, JSONARGPARSE = (os.path.dirname(str(package.__file__)) + os.sep for package in (lightning, jsonargparse))


class FederatedCLI(LightningCLI):
    """LightningCLI for a federation of one model or of several; needs jsonargparse, the ``cli`` extra.

    ``model`` and ``data`` take the arguments of `FederatedModule` and `FederatedDataModule`, or those of
    `MultiModelModule` and `MultiModelDataModule`, or a ``class_path`` of a subclass with its ``init_args``.

    Args:
        args: Arguments, as on the command line or as a mapping; ``None`` for those of the command line.
        **options: As for LightningCLI. ``seed_everything`` is 0 by default, so that runs are repeatable.
    """

    def __init__(self, args: ArgsType = None, **options: Any) -> None:
        defaults = {"seed_everything_default": 0, "auto_configure_optimizers": False, "parser_class": OneLineParser}
        # the common base, whose subclasses remember what they were built from, for checkpoints
        super().__init__(FederatedHooks, subclass_mode_model=True, args=args, **{**defaults, **options})

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, without ``predict``: a federation's data module has no data for it."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def _parse_ckpt_path(self) -> None:
        """Take the federation's arguments from ``ckpt_path``, unless those given differ; there is no public hook.

        Lightning's own would take those of the user's module, which stand where any checkpoint has its arguments.
        """
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if not path:
            return
        is_elsewhere = "://" in path or path.startswith(("best", "last", "hpc", "registry"))
        if not is_elsewhere and not os.path.exists(path):
            raise ValueError(f"`ckpt_path`: there is no file {path}.")  # before anything is built from the config
        if not Path(path).is_file():
            return
        check_loadable(path)
        saved = torch.load(path, weights_only=True, map_location="cpu").get(ARGUMENTS, {})
        saved.pop("_instantiator", None)
        if not saved:
            return
        given = self.config[command].model.clone()
        # LightningCLI itself, which knows only one class, does not name it
        plain = f"{FederatedModule.__module__}.{FederatedModule.__name__}"
        model = {"class_path": saved.pop("_class_path", plain), "dict_kwargs": saved}
        self.config = self.parser.parse_object({command: {"model": model}}, self.config)
        report_differences(self.config[command].model, given, command)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        """Let every run keep its record, for a report; there is no public hook after the config's own callbacks."""
        if config.get("logger") is False:  # which would have a folder of its own for the config
            self.save_config_callback = None
        own = config.get("callbacks") or []
        if not any(isinstance(one, RoundHistory) for one in (own if isinstance(own, list) else [own])):
            callbacks = [*callbacks, RoundHistory()]
        trainer: pl.Trainer = super()._instantiate_trainer(config, callbacks)
        return trainer

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        models, data = (FederatedModule, MultiModelModule), (FederatedDataModule, MultiModelDataModule)
        parser.add_subclass_arguments(models, "model", fail_untyped=False, required=True)
        parser.add_subclass_arguments(data, "data", fail_untyped=False, required=True)


def report_differences(saved: Any, given: Any, command: str) -> None:
    """Compare the arguments of a checkpoint, which are used, with those in the config and on the command line.

    A fit is refused, like one from Python, because it would not continue that run. For other commands the model is that
    of the checkpoint, with a warning.
    """
    before, now = _flat(saved), _flat(given)
    if not (names := {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}):
        return
    outermost = sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))
    changed = [f"{name}: {before.get(name)!r} in the checkpoint, {now.get(name)!r} now" for name in outermost]
    listed = "\n  - ".join(["", *changed])
    if command == "fit":
        raise ValueError(
            "The checkpoint was written with another configuration, so this run would not continue it; "
            f"change it back, or start a new run without `ckpt_path`:{listed}"
        )
    warn(f"The checkpoint's model is used, not the one given, which differs:{listed}")


def _flat(arguments: Namespace | Mapping[str, Any], name: str = "model") -> dict[str, Any]:
    """Arguments by the names that they have on the command line, where nothing needs ``init_args``."""
    found: dict[str, Any] = {}
    for key, value in (vars(arguments) if isinstance(arguments, Namespace) else arguments).items():
        inner = name if key in ("init_args", "class_path") else f"{name}.{key}"
        parts = value.values() if isinstance(value, Mapping) else [value]  # one object, or several by name
        found |= _flat(value, inner) if any(isinstance(one, Namespace) for one in parts) else {inner: value}
    return found


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, which ends the process with one line in place of all options and a tree of types."""

    _config_file: object = None

    def parse_path(self, cfg_path: Any, *args: Any, **options: Any) -> Any:
        self._config_file = cfg_path
        return super().parse_path(cfg_path, *args, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Parse arguments; jsonargparse hands on a null within a class as the text None."""
        given = args and [f"{text[:-4]}null" if text.endswith("=None") else text for text in args]
        return super().parse_args(given, namespace, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with status 2; within a larger value, raise an error with the nearest key."""
        for before, after in (("ption '", "'"), ("unrecognized arguments: --", "=")):
            if before in message:
                key = message.partition(before)[2].partition(after)[0]
                message += f"; in Python: {MOVED[key]}" if key in MOVED else _nearest(key, _keys(self))
        if message.startswith(("Problems parsing config", "Unexpected config")):
            message = f"{self._config_file}: {' '.join(message.split())}"
        if not self.exit_on_error:
            super().error(message, ex)
        _exit(one_line(message))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Report an error in one line if it was raised on purpose, by this package or Lightning; others have a traceback.

    As for jsonargparse, ``JSONARGPARSE_DEBUG`` in the environment shows the traceback of all errors.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while _raised_in(cause, JSONARGPARSE) and cause.__cause__ is not None:
            cause = cause.__cause__
        line = traceback.extract_tb(cause.__traceback__)[-1].line or ""
        reads_arguments = any(_raised_in(cause, folder) for folder in (OWN, LIGHTNING, JSONARGPARSE))
        is_of_a_round = isinstance(cause, RuntimeError) and _raised_in(cause, OWN)  # a round or a client failed
        if not line.startswith("raise ") or not reads_arguments or is_of_a_round or "JSONARGPARSE_DEBUG" in os.environ:
            raise
        if _raised_in(error, JSONARGPARSE):
            _exit(one_line(str(error)))
        _exit(" ".join(str(error).replace(":\n  - ", ": ").replace("\n  - ", "; ").split()))


def one_line(message: str) -> str:
    r"""The innermost line of a message of jsonargparse, after the key that it is about.

    Example:
        >>> one_line("Parser key \"model\":\n  Errors:\n    - Parser key \"seed\":\n        Expected a <class 'int'>")
        "model.seed: Expected a <class 'int'>"
    """
    lines = [(len(line) - len(text), text) for line in message.splitlines() if (text := line.lstrip(" -"))]
    if not (causes := [number for number, (_, text) in enumerate(lines) if not text.startswith(TRIED)]):
        return " ".join(message.split())
    first = max(causes, key=lambda number: lines[number][0])
    depth, said = lines[first]
    if said.startswith(TYPE):
        said = "; ".join(dict.fromkeys(text for above, text in lines if above == depth and text.startswith(TYPE)))
    keys = []
    for above, text in reversed(lines[:first]):
        if above < depth:
            depth = above
            keys += text.split('"')[1:2] if text.startswith("Parser key") else []
    if found := re.search(r"Expected a dot import path string: (\w+)(;|$)", said):
        said = f"There is no class {found[1]!r}{_nearest_class(keys[0] if keys else '', found[1])}"
    elif said.endswith("is abstract"):
        said = f"Name a class first{_nearest_class(keys[0], '?')}"
    elif said.startswith(f"{TYPE}<class") and "Got value" not in said:
        said += next((f". Got value: {own.removeprefix(GIVEN)}" for _, own in lines if own.startswith(GIVEN)), "")
    said += "; write a list, as in [TopK]" if "abc.Sequence'>" in said else ""
    return ": ".join(filter(None, (".".join(reversed(keys)), said)))


KINDS = {
    "algorithm": algorithms.Algorithm,
    "callbacks": pl.Callback,
    "design": designs.Design,
    "filters": filters.Filter,
    "logger": pl.loggers.Logger,
    "participation": participation.Sampler,
    "partitioner": partition.Partitioner,
    "server_optimizer": server.optimizers.FedOptimizer,
    "strategy": sharding.ShardingStrategy,
}


def _nearest_class(key: str, given: str) -> str:
    """Suggest a class for an unknown name, preferably one that begins with it; otherwise list all that fit.

    Example:
        >>> _nearest_class("partitioner", "Dirichle"), _nearest_class("strategy", "FedAvg")
        ("; did you mean 'DirichletPartitioner'?", '; choose from Collective, EffectiveCohort, PriSM, ...')
    """
    given, kind = given.casefold(), KINDS.get(key, object)
    rooms = algorithms, callbacks, client, designs, filters, participation, partition, server, sharding, simulation
    found = {name: getattr(room, name) for room in (*rooms, pl.callbacks, pl.loggers) for name in room.__all__}
    classes = {name: one for name, one in found.items() if isinstance(one, type) and one is not kind}
    known = {name.casefold(): name for name, one in classes.items() if issubclass(one, kind)}
    begun = [name for name in sorted(known) if name.startswith(given)]
    close = begun or difflib.get_close_matches(given, sorted(known), 1)
    if close:
        return f"; did you mean {known[close[0]]!r}?"
    return f"; choose from {', '.join(sorted(known.values()))}" if len(known) <= MOST_NAMES else ""


def _nearest(key: str, known: Sequence[str]) -> str:
    """Suggest the intended key; any part between dots may be misspelt."""
    for place, part in enumerate(key.split(".")):
        before = key.split(".")[:place]
        names = {one.split(".")[place] for one in known if one.split(".")[:place] == before and one.count(".") >= place}
        if part not in names:
            close = difflib.get_close_matches(part, names, 1)
            return f"; did you mean {close[0]!r}?" if close else ""
    return ""


def _keys(parser: Any) -> list[str]:
    found = []
    for action in parser._actions:  # there is no public way to ask
        found.append(action.dest)
        if isinstance(action.choices, Mapping):
            found += [key for subcommand in action.choices.values() for key in _keys(subcommand)]
    return found


def _raised_in(error: BaseException, folder: str) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(folder)


def _exit(line: str) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
