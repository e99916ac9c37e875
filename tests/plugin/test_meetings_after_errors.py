"""A process that has failed alone saves its checkpoint without waiting for the others."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import lightning_spectral as ls


class Met(Exception):
    """The process would wait for the others."""


@contextmanager
def waiting() -> Any:
    raise Met
    yield


@pytest.fixture
def strategy() -> ls.plugin.ClientParallelStrategy:
    """That of one of several processes whose Trainer is handling an error."""
    strategy = ls.plugin.ClientParallelStrategy()
    strategy._meetings = SimpleNamespace(is_broken=False, meeting=waiting)  # type: ignore[assignment]
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(interrupted=True))  # type: ignore[assignment]
    return strategy


@pytest.mark.parametrize(
    "error", [KeyError("mine"), KeyboardInterrupt(), ls.errors.LostProcessError("another is gone")]
)
def test_nobody_waits_after_an_error_of_one(error: BaseException, strategy: ls.plugin.ClientParallelStrategy) -> None:
    try:
        raise error
    except BaseException:
        strategy.barrier("Trainer.save_checkpoint")
        assert strategy.broadcast("mine") == "mine"


def test_processes_with_the_same_error_wait_for_the_checkpoint(strategy: ls.plugin.ClientParallelStrategy) -> None:
    """Otherwise a launcher might end process 0 while it writes."""
    try:
        raise ls.ClientError("Round 3, client 7, local training: KeyError")
    except ls.ClientError:
        with pytest.raises(Met):
            strategy.barrier("Trainer.save_checkpoint")
