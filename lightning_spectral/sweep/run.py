"""One run of a sweep: its folder, its config, and its training, which has a process of its own."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.cli import FederatedCLI, errors_in_one_line, one_line
from lightning_spectral.plugin.trainer import silence
from lightning_spectral.report.runs import NAME as RECORD
from lightning_spectral.sweep.clients import compare_clients
from lightning_spectral.sweep.plan import CHECKPOINT, CONFIG, FINISHED, SEED, LastCheckpoint, PlannedRun, SweepError

FEDERATED, COMPARED = "federated", "compared"  # a model of a comparison, and a file that exists once it is finished
OWN_ARGUMENTS = "LightningCLI's args parameter is intended"  # its warning: this process has arguments too


def resolved(given: Sequence[str], run: PlannedRun) -> str:
    """A run's config with all its defaults, or a `SweepError` about its arguments; nothing is built yet."""

    class ConfigOnly(FederatedCLI):
        def instantiate_classes(self) -> None: ...

    seed = [] if run.seed is None else [f"--seed_everything={run.seed}"]
    options: dict[str, Any] = {"run": False, "save_config_callback": None, "parser_kwargs": {"exit_on_error": False}}
    try:
        with silence(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", OWN_ARGUMENTS)
            cli = ConfigOnly([*given, *run.arguments, *seed], **options)
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


def train(folder: Path, settings: Mapping[str, Any], ends: bool = False) -> None:
    """Train a folder's run to its end, from its checkpoint if there is one, or compare it with the ``ends``.

    Its ``settings`` are for the report.
    """
    for known in (OWN_ARGUMENTS, "Checkpoint directory .* exists and is not empty"):
        warnings.filterwarnings("ignore", known)

    class Training(FederatedCLI):
        """A command line whose Trainer keeps its record and its last round in the run's folder."""

        def instantiate_trainer(self, **options: Any) -> Trainer:
            own = self.config_init.trainer.callbacks or []
            listed: list[Callback] = list(own) if isinstance(own, Sequence) else [own]
            kept = [one for one in listed if not isinstance(one, ProgressBar)]  # nobody would see its bars
            history = next((one for one in kept if isinstance(one, RoundHistory)), None) or RoundHistory()
            history.path, history.config = folder / RECORD, {"sweep": settings}
            last = LastCheckpoint(folder, Path(CHECKPOINT).stem, enable_version_counter=False)
            return super().instantiate_trainer(
                logger=CSVLogger(folder, name=""),
                callbacks=[*kept, *([] if history in kept else [history]), last],
                default_root_dir=folder,
                enable_checkpointing=True,
                enable_progress_bar=False,
                **options,
            )

    cli = Training(["--config", str(folder / CONFIG)], run=False, save_config_callback=None)
    if ends:
        _compare(cli, folder, settings)
        return
    start = str(folder / CHECKPOINT) if (folder / CHECKPOINT).is_file() else None
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=start)
    (folder / FINISHED).touch()


def _compare(cli: FederatedCLI, folder: Path, settings: Mapping[str, Any]) -> None:
    """Compare the run with the two ends, on clients' held-out examples."""

    def federate(module: LightningModule) -> Any:
        model = copy.deepcopy(cli.model)
        model.module.load_state_dict(module.state_dict())
        return model

    given = vars(cli.config_init.trainer).items()
    options = {name: value for name, value in given if value is not None and name != "default_root_dir"}
    compare_clients(
        lambda: copy.deepcopy(cli.model.module),
        cli.datamodule,
        folder,
        trainer={**options, "logger": True},
        federated={FEDERATED: federate},
        leave_out=False,
        settings=settings,
        seed=cli.config.seed_everything,
    )
    (folder / COMPARED).touch()


def _end_with_sweep() -> None:
    """Kill this process and all that it has started as soon as the sweep closes the pipe, however the sweep ends."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # as a sweep starts it, in a session of its own
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    path, settings, *ends = sys.argv[1:]
    with errors_in_one_line():
        train(Path(path), json.loads(settings), bool(ends))
