"""How long clients would take, on a clock that no machine has to wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_spectral.errors import check_is
from lightning_spectral.protocol.rng import derived_seed

__all__ = ["DeviceProfile", "Turn", "VirtualClock"]

PASSES = 3  # a backward pass multiplies about twice as often as the forward pass before it


@dataclass(frozen=True)
class DeviceProfile:
    """How fast a kind of device is.

    Args:
        downlink: Bytes per second that it receives; ``float("inf")`` for no time at all.
        uplink: Bytes per second that it sends.
        macs_per_second: Multiply-accumulates per second that it computes while training.

    Raises:
        ValueError: If a speed is not positive.
    """

    downlink: float
    uplink: float
    macs_per_second: float

    def __post_init__(self) -> None:
        for name, speed in vars(self).items():
            if not speed > 0.0:
                raise ValueError(f"`{name}` must be positive, got {speed!r}.")


@dataclass(frozen=True)
class Turn:
    """What a client is asked to do in a round.

    Attributes:
        keep_ratio: Share of singular terms of its sub-model.
        num_examples: Its training examples.
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
    """Says when each client of a round would be done, which is late, and how long the round takes.

    A client takes ``downlink_bytes / downlink + 3 macs * num_examples * local_epochs / macs_per_second + uplink_bytes
    / uplink`` seconds; all clients of a round begin together. The real duration of anything plays no part.

    Args:
        profiles: One for all clients; ``{profile: share}``, drawn for each client from the seed; or one per client.
        deadline: Seconds after which the server waits no longer; a client that takes longer is late.
        keep_first: Over-selection: of the ``clients_per_round`` that are asked, the server waits for the first so
            many, and leaves out the others as surplus; ``None`` to wait for all.
        macs: Multiply-accumulates of a sub-model's forward pass for one example, by keep ratio: a mapping or a
            function. ``None`` for the number of the sub-model's parameters, which is right for linear layers that see
            an example once, and too low for convolutions.

    Raises:
        ValueError: If shares are not positive or do not sum to 1, or ``deadline`` or ``keep_first`` is not positive.

    Note:
        A client that drops out is missed: the server waits for it until the deadline, or, without one, not at all.

    Example:
        >>> clock = VirtualClock(DeviceProfile(downlink=1e6, uplink=1e5, macs_per_second=1e9))
        >>> turn = Turn(0.5, num_examples=100, local_epochs=2, num_parameters=10**6, downlink_bytes=4 * 10**6,
        ...             uplink_bytes=4 * 10**6)
        >>> clock.seconds(0, 7, turn)  # 4 s down, 3 * 10**6 * 200 / 10**9 = 0.6 s of work, 40 s up
        44.6
    """

    profiles: DeviceProfile | Mapping[DeviceProfile, float] | Sequence[DeviceProfile]
    deadline: float = math.inf
    keep_first: int | None = None
    # a function's repr has its address, and a run's identity, to which the clock's repr belongs, must not
    macs: Mapping[float, float] | Callable[[float], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        listed = [self.profiles] if isinstance(self.profiles, DeviceProfile) else list(self.profiles)
        for profile in listed:
            check_is("profiles", profile, DeviceProfile)
        if isinstance(self.profiles, Mapping):
            _check_shares(list(self.profiles.values()))
        if not self.deadline > 0.0:
            raise ValueError(f"`deadline` must be positive, got {self.deadline!r} seconds.")
        if self.keep_first is not None and self.keep_first < 1:
            raise ValueError(f"`keep_first` must be at least 1, got {self.keep_first}; write None to wait for all.")

    def check(self, num_clients: int, clients_per_round: int) -> None:
        """Raise ``ValueError`` if this clock does not fit the federation."""
        if isinstance(self.profiles, Sequence) and len(self.profiles) != num_clients:
            raise ValueError(
                f"`profiles` lists {len(self.profiles)} devices for {num_clients} clients; give one per client, one "
                "for all, or {profile: share}."
            )
        if self.keep_first is not None and self.keep_first > clients_per_round:
            raise ValueError(
                f"`keep_first` must be at most clients_per_round={clients_per_round}, got {self.keep_first}; ask more "
                "clients than you keep."
            )

    def profile(self, seed: int, client_id: int) -> DeviceProfile:
        """A client's device, the same in every round."""
        if isinstance(self.profiles, DeviceProfile):
            return self.profiles
        if isinstance(self.profiles, Mapping):
            position = derived_seed(seed, "device profile", client_id) / 2**63
            bounds = accumulate(self.profiles.values())
            candidates = zip(self.profiles, bounds, strict=True)
            return next((profile for profile, bound in candidates if position < bound), list(self.profiles)[-1])
        return self.profiles[client_id]

    def seconds(self, seed: int, client_id: int, turn: Turn) -> float:
        """How long a client takes, from the server's first byte to its own last."""
        device = self.profile(seed, client_id)
        work = PASSES * self._forward_macs(turn) * turn.num_examples * turn.local_epochs
        down, up = turn.downlink_bytes / device.downlink, turn.uplink_bytes / device.uplink
        return down + work / device.macs_per_second + up

    def _forward_macs(self, turn: Turn) -> float:
        if self.macs is None:
            return turn.num_parameters
        if callable(self.macs):
            return self.macs(turn.keep_ratio)
        if turn.keep_ratio not in self.macs:
            raise ValueError(f"`macs` has no entry for keep ratio {turn.keep_ratio}, only {sorted(self.macs)}; add it.")
        return self.macs[turn.keep_ratio]


def _check_shares(shares: Sequence[float]) -> None:
    if not all(share > 0.0 for share in shares) or abs(sum(shares) - 1.0) > 1e-9:
        raise ValueError(
            f"Shares of `profiles` must be positive and sum to 1, got {shares}; write {{profile: share of clients}}."
        )
