"""The device half of SCAFFOLD, which corrects the gradients of every local step, and the optimizer that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.side import StepActions
from lightning_spectral.protocol.exchange import load_tensors
from lightning_spectral.protocol.records import Download, Tensors, Upload

CORRECTION = "correction:"  # before the name of a parameter: what is added to its gradients
LEARNING_RATE = "learning_rate:"  # of the round; sent back because the server needs it
UNLIKE = ("momentum", "dampening", "nesterov", "maximize")  # options that make a step something else


@dataclass(frozen=True)
class ScaffoldSide(DenseSide):
    """Whole models whose gradients are corrected before each step, after the user's local hooks."""

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, {n: t for n, t in download.tensors.items() if not n.startswith(CORRECTION)})

    def start(self, client: nn.Module, download: Download) -> StepActions:
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


def check_plain_sgd(template: Optimizer, server: nn.Module) -> None:
    """Raise ``ValueError`` unless one optimizer steps all trainable parameters by one rate times the gradient."""
    if type(template) is not SGD:
        raise ValueError(
            f"SCAFFOLD needs plain SGD, got {type(template).__name__}; use torch.optim.SGD without momentum, and an "
            "adaptive optimizer at the server, e.g. FedAdam."
        )
    for name, value in ((name, group[name]) for group in template.param_groups for name in UNLIKE):
        if value:
            raise ValueError(
                f"SCAFFOLD needs plain SGD, got {name}={value!r}; leave it out. A server may have momentum: FedAvgM."
            )
    check_one_rate({float(group["lr"]) for group in template.param_groups})
    held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
    if missing := [name for name, p in server.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ValueError(
            f"SCAFFOLD needs one optimizer for all trainable parameters, and yours does not step {', '.join(missing)}; "
            "give it all of them, or freeze the others with `requires_grad_(False)`."
        )


def check_one_rate(rates: set[float]) -> None:
    """Raise ``ValueError`` if there are several learning rates."""
    if len(rates) > 1:
        raise ValueError(
            f"SCAFFOLD needs one learning rate for all parameters, got {', '.join(map(str, sorted(rates)))}; give all "
            "parameter groups the same, in every round."
        )
