"""The setups that are compared: samplers, corrections, and what each is allowed to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import lightning_spectral as ls

ACTIVE = 12  # of about 240 processors
FIXED = ls.ConditionalPoisson()


@dataclass(frozen=True)
class Setup:
    """One way to run the federation.

    Attributes:
        sampler: Draws which clients train which models.
        algorithm: Makes the algorithm of each model.
        published: Accuracy relative to full participation in the slides, by federation; empty if they do not report it.
    """

    sampler: ls.participation.Sampler
    algorithm: Callable[[], ls.Algorithm] = ls.FedAvg
    published: Mapping[str, float] = field(default_factory=dict)


def spectral() -> ls.SpectralSharding:
    layers = ls.LayerChoices(keep_first_and_last_dense=False)
    return ls.SpectralSharding(keep_ratio={0.2: 0.5, 0.4: 0.5}, layers=layers)


SETUPS: dict[str, Setup] = {
    "Full participation": Setup(ls.FullParticipation(), published={"three": 1.000, "five": 1.000}),
    "Random": Setup(ls.Uniform(ACTIVE), published={"three": 0.778, "five": 0.749}),
    "LVR": Setup(ls.LossVarianceReduced(ACTIVE), published={"three": 0.912, "five": 0.849}),
    "GVR": Setup(ls.UpdateVarianceReduced(ACTIVE), published={"three": 0.893, "five": 0.842}),
    "GVR*": Setup(ls.StaleUpdateVarianceReduced(ACTIVE), ls.StaleUpdates, published={"three": 0.960, "five": 0.869}),
    "FedVARP": Setup(ls.Uniform(ACTIVE), ls.StaleUpdates, published={"three": 0.712, "five": 0.690}),
    "MIFA": Setup(ls.Uniform(ACTIVE), ls.StaleUpdates.mifa, published={"three": 0.868, "five": 0.835}),
    "SCAFFOLD": Setup(ls.Uniform(ACTIVE), ls.Scaffold, published={"three": 0.794, "five": 0.650}),
    "Round robin": Setup(ls.RoundRobin(ACTIVE)),
    "Random, fixed size": Setup(ls.Uniform(ACTIVE, design=FIXED)),
    "Random, normalized": Setup(ls.Uniform(ACTIVE, normalize=True)),
    "LVR, last known": Setup(ls.LossVarianceReduced(ACTIVE, measure="last")),
    "LVR, 12 measured": Setup(ls.LossVarianceReduced(ACTIVE, measure=12)),
    "LVR, fixed size": Setup(ls.LossVarianceReduced(ACTIVE, design=FIXED)),
    "LVR, normalized": Setup(ls.LossVarianceReduced(ACTIVE, normalize=True)),
    "LVR, last known, FedVARP": Setup(ls.LossVarianceReduced(ACTIVE, measure="last"), ls.StaleUpdates),
    "GVR, last known": Setup(ls.UpdateVarianceReduced(ACTIVE, measure="last")),
    "GVR*, last known": Setup(ls.StaleUpdateVarianceReduced(ACTIVE, measure="last"), ls.StaleUpdates),
    "GVR*, 4 terms": Setup(ls.StaleUpdateVarianceReduced(ACTIVE), lambda: ls.StaleUpdates(num_terms=4)),
    "LVR, spectral": Setup(ls.LossVarianceReduced(ACTIVE), spectral),
    "Random, spectral": Setup(ls.Uniform(ACTIVE), spectral),
}
