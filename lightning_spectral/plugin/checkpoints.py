"""Checks that a checkpoint fits the run, and makes it hold whole rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

TRAINER_SETTINGS = ("limit_train_batches", "overfit_batches", "precision")
DEFAULTS = {"drop_last": False}  # of settings that are missing in older checkpoints


def check_checkpoint(checkpoint: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written by a run of the same configuration.

    Settings of the Trainer are compared if both have them: older checkpoints and quick tries (``fast_dev_run``) do not.

    Raises:
        ValueError: If the checkpoint was not written by a federated run, or names another configuration.
    """
    saved = checkpoint.get("federation")
    if saved is None:
        raise ValueError(
            "The checkpoint was not written by a FederatedModule; to start from its weights, load them into your "
            "module first: module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])."
        )
    uncompared = set(TRAINER_SETTINGS) - (saved.keys() & configuration.keys())
    before = {name: DEFAULTS.get(name.rpartition(": ")[2]) for name in configuration} | saved
    changed = [
        f"{name}: {value!r} in the checkpoint, {configuration.get(name)!r} now"
        for name, value in before.items()
        if name not in uncompared and value != configuration.get(name)
    ]
    if changed:
        raise ValueError(
            "The checkpoint is of another configuration, and resuming it would continue neither run; "
            "change it back, or start a new run from the weights:\n  - " + "\n  - ".join(changed)
        )


def settle_progress(checkpoint: dict[str, Any], *, round_is_open: bool) -> None:
    """Make a checkpoint written within an epoch hold whole rounds, like one written at the end of an epoch.

    The server's weights change only when a round closes, and what clients have sent so far is not saved. An open round
    therefore counts as not begun, and is repeated from its first client. A checkpoint from the end of the last client's
    batch already has the round's result: that round is over, and resuming begins the next one.
    """
    progress = checkpoint["loops"]["fit_loop"]
    batches = progress["epoch_loop.batch_progress"]["current"]
    if not round_is_open and batches["completed"] == batches["ready"]:
        return  # between batches, or after validation: Lightning resumes there itself
    for counts in (progress["epoch_progress"]["total"], progress["epoch_progress"]["current"]):
        finished = counts["processed"] + (0 if round_is_open else 1)
        counts.update(ready=finished, started=finished, processed=finished, completed=max(finished - 1, 0))


def fit_slots(checkpoint: dict[str, Any], num_slots: int) -> None:
    """Adapt the progress of a finished round to this run's number of slots, which depends on the processes."""
    if "loops" not in checkpoint:
        return  # weights only: Lightning reports what is missing
    current = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    if current["completed"] == checkpoint.get("federation_slots"):
        current.update(ready=num_slots, started=num_slots, processed=num_slots, completed=num_slots)


def described(server_optimizer: Any) -> str:
    """Describe the server optimizer with its settings, except those of a function, which are not visible."""
    if server_optimizer is None or is_dataclass(server_optimizer):
        return repr(server_optimizer)
    return "a function, whose settings are not compared"
