"""A checkpoint holds whole rounds of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_checkpoint(checkpoint: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Refuse to resume a run as another one.

    Raises:
        ValueError: If the checkpoint was not written by a federated run, or names another configuration.
    """
    saved = checkpoint.get("federation")
    if saved is None:
        raise ValueError(
            "The checkpoint was not written by a FederatedModule; to start from its weights, load them into your "
            "module first: module.load_state_dict(torch.load(path)['state_dict'])."
        )
    changed = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in configuration.items()
        if saved.get(name) != value
    ]
    if changed:
        raise ValueError(
            "The checkpoint is of another configuration, so resuming it would be neither run; "
            "change it back, or start a new run from the weights:\n  - " + "\n  - ".join(changed)
        )


def rewind_open_round(checkpoint: dict[str, Any]) -> None:
    """Make a checkpoint that is written within a round say that the round has not begun.

    The server's weights change only when a round closes, and what clients sent so far is not saved; so resuming
    repeats the round from its first client. The progress is written as Lightning writes it at the end of an epoch.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for counts in (progress["total"], progress["current"]):
        finished = counts["processed"]
        counts.update(ready=finished, started=finished, completed=max(finished - 1, 0))
