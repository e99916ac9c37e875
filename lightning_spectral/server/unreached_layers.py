"""Sharded layers that no client gives a gradient, as seen over all clients of several rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_spectral.protocol.records import ClientOutcome


class UnreachedLayers:
    """The sharded layers that no client has given a gradient so far.

    One client alone says little: a router may send it to other experts, or a layer may be dropped at random.

    Args:
        names: The unreached layers of the rounds before a checkpoint; ``None`` if no client has trained yet.

    Attributes:
        names: Names of the layers, sorted; ``None`` if no client has trained yet.
        remedy: How the algorithm can leave them out; empty if it cannot.

    Example:
        >>> layers = UnreachedLayers(["experts.0", "experts.1"])
        >>> layers.warning()[:75]
        'no client has given a gradient to these sharded layers: experts.0, experts.'
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.names = None if names is None else sorted(names)
        self.remedy = ""

    def note(self, outcomes: Iterable[ClientOutcome]) -> None:
        """Record a round: a layer counts as reached if it was reached in at least one turn."""
        for outcome in outcomes:
            if outcome.unreached is not None:
                unreached = set(outcome.unreached)
                self.names = sorted(unreached if self.names is None else unreached & set(self.names))

    def warning(self) -> str:
        """The text of the warning; empty if there is nothing to warn of."""
        if not self.names:
            return ""
        remedy = f"{self.remedy}, or remove them" if self.remedy else "remove them"
        return (
            f"no client has given a gradient to these sharded layers: {', '.join(self.names)}. If `training_step` "
            f"never uses them, {remedy} from the module. If it does for other clients or in later rounds, as with "
            "experts or gradual unfreezing, nothing is wrong."
        )
