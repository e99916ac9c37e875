"""Convolutions whose clients hold Tucker-2 factors: what the server keeps of them, and their part of a round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.tucker import PARTS, compose, tucker_factors, tucker_ranks
from lightning_spectral.nn.plan.module_plan import LayerPlan
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import Tensors, Upload
from lightning_spectral.sums import MeanChange


def ranks_of(layer: LayerPlan, keep_ratio: float) -> tuple[int, int]:
    """Numbers of inner channels of a client."""
    (block,), (shape,) = layer.blocks, layer.shapes
    return tucker_ranks(shape, block.num_terms(keep_ratio))


class TuckerState(nn.Module):
    """The factors of the largest clients, which the server optimizer steps; others hold leading parts of them.

    They have the names that they have in a sub-model, such as ``net.3.down``.

    Args:
        server: The server's module.
        layers: The convolutions, by name.
        keep_ratio: The largest of any client.

    Attributes:
        has_begun: Whether a fit has begun; until then factors are zero, as a user may still load other weights.
    """

    has_begun: Tensor

    def __init__(self, server: nn.Module, layers: Mapping[str, LayerPlan], keep_ratio: float) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.register_buffer("has_begun", torch.tensor(False))
        for name, layer in layers.items():
            holder: nn.Module = self
            for part in name.split("."):
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            weight, (a, b) = server.get_parameter(f"{name}.weight"), ranks_of(layer, keep_ratio)
            shapes = (a, weight.shape[1]), (b, a, *weight.shape[2:]), (len(weight), b)
            for part, shape in zip(PARTS, shapes, strict=True):
                holder.register_parameter(part, nn.Parameter(weight.new_zeros(shape)))

    def factors(self, name: str) -> dict[str, nn.Parameter]:
        """The factors of one convolution, by full name."""
        return {f"{name}.{part}": self.get_parameter(f"{name}.{part}") for part in PARTS}

    @torch.no_grad()
    def settle(self, server: nn.Module, names: Mapping[str, LayerPlan]) -> None:
        """Write the weights of some convolutions into the server's module; before the first round, read them."""
        for name in names:
            weight, factors = server.get_parameter(f"{name}.weight"), list(self.factors(name).values())
            if not self.has_begun:
                down, core, _ = factors
                for own, factor in zip(factors, tucker_factors(weight, len(down), len(core)), strict=True):
                    own.copy_(factor)
            weight.copy_(compose(*(factor.double() for factor in factors)))
        self.has_begun.fill_(True)


class TuckerRound:
    """The convolutions of one open round: a client holds the leading inner channels of each.

    If clients differ, every entry is averaged over those that hold it.

    Args:
        state: The factors.
        layers: The convolutions, by name.
        cohort: Who takes part.
        is_mixed: Whether clients have different keep ratios, in this round or in others.

    Attributes:
        sent: What clients of each keep ratio are sent, by full name.
        places: The places of their entries in the whole factors; nothing if all clients hold these whole.
        running: Running mean of the changes of all factors.
    """

    def __init__(self, state: TuckerState, layers: Mapping[str, LayerPlan], cohort: Cohort, is_mixed: bool) -> None:
        self.state, self.layers = state, layers
        whole = {n: own.detach() for name in layers for n, own in state.factors(name).items()}
        by_index = dict.fromkeys(whole) if is_mixed else None
        places = {name: torch.arange(own.numel()).view(own.shape) for name, own in whole.items()} if is_mixed else {}
        self.sent = {ratio: self._leading(whole, ratio) for ratio in cohort.groups}
        self.places = {ratio: self._leading(places, ratio) if is_mixed else {} for ratio in cohort.groups}
        self.running = MeanChange(whole, cohort.total, cohort.absolute, by_index=by_index)

    def _leading(self, whole: Tensors, keep_ratio: float) -> dict[str, Tensor]:
        """What a client of a keep ratio holds of tensors of the factors' shapes, by full name."""
        found: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            a, b = ranks_of(layer, keep_ratio)
            down, core, up = (f"{name}.{part}" for part in PARTS)
            found |= {down: whole[down][:a], core: whole[core][:b, :a], up: whole[up][:, :b]}
        return {name: part.contiguous() for name, part in found.items()}

    def add(self, upload: Upload, coefficient: float, keep_ratio: float) -> None:
        self.running.add(upload.tensors, coefficient, upload.largest, where=self.places[keep_ratio])

    def close(self) -> None:
        apply_mean_change(self.state, self.running.finish())
