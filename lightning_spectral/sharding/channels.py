"""Which channels of a layer a client gets when sub-models are cut by width."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields


class ChannelChoice(ABC):
    """Chooses the channels that a client holds, for each group of channels that belong together.

    ``lightning_spectral.testing.check_channel_choice(MyChoice())`` checks the contract.
    """

    @abstractmethod
    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        """Choose ``num_kept`` of a group's ``num_channels`` channels for one client.

        Args:
            num_channels: Number N of the group's channels.
            num_kept: Number n of those that the client holds, ``1 <= n <= N``.
            round_idx: Communication round, from 0.
            generator: The client's generator for this group and round, the only source of randomness.

        Returns:
            Distinct indices, shape ``(n,)``, int64, on the CPU, in any order.
        """


@dataclass(frozen=True)
class PrefixChannels(ChannelChoice):
    """The first channels: sub-models are nested, and the last channels are trained only by large clients.

    Reference:
        Diao et al. (2021), HeteroFL.

    Example:
        >>> PrefixChannels()(8, 3, round_idx=7, generator=torch.Generator())
        tensor([0, 1, 2])
    """

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return torch.arange(num_kept)


@dataclass(frozen=True)
class RollingChannels(ChannelChoice):
    """A window that moves on in every round and wraps around at the end: all channels are trained equally often.

    Args:
        step: Number of channels by which it moves in each round.

    Note:
        As in the paper, the window starts at the channel with the round's number. The authors' code moves it backwards.

    Reference:
        Alam et al. (2022), FedRolex.

    Example:
        >>> RollingChannels()(8, 3, round_idx=7, generator=torch.Generator())
        tensor([7, 0, 1])
    """

    step: int = 1

    def __post_init__(self) -> None:
        check_fields(self, step=Whole(at_least=1))

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return (round_idx * self.step + torch.arange(num_kept)) % num_channels


@dataclass(frozen=True)
class RandomChannels(ChannelChoice):
    """Random channels, drawn anew for each client and round.

    Reference:
        Caldas et al. (2018), Federated Dropout.

    Example:
        >>> RandomChannels()(8, 3, round_idx=7, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(num_channels, generator=generator)[:num_kept]
