"""What the first rounds show of mistakes: large updates, and layers that no client's gradient reaches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.client.training_checks import WATCHED_ROUNDS
from lightning_spectral.errors import SpectralWarning
from lightning_spectral.nn.batch_norm import layers_with_averages
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary
from lightning_spectral.server.losses import Losses, smaller_updates
from lightning_spectral.server.metrics import mean_loss


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


ROUNDS_OF_UPDATES = 10
LARGEST_UPDATE = 10.0  # in units of the tensor's own norm
LEAST_ENTRY = 1e-3  # root mean square: weights that start at zero may grow by any factor


class FirstRounds:
    """Watches the first rounds of one fit, and warns at most once for each reason.

    Args:
        warns: Whether this process warns; one of several is enough, because all of them see the same rounds.
        unreached: Layers that no client had given a gradient before the checkpoint from which the run is resumed;
            ``None`` if it is not resumed, or no client had trained.
        averages_may_rest: Whether BatchNorm's running averages may stay unchanged in a round in which clients trained.
    """

    def __init__(
        self, warns: bool = True, unreached: Collection[str] | None = None, averages_may_rest: bool = False
    ) -> None:
        self._warns = warns
        self._averages_are_watched = warns and not averages_may_rest
        self._discards_are_watched = self._attributes_are_watched = warns
        self._losses = Losses()
        self._update_is_watched = warns
        self._unreached = UnreachedLayers(unreached)
        self._last_watched = -1

    def begin(self, opened: Round, round_idx: int) -> None:
        """Pass on what the algorithm finds wrong with its first round, before any client trains."""
        if self._warns and round_idx == 0:
            for message in opened.advice(Moment.BEFORE_TRAINING):
                _warn(round_idx, message)

    def end(self, half: ServerHalf, summary: RoundSummary) -> None:
        """Check a closed round, before the server's step, and pass on what the algorithm finds wrong with the first.

        Args:
            half: The server's half; the gradients of its module are the pseudo-gradients.
            summary: The round.
        """
        server = half.server
        has_trained = any(client.num_steps for client in summary.averaged)
        if self._warns and summary.round_idx == 0 and has_trained:
            for message in half.advice(Moment.AFTER_TRAINING, summary):
                _warn(summary.round_idx, message)
        if self._update_is_watched and summary.round_idx < ROUNDS_OF_UPDATES:
            self._look_at_update(half, summary.round_idx)
        if self._warns and not self._losses.is_over:
            self._look_at_loss(half, mean_loss(summary), summary.round_idx)
        if self._averages_are_watched and has_trained:
            self._averages_are_watched = False
            if summary.round_idx == 0 and (layers := untouched_averages(server)):
                _warn(summary.round_idx, _no_averages(layers))
        if self._discards_are_watched and (names := sorted({n for c in summary.clients for n in c.discarded})):
            self._discards_are_watched = False
            _warn(summary.round_idx, _lost_changes(names))
        if self._attributes_are_watched and (names := sorted({n for c in summary.clients for n in c.put_back})):
            self._attributes_are_watched = False
            _warn(summary.round_idx, _put_back(names))
        if summary.round_idx < WATCHED_ROUNDS:
            self._unreached.note(summary.clients)
            self._unreached.remedy = ", or ".join(half.advice(Moment.UNUSED_LAYERS))
            self._last_watched = summary.round_idx
            if summary.round_idx == WATCHED_ROUNDS - 1:
                self._say_what_is_unreached()

    def finish(self) -> None:
        """Give the warnings that remain when a fit ends, perhaps before the first rounds are over."""
        if 0 <= self._last_watched < WATCHED_ROUNDS - 1:
            self._say_what_is_unreached()

    def _say_what_is_unreached(self) -> None:
        if self._warns and (message := self._unreached.warning()):
            _warn(self._last_watched, message)

    @property
    def unreached(self) -> list[str] | None:
        """The layers that no client has given a gradient, for a checkpoint; ``None`` once watching has ended."""
        return self._unreached.names if self._last_watched < WATCHED_ROUNDS - 1 else None

    def _look_at_update(self, half: ServerHalf, round_idx: int) -> None:
        ratio, name = max(relative_updates(half.server), default=(0.0, ""))
        if ratio > LARGEST_UPDATE:
            self._update_is_watched = False
            _warn(round_idx, _huge_update(ratio, name, smaller_updates(half)))

    def _look_at_loss(self, half: ServerHalf, loss: float, round_idx: int) -> None:
        if message := self._losses.note(half, loss, round_idx):
            _warn(round_idx, message)


@torch.no_grad()
def relative_updates(server: nn.Module) -> Iterator[tuple[float, str]]:
    """Yield the norm of each weight's pseudo-gradient, relative to the weight's own norm, and the weight's name.

    Biases, scales and other vectors are left out, and so are weights that are nearly zero, because these may grow many
    times over in a healthy round. All norms are read from the device at once.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.data, layer.weight.grad = torch.tensor([[2.0]]), torch.tensor([[-6.0]])
        >>> list(relative_updates(layer))
        [(3.0, 'weight')]
    """
    pairs = [(name, p, p.grad) for name, p in server.named_parameters() if p.grad is not None and p.ndim > 1]
    if pairs:
        names, weights, updates = zip(*pairs, strict=True)
        norms = torch.stack(torch._foreach_norm([*weights, *updates])).view(2, -1)
        for name, weight, size, change in zip(names, weights, *norms.tolist(), strict=True):
            if size > LEAST_ENTRY * math.sqrt(weight.numel()):
                yield change / size, name


def untouched_averages(server: nn.Module) -> list[str]:
    """Names of the normalisation layers whose running averages are as they were built, 0 and 1.

    Example:
        >>> untouched_averages(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)))
        ['0']
    """
    return [
        name
        for name, layer in layers_with_averages(server).items()
        if layer.running_mean is not None
        and layer.running_var is not None
        and not bool(layer.running_mean.any())
        and bool((layer.running_var == 1).all())
    ]


def _no_averages(layers: list[str]) -> str:
    return (
        f"the running averages of {', '.join(layers)} are still 0 and 1, as they were built, and evaluation reads "
        "them. Let the callback BatchNormEstimation estimate them, or average those of the clients: take them out of "
        "`buffers`, or with LoRA name their layers in `train`."
    )


def _lost_changes(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"clients change {shown} without an optimizer, as one does with a teacher, a target network or an average of "
        "weights, and these changes are lost. To send them back and average them, call `requires_grad_(False)` on "
        "that module, and name it in an attribute of your LightningModule: `averaged_parameters = ['teacher.*']`; or "
        "update it at the server, in `RoundCallback.on_round_end`."
    )


def _put_back(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"clients change {shown}, which are no parameters and no buffers, so every client begins with the server's "
        "values, and these changes are lost. For what is to last, register a buffer, and say how those of clients are "
        "combined, e.g. FedAvg(buffers={'steps': 'max'}); or change it at the server, in `on_validation_epoch_end` or "
        "`RoundCallback.on_round_end`."
    )


def _huge_update(ratio: float, name: str, remedies: str) -> str:
    return (
        f"the clients' mean update of {name!r} is {ratio:.3g} times as large as the tensor itself (Frobenius norms) "
        f"and overwhelms it. {remedies}."
    )


def _warn(round_idx: int, what: str) -> None:
    warnings.warn(f"Round {round_idx}: {what}", SpectralWarning, stacklevel=4)
