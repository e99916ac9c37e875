"""The two federations of the slides: three models, and five."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import five_tasks
import tasks
from torch import nn

import lightning_spectral as ls


@dataclass(frozen=True)
class Federation:
    """Models and their data.

    Attributes:
        nets: Makes the network of each model.
        rates: Learning rate of each model.
        deal: Makes the data of all models from a seed.
        output: Folder of the results.
        figure: Stem of the figure's file name.
        about: Note on comparisons with the slides.
    """

    nets: Mapping[str, Callable[[], nn.Module]]
    rates: Mapping[str, float]
    deal: Callable[[int], ls.MultiModelDataModule]
    output: Path
    figure: str
    about: str

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(self.nets)

    def module(self, model: str) -> tasks.Classifier:
        """Return a model with new weights."""
        return tasks.Classifier(self.nets[model](), self.rates[model])


FEDERATIONS: dict[str, Federation] = {
    "three": Federation(
        nets=dict.fromkeys(tasks.MODELS, tasks.perceptron),
        rates=dict.fromkeys(tasks.MODELS, 0.1),
        deal=tasks.deal,
        output=Path("outputs/several_models"),
        figure="several_models",
        about=(
            "Perceptrons with one hidden layer of 100 units on Fashion-MNIST at 14 x 14 pixels: compare the order with "
            "that of the slides (Table I, 3 tasks), not the numbers."
        ),
    ),
    "five": Federation(
        nets=five_tasks.NETS,
        rates=five_tasks.RATES,
        deal=five_tasks.deal_five,
        output=Path("outputs/several_models_five"),
        figure="several_models_five",
        about=(
            "All models are smaller than those of the slides: compare the order with that of the slides (Table I, 5 "
            "tasks), not the numbers."
        ),
    ),
}
