"""How many multiplications clients carry out in a round."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import default_collate

from lightning_spectral.algorithms.costs import cost_table
from lightning_spectral.errors import SpectralWarning
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Trained
from lightning_spectral.plugin.lightning.logs import log_values
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.rng import isolated_rng

NAME = "fl/multiplications"
EXAMPLES = 2  # of the batch that is counted: layers that normalise over a batch need more than one
PASSES = 3  # forward once; backward costs twice as much


class Multiplications(RoundCallback):
    """Logs ``fl/multiplications``: all multiplications of a round's local training, summed over clients.

    Those of one forward pass of each keep ratio's sub-model are counted once, by `cost_table`, on the module's
    ``example_input_array``, or else on the first examples of the training data, whose first part is taken for the
    module's input. Training takes three times as many for each example. If they cannot be counted, a warning says why,
    and nothing is logged.

    Note:
        What the server computes, such as singular values, and measurements for a sampler are not included.
    """

    def __init__(self) -> None:
        self._per_example: dict[str, dict[float, float] | None] = {}  # by model; None if they cannot be counted

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._per_example = {}

    def on_round_end(self, trainer: pl.Trainer, pl_module: Trained, summary: RoundSummary) -> None:  # type: ignore[override]
        run, trained = pl_module.engine.run, [client for client in summary.clients if client.num_steps > 0]
        counts = self._counted(pl_module, sorted({client.keep_ratio for client in trained}))
        if counts is not None:
            examples = {one.unit.key: run.clients.examples_per_epoch(one.num_examples) for one in trained}
            passes = PASSES * run.local_epochs
            total = sum(passes * counts[one.keep_ratio] * examples[one.unit.key] for one in trained)
            log_values(trainer, summary.round_idx, {"fl/round": summary.round_idx, summary.metric(NAME): total})

    def _counted(self, owner: Trained, keep_ratios: Sequence[float]) -> dict[float, float] | None:
        """Multiplications of a forward pass of one example, by keep ratio; ``None`` if they cannot be counted."""
        known = self._per_example.setdefault(owner.name, {})
        missing = [ratio for ratio in keep_ratios if known is not None and ratio not in known]
        if known is not None and missing:
            try:
                known.update(_per_example(owner, missing))
            except Exception as error:  # of a module whose input is something else
                self._per_example[owner.name] = known = None
                _warn(error)
        return known


def _per_example(owner: Trained, keep_ratios: Sequence[float]) -> dict[float, float]:
    example = example_of(owner.module)
    with isolated_rng(owner.seed, [owner.module.device]):
        given = _first_examples(owner.data) if example is None else example
        table = cost_table(owner.module, owner.algorithm, keep_ratios, given)
    return {ratio: table.at[ratio].macs / _batch_size(given) for ratio in keep_ratios}


def _warn(error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    warnings.warn(
        f"Multiplications are not counted, because a forward pass failed: {reason} Set the module's "
        "`example_input_array`, or remove the callback.",
        SpectralWarning,
        stacklevel=2,
    )


def _first_examples(data: Any) -> Example:
    """The module's input for the first training examples."""
    collate = data.collate_fn or default_collate
    batch = collate([data.train[index] for index in range(min(EXAMPLES, len(data.train)))])
    return batch[0] if isinstance(batch, list | tuple) else batch


def _batch_size(example: Any) -> int:
    while not isinstance(example, torch.Tensor):
        example = next(iter(example.values())) if isinstance(example, Mapping) else example[0]
    return len(example)
