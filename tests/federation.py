"""How these tests train: any module, on any clients, under a Trainer that prints and writes nothing.

Tests ask for the fixture `fit`, which is the function `fit` below with the options of the fixture `quiet` filled in.
A file whose tests share further settings overrides the fixture, e.g. ``partial(fit, max_epochs=2)``.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import lightning_spectral as ls

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# For `pytest.mark.filterwarnings`, where Zampling trains at a learning rate for weights and need not learn.
HARDLY_MOVED = "ignore:.*clients move their probabilities by only"


@dataclass(frozen=True)
class Fitted:
    """A finished federated fit.

    Attributes:
        model: The federation.
        trainer: The Trainer that ran it.
        history: Metrics of every round.
        ledger: Bytes of every client in every round.
    """

    model: ls.FederatedModule
    trainer: pl.Trainer
    history: ls.RoundHistory
    ledger: ls.CommunicationLedger

    @property
    def module(self) -> Any:
        """The user's module, with the server's weights."""
        return self.model.module

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the user's module."""
        return self.model.module.state_dict()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that lasts between rounds at the server: the user's parameters and buffers, and the algorithm's state."""
        state = {} if self.model.state is None else self.model.state.state_dict(prefix="state.")
        return {**self.state, **state}

    @property
    def weights(self) -> Tensor:
        """All parameters of the user's module in one vector."""
        return nn.utils.parameters_to_vector(self.model.module.parameters()).detach()

    @property
    def rows(self) -> list[dict[str, float]]:
        """Metrics of every round that do not depend on how fast the machine is."""
        return [without_seconds(row) for row in self.history.rows]

    @property
    def logged(self) -> dict[str, float]:
        """The metrics that the Trainer logged last, except for seconds."""
        return without_seconds({name: float(value) for name, value in self.trainer.callback_metrics.items()})


Fit = Callable[..., Fitted]  # the fixture `fit`


def fit(
    quiet: Mapping[str, Any],
    module: pl.LightningModule,
    data: Any,
    *,
    algorithm: Any = None,
    clients_per_round: int = 4,
    max_epochs: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    trainer: Mapping[str, Any] | None = None,
    ckpt_path: str | Path | None = None,
    **federation: Any,
) -> Fitted:
    """Train a module federatedly.

    Args:
        quiet: Options of the Trainer in all tests.
        module: The user's module; or a `FederatedModule`, which is trained as it is.
        data: The clients and the data for validation.
        algorithm: As for `FederatedModule`.
        clients_per_round: As for `FederatedModule`.
        max_epochs: Number of rounds, including those before the checkpoint.
        callbacks: In addition to a history and a ledger.
        trainer: Further options of the Trainer. There is no validation before the first round unless these ask for it.
        ckpt_path: The checkpoint to resume from.
        **federation: Further options of `FederatedModule`.
    """
    if isinstance(module, ls.FederatedModule):
        assert not federation, "a federation has its options already"
        model = module
    else:
        model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=clients_per_round, **federation)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    options = {**quiet, "num_sanity_val_steps": 0, **(trainer or {})}
    runner = pl.Trainer(max_epochs=max_epochs, callbacks=[history, ledger, *callbacks], **options)
    resume(runner, model, data, ckpt_path)
    return Fitted(model, runner, history, ledger)


def resume(trainer: pl.Trainer, model: Any, data: Any, ckpt_path: str | Path | None) -> None:
    """Fit without executing code from the checkpoint to resume from: ours hold only tensors and plain values."""
    trainer.fit(model, data, ckpt_path=ckpt_path, **({} if ckpt_path is None else tensors_only(trainer)))


def tensors_only(trainer: pl.Trainer) -> dict[str, bool]:
    """The option of `Trainer.fit` that refuses code in a checkpoint; Lightning before 2.6 has none."""
    return {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}


class ScalesAlone(MixedPrecision):
    """Scales gradients and does nothing else; from a large scale they overflow, and steps are skipped."""

    def __init__(self, scale: float = 2.0**8) -> None:
        super().__init__("16-mixed", "cpu", GradScaler("cpu", init_scale=scale, growth_interval=1))

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def seeded(make: Callable[..., ModuleT], *arguments: Any, **options: Any) -> ModuleT:
    """A module whose initial weights are always the same; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make(*arguments, **options)


def same_state(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether two state dictionaries have the same names and, bit for bit, the same tensors."""
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def check_resumes(fit: Fit, make: Callable[[], pl.LightningModule], data: Any, folder: Path, **options: Any) -> Fitted:
    """Fail unless two rounds, returned, a checkpoint and one more equal three, bit for bit and byte for byte."""
    whole = fit(seeded(make), data, max_epochs=3, **options)
    part = fit(seeded(make), data, max_epochs=2, **options)
    part.trainer.save_checkpoint(folder / "2.ckpt")
    resumed = fit(seeded(make), data, max_epochs=3, ckpt_path=folder / "2.ckpt", **options)
    assert same_state(resumed.tensors, whole.tensors)
    assert resumed.ledger.rows == whole.ledger.rows
    assert not same_state(part.state, whole.state)
    return part


def without_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that two runs of the same federation share."""
    return {name: value for name, value in metrics.items() if "seconds" not in name}


def said_during(run: Callable[[], Any]) -> list[str]:
    """The package's warnings during a run, repeated ones included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if issubclass(warning.category, ls.SpectralWarning)]
