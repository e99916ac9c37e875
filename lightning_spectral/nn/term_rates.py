"""Learning rates of singular terms, set for each client."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_spectral.functional.local_training import effective_lr_factors, weight_lr_factors
from lightning_spectral.nn.layers.terms import SingularTerms, sharded_layers


class TermRates:
    """Scales the gradients of each term's vectors by a factor of at most 1 that is fixed for a client's turn.

    The factor is the smaller of two: `effective_lr_factors`, which bounds the learning rate of the vectors, and
    `weight_lr_factors`, which bounds that of the weight. It acts just before a step, before momentum.

    Args:
        module: The module whose sharded layers are scaled.
        clip_tau: Bound on the learning rate of a term's vectors, in units of the nominal one.
        clip_weight_lr: Bound on the learning rate of the weight, in the same unit.
    """

    def __init__(self, module: nn.Module, clip_tau: float, clip_weight_lr: float) -> None:
        self.clip_tau = clip_tau
        self.clip_weight_lr = clip_weight_lr
        self._layers = list(sharded_layers(module).values())
        self._scaled: list[tuple[nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def start_client(self) -> None:
        """Compute the factors of the terms that the layers hold now."""
        self._scaled = []
        for layer in self._layers:
            factors = self._factors(layer)
            if bool((factors < 1.0).any()):
                self._scaled += [(layer.u, factors), (layer.v, factors[:, None])]

    def _factors(self, layer: SingularTerms) -> Tensor:
        of_vectors = effective_lr_factors(layer.omega, self.clip_tau)
        # Both vectors of a drawn term have equal length, so v stands in for a u without some of its rows, whose norm
        # would allow too long a step.
        u = layer.u if layer.has_all_rows else layer.v.T
        return torch.minimum(of_vectors, weight_lr_factors(u, layer.omega, layer.v, self.clip_weight_lr))

    def register(self, optimizer: Optimizer) -> RemovableHandle:
        """Attach the hook; parameters that this optimizer does not step are left unchanged."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return optimizer.register_step_pre_hook(lambda *_: self._scale(stepped))

    @torch.no_grad()
    def _scale(self, stepped: set[int]) -> Any:
        for parameter, factors in self._scaled:
            if parameter.grad is not None and id(parameter) in stepped:
                parameter.grad.mul_(factors)
