"""Ctrl-C while the module is a client: it is the server again, and what is saved then is the last whole round."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from mixed_federation import MIXED
from toy_models import LitSmall

import lightning_spectral as ls

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path="),  # OnExceptionCheckpoint looks for a checkpoint
    pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning"),  # nothing need be learned
]


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell starts background jobs with Ctrl-C ignored."""
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, own)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_again_and_again() -> None:
    """Every few milliseconds, until Lightning, which is shutting down, ignores it."""

    def pressing() -> None:
        end = time.monotonic() + 5.0
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and time.monotonic() < end:
            press()
            time.sleep(0.002)

    threading.Thread(target=pressing, daemon=True).start()


class Pressed(LitSmall):
    """Has its training interrupted at one step, whose number is not the server's to know."""

    interrupt: Callable[[], None] | None = None
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps += 1
        loss = super().training_step(batch, batch_idx)
        if type(self).steps >= 40 and self.interrupt is not None:
            type(self).interrupt, act = None, type(self).interrupt
            act()  # type: ignore[misc]
        return loss


def forms(module: torch.nn.Module) -> list[Any]:
    parts = [(name, type(part), sorted(vars(part))) for name, part in module.named_modules()]
    return [*parts, *((name, tensor.shape, tensor.requires_grad) for name, tensor in module.named_parameters())]


@pytest.mark.parametrize("interrupt", [press, press_again_and_again])
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), MIXED, ls.Zampling(4, degree=3), ls.LoRA({1: 0.5, 3: 0.5})],
    ids=["FedAvg", "spectral", "Zampling", "LoRA"],
)
def test_ctrl_c_in_a_client_leaves_the_server(
    algorithm: Any, interrupt: Callable[[], None], data: Any, fit: Fit, tmp_path: Path
) -> None:
    Pressed.interrupt, Pressed.steps = staticmethod(interrupt), 0  # type: ignore[assignment]
    module = seeded(Pressed)
    before = forms(module)
    trainer = {"enable_checkpointing": True}
    options = {"algorithm": algorithm, "max_epochs": 4}
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(module, data, callbacks=[OnExceptionCheckpoint(tmp_path)], trainer=trainer, **options)
    assert [part[:2] for part in forms(module)] == [part[:2] for part in before]
    path = ls.latest_checkpoint(tmp_path)
    if path is None and interrupt is press_again_and_again:
        return  # it was pressed before Lightning could begin to shut down
    saved = torch.load(path, weights_only=True)
    rounds = saved["global_step"]
    assert 1 <= rounds <= 3
    assert same_state(saved["state_dict"], fit(seeded(Pressed), data, **{**options, "max_epochs": rounds}).state)
    assert same_state(
        fit(seeded(Pressed), data, ckpt_path=path, **options).tensors, fit(seeded(Pressed), data, **options).tensors
    )
