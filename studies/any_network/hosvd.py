"""FedHM with Tucker factors: convolutions are decomposed anew in every round, and become the mean of the composed ones.

The published recipe for terms, `MatrixMeans`, with the other layout: what only larger clients hold is halved in every
round where they are half of the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.algorithms.base import UNKNOWN, Known
from lightning_spectral.algorithms.fed_avg import sum_of
from lightning_spectral.algorithms.spectral.algorithm import SpectralHalf, SpectralRound
from lightning_spectral.algorithms.spectral.tucker import ranks_of
from lightning_spectral.nn.layers.tucker import PARTS, compose, tucker_factors
from lightning_spectral.nn.plan.planner import plan_of
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Upload


class WeightMeans:
    """The convolutions of one open round, in place of `TuckerRound`."""

    def __init__(self, half: SpectralHalf, cohort: Cohort) -> None:
        layers = half.plan.tucker
        self.places: Mapping[float, dict[str, Tensor]] = {ratio: {} for ratio in cohort.groups}
        self.sent: dict[float, dict[str, Tensor]] = {}
        self.composed: dict[float, dict[str, Tensor]] = {}
        self.weights = {name: half.server.get_parameter(f"{name}.weight") for name in layers}
        for ratio in cohort.groups:
            self.sent[ratio], self.composed[ratio] = {}, {}
            for name, layer in layers.items():
                weight = self.weights[name].detach()
                down, core, up = tucker_factors(weight, *ranks_of(layer, ratio))
                if cohort.round_idx:  # later on nothing is given back for what truncation takes
                    core = torch.einsum("ob,oi...,ai->ba...", up, weight, down)
                self.sent[ratio] |= {
                    f"{name}.{part}": factor for part, factor in zip(PARTS, (down, core, up), strict=True)
                }
                self.composed[ratio][name] = compose(down.double(), core.double(), up.double())
        kinds = ("trained", "lost")
        self.running = sum_of({f"{name}.{k}": w.detach() for name, w in self.weights.items() for k in kinds}, cohort)

    def add(self, upload: Upload, coefficient: float, keep_ratio: float) -> None:
        changes = {}
        for name, sent in self.composed[keep_ratio].items():
            own = compose(*(upload.tensors[f"{name}.{part}"].double() for part in PARTS))
            changes[f"{name}.trained"], changes[f"{name}.lost"] = own - sent, sent - self.weights[name].detach()
        self.running.add_change(changes, coefficient)

    def close(self) -> None:
        means = dict(self.running.finish())
        for name, weight in self.weights.items():
            weight.grad = -means[f"{name}.trained"].to(weight.dtype)
            weight.detach().add_(means[f"{name}.lost"])


class HosvdHalf(SpectralHalf):
    """Has no factors at the server."""

    def open(self, cohort: Cohort) -> SpectralRound:
        opened = super().open(cohort)
        opened.tucker = [WeightMeans(self, cohort)] if self.plan.tucker else []  # type: ignore[list-item]
        return opened


@dataclass(frozen=True)
class HosvdSharding(ls.SpectralSharding):
    """Spectral sharding with Tucker factors of means of weights."""

    layers: ls.LayerChoices = field(default_factory=partial(ls.LayerChoices, convolutions="tucker"))

    def new_state(self, server: nn.Module, seed: int) -> None:
        return None

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> HosvdHalf:
        missing_rank = None if known.decisions is None else known.decisions.get("missing_rank", {})
        plan = plan_of(server, self.layers, missing_rank=missing_rank).keeping_dense(known.untrained, "in no optimizer")
        return HosvdHalf(self, server, plan, known.rules, known.decisions)
