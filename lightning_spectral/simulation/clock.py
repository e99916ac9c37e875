"""How long clients take, predicted without waiting for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from lightning_spectral.arguments import Number, Whole, check_fields
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries, check_per_client

__all__ = ["DeviceProfile", "SimulatedTask", "VirtualClock"]

PASSES = 3  # a backward pass takes about twice as many multiplications as the forward pass before it


@dataclass(frozen=True)
class DeviceProfile:
    """The speed of one type of device.

    Args:
        downlink: Bytes per second that it receives; ``float("inf")`` if transfers take no time.
        uplink: Bytes per second that it sends.
        macs_per_second: Multiply-accumulates per second that it computes while training.
    """

    downlink: float
    uplink: float
    macs_per_second: float

    def __post_init__(self) -> None:
        speed = Number(above=0, finite=False)
        check_fields(self, downlink=speed, uplink=speed, macs_per_second=speed)


def _profile(argument: str, value: Any) -> DeviceProfile:
    check_is(argument, value, DeviceProfile)
    return cast(DeviceProfile, value)


def _macs(argument: str, value: Any) -> Mapping[float, float] | Callable[[float], float] | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return cast("Callable[[float], float] | None", value)
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"`{argument}` must be a function of the keep ratio, or a mapping such as {{0.5: 1e6}}, got {value!r}."
        )
    ratio, count = Number(above=0, hint="its keys are keep ratios"), Number(at_least=0)
    return {ratio(argument, key): count(f"{argument}[{key!r}]", entry) for key, entry in value.items()}


@dataclass(frozen=True)
class SimulatedTask:
    """What a client is asked to do in a round, as far as it affects the duration.

    Attributes:
        keep_ratio: Share of singular terms of its sub-model.
        num_examples: Examples that it trains on in a local epoch.
        local_epochs: Passes over them.
        num_parameters: Parameters of its sub-model.
        downlink_bytes: Bytes that it is sent.
        uplink_bytes: Bytes that it sends back.
    """

    keep_ratio: float
    num_examples: int
    local_epochs: int
    num_parameters: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0


@dataclass(frozen=True)
class VirtualClock:
    """Predicts when each client of a round finishes, from the speed of its device.

    A client takes ``downlink_bytes / downlink + 3 macs * num_examples * local_epochs / macs_per_second + uplink_bytes /
    uplink`` seconds; all clients of a round start together. Real time plays no part.

    Args:
        profiles: One for all clients; ``{profile: share of clients}``; or one per client.
        deadline: Seconds that the server waits; a client that takes longer is late.
        keep_first: Over-selection: of the ``clients_per_round`` that are asked, the server waits for this many and
            leaves out the others as surplus; ``None`` to wait for all.
        macs: Multiply-accumulates of a sub-model's forward pass for one example, by keep ratio: a mapping or a
            function. ``None`` for the number of the sub-model's parameters, which is right for linear layers that see
            an example once, and too low for convolutions.

    Note:
        The server waits for a client that drops out until the deadline, or, without a deadline, not at all.

    Example:
        >>> phone = DeviceProfile(downlink=1e6, uplink=1e5, macs_per_second=1e9)
        >>> sizes = {"num_parameters": 10**6, "downlink_bytes": 4 * 10**6, "uplink_bytes": 4 * 10**6}
        >>> task = SimulatedTask(keep_ratio=0.5, num_examples=100, local_epochs=2, **sizes)
        >>> VirtualClock(phone).seconds(phone, task)  # 4 s down, 3 * 10**6 * 200 / 10**9 = 0.6 s of work, 40 s up
        44.6
    """

    profiles: PerClient[DeviceProfile]
    deadline: float = math.inf
    keep_first: int | None = None
    # the repr of a function contains its address, which must not enter a run's configuration
    macs: Mapping[float, float] | Callable[[float], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            profiles=partial(check_per_client, rule=_profile),
            deadline=Number(above=0, finite=False, hint="it is in seconds"),
            keep_first=Whole(at_least=1, optional=True),
            macs=_macs,
        )

    def check(self, num_clients: int, clients_per_round: int) -> None:
        """Raise ``ValueError`` if this clock does not fit the federation."""
        check_num_entries("profiles", self.profiles, num_clients)
        if self.keep_first is not None and self.keep_first > clients_per_round:
            raise ValueError(
                f"`keep_first` must be at most clients_per_round={clients_per_round}, got {self.keep_first}; lower "
                "it, or raise `clients_per_round`."
            )

    def assign(self, num_clients: int, seed: int) -> Assigned[DeviceProfile]:
        """Each client's device, the same in every round."""
        return assign(self.profiles, num_clients, seed, "device profile")

    def seconds(self, profile: DeviceProfile, task: SimulatedTask) -> float:
        """Duration of a task on a device in seconds, from the server's first byte to the device's last."""
        macs = PASSES * self._forward_macs(task) * task.num_examples * task.local_epochs
        down, up = task.downlink_bytes / profile.downlink, task.uplink_bytes / profile.uplink
        return down + macs / profile.macs_per_second + up

    def _forward_macs(self, task: SimulatedTask) -> float:
        if self.macs is None:
            return task.num_parameters
        if callable(self.macs):
            return self.macs(task.keep_ratio)
        if task.keep_ratio not in self.macs:
            raise ValueError(f"`macs` has no entry for keep ratio {task.keep_ratio}, only {sorted(self.macs)}; add it.")
        return self.macs[task.keep_ratio]
