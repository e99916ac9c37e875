"""A federation whose clients have two keep ratios, for tests with a Trainer of their own, and every system."""

from typing import Any

import lightning.pytorch as pl
import torch
from toy_models import LitMLP

import lightning_spectral as ls

MIXED = ls.SpectralSharding(ls.Collective(), keep_ratio={0.3: 0.5, 0.6: 0.5})
PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))
HEAD, HEAD_FIRST = ls.Personal(["net.5.*"]), ls.Personal(["net.5.*"], epochs=1)
ALGORITHMS = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(
        ls.Unbiased(),
        keep_ratio={0.3: 0.5, 0.6: 0.5},
        clip_tau=2.0,
        layers=ls.LayerChoices(keep_first_and_last_dense=False),
    ),
    "outputs cut": ls.SpectralSharding(keep_ratio=0.5, output_ratio=0.4),
    "FIARSE": ls.FIARSE({0.25: 0.5, 1.0: 0.5}),
    "Zampling": ls.Zampling(4, degree=3),
    "stale updates": ls.StaleUpdates(beta=0.7, num_terms=1),
    "SCAFFOLD": ls.Scaffold(),
    "FedDyn": ls.FedDyn(alpha=0.1),
    "Ditto": ls.Ditto(),
    "q-FedAvg": ls.QFedAvg(),
    "FedBuff": ls.FedBuff(concurrency=6, durations={1.0: 0.5, 3.0: 0.5}, max_staleness=4),
    "LoRA": ls.LoRA({1: 0.5, 3: 0.5}),
    "LoRA, alternating": ls.LoRA(2, aggregation=ls.AlternatingFactors()),
    "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio={0.25: 0.5, 0.5: 0.5}, scaler=True, plan=PLAN),
    "width of each step": ls.WidthSharding(keep_ratio={0.25: 0.5, 0.5: 0.5}, step_widths=(0.25, 0.5), plan=PLAN),
}
EVERY_SYSTEM: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": algorithm} for name, algorithm in ALGORITHMS.items()},
    "personal head": {"filters": [HEAD_FIRST]},
    "largest changes": {"filters": [ls.TopK(0.1)]},
    "eight bits, personal head": {"filters": [HEAD, ls.Int8()]},
    "spectral, personal head": {"algorithm": ls.SpectralSharding(keep_ratio=0.5), "filters": [HEAD]},
}


def federate(module: pl.LightningModule, **options: Any) -> ls.FederatedModule:
    """A module, trained on four clients a round."""
    settings: dict[str, Any] = {"algorithm": MIXED, "clients_per_round": 4, **options}
    return ls.FederatedModule(module, **settings)
