import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.algorithms import SpectralSharding
from lightning_spectral.protocol.per_client import assign_keep_ratios


@given(num_clients=st.integers(1, 500), seed=st.integers(0, 3), share=st.floats(0.01, 0.99))
def test_shares_are_exact_to_the_client(num_clients: int, seed: int, share: float) -> None:
    ratios = assign_keep_ratios({0.2: share, 0.4: 1.0 - share}, num_clients, seed)
    assert len(ratios) == num_clients
    assert abs(int((ratios == 0.2).sum()) - share * num_clients) < 1.0


def test_shares_that_divide_evenly_are_hit() -> None:
    ratios = assign_keep_ratios({0.1: 0.2, 0.2: 0.5, 1.0: 0.3}, 100, seed=0)
    assert [int((ratios == r).sum()) for r in (0.1, 0.2, 1.0)] == [20, 50, 30]


def test_who_gets_which_ratio_is_drawn_from_the_seed_alone() -> None:
    first, again, other = (assign_keep_ratios({0.2: 0.5, 0.4: 0.5}, 50, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_ratio_for_all_or_one_each() -> None:
    assert assign_keep_ratios(0.3, 3, seed=0).tolist() == [0.3] * 3
    assert assign_keep_ratios([0.1, 0.2, 0.1], 3, seed=5).tolist() == [0.1, 0.2, 0.1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_ratio": 0.0}, r"`keep_ratio` must be in \(0, 1\], got 0.0"),
        ({"keep_ratio": {0.2: 0.6, 1.4: 0.4}}, "got 1.4"),
        ({"keep_ratio": [0.2, -1.0]}, "got -1.0"),
        ({"keep_ratio": {0.2: 0.6, 0.4: 0.5}}, "must sum to 1, got .* with sum 1.1"),
        ({"keep_ratio": {0.2: 1.2, 0.4: -0.2}}, "must be positive, got -0.2 for ratio 0.4"),
        ({"keep_ratio": []}, r"or a list with one number per client, got \[\]"),
        ({"keep_ratio": "0.2"}, "or a list with one number per client, got '0.2'"),
        ({"clip_tau": 0.5}, "`tau` must be at least 1, got 0.5"),
        ({"frobenius_decay": -1e-4}, "`frobenius_decay` must be at least 0, got -0.0001"),
    ],
)
def test_settings_out_of_range_are_refused_in_the_constructor(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpectralSharding(**options)  # type: ignore[arg-type]


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="lists 2 ratios for 3 clients"):
        assign_keep_ratios([0.1, 0.2], 3, seed=0)
