"""Settings and state shared by all rounds of a run, with the sizes of sub-models, which a virtual clock needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from torch import nn

from lightning_spectral.algorithms.base import Algorithm, Round, ServerHalf
from lightning_spectral.client.forms import Forms
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.records import Options, WorkUnit
from lightning_spectral.protocol.stage_clock import Profile
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.update_norms import MaxUpdateNorm
from lightning_spectral.simulation import Conditions, Simulation

Figure = Literal["", "loss", "update", "stale update"]


def _no_options() -> tuple[tuple[Options, ...], ...]:
    return ()


class SubModelSize(NamedTuple):
    """The size of the sub-models of one keep ratio, which all of its clients share.

    Attributes:
        num_parameters: Number of values in its parameters.
        downlink_bytes: Bytes sent to a client.
        uplink_bytes: Bytes that it sends back.
    """

    num_parameters: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0


class SubModelSizes:
    """Measures the sub-model size of each keep ratio once, on a temporary sub-model."""

    def __init__(self) -> None:
        self._sizes: dict[float, SubModelSize] = {}

    def of(self, half: ServerHalf, opened: Round, unit: WorkUnit, keep_ratio: float) -> SubModelSize:
        """The size of a unit's sub-model, in a round that the algorithm has opened."""
        if keep_ratio not in self._sizes:
            download, _ = opened.send(unit)
            side = half.device_half
            with Forms(half.server, side.take_form).client(download.capacity) as client:
                num_parameters = sum(parameter.numel() for parameter in client.parameters())
                uplink_bytes = side.collect(client, download).num_bytes
            self._sizes[keep_ratio] = SubModelSize(num_parameters, download.num_bytes, uplink_bytes)
        return self._sizes[keep_ratio]


@dataclass(frozen=True, eq=False)
class Run:
    """One federated run: settings and state shared by all of its rounds.

    Attributes:
        algorithm: The algorithm, as the user chose it.
        half: The algorithm, bound to the user's module with dense weights.
        clients: What is known of the clients.
        seed: The run's seed.
        local_epochs: Passes over a client's data in a round; 0 trains nothing.
        absolute: Whether units' coefficients are used as weights without being divided by their sum; see `Cohort`.
        options: Called once a round; returns the options of the parameter groups of each of the user's optimizers.
        model: The model's name; empty if there is only one.
        figure: The figure of each client that the sampler uses; "" for none.
        faults: What to do about clients that do not report back.
        update_bound: Bound on each client's update; ``None`` for none.
        conditions: Simulated dropout and device speed.
        processes: The processes that train the clients of a round; each has its own `Run`, with the same weights.
        store: State of single clients that the server keeps.
        frozen_base: Record of the frozen tensors that each client already has.
        sizes: Sizes of sub-models, measured for a virtual clock.
        profile: Maps the name of a stage to a context manager that is entered around it.
    """

    algorithm: Algorithm
    half: ServerHalf
    clients: ClientDirectory
    seed: int
    local_epochs: int = 1
    absolute: bool = False
    options: Callable[[], tuple[tuple[Options, ...], ...]] = _no_options
    model: str = ""
    figure: Figure = ""
    faults: Faults = field(default_factory=Faults)
    update_bound: MaxUpdateNorm | None = None
    conditions: Conditions = field(default_factory=Conditions)
    processes: Processes = field(default_factory=Processes)
    store: ClientStore = field(default_factory=ClientStore)
    frozen_base: FrozenBase = field(default_factory=FrozenBase)
    sizes: SubModelSizes = field(default_factory=SubModelSizes)
    profile: Profile = nullcontext

    @property
    def server(self) -> nn.Module:
        """The user's module with dense weights."""
        return self.half.server

    @cached_property
    def simulation(self) -> Simulation:
        """Dropout and device speed as assigned to the clients."""
        return self.conditions.prepare(self.clients.num_clients, self.seed)
