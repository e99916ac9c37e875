"""The contract of a choice of channels, as a test."""

import torch
from torch import Tensor

from lightning_spectral.errors import check_is
from lightning_spectral.sharding.channels import ChannelChoice

CASES = ((1, 1), (2, 1), (7, 3), (8, 8), (64, 16), (64, 63))  # channels of a group, and how many of them are kept
ROUNDS = (0, 1, 5, 1000)


def check_channel_choice(channels: ChannelChoice) -> None:
    """Check that a choice of channels satisfies the contract of :class:`~lightning_spectral.sharding.ChannelChoice`.

    This tries groups of 1 to 64 channels, of which few or all are kept, in several rounds. It checks the number, type
    and device of the indices, that they are distinct channels of the group, that they depend only on the arguments, and
    that nothing is drawn from torch's global generator.

    Args:
        channels: The choice.

    Example:
        >>> from lightning_spectral import RandomChannels
        >>> check_channel_choice(RandomChannels())
    """
    check_is("channels", channels, ChannelChoice)
    for num_channels, num_kept in CASES:
        for round_idx in ROUNDS:
            where = f"{channels!r} on {num_kept} of {num_channels} channels in round {round_idx}"
            before = torch.get_rng_state()
            chosen, again = (channels(num_channels, num_kept, round_idx, _generator()) for _ in range(2))
            is_untouched = torch.equal(before, torch.get_rng_state())
            assert is_untouched, f"{where}: it drew from torch's global generator, not from the one that it was given."
            _check_indices(chosen, num_channels, num_kept, where)
            assert torch.equal(chosen, again), f"{where}: the same generator state gave {chosen} and {again}."


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _check_indices(chosen: Tensor, num_channels: int, num_kept: int, where: str) -> None:
    assert isinstance(chosen, Tensor), f"{where}: it returned {chosen!r}, not a tensor."
    assert chosen.dtype == torch.int64, f"{where}: indices have dtype {chosen.dtype}, not int64."
    assert chosen.device.type == "cpu", f"{where}: indices are on {chosen.device}, not on the CPU."
    assert chosen.shape == (num_kept,), f"{where}: indices have shape {tuple(chosen.shape)}, not ({num_kept},)."
    assert bool(((chosen >= 0) & (chosen < num_channels)).all()), f"{where}: an index is not in [0, N): {chosen}."
    assert len(set(chosen.tolist())) == num_kept, f"{where}: indices are not distinct: {chosen}."
