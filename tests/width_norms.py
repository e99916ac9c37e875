"""A module with three norms, and `WidthSharding` with running averages for each width."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_models import LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms.width import WidthRound
from lightning_spectral.nn.width.plan import cut_module

MIXED, WIDTHS = {0.25: 0.3, 0.75: 0.4, 1.0: 0.3}, (0.25, 0.5, 0.75, 1.0)


class LitNorms(LitSmall):
    """A norm that is never cut, one whose average is the mean of all batches, and a convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.conv = nn.BatchNorm1d(6), nn.Conv1d(1, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm1d(8, momentum=None), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.head(self.norm(self.conv(self.before(x)[:, None])).relu().flatten(1)))


def recorded_turns(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The receipts and tensors of all clients, as they are added."""
    turns, add = list[Any](), WidthRound.add

    def recording(self: WidthRound, receipt: Any, upload: Any) -> None:
        add(self, receipt, upload)
        turns.append((receipt, {name: tensor.clone() for name, tensor in upload.tensors.items()}))

    monkeypatch.setattr(WidthRound, "add", recording)
    return turns


AVERAGES = [f"{layer}.running_{part}" for layer in ("net.1", "before", "norm") for part in ("mean", "var")]


def ours(keep_ratio: Any = MIXED, step_widths: Any = WIDTHS, **options: Any) -> ls.WidthSharding:
    return ls.WidthSharding(keep_ratio=keep_ratio, step_widths=step_widths, **{"averages_per_width": True, **options})


def randomised(lit: Any, seed: int) -> Any:
    """Replace the initial weights and averages, so that nothing agrees by accident."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in lit.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return lit


def cut(lit: Any, plan: ls.nn.WidthPlan, width: float) -> Any:
    small = copy.deepcopy(lit)
    cut_module(small, plan.indices(plan.first(width)))
    return small
