"""One run of a sweep: its folder, its config, and its training, which has a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.cli import FederatedCLI, errors_in_one_line, one_line
from lightning_spectral.plugin.trainer import silence
from lightning_spectral.report.runs import NAME as RECORD
from lightning_spectral.sweep.plan import SEED, PlannedRun, SweepError

OWN_ARGUMENTS = "LightningCLI's args parameter is intended"  # its warning: this process has arguments too
# What is in a run's folder, beside its record: all settings, as `fit --config` takes them; what the run printed, with
# the traceback if it failed; the last round; and a file that exists once the run is finished.
CONFIG, OUTPUT, CHECKPOINT, FINISHED = "config.yaml", "output.txt", "last.ckpt", "finished"
MISSING = "nothing"
MAX_LISTED = 3  # differences in a message


def begin(folder: Path, config: str) -> None:
    """Keep a run's config; refuse a folder with other settings, and remove the record of a run without checkpoint."""
    if changed := differences(folder, config):
        raise SweepError(
            f"{folder} has a run with other settings: {'; '.join(changed)}. Change them back, or remove that folder, "
            "or choose another for this sweep with `-o`."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config, encoding="utf-8")
    if not (folder / CHECKPOINT).is_file() and not (folder / FINISHED).is_file():
        (folder / RECORD).unlink(missing_ok=True)


def differences(folder: Path, config: str) -> list[str]:
    """The settings in which the run that is already there differs from a config; none if there is no run."""
    if not (folder / CONFIG).is_file():
        return []
    there, now = (dict(_flat("", yaml.safe_load(text))) for text in ((folder / CONFIG).read_text("utf-8"), config))
    changed = [name for name in (*there, *(now.keys() - there.keys())) if there.get(name) != now.get(name)]
    listed = [f"{name} is {there.get(name, MISSING)} there, {now.get(name, MISSING)} now" for name in changed]
    more = [f"and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
    return [*listed[:MAX_LISTED], *more]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings by their names on the command line, which have no ``init_args``."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _flat(name if key in ("init_args", "class_path") else f"{name}.{key}".lstrip("."), below)
    if not inner:
        yield name, str(value)


class _ConfigOnly(FederatedCLI):
    """A command line that is only parsed."""

    def instantiate_classes(self) -> None: ...


def resolved(given: Sequence[str], run: PlannedRun) -> str:
    """A run's config with all its defaults, or a `SweepError` about its arguments; nothing is built yet."""
    seed = [] if run.seed is None else [f"--seed_everything={run.seed}"]
    options: dict[str, Any] = {"run": False, "save_config_callback": None, "parser_kwargs": {"exit_on_error": False}}
    try:
        with silence(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", OWN_ARGUMENTS)
            cli = _ConfigOnly([*given, *run.arguments, *seed], **options)
    except Exception as error:
        of_parser = isinstance(error, ArgumentError)
        raise SweepError(one_line(str(error)) if of_parser else f"{type(error).__name__}: {error}") from error
    if run.seed is not None and not any(text.startswith("--model.seed=") for text in run.arguments):
        model = cli.config.model.init_args
        models = model.get("models") or {}
        for part in (model, *(vars(models) if isinstance(models, Namespace) else models).values()):
            arguments = part.get("init_args", part)
            if SEED in arguments:  # of a federation's own draws, and of each of its models
                arguments[SEED] = run.seed
    return str(cli.parser.dump(cli.config, skip_none=False))


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last round; a class of its own, beside which a config may have any `ModelCheckpoint`."""


class _Training(FederatedCLI):
    """A command line whose Trainer keeps its record and its last round in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        super().__init__(["--config", str(folder / CONFIG)], run=False, save_config_callback=None)

    def instantiate_trainer(self, **options: Any) -> Trainer:
        own = self.config_init.trainer.callbacks or []
        listed: list[Callback] = list(own) if isinstance(own, Sequence) else [own]
        kept = [callback for callback in listed if not isinstance(callback, ProgressBar)]  # nobody would see its bars
        history = next((one for one in kept if isinstance(one, RoundHistory)), None) or RoundHistory()
        history.path, history.config = self.folder / RECORD, {"sweep": self.settings}
        last = LastCheckpoint(self.folder, Path(CHECKPOINT).stem, enable_version_counter=False)
        return super().instantiate_trainer(
            logger=CSVLogger(self.folder, name=""),
            callbacks=[*kept, *([] if history in kept else [history]), last],
            default_root_dir=self.folder,
            enable_checkpointing=True,
            enable_progress_bar=False,
            **options,
        )


def train(folder: Path, settings: Mapping[str, Any]) -> None:
    """Train a folder's run to its end, from its checkpoint if there is one; its ``settings`` are for the report."""
    for known in (OWN_ARGUMENTS, "Checkpoint directory .* exists and is not empty"):
        warnings.filterwarnings("ignore", known)
    cli = _Training(folder, settings)
    start = str(folder / CHECKPOINT) if (folder / CHECKPOINT).is_file() else None
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=start)
    (folder / FINISHED).touch()


def _end_with_sweep() -> None:
    """Kill this process and all that it has started as soon as the sweep closes the pipe, however the sweep ends."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # as a sweep starts it, in a session of its own
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    path, settings = sys.argv[1:]
    with errors_in_one_line():
        train(Path(path), json.loads(settings))
