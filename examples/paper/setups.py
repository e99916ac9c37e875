"""The rows of the papers' tables: what each name means as an algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning_spectral as ls

KeepRatio = float | Mapping[float, float]
CLIP = 10.0  # the 2024 paper's tau
UNBIASED_PRISM = ls.PriSM(compensation="wallenius", marginals="manly")  # with the approximation that the paper used


@dataclass(frozen=True)
class Setup:
    """One row.

    Attributes:
        strategy: Of spectral sharding; ``None`` for the whole model on every client.
        clip_tau: Bound on effective learning rates.
        published: Whether the recipe is the paper's, without a spectral start and a bound on steps of the weight.
    """

    strategy: ls.ShardingStrategy | None
    clip_tau: float = math.inf
    published: bool = True

    def algorithm(self, keep_ratio: KeepRatio | None, design: str | None) -> ls.Algorithm[Any]:
        """The algorithm at some keep ratio, which only the whole model does without.

        Args:
            keep_ratio: Share of the terms, or the share of clients that have each.
            design: Name of a design; ``None`` for the strategy's own.
        """
        if self.strategy is None:
            return ls.FedAvg()
        assert keep_ratio is not None, "a row of a grid lacks its keep ratio"
        make = ls.SpectralSharding.published if self.published else ls.SpectralSharding
        return make(self.strategy, keep_ratio, design=DESIGNS[design]() if design else None, clip_tau=self.clip_tau)


DESIGNS = {"Brewer": ls.Brewer, "MinimumSupport": ls.MinimumSupport, "ConditionalPoisson": ls.ConditionalPoisson}
SETUPS = {
    "No sharding": Setup(None),
    "Top-n": Setup(ls.TopN()),
    "Top-n + Scaled": Setup(ls.Scaled(ls.TopN())),
    "PriSM": Setup(ls.PriSM()),
    "PriSM, exponent 4": Setup(ls.PriSM(exponent=4)),  # for clients of all keep ratios, as in PriSM's own runs
    "PriSM + Scaled": Setup(ls.Scaled(ls.PriSM())),
    "PriSM + Wallenius": Setup(UNBIASED_PRISM),
    "PriSM + Wallenius + ClipLR": Setup(UNBIASED_PRISM, CLIP),
    "Unbiased": Setup(ls.Unbiased(), CLIP),
    "Unbiased without ClipLR": Setup(ls.Unbiased()),
    "Collective": Setup(ls.Collective(), CLIP),
    "Schatten, p = 4": Setup(ls.Schatten(4), CLIP),
    "This package's default": Setup(ls.Collective(), CLIP, published=False),
}
