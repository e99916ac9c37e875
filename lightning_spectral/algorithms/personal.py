"""Personal parameters: each client keeps its own of some tensors, and the federation shares the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_spectral.arguments import check_matches, matches_any
from lightning_spectral.client.device import StepActions
from lightning_spectral.protocol.buffer_rules import Rules
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.records import Tensors


@dataclass(frozen=True)
class Personal:
    """The tensors that stay with each client, as the device half of an algorithm sees them.

    Attributes:
        names: Names of parameters and buffers.
        epochs: Passes over a client's data that train these parameters alone, before those that train the others; 0 to
            train all of them together.
    """

    names: tuple[str, ...] = ()
    epochs: int = 0

    def of(self, client_state: Tensors) -> Tensors:
        """The client's own values; empty before its first turn, which begins with the server's."""
        return {name: client_state[name] for name in self.names if name in client_state}

    def phases(self, client: nn.Module, actions: StepActions | None) -> StepActions | Sequence[StepActions] | None:
        """An algorithm's actions in one phase or in two, in each of which only some parameters need a gradient."""
        if self.epochs == 0:
            return actions
        trained = {name: p for name, p in client.named_parameters() if p.requires_grad}

        def train(personal: bool) -> None:
            for name, parameter in trained.items():
                parameter.requires_grad_((name in self.names) is personal)

        own = replace(actions or StepActions(), epochs=self.epochs, prepare=lambda: train(True))
        return [own, replace(own, epochs=None, prepare=lambda: train(False))]


NOTHING = Personal()


def personal_names(server: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Names of the parameters and buffers that match one of the patterns.

    Raises:
        ValueError: If a pattern matches none, or clients would share no parameter.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> personal_names(net, ["2.*", "1.running_*"])
        ('2.weight', '2.bias', '1.running_mean', '1.running_var')
        >>> personal_names(net, ["*"])
        Traceback (most recent call last):
        ValueError: `personal` matches all parameters that are trained, so clients would share nothing; name those \
that stay with each client, such as `personal=["head.*"]`.
    """
    state = named_state(server)
    check_matches("personal", patterns, state, "parameter or buffer")
    names = tuple(name for name in state if matches_any(name, patterns))
    trained = {name for name, parameter in server.named_parameters() if parameter.requires_grad}
    if trained and trained.issubset(names):
        raise ValueError(
            "`personal` matches all parameters that are trained, so clients would share nothing; name those that stay "
            'with each client, such as `personal=["head.*"]`.'
        )
    return names


def rules_with(personal: Sequence[str], server: nn.Module, rules: Rules) -> Rules:
    """The rules of buffers, of which the personal ones are not averaged."""
    return {**{name: "server" for name, _ in server.named_buffers() if name in personal}, **rules}


def check_personal(patterns: Sequence[str], epochs: int) -> None:
    """Raise ``ValueError`` for passes that would train no parameter."""
    if epochs > 0 and not patterns:
        raise ValueError(
            f"`personal_epochs={epochs}` trains personal parameters, and there are none: name them, such as "
            '`personal=["head.*"]`, or leave it out.'
        )
