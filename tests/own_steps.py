"""The same local steps in three ways: taken by Lightning, in the module's own hooks, and in its `training_step`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from federation import Fit, Fitted, seeded
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

import lightning_spectral as ls

MIXED = ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=1.2, frobenius_decay=0.01)
UNCLIPPED = replace(MIXED, clip_tau=float("inf"))  # Adam undoes the clip
DENSE = ls.FedAvg()


class ScalesAlone(MixedPrecision):
    """Scales gradients and does nothing else; from a large scale they overflow, and steps are skipped."""

    def __init__(self, scale: float = 2.0**8) -> None:
        super().__init__("16-mixed", "cpu", GradScaler("cpu", init_scale=scale, growth_interval=1))

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def in_own_hooks(kind: Any) -> Any:
    """A class whose hooks do what Lightning does where they are not overridden."""

    class Own(kind):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    return Own


def by_hand(kind: Any) -> Any:
    """A class that takes the same steps in its ``training_step``."""

    class Manual(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is not None:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return output

    return Manual


WAYS: dict[str, Callable[[Any], Any]] = {"own hooks": in_own_hooks, "manual": by_hand}


def both_ways(way: str, fit: Fit, kind: Any, data: Any, **options: Any) -> list[Fitted]:
    """The same federation twice, from the same weights: steps are Lightning's, and then those of a way."""
    return [fit(seeded(one), data, **options) for one in (kind, WAYS[way](kind))]


def assert_same_run(one: Fitted, two: Fitted) -> None:
    for name, value in one.state.items():
        assert torch.equal(value, two.state[name]), name
    assert repr(one.rows) == repr(two.rows)  # NaN equals NaN
