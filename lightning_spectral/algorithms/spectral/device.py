"""The device half of spectral sharding: sub-models of singular terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_spectral.client.device import ClientSide, StepActions
from lightning_spectral.nn.layers.terms import SingularTerms, sharded_layers
from lightning_spectral.nn.optimizer_hooks import FrobeniusDecay, TermRates
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.swap import swap_layers
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, Options, Upload

DECAY = "frobenius_decay"  # option of a group of factors


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

    def take_form(self, module: nn.Module, capacity: float) -> None:
        swap_layers(module, self.plan, lambda sharded, dense, num_terms: sharded.like(dense, num_terms), capacity)

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, download.tensors)

    def origin(self, name: str) -> str:
        return self.weight_of.get(name, name)

    def overrides(self, name: str, options: Options) -> Options:
        """Factors have Frobenius decay in place of weight decay, which would act on each of them alone."""
        if name not in self.weight_of:
            return {}
        return {"weight_decay": 0.0, DECAY: self.frobenius_decay + options.get("weight_decay", 0.0)}

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """Frobenius decay, then clipping, just before each step."""
        layers = sharded_layers(client)
        rates = TermRates(client, self.clip_tau, self.clip_weight_lr)
        rates.start_client()
        acts: dict[int, Sequence[Callable[[], None]]] = {}

        def before_step(optimizer: Optimizer) -> None:
            if id(optimizer) not in acts:
                coefficients = _decays(layers, optimizer)
                decay = FrobeniusDecay(coefficients, _is_decoupled(optimizer))
                acts[id(optimizer)] = decay.acting(optimizer, client), rates.acting(optimizer)
            for act in acts[id(optimizer)]:
                act()

        return StepActions(before_step=before_step)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        return Upload(download.unit, select_tensors(client, self.returned))

    def watched(self, client: nn.Module) -> dict[str, nn.Parameter]:
        return {name: layer.u for name, layer in sharded_layers(client).items()}


def _decays(layers: Mapping[str, SingularTerms], optimizer: Optimizer) -> dict[str, float]:
    """For each layer that an optimizer steps, the coefficient of its penalty."""
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    return {name: group_of[id(layer.u)][DECAY] for name, layer in layers.items() if id(layer.u) in group_of}


def _is_decoupled(optimizer: Optimizer) -> bool:
    """Whether weight decay is a step of its own, as in AdamW."""
    return isinstance(optimizer, AdamW) or any(g.get("decoupled_weight_decay") for g in optimizer.param_groups)
