"""The contract test shipped for choices of channels, and choices that must fail it."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lightning_spectral as ls
from lightning_spectral.testing import check_channel_choice

OURS = [ls.PrefixChannels(), ls.RollingChannels(), ls.RollingChannels(step=100), ls.RandomChannels()]
COUNT = itertools.count()


@pytest.mark.parametrize("channels", OURS, ids=repr)
def test_our_choices_keep_the_contract(channels: ls.sharding.ChannelChoice) -> None:
    check_channel_choice(channels)


class Breaks(ls.sharding.ChannelChoice):
    """Chooses with a function that the test provides."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        self.choose = choose

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Any:
        return self.choose(num_channels, num_kept, round_idx, generator)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda N, n, round_idx, generator: list(range(n)), r"returned \[0\], not a tensor"),
        (lambda N, n, round_idx, generator: torch.arange(n, dtype=torch.int32), "dtype torch.int32, not int64"),
        (lambda N, n, round_idx, generator: torch.arange(n, device="meta"), "are on meta, not on the CPU"),
        (lambda N, n, round_idx, generator: torch.arange(N), r"2 channels .* shape \(2,\), not \(1,\)"),
        (lambda N, n, round_idx, generator: torch.arange(n)[None], r"shape \(1, 1\), not \(1,\)"),
        (lambda N, n, round_idx, generator: torch.arange(n) + round_idx, r"in round 1: an index is not in \[0, N\)"),
        (lambda N, n, round_idx, generator: -torch.arange(n), r"7 channels .* an index is not in \[0, N\)"),
        (lambda N, n, round_idx, generator: torch.zeros(n, dtype=torch.int64), "7 channels .* not distinct"),
        (lambda N, n, round_idx, generator: torch.randint(N, (n,), generator=generator), "not distinct"),
        (lambda N, n, round_idx, generator: torch.randperm(N)[:n], "drew from torch's global generator"),
        (
            lambda N, n, round_idx, generator: torch.from_numpy(np.random.default_rng(next(COUNT)).permutation(N))[:n],
            "the same generator state gave",
        ),
    ],
)
def test_what_breaks_it_is_found(choose: Callable[..., Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_channel_choice(Breaks(choose))
