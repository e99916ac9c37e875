"""A run of a sweep, in the process that does many of them: its config, checked and resolved, and its training."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.cli.command import FederatedCLI
from lightning_spectral.plugin.cli.errors import explained, one_line
from lightning_spectral.sweep.plan import SEED, PlannedRun
from lightning_spectral.sweep.run_folder import RunFolder


class Checked(NamedTuple):
    """A config with all its defaults, or what is wrong with it."""

    config: str
    mistake: str = ""


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last round; a class of its own, beside which a config may have any `ModelCheckpoint`."""


class _ConfigOnly(FederatedCLI):
    """A command line that is only parsed."""

    def __init__(self, given: Sequence[str], run: PlannedRun) -> None:
        self.planned = run
        arguments = [*given, *run.arguments, *([] if run.seed is None else [f"--seed_everything={run.seed}"])]
        super().__init__(arguments, run=False, save_config_callback=None, parser_kwargs={"exit_on_error": False})

    def parse_arguments(self, parser: Any, args: Any) -> None:
        super().parse_arguments(parser, args)
        if self.planned.seed is not None and not any(
            text.startswith("--model.seed=") for text in self.planned.arguments
        ):
            set_seed(self.config.model.init_args, self.planned.seed)

    def instantiate_classes(self) -> None:
        """Nothing is built."""


class _Training(_ConfigOnly):
    """A command line whose Trainer keeps its record and its last round in the run's folder."""

    def __init__(self, given: Sequence[str], run: PlannedRun, folder: RunFolder) -> None:
        self.folder = folder
        super().__init__(given, run)

    def instantiate_classes(self) -> None:
        FederatedCLI.instantiate_classes(self)

    def instantiate_trainer(self, **options: Any) -> Trainer:
        own = self.config_init.trainer.callbacks or []
        listed: list[Callback] = list(own) if isinstance(own, Sequence) else [own]
        kept = [callback for callback in listed if not isinstance(callback, ProgressBar)]  # nobody would see its bars
        history = next((one for one in kept if isinstance(one, RoundHistory)), None) or RoundHistory()
        seeds = {} if self.planned.seed is None else {SEED: self.planned.seed}
        history.path, history.config = self.folder.rounds, {"sweep": {**dict(self.planned.choices), **seeds}}
        watching = [] if history in kept else [history]
        last = LastCheckpoint(self.folder.path, "last", enable_version_counter=False)
        return super().instantiate_trainer(
            logger=CSVLogger(self.folder.path, name=""),
            callbacks=[*kept, *watching, last],
            default_root_dir=self.folder.path,
            enable_checkpointing=True,
            enable_progress_bar=False,
            **options,
        )


def set_seed(model: Namespace, seed: int) -> None:
    """Set the seed of a federation's own draws, and of each of its models, where they take one."""
    models = model.get("models") or {}
    for part in (model, *(vars(models) if isinstance(models, Namespace) else models).values()):
        arguments = part.get("init_args", part)
        if SEED in arguments:
            arguments[SEED] = seed


def checked(given: Sequence[str], run: PlannedRun) -> Checked:
    """Parse a run's settings; nothing is built yet."""
    with output_to(Path(os.devnull)):
        try:
            cli = _ConfigOnly(given, run)
            return Checked(cli.parser.dump(cli.config, skip_none=False))
        except (Exception, SystemExit) as error:
            return Checked("", reason(error))


def train(given: Sequence[str], run: PlannedRun, path: Path) -> str:
    """Train a run, from its checkpoint if it has one, until it is finished.

    Returns:
        Why it failed, in one line; empty if it is finished.
    """
    folder, began = RunFolder(path), time.monotonic()
    with output_to(folder.output), warnings.catch_warnings():  # so that each run has its own warnings once
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        try:
            folder.finish(_fit(given, run, folder), time.monotonic() - began)
            return ""
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return reason(error)
        finally:
            gc.collect()  # the Trainer and the model refer to each other


def _fit(given: Sequence[str], run: PlannedRun, folder: RunFolder) -> int:
    """Fit, and return the number of rounds."""
    cli = _Training(given, run, folder)
    start = str(folder.checkpoint) if folder.checkpoint.is_file() else None
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=start)
    return int(cli.trainer.current_epoch)


def reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, ArgumentError):  # of jsonargparse
        return one_line(str(error))
    own = explained(error) if isinstance(error, Exception) else None
    return own or " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append what this process prints in the block, also from other languages, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = [os.dup(stream.fileno()) for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    with path.open("a") as file:
        try:
            _redirect([file.fileno()] * len(before))
            yield
        finally:
            _redirect(before)
            for one in before:
                os.close(one)


def _redirect(targets: Sequence[int]) -> None:
    for number, target in enumerate(targets, start=1):
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(target, number)
