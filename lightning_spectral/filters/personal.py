"""Personal parameters: each client keeps its own of some tensors, and the federation shares the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import ClassVar

from torch import nn

from lightning_spectral.algorithms.base import ServerHalf, promises_of
from lightning_spectral.algorithms.filter import Filter, Fit, Form, Plan, ServerEnd
from lightning_spectral.arguments import Whole, as_patterns, check_fields, check_matches, first_of, matches_any
from lightning_spectral.client.device import DeviceEnd, DeviceTurn, StepActions
from lightning_spectral.functional.checks import all_names, named_by_any
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Tensors, Upload


@dataclass(frozen=True)
class PersonalEnd(DeviceEnd):
    """Gives clients their own values of some parameters and buffers, and keeps them; for epochs see `Personal`."""

    keeps: ClassVar[bool] = True

    names: tuple[str, ...]
    epochs: int = 0

    def own_model(self, kept: Tensors) -> Tensors:
        return {name: kept[name] for name in self.names if name in kept}

    def enter(self, turn: DeviceTurn) -> None:
        load_tensors(turn.client, self.own_model(turn.kept))

    def phases(self, client: nn.Module, phases: Sequence[StepActions]) -> Sequence[StepActions]:
        """In each of two phases only some parameters need a gradient."""
        if self.epochs == 0:
            return phases
        (actions,) = phases
        trained = {name: p for name, p in client.named_parameters() if p.requires_grad}

        def train(personal: bool) -> None:
            for name, parameter in trained.items():
                parameter.requires_grad_((name in self.names) is personal)

        own = replace(actions, epochs=self.epochs, prepare=lambda: train(True))
        return [own, replace(own, epochs=None, prepare=lambda: train(False))]

    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        return upload, select_tensors(turn.client, self.names)


@dataclass(eq=False)
class PersonalServerEnd(ServerEnd):
    """Says that the server's own values do not learn."""

    names: tuple[str, ...]

    def remarks(self) -> Sequence[str]:
        return [
            f"Personal: {first_of(self.names, 2)} stay with clients, and the server's own do not learn, so validation "
            "says little of what clients get; `ClientEvaluation` judges each with its own."
        ]


@dataclass(frozen=True)
class Personal(Filter):
    """Some parameters and buffers stay with each client: a head, or normalisation layers.

    The server never gets them. Its own values stay as they are, and are where new clients begin. `ClientEvaluation`
    evaluates every client with its own, and `FederatedModule.own_model` returns them.

    Args:
        patterns: Patterns of their names: a head (FedPer), or normalisation layers with their running averages (FedBN).
        epochs: Passes over a client's data that train these parameters alone, before the ``local_epochs`` that train
            the others (FedRep); 0 to train all of them together.

    Reference:
        Arivazhagan et al. (2019), FedPer; Collins et al. (2021), FedRep, Algorithm 1; Li et al. (2021), FedBN.

    Example:
        >>> from lightning_spectral.algorithms import FedAvg
        >>> from lightning_spectral.algorithms.base import Known
        >>> from lightning_spectral.algorithms.filter import Plan
        >>> line = nn.Linear(3, 2)
        >>> plan = Plan(line, FedAvg(), filters=[Personal(["bias"])])
        >>> FedAvg().bind(line, known=Known(plan.rules())).client_side.returned
        ('weight',)
    """

    takes: ClassVar[Form | None] = None
    needs: ClassVar[Sequence[str]] = ("parts_stay",)

    patterns: Sequence[str]
    epochs: int = 0

    def __post_init__(self) -> None:
        check_fields(self, patterns=as_patterns, epochs=Whole(at_least=0))
        if not self.patterns:
            raise ValueError('Personal needs patterns of names, such as Personal(["head.*"]); got none.')

    def stays(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the parameters and buffers that match one of the patterns.

        Raises:
            ValueError: If a pattern matches none, or clients would share no parameter.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
            >>> Personal(["2.*", "1.running_*"]).stays(net)
            ('2.weight', '2.bias', '1.running_mean', '1.running_var')
        """
        check_matches("Personal", self.patterns, chain.from_iterable(all_names(module).values()), "parameter or buffer")
        names = named_by_any(module, partial(matches_any, patterns=self.patterns))
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if trained and trained.issubset(names):
            raise ValueError(
                "`Personal` matches all parameters that are trained, so clients would share nothing; name those that "
                'stay with each client, such as Personal(["head.*"]).'
            )
        return names

    def check(self, plan: Plan) -> None:
        self.stays(plan.module)
        if self.epochs and not promises_of(plan.algorithm).any_steps:
            raise ValueError(
                f"{type(plan.algorithm).__name__} needs every step of a client to train what it sends back; leave out "
                f"`epochs={self.epochs}` of Personal."
            )

    def device(self, half: ServerHalf) -> PersonalEnd:
        return PersonalEnd(self.stays(half.server), self.epochs)

    def server(self, fit: Fit) -> PersonalServerEnd:
        return PersonalServerEnd(self.stays(fit.half.server))
