"""Weights that are computed from scores whenever they are used, for training without federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_spectral.functional.zampling.links import Link
from lightning_spectral.nn.zampling.compressed import CompressedWeight, Compression
from lightning_spectral.nn.zampling.sampled_weights import SampledWeights
from lightning_spectral.protocol.rng import derived_generator, derived_seed


class LocalWeights(SampledWeights):
    """Weights that renew themselves before they are used.

    Attributes:
        num_draws: Buffer with the number of samples that backward passes have used; the seed and k determine draw k.
        matrix_id: Buffer with a hash of Q; scores are meaningless with another Q, and are then not loaded.
    """

    num_draws: Tensor
    matrix_id: Tensor

    def __init__(
        self, module: nn.Module, weights: Sequence[CompressedWeight], compression: Compression, link: Link, seed: int
    ) -> None:
        matrix = compression.matrix(weights, seed)
        names = {owner: tuple(owner._parameters) for owner in module.modules()}
        super().__init__(module, weights, matrix, link, compression.sampled)
        self.set_probs(compression.first_probs(weights, seed))
        described = repr((matrix.layers, matrix.num_columns, matrix.degree, matrix.values))
        device = self.scores.device
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("matrix_id", torch.tensor(derived_seed(seed, "matrix", described), device=device))
        self.seed = seed
        self._names = {owner: names[owner] for owner, *_ in self._sites}  # in order, including the dense ones
        self._draw = 0  # index of the sample in use
        self._made: tuple[Any, ...] | None = None  # what the weights were made for; None if new ones are needed
        self._held = False
        owners = set(self._names)
        users = [part for part in module.modules() if not owners.isdisjoint(part.modules())]
        self._handles = [user.register_forward_pre_hook(self.renew) for user in users]

    def renew(self, *_: Any) -> None:
        """Make new weights if the old ones were used up, or were made for other scores or another mode."""
        graph = torch.is_grad_enabled() and self.scores.requires_grad
        wanted = (self.training, graph, self.scores._version)
        made_for, *made = self._made or (None,)
        if self._held or (made_for is self.scores and tuple(made) == wanted):
            return
        # A checkpointed segment is computed again during the backward pass, with its original sample.
        if torch._C._current_graph_task_id() == -1:
            self._draw = int(self.num_draws)
        self._made = (self.scores, *wanted)
        drawn = self.sampled and self.training
        with torch.inference_mode(False), torch.set_grad_enabled(graph), _kept_as_they_are():
            z = self.draw_bits(derived_generator(self.seed, "local bits", self._draw)) if drawn else self.probs
            parts = self.combine(z)
        if graph:
            assert parts[0].grad_fn is not None
            parts[0].grad_fn.register_hook(self._count if drawn else self._give_up)
        self.put(parts)

    def hold(self, z: Tensor) -> None:
        """Use the weights Qz until `release`."""
        self._held = True
        self.put(self._expanded(z))

    def release(self) -> None:
        self._held, self._made = False, None

    def restore(self, generator: torch.Generator | None) -> None:
        """Give the module parameters with the values Qp, or Qz of one sample, which do not depend on the scores."""
        for handle in self._handles:
            handle.remove()
        z = self.probs if generator is None else self.draw_bits(generator)
        parameters = [nn.Parameter(part.clone()) for part in self._expanded(z)]
        self.put(parameters)
        for owner, names in self._names.items():
            found = dict(owner._parameters)
            owner._parameters.clear()
            owner._parameters.update((name, found[name]) for name in names)

    @torch.no_grad()
    def _expanded(self, z: Tensor) -> tuple[Tensor, ...]:
        return self.split(self.matrix.expand(z.to(self.scores.dtype)))

    def _count(self, *_: Any) -> None:
        self.num_draws.fill_(self._draw + 1)
        self._give_up()

    def _give_up(self, *_: Any) -> None:
        self._made = None
        self.rest()

    def _apply(self, fn: Any, recurse: bool = True) -> LocalWeights:
        self._made = None  # the weights already made would keep their device and type
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}matrix_id")
        if saved is not None and int(saved) != int(self.matrix_id):
            *_, errors = others
            errors.append("The scores belong to another matrix Q: `zample` the module with the arguments of that run.")
        else:
            super()._load_from_state_dict(state_dict, prefix, *others)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the graph of the weights, which cannot be copied; the module and its copy each make new weights.

        The hooks are copied before the weights, so this happens early enough.
        """
        self._give_up()
        return {**self.__dict__, "_held": False}


def _kept_as_they_are() -> saved_tensors_hooks:
    """Hooks that keep tensors saved for the backward pass out of a checkpointed segment in which they are made."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
