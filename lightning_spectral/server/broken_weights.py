"""Checks for server weights that are not finite: an error of the run, not of a client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lightning_spectral.errors import RoundError

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
