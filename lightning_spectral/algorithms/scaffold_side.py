"""The device half of SCAFFOLD: a correction is added to the gradients of every local step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.algorithms.plain_sgd import check_one_rate
from lightning_spectral.client.side import StepActions
from lightning_spectral.protocol.exchange import load_tensors
from lightning_spectral.protocol.records import Download, Tensors, Upload

CORRECTION = "correction:"  # before the name of a parameter: what is added to its gradients
LEARNING_RATE = "learning_rate:"  # of the round; sent back because the server needs it


@dataclass(frozen=True)
class ScaffoldSide(DenseSide):
    """Whole models whose gradients are corrected before each step, after the user's local hooks."""

    def load(self, client: nn.Module, download: Download) -> None:
        """Copy the server's values, but not the corrections."""
        load_tensors(client, {n: t for n, t in download.tensors.items() if not n.startswith(CORRECTION)})

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """Return the action that corrects gradients."""
        parameters = dict(client.named_parameters())
        corrected = [(parameters[name], correction) for name, correction in corrections(download.tensors).items()]

        @torch.no_grad()
        def correct(optimizer: Optimizer) -> None:
            for parameter, correction in corrected:
                if parameter.grad is not None:
                    parameter.grad.add_(correction)
                elif parameter.requires_grad:  # not in this step's loss: its gradient is zero
                    parameter.grad = correction.clone()

        return StepActions(before_step=correct)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        """The trained values, and the learning rate.

        Raises:
            ValueError: If parameter groups have different learning rates in this round.
        """
        upload = super().collect(client, download)
        rates = {float(group["lr"]) for groups in download.options for group in groups}
        check_one_rate(rates)
        device = next(iter(upload.tensors.values())).device
        rate = torch.tensor(next(iter(rates), 0.0), dtype=torch.float64, device=device)
        return Upload(download.unit, {**upload.tensors, LEARNING_RATE: rate})


def corrections(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The corrections in a download, by the parameters' names.

    Example:
        >>> corrections({"bias": torch.zeros(1), "correction:bias": torch.ones(1)})
        {'bias': tensor([1.])}
    """
    return {n.removeprefix(CORRECTION): t for n, t in tensors.items() if n.startswith(CORRECTION)}
