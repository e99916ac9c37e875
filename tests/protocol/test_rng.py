"""Derived generators and the block that leaves no trace."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

parts = st.tuples(st.integers(), st.text(max_size=4)).flatmap(
    lambda head: st.lists(st.integers() | st.text(max_size=4), max_size=4).map(lambda ids: (*head, *ids))
)


def global_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def global_draws() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()


@given(first=parts, second=parts)
def test_different_arguments_give_different_seeds(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert (derived_seed(*first) == derived_seed(*second)) == (first == second)


def test_encoding_cannot_be_confused_by_its_own_punctuation() -> None:
    alike = [(1, 23), (12, 3), (123,), ("1", 23), (1, "23"), ("1i2:23",), ("1", "23"), (1, 2, 3), ("", 123), (-1, 23)]
    assert len({derived_seed(0, "terms", *ids) for ids in alike}) == len(alike)


@given(parts)
def test_seeds_fit_in_63_bits(arguments: tuple[Any, ...]) -> None:
    assert 0 <= derived_seed(*arguments) < 2**63


def test_seeds_use_all_63_bits() -> None:
    seeds = np.array([derived_seed(0, "bits", i) for i in range(2000)], dtype=np.int64)
    assert (np.abs((seeds[:, None] >> np.arange(63) & 1).mean(0) - 0.5) <= 5.0 * 0.5 / np.sqrt(2000)).all()


def test_integers_of_numpy_are_integers() -> None:
    assert derived_seed(0, "terms", int(np.int64(5))) == derived_seed(0, "terms", np.int64(5))


def test_id_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        derived_seed(0, "terms", 1.5)  # type: ignore[arg-type]


def test_generators_of_neighbouring_ids_are_uncorrelated() -> None:
    size = 4000
    draws = [torch.randn(size, generator=derived_generator(0, "terms", i)) for i in range(8)]
    for first, second in itertools.combinations(draws, 2):
        assert abs(float((first * second).mean())) <= 5.0 / size**0.5  # the product of two has variance 1


def test_generator_starts_afresh_and_leaves_the_global_generators_alone() -> None:
    before = global_states()
    first, again = (torch.rand(4, generator=derived_generator(1, "order", 2)) for _ in range(2))
    assert torch.equal(first, again)
    assert global_states() == before


def test_isolated_block_draws_the_same_whatever_came_before() -> None:
    draws = []
    for noise in range(2):
        for _ in range(noise):
            global_draws()
        with isolated_rng(5):
            draws.append(global_draws())
    with isolated_rng(6):
        draws.append(global_draws())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[1], draws[2], strict=True))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**70])
def test_isolated_block_leaves_no_trace(seed: int) -> None:
    random.gauss(0, 1)  # leaves half a pair behind in Python's and numpy's state
    np.random.randn()
    before = global_states()
    with isolated_rng(seed):
        global_draws()
    assert global_states() == before


def test_isolated_block_leaves_no_trace_when_it_fails() -> None:
    @isolated_rng(0)
    def fail() -> None:
        global_draws()
        raise RuntimeError("training failed")

    before = global_states()
    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert global_states() == before


def test_isolated_blocks_nest() -> None:
    with isolated_rng(1):
        outer = global_draws(), global_draws()
    with isolated_rng(1):
        first = global_draws()
        with isolated_rng(2):
            global_draws()
        assert (first, global_draws()) == outer


def test_cpu_devices_need_no_accelerator() -> None:
    with isolated_rng(0, [torch.device("cpu")]):
        torch.rand(1)
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@CUDA
def test_isolated_block_covers_the_given_cuda_device() -> None:
    before = torch.cuda.get_rng_state()
    draws = []
    for device in (torch.device("cuda"), torch.device("cuda", torch.cuda.current_device())):
        with isolated_rng(3, [device, torch.device("cpu")]):
            draws.append(torch.rand(4, device=device))
    assert torch.equal(*draws)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@CUDA
def test_derived_generator_lives_on_the_given_device() -> None:
    first, again = (
        torch.rand(4, device="cuda", generator=derived_generator(0, "noise", device="cuda")) for _ in range(2)
    )
    assert torch.equal(first, again)
