"""What a run tells its user: what the first rounds and losses show of mistakes, and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import nn

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.arguments import first_of
from lightning_spectral.client.device import TOO_LARGE, WATCHED_ROUNDS
from lightning_spectral.errors import RoundError, warn
from lightning_spectral.nn.torch_modules import layers_with_averages
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary
from lightning_spectral.server.metrics import mean_loss

ROUNDS_OF_UPDATES = 10
LARGEST_UPDATE = 10.0  # in units of the tensor's own norm
LEAST_ENTRY = 1e-3  # root mean square: weights that start at zero may grow by any factor
ROUNDS_OF_EXPLOSIONS = 20
LARGEST_GROWTH = 3.0  # of the loss, relative to the first round
LEAST_LOSS = 1e-2  # below this, and for negative losses, the ratio of two losses says little
EARLY, LATE = range(5, 10), range(25, 30)  # rounds whose mean losses are compared
FLAT = 0.9  # of the early loss
HALF = 0.5  # of the first loss: below it a run has learned, and may have converged
CLIP = "clip gradients with `local_hooks=[GradientClip(...)]`"
NAMED = 3  # tensors that a message names; in a run that has diverged, all are broken


class FirstRounds:
    """Watches the first rounds of one fit, and warns at most once for each reason.

    Args:
        warns: Whether this process warns; one of several is enough, because all of them see the same rounds.
        averages_may_rest: Whether BatchNorm's running averages may stay unchanged in a round in which clients trained.
    """

    def __init__(self, warns: bool = True, averages_may_rest: bool = False) -> None:
        self._warns = warns
        self._done = {"averages"} if averages_may_rest else set[str]()
        self._losses: dict[int, float] = {}  # the finite ones by round
        # One client alone says little: a router may send it to other experts, or a layer may be dropped at random.
        self._unreached: list[str] | None = None  # before any client has trained, and once they are named
        self._last_watched = -1

    def state_dict(self) -> dict[str, Any]:
        """The layers that no client has given a gradient yet; empty if that is settled, or no client has trained."""
        return {} if self._unreached is None else {"unreached": list(self._unreached)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._unreached = sorted(state_dict["unreached"])

    def begin(self, half: ServerHalf, opened: Round, round_idx: int) -> None:
        """Pass on what the algorithm finds wrong with its first round, before any client trains."""
        if self._warns and round_idx == 0:
            for message in half.advice(Moment.BEFORE_TRAINING, opened):
                _warn(round_idx, message)

    def end(self, half: ServerHalf, summary: RoundSummary, outcomes: Sequence[ClientOutcome] = ()) -> None:
        """Check a closed round, before the server's step, and pass on what the algorithm finds wrong with the first.

        Args:
            half: The server's half; the gradients of its module are the pseudo-gradients.
            summary: The round.
            outcomes: Those of a private round, whose summary has none. Only names in the user's code are told of them.
        """
        clients = summary.clients or tuple(outcomes)
        if self._warns:
            self._look(half, summary, clients)
        if summary.round_idx < WATCHED_ROUNDS:
            for client in clients:
                if client.unreached is not None:  # a layer counts as reached if it was reached in at least one turn
                    names = set(client.unreached)
                    self._unreached = sorted(names if self._unreached is None else names.intersection(self._unreached))
            self._last_watched = summary.round_idx
            if summary.round_idx == WATCHED_ROUNDS - 1:
                self.finish(half)
                self._unreached = None

    def _look(self, half: ServerHalf, summary: RoundSummary, clients: Sequence[ClientOutcome]) -> None:
        round_idx, server = summary.round_idx, half.server
        trained = [client for client in clients if not client.left_out and (client.num_steps or summary.is_private)]
        if round_idx == 0 and trained and not summary.is_private:
            for message in half.advice(Moment.AFTER_TRAINING, summary=summary):
                _warn(round_idx, message)
        if round_idx < ROUNDS_OF_UPDATES and "update" not in self._done:
            ratio, name = max(relative_updates(server), default=(0.0, ""))
            if ratio > LARGEST_UPDATE:
                self._done.add("update")
                _warn(
                    round_idx,
                    f"the clients' mean update of {name!r} is {ratio:.3g} times as large as the tensor itself "
                    f"(Frobenius norms) and overwhelms it. {smaller_updates(half)}.",
                )
        if message := self.note_loss(half, mean_loss(summary), round_idx):
            _warn(round_idx, message)
        if trained and "averages" not in self._done:
            self._done.add("averages")
            if round_idx == 0 and (layers := untouched_averages(server)):
                _warn(
                    round_idx,
                    f"the running averages of {', '.join(layers)} are still 0 and 1, as they were built, and "
                    "evaluation reads them. Let the callback BatchNormEstimation estimate them, or average those of "
                    "the clients: take them out of `buffers`, or with LoRA name their layers in `train`.",
                )
        discarded = {name for client in clients for name in client.discarded}
        buffers = discarded.intersection(dict(server.named_buffers()))
        if "buffers" not in self._done and (names := sorted(buffers - half.rules.asked)):
            self._done.add("buffers")
            _warn(
                round_idx,
                f"clients change {first_of(names, NAMED)}, and the server keeps its value of such buffers, so every "
                "client begins with it: a flag is set, and a counter begins, in each turn anew. For the largest value "
                f"of the clients, which fits both, write FederatedModule(..., buffers={{{names[0]!r}: 'max'}}); if "
                "nothing is to be kept, 'server'.",
            )
        if "discarded" not in self._done and (names := sorted(discarded - buffers)):
            self._done.add("discarded")
            _warn(
                round_idx,
                f"clients change {first_of(names, NAMED)} without an optimizer, as one does with a teacher, a target "
                "network or an average of weights, and these changes are lost. To send them back and average them, "
                "call `requires_grad_(False)` on that module, and name it in an attribute of your LightningModule: "
                "`averaged_parameters = ['teacher.*']`; or update it at the server, in `RoundCallback.on_round_end`.",
            )
        changed = sorted({n for c in clients for n in c.put_back})
        if "too large" not in self._done and (names := [name for name in changed if name.endswith(TOO_LARGE)]):
            self._done.add("too large")
            _warn(
                round_idx,
                f"clients change {first_of([f'`{name}`' for name in names], NAMED)}: what one of them leaves behind, "
                "the next one in the same process finds, and so does the server. Register it as a buffer.",
            )
        if "put back" not in self._done and (names := [name for name in changed if not name.endswith(TOO_LARGE)]):
            self._done.add("put back")
            _warn(
                round_idx,
                f"clients change {first_of([f'`{name}`' for name in names], NAMED)}, which are neither parameters "
                "nor buffers, so every client begins with the server's values, and these changes are lost. To keep "
                "something, register a buffer, and say how those of clients are combined, e.g. "
                "FederatedModule(..., buffers={'steps': 'max'}); or change it at the server, in "
                "`on_validation_epoch_end` or `RoundCallback.on_round_end`.",
            )

    def note_loss(self, half: ServerHalf, loss: float, round_idx: int) -> str:
        """Record the mean training loss of a round, NaN if nobody trained; return what its user should hear, if any."""
        if "losses" in self._done:
            return ""
        losses = self._losses
        if round_idx < LATE.stop and math.isfinite(loss):
            losses[round_idx] = loss
            begin, first = next(iter(losses.items()))
            if round_idx < ROUNDS_OF_EXPLOSIONS and first >= LEAST_LOSS and loss > LARGEST_GROWTH * first:
                self._done.add("losses")
                return (
                    f"the training loss is {loss:.3g}, {loss / first:.3g} times that of round {begin} ({first:.3g}). "
                    f"{smaller_updates(half)}. Where rounds have few clients whose data differ much, look at the "
                    "validation loss first."
                )
        if round_idx < LATE[-1]:
            return ""
        self._done.add("losses")
        remedy, first = ", or ".join(half.advice(Moment.FLAT_LOSSES)), next(iter(losses.values()), math.nan)
        known = ([losses[index] for index in rounds if index in losses] for rounds in (EARLY, LATE))
        early, late = (fmean(found) if found else math.nan for found in known)
        # False if one is unknown. The first few rounds do not count: in them clients learn to predict their few labels,
        # even if the network learns nothing else.
        is_flat = first >= LEAST_LOSS and max(FLAT * early, HALF * first) < late <= LARGEST_GROWTH * early
        if not remedy or not is_flat:
            return ""
        return (
            f"the training loss has hardly fallen since rounds {EARLY[0]} to {EARLY[-1]}: {late:.3g} now, {early:.3g} "
            f"then. If the validation metrics do not improve either, {remedy}."
        )

    def finish(self, half: ServerHalf) -> None:
        """Give the warnings that remain when a fit ends, perhaps before the first rounds are over."""
        if self._warns and self._unreached and self._last_watched >= 0:
            remedy = ", or ".join([*half.advice(Moment.UNUSED_LAYERS), "remove them"])
            _warn(
                self._last_watched,
                "no client has given a gradient to these sharded layers: "
                f"{', '.join(self._unreached)}. If `training_step` never uses them, {remedy} from the module. If it "
                "does for other clients or in later rounds, as with experts or gradual unfreezing, nothing is wrong.",
            )


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


def _warn(round_idx: int, what: str) -> None:
    warn(f"Round {round_idx}: {what}", 4)


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


def check_weights(server: nn.Module, round_idx: int, cause: Exception | None = None) -> None:
    """Raise an error if the server's weights are not finite.

    This reads every weight, so it is called only after something else has gone wrong. Buffers are not checked:
    attention masks and running limits are infinite by design.

    Args:
        server: The server's module.
        round_idx: The round that trains from these weights, from 0.
        cause: What went wrong.

    Raises:
        RoundError: If a parameter holds a NaN, or a trainable one an infinite value; in all processes alike.
    """
    suspects = (
        "Updates of clients are averaged only if they are finite, so most likely the run diverged and the server "
        "optimizer's step did it: lower its learning rate and the clients', and resume from an earlier checkpoint. Or "
        "look for a hook or callback that changes weights between rounds."
    )
    if round_idx == 0:
        suspects = (
            "These are the initial weights: look at how your module sets them, and at the checkpoint they come from."
        )
    broken = []
    for name, parameter in server.named_parameters():  # a frozen one may be a mask, which is infinite on purpose
        wrong = ~torch.isfinite(parameter) if parameter.requires_grad else torch.isnan(parameter)
        if bool(wrong.any()):
            broken.append(repr(name))
    if broken:
        raise RoundError(
            f"Round {round_idx}: the server's weights were not finite before it began: {first_of(broken, NAMED)} had a "
            f"NaN or an infinite value, so no client can train from them. {suspects}"
        ) from cause


@contextmanager
def suspecting_weights(server: nn.Module, round_idx: int) -> Iterator[None]:
    """If the block fails, raise the error of `check_weights`, or the block's own error if the weights are finite."""
    try:
        yield
    except Exception as error:
        check_weights(server, round_idx, error)
        raise
