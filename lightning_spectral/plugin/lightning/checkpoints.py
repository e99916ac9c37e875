"""Checks that a checkpoint fits the run, and makes it hold whole rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

TRAINER_SETTINGS = ("limit_train_batches", "overfit_batches", "precision")


def check_checkpoint(checkpoint: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written by a run of the same configuration.

    Settings of the Trainer are compared if both have them: quick tries (``fast_dev_run``) do not.
    """
    saved = checkpoint.get("federation")
    if saved is None:
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
            "The checkpoint was written with another configuration, so resuming would continue neither run; "
            "change it back, or start a new run from the weights:\n  - " + "\n  - ".join(changed)
        )


def settle_progress(checkpoint: dict[str, Any], *, round_is_over: bool, server_has_stepped: bool) -> None:
    """Make a checkpoint hold whole rounds, as if it had been written between two epochs.

    The server's weights change only when a round closes, and what clients have sent so far is not saved. An open round
    therefore counts as not begun, and is repeated from its first client. A round in which the server has stepped, but
    whose validation or epoch has not ended, counts as not begun either: `finish_epoch` then does the rest of it.
    """
    progress = checkpoint["loops"]["fit_loop"]
    epochs, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    steps = progress["epoch_loop.manual_optimization.optim_step_progress"]["total"]
    for counts in (epochs["total"], epochs["current"]):
        finished = counts["processed"] if round_is_over else counts["completed"]
        counts.update(ready=finished, started=finished, processed=finished, completed=finished)
    if not round_is_over:
        for name, count in batches["current"].items():
            batches["total"][name] -= count
        if server_has_stepped:
            steps.update({name: count - 1 for name, count in steps.items()})
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    progress["epoch_loop.state_dict"]["_batches_that_stepped"] = steps["completed"]


def described(server_optimizer: Any) -> str:
    """Describe the server optimizer with its settings, except those of a function, which are not visible."""
    if server_optimizer is None or is_dataclass(server_optimizer):
        return repr(server_optimizer)
    return "a function, whose settings are not compared"
