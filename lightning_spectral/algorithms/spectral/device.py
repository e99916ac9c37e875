"""The device half of spectral sharding: sub-models of singular terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from torch.optim import AdamW

from lightning_spectral.client.local_optimizer import LocalOptimizer, OptimizerRecipe, rebuild_optimizer
from lightning_spectral.client.side import ClientSide
from lightning_spectral.nn.layers.terms import sharded_layers
from lightning_spectral.nn.optimizer_hooks import FrobeniusDecay, TermRates
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.swap import swap_layers
from lightning_spectral.protocol.exchange import copy_module, load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, Options, Upload


@dataclass(frozen=True)
class SpectralSide(ClientSide):
    """Sub-models whose sharded layers hold the terms that were sent.

    Attributes:
        plan: How clients hold each layer.
        dense: Names of the tensors that travel back whole.
        clip_tau: Bound on the learning rate of a term's vectors.
        clip_weight_lr: Bound on the learning rate of the weight.
        frobenius_decay: Coefficient of the penalty on sharded layers, in addition to the optimizer's weight decay.
    """

    plan: ModulePlan
    dense: tuple[str, ...]
    clip_tau: float
    clip_weight_lr: float
    frobenius_decay: float

    @cached_property
    def weight_of(self) -> dict[str, str]:
        """Maps the name of a factor to that of the dense weight that it stands for."""
        return {
            f"{name}.{factor}": block.parameter for name, block in self.plan.blocks.items() for factor in ("u", "v")
        }

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """Names of the tensors that travel back; multipliers do not."""
        return (*self.dense, *self.weight_of)

    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        # The dense weights are about to be replaced, so they are not copied.
        client: nn.Module = copy_module(module, [module.get_parameter(name) for name in self.plan.sharded_weights])
        swap_layers(client, self.plan, lambda sharded, dense, num_terms: sharded.like(dense, num_terms), capacity)
        return client

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, download.tensors)

    def local_optimizer(self, recipe: OptimizerRecipe, client: nn.Module) -> LocalOptimizer:
        """The user's optimizer, with factors in groups without weight decay, then Frobenius decay, then clipping."""
        local = rebuild_optimizer(
            recipe,
            client,
            origin=lambda name: self.weight_of.get(name, name),
            overrides=lambda name: {"weight_decay": 0.0} if name in self.weight_of else {},
        )
        decoupled = issubclass(recipe.optimizer_class, AdamW) or any(
            options.get("decoupled_weight_decay") for options in recipe.options
        )
        decays = self._decays(recipe, recipe.options)
        FrobeniusDecay(decays, decoupled).register(local.optimizer, client)
        rates = TermRates(client, self.clip_tau, self.clip_weight_lr)
        rates.register(local.optimizer)

        def start_client(options: Sequence[Options]) -> None:
            decays.update(self._decays(recipe, options))
            rates.start_client()

        return replace(local, on_options=start_client)

    def _decays(self, recipe: OptimizerRecipe, options: Sequence[Options]) -> dict[str, float]:
        """For each block of a weight that this optimizer steps, the coefficient of its penalty in a round."""
        decay_of = {name: options[i].get("weight_decay", 0.0) for name, i in recipe.group_of.items()}
        blocks = self.plan.blocks.items()
        return {n: self.frobenius_decay + decay_of[b.parameter] for n, b in blocks if b.parameter in decay_of}

    def collect(self, client: nn.Module, download: Download) -> Upload:
        return Upload(download.unit, select_tensors(client, self.returned))

    def watched(self, client: nn.Module) -> dict[str, nn.Parameter]:
        return {name: layer.u for name, layer in sharded_layers(client).items()}
