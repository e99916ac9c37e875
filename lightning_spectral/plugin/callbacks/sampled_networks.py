"""Validates sampled networks of Zampling alongside the expected one, which the server's module holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_spectral.algorithms.capabilities import DrawsNetworks
from lightning_spectral.arguments import Whole
from lightning_spectral.errors import SpectralWarning
from lightning_spectral.plugin.callbacks.validated_beside import SUFFIX, ValidatedBeside
from lightning_spectral.plugin.host import Trained, is_trained
from lightning_spectral.plugin.processes import ClientParallelStrategy
from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng


class SampledNetworks(pl.Callback):
    """Logs how well sampled networks Qz do whenever Lightning validates the expected network Qp.

    For every metric M that ``validation_step`` logs, and that Lightning averages over examples or computes:

    - ``M/sampled_mean``, ``M/sampled_std``: mean and sample standard deviation over the sampled networks.
    - ``M/sampled_max``, ``M/sampled_min``: largest and smallest value among the sampled networks.
    - ``M/sampling_gap``: M of the expected network minus the mean over the sampled ones.

    With several dataloaders, which need Lightning 2.5.3, names end in the dataloader's index, as in Lightning's own
    names. A single network has no standard deviation. Each network is a copy of your module with its metrics and
    buffers. It runs ``validation_step``, and no other hook, on the batches that Lightning validates on. During
    validation there are thus ``num_samples`` copies in memory. Bits are drawn from the run's seed, the round and the
    number of the network, and the global random generators are left unchanged: the run is the same with and without
    this callback.

    It also acts in every ``Trainer.validate``. With ``strategy="client_parallel"``, each process validates all networks
    on all of the data, as it does the server's module.

    Args:
        num_samples: Number of networks, at least 1.
        every_n_validations: Act in validations 0, n, 2n, ... of a run; the sanity check does not count.

    Raises:
        TypeError: At set-up, if the algorithm is not `Zampling`.
        ValueError: At set-up, if several processes share the data for validation.

    Example:
        >>> callback = SampledNetworks(num_samples=20)  # Trainer(callbacks=[callback])
    """

    def __init__(self, num_samples: int = 10, every_n_validations: int = 1) -> None:
        self.num_samples: int = Whole(at_least=1)("num_samples", num_samples)
        self.every_n_validations: int = Whole(at_least=1)("every_n_validations", every_n_validations)
        self._num_validations = 0
        self._is_due = False
        self._networks: list[ValidatedBeside] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        trained_by = type(pl_module.algorithm).__name__ if is_trained(pl_module) else type(pl_module).__name__
        if not (is_trained(pl_module) and isinstance(pl_module.algorithm, DrawsNetworks)):
            raise TypeError(
                f"SampledNetworks needs the probabilities of bits, which {trained_by} does not train; leave the "
                "callback out, or train with algorithm=Zampling(...)."
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientParallelStrategy):
            raise ValueError(
                f"{type(trainer.strategy).__name__} shares the data for validation out to {trainer.world_size} "
                "processes, and SampledNetworks needs all of it in each; use strategy='client_parallel', or devices=1."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._networks = []
        self._is_due = not trainer.sanity_checking
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._is_due = self._num_validations % self.every_n_validations == 0
            self._num_validations += 1

    def on_validation_batch_start(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: Trained, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> None:
        if not self._is_due:
            return
        if not self._networks:  # only now, after the user's hooks have prepared the module for validation
            self._networks = list(self._draw(trainer, pl_module))
        seed = derived_seed(
            pl_module.seed, "validation of sampled networks", trainer.current_epoch, dataloader_idx or 0, batch_idx
        )
        for network in self._networks:
            # a step may draw: the same for all networks
            with isolated_rng(seed, [trainer.strategy.root_device]), network.entered():
                network.step(batch, batch_idx, dataloader_idx)

    def _draw(self, trainer: pl.Trainer, host: Trained) -> Iterator[ValidatedBeside]:
        assert isinstance(host.algorithm, DrawsNetworks)
        for k in range(self.num_samples):
            generator = derived_generator(host.seed, "sampled networks", trainer.current_epoch, k)
            weights = host.algorithm.network(host.module, host.state, generator)
            yield ValidatedBeside(host.module, weights, trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Trained) -> None:  # type: ignore[override]
        networks, self._networks = self._networks, []
        if not networks:
            return
        expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
        figures = sampling_figures([_logged(network) for network in networks], expected)
        if not figures and trainer.is_global_zero:
            warnings.warn(
                f"`{type(pl_module.module).__name__}.validation_step` logs no mean and no metric with `self.log`, so "
                "SampledNetworks has nothing to compare; log there, and not in `on_validation_epoch_end`.",
                SpectralWarning,
                stacklevel=2,
            )
        for name, value in figures.items():
            tensor = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, tensor, on_step=False, on_epoch=True, add_dataloader_idx=False, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._networks = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_validations = state_dict["num_validations"]


def _logged(network: ValidatedBeside) -> dict[str, float]:
    with network.entered():
        return network.logged()


def sampling_figures(logged: Sequence[Mapping[str, float]], expected: Mapping[str, float]) -> dict[str, float]:
    """The figures of each metric, by the names under which they are logged.

    Example:
        >>> sampling_figures([{"acc": 0.5}, {"acc": 0.75}], {"acc": 1.0})["acc/sampling_gap"]
        0.375
    """
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in logged for name in metrics):
        values = torch.tensor([metrics[name] for metrics in logged if name in metrics], dtype=torch.float64)
        mean = float(values.mean())
        own = {"sampled_mean": mean, "sampled_max": float(values.max()), "sampled_min": float(values.min())}
        if len(values) > 1:
            own["sampled_std"] = float(values.std())
        if name in expected:
            own["sampling_gap"] = expected[name] - mean
        metric, suffix, dataloader = name.partition(SUFFIX)
        figures.update({f"{metric}/{figure}{suffix}{dataloader}": value for figure, value in own.items()})
    return figures
