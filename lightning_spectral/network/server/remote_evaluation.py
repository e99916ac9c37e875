"""Asks devices to evaluate the server's model on their own held-out examples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spectral.errors import RecordError, SpectralWarning
from lightning_spectral.network.messages import EVALUATE, MODEL, PRECISION, record_of, record_parts
from lightning_spectral.network.server.asking import Asking
from lightning_spectral.network.server.line import Question
from lightning_spectral.network.server.remote_executor import usable
from lightning_spectral.network.server.roster import Roster
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.records import Download, Upload, WorkUnit


@dataclass(frozen=True, eq=False)
class HeldOut:
    """How many held-out examples each client has.

    Attributes:
        sizes: Their numbers, int64, shape ``(num_clients,)``.
    """

    sizes: Tensor

    @property
    def num_assigned(self) -> int:
        """Number of held-out examples of all clients."""
        return int(self.sizes.sum())

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of held-out examples of each given client."""
        return [int(self.sizes[client_id]) for client_id in client_ids]


def held_out(roster: Roster, model: str) -> HeldOut:
    """What clients hold out for a model."""
    return HeldOut(torch.tensor([roster.holding(i, model).num_held_out for i in range(len(roster.names))]))


def evaluate_on_devices(
    roster: Roster, model: str, owner: Any, round_idx: int, client_ids: Sequence[int]
) -> dict[int, Mapping[str, float]]:
    """The metrics of each client that answers; those that do not are named in a warning.

    Args:
        roster: Who is there.
        model: The model's name; empty if there is only one.
        owner: The `FederatedModule`, whose weights all clients get.
        round_idx: The round, from 0.
        client_ids: Clients to evaluate.
    """
    asking, units = Asking(roster.line), dict[int, WorkUnit]()
    tensors = travelling_tensors(owner.module)
    common = {MODEL: model.encode(), PRECISION: owner.trainer.precision.encode()}
    for client_id in client_ids:
        if (node := roster.node_of(client_id)) is not None:
            units[node] = WorkUnit(client_id, model)
            parts = record_parts(Download(units[node], 1.0, tensors, round_idx, seed=owner.seed))
            asking.ask(Question(node, EVALUATE, {**parts, **common}, round_idx))
    found: dict[int, Mapping[str, float]] = {}
    for question, answer in asking.arrived(wait=True):
        client_id = units[question.node].client_id
        try:
            upload = record_of(usable(answer), Upload)
            if upload.failure is not None:
                raise RecordError(upload.failure.message)
            found[client_id] = {name: logged.value for name, logged in upload.logged.items()}
        except RecordError as error:
            name = roster.names[client_id]
            warnings.warn(
                f"Round {round_idx}: client {name!r} is not evaluated: {error}.", SpectralWarning, stacklevel=2
            )
    return found
