"""What a run tells its user: what the first rounds and losses show of mistakes, and weights that are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import nn

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.client.device import WATCHED_ROUNDS
from lightning_spectral.errors import RoundError, SpectralWarning
from lightning_spectral.nn.torch_modules import layers_with_averages
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary
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


ROUNDS_OF_EXPLOSIONS = 20
LARGEST_GROWTH = 3.0  # of the loss, relative to the first round
LEAST_LOSS = 1e-2  # below this, and for negative losses, the ratio of two losses says little
EARLY, LATE = range(5, 10), range(25, 30)  # rounds whose mean losses are compared
FLAT = 0.9  # of the early loss
HALF = 0.5  # of the first loss: below it a run has learned, and may have converged
CLIP = "clip gradients with `local_hooks=[GradientClip(...)]`"


class Losses:
    """Watches the losses of the first rounds of one fit; warns at most once.

    Attributes:
        is_over: Whether nothing more is to be noted.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._losses: dict[int, float] = {}  # the finite ones by round

    def note(self, half: ServerHalf, loss: float, round_idx: int) -> str:
        """Record a round, and return a warning for the user; mostly empty.

        Args:
            half: The server's half, which knows the remedies of its algorithm.
            loss: The mean training loss; NaN if nobody trained.
            round_idx: The index of the round.
        """
        if round_idx < LATE.stop and math.isfinite(loss):
            self._losses[round_idx] = loss
            begin, first = next(iter(self._losses.items()))
            if round_idx < ROUNDS_OF_EXPLOSIONS and has_exploded(loss, first):
                self.is_over = True
                return _explosion(loss, begin, first, smaller_updates(half))
        self.is_over = round_idx >= LATE[-1]
        return self._plateau(half) if self.is_over else ""

    def _plateau(self, half: ServerHalf) -> str:
        remedy = ", or ".join(half.advice(Moment.FLAT_LOSSES))
        first, early, late = next(iter(self._losses.values()), math.nan), self._mean(EARLY), self._mean(LATE)
        if not remedy or not stays_flat(first, early, late):
            return ""
        return (
            f"the training loss has hardly fallen since rounds {EARLY[0]} to {EARLY[-1]}: {late:.3g} now, {early:.3g} "
            f"then. If the validation metrics do not improve either, {remedy}."
        )

    def _mean(self, rounds: range) -> float:
        """The mean loss of some rounds; NaN if nobody trained in any of them."""
        found = [self._losses[round_idx] for round_idx in rounds if round_idx in self._losses]
        return fmean(found) if found else math.nan


def has_exploded(loss: float, first: float) -> bool:
    """Whether a loss is finite and far above the first one; never true if the first was negative or nearly zero.

    Example:
        >>> has_exploded(9.0, 2.0), has_exploded(5.0, 2.0), has_exploded(5.0, -2.0), has_exploded(float("nan"), 2.0)
        (True, False, False, False)
    """
    return first >= LEAST_LOSS and LARGEST_GROWTH * first < loss < math.inf


def stays_flat(first: float, early: float, late: float) -> bool:
    """Whether losses have hardly fallen since the first few rounds; never true if one of them is unknown.

    The first few rounds do not count: in them clients learn to predict their few labels, even if the network learns
    nothing else.

    Args:
        first: Loss of the first round.
        early: Mean of a few rounds soon after; NaN for none, as in a run that was resumed later.
        late: Mean of a few rounds at the end.

    Example:
        >>> stays_flat(2.3, 2.3, 2.3), stays_flat(2.3, 0.4, 0.4), stays_flat(2.3, float("nan"), 2.3)
        (True, False, False)
    """
    return first >= LEAST_LOSS and max(FLAT * early, HALF * first) < late <= LARGEST_GROWTH * early


def smaller_updates(half: ServerHalf) -> str:
    """What the user can do about updates that are too large, as a sentence without its full stop.

    Example:
        >>> from torch import nn
        >>> from lightning_spectral.algorithms import FedAvg
        >>> smaller_updates(FedAvg().bind(nn.Linear(1, 1)))
        'Lower the learning rate, or clip gradients with `local_hooks=[GradientClip(...)]`'
    """
    *first, last = ["Lower the learning rate", CLIP, *half.advice(Moment.LARGE_UPDATES)]
    return f"{', '.join(first)}, or {last}"


def _explosion(loss: float, first_round: int, first: float, remedies: str) -> str:
    return (
        f"the training loss is {loss:.3g}, {loss / first:.3g} times that of round {first_round} ({first:.3g}). "
        f"{remedies}. Where rounds have few clients whose data differ much, look at the validation loss first."
    )


_NAMED = 3  # tensors that a message names; in a run that has diverged, all are broken


def check_weights(server: nn.Module, round_idx: int, cause: Exception | None = None) -> None:
    """Raise an error if the server's weights are not finite.

    This reads every weight, so it is called only after something else has gone wrong. Buffers are not checked:
    attention masks and running limits are infinite by design.

    Args:
        server: The server's module.
        round_idx: The round that trains from these weights, from 0.
        cause: What went wrong.

    Raises:
        RoundError: If a parameter holds a NaN, or a trainable one an infinite value. All processes raise it, since they
            have the same weights.
    """
    if broken := [name for name, parameter in server.named_parameters() if _is_broken(parameter)]:
        raise RoundError(
            f"Round {round_idx}: the server's weights were not finite before it began: {_listed(broken)} had a NaN or "
            f"an infinite value, so no client can train from them. {_suspects(round_idx)}"
        ) from cause


@contextmanager
def suspecting_weights(server: nn.Module, round_idx: int) -> Iterator[None]:
    """If the block fails, raise the error of `check_weights`, or the block's own error if the weights are finite."""
    try:
        yield
    except Exception as error:
        check_weights(server, round_idx, error)
        raise


def _is_broken(parameter: nn.Parameter) -> bool:
    """Whether training from a parameter is impossible; a frozen one may be a mask, which is infinite on purpose."""
    wrong = ~torch.isfinite(parameter) if parameter.requires_grad else torch.isnan(parameter)
    return bool(wrong.any())


def _listed(names: Sequence[str]) -> str:
    """The first names in quotes, and the number of the remaining ones.

    Example:
        >>> _listed(["a", "b"]), _listed(["a", "b", "c", "d", "e"])
        ("'a', 'b'", "'a', 'b', 'c' and 2 more")
    """
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _suspects(round_idx: int) -> str:
    if round_idx == 0:
        return "These are the initial weights: look at how your module sets them, and at the checkpoint they come from."
    return (
        "Updates of clients are averaged only if they are finite, so most likely the run diverged and the server "
        "optimizer's step did it: lower its learning rate and the clients', and resume from an earlier checkpoint. Or "
        "look for a hook or callback that changes weights between rounds."
    )
