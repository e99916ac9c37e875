"""Zampling: a short vector of probabilities goes down, and one bit for each comes back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.zampling.halves import ZamplingHalf, ZamplingSide, ZamplingState
from lightning_spectral.arguments import Number, as_patterns, check_fields, each, flag
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.zampling import Clip, Link, Sigmoid, Values
from lightning_spectral.nn.zampling import (
    COMPRESSION,
    DOWNLINK_BITS,
    CompressedWeight,
    Compression,
    Compressions,
    Init,
)
from lightning_spectral.protocol.buffer_rules import Rules, as_rules, buffer_rules
from lightning_spectral.protocol.exchange import returned_tensors
from lightning_spectral.protocol.rng import derived_generator


@dataclass(frozen=True)
class Zampling(Algorithm):
    r"""Weights are sparse random combinations w = Qz of bits, and clients train the probabilities of these bits.

    Q is derived from the run's seed and never travels. A client gets the n probabilities p and trains scores that start
    from them, with new bits in each local step and the straight-through gradient :math:`Q^T \nabla_w`. It returns one
    draw of bits, eight to a byte. The new p is the mean of the clients' bits, and the server's module holds Qp.

    Weights and biases of affine layers and embeddings are compressed. Everything else travels whole and is averaged as
    in `FedAvg`: parameters of normalisation layers, buffers, and modules that this package does not know. All clients
    share one n, since bits of different Q cannot be averaged: there are no keep ratios.

    Args:
        compression: Number of weights for each probability, m / n, at least 1.
        degree: Number d of probabilities that a weight depends on; ``None`` for one of its own, a diagonal Q.
        init: ``"he"`` for weights with He's variance, 2 / fan-in, in the forward pass; ``"paper"`` for the variance of
            Q printed in the paper, with which they have 3 / fan-in.
        gain: Factor on the standard deviation of the entries of Q. As p lies in [0, 1], this also bounds how large a
            weight can become.
        sampled: Whether local steps use bits; ``False`` for probabilities, the paper's ContinuousModel. Bits are sent
            either way.
        smoothing: Pseudo-count of a symmetric Beta prior on each mean of bits. With 0, as published, a probability
            becomes 0 or 1 if all clients' bits agree, and an absorbing `Clip` keeps it there.
        link: From scores to probabilities; ``None`` for `Clip()`.
        values: Distribution of the entries of Q: ``"normal"``, or ``"sign"`` for plus or minus a constant.
        downlink_bits: Number of bits per probability in the download, from 1 to 16, rounded at random; ``None`` for a
            float.
        coordinated: Whether clients draw the bits that they send jointly, each with its own probabilities. The mean of
            the bits is then closer to that of the probabilities than with independent draws, which the paper uses. Each
            client is told its place in the round, in eight bytes.
        normal_scores: Whether training starts from standard normal scores, whose probabilities the link gives;
            by default the first probabilities are uniform.
        exclude: Shell-style patterns of the names of parameters that travel whole.
        buffers: Rules for buffers by patterns of their names, as in `FedAvg`.
        memory: Number of bytes of Q that a process may keep, eight for each of its m d entries and four for each row;
            what does not fit is drawn again in every product.

    Reference:
        Villani, Natale & Mallmann-Trenn, Trading-off accuracy and communication cost in federated learning.

    Example:
        >>> Zampling(compression=8).new_state(nn.Linear(30, 10), seed=0).probs.shape
        torch.Size([39])
    """

    updates_have_norms: ClassVar[bool] = False

    capacity_name: ClassVar[str] = "compression"
    capacity_is_shared: ClassVar[bool] = True

    compression: float = 32
    degree: int | None = 10
    init: Init = "he"
    sampled: bool = True
    smoothing: float = 0.0
    link: Link = field(default_factory=Clip)
    values: Values = "normal"
    downlink_bits: int | None = None
    exclude: Sequence[str] = ()
    buffers: Rules = field(default_factory=dict)
    memory: int = 2**30
    gain: float = 1.0
    coordinated: bool = False
    normal_scores: bool = False

    def __post_init__(self) -> None:
        check_is("link", self.link, Link)
        check_fields(
            self,
            **COMPRESSION,
            exclude=as_patterns,
            buffers=as_rules,
            smoothing=Number(at_least=0, hint="it is a pseudo-count"),
            downlink_bits=DOWNLINK_BITS,
            coordinated=flag,
            normal_scores=flag,
        )
        self.scheme()

    @classmethod
    def supermask(cls) -> Zampling:
        """The supermasks of Zhou et al. (2019): each weight is a random number that is either present or zero."""
        return cls(compression=1, degree=None, link=Sigmoid())

    @classmethod
    def fed_pm(cls) -> Zampling:
        r"""FedPM (Isik et al., 2023), as in its authors' code: a bit decides if a weight is there or zero.

        Weights are :math:`\pm e / \sqrt{\text{fan-in}}`, and scores start from normal draws. The server takes the mode
        of a Beta posterior whose prior, Beta(1, 1), is reset in each round: this is the mean of the bits. The authors
        evaluate sampled networks, as `SampledNetworks` does. Gradients that pass through the draw are multiplied by p.

        Note:
            There, clients' bits count as 0.01 and 0.99, and their optimizers keep their state over rounds. Here, the
            sigmoid clips the mean of the bits to these values instead, and optimizers start afresh in every round.
        """
        link = Sigmoid(straight_through=False)
        return cls(compression=1, degree=None, link=link, values="sign", gain=math.e / 2, normal_scores=True)

    @classmethod
    def fed_pm_posterior_mean(cls) -> Zampling:
        """Relative of FedPM: the *mean* of the Beta(1, 1) posterior, constants of He's variance, uniform probabilities.

        No probability becomes 0 or 1, so bits that all clients agree on stay uncertain: with ten clients, one sample
        in twelve has the other value.
        """
        return cls(compression=1, degree=None, link=Sigmoid(straight_through=False), values="sign", smoothing=1.0)

    def with_capacities(self, capacities: Sequence[float]) -> dict[float, tuple[Zampling, float]]:
        factors = each("capacities", capacities, COMPRESSION["compression"])
        return {factor: (replace(self, compression=factor), 1.0) for factor in factors}

    def all_capacities(self, server: nn.Module) -> Compressions:
        """The compressions at which there is another probability, from as many as the degree to one for each weight."""
        weights = replace(self, compression=1.0).scheme().weights_of(server)
        return Compressions(sum(weight.num_values for weight in weights), self.degree or 1)

    def scheme(self) -> Compression:
        """How weights are compressed."""
        return Compression(
            self.compression,
            self.degree,
            self.init,
            self.sampled,
            self.values,
            self.exclude,
            self.memory,
            self.gain,
        )

    def check(self, server: nn.Module) -> None:
        how = self.scheme()
        how.matrix(how.weights_of(server), seed=0)

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        check_score_groups(template, [server.get_parameter(weight.name) for weight in self.weights_of(server)])

    def weights_of(self, server: nn.Module) -> tuple[CompressedWeight, ...]:
        """The weights that are compressed."""
        return self.scheme().weights_of(server)

    def new_state(self, server: nn.Module, seed: int) -> ZamplingState:
        weights, how = self.weights_of(server), self.scheme()
        first = how.first_probs(weights, seed)
        if self.normal_scores:
            generator = derived_generator(seed, "probabilities")
            first = self.link.probs(torch.randn(len(first), generator=generator, dtype=torch.float32))
        return ZamplingState(first, weights, how.matrix(weights, seed))

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> ZamplingHalf:
        assert isinstance(state, ZamplingState), "Zampling is bound together with the state that `new_state` returned"
        buffers = buffer_rules(server, self.buffers, decisions)
        weights = self.weights_of(server)
        names = [weight.name for weight in weights]
        check_none_untrained(names, untrained)
        check_unchanged(state.weights, weights)
        side = ZamplingSide(
            state.matrix,
            state.weights,
            self.link,
            tuple(returned_tensors(server, names, buffers)),
            self.sampled,
            self.downlink_bits,
        )
        return ZamplingHalf(
            server,
            state,
            side,
            smoothing=self.smoothing,
            coordinated=self.coordinated,
            buffers=buffers,
        )

    def network(
        self, server: nn.Module, state: nn.Module | None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The compressed weights Qz for bits z that ``generator`` draws, by name; without one Qp, the expected ones."""
        assert isinstance(state, ZamplingState)
        check_unchanged(state.weights, self.weights_of(server))
        return state.network(generator)

    def histograms(self, state: nn.Module | None) -> dict[str, Tensor]:
        return {"probs": state.probs} if isinstance(state, ZamplingState) else {}


def check_score_groups(template: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Check that one optimizer steps all scores with the same options; warn that weight decay does not reach them."""
    wanted = {id(weight) for weight in weights}
    groups = [group for group in template.param_groups if any(id(p) in wanted for p in group["params"])]
    if not groups:
        return
    held = {id(p) for group in groups for p in group["params"]} & wanted
    first, *others = ({name: value for name, value in group.items() if name != "params"} for group in groups)
    if held != wanted or any(options != first for options in others):
        raise ValueError(
            "Zampling trains one vector of scores for all compressed weights, so one optimizer must step them with the "
            f"same options; your {type(template).__name__} holds only some of them, or in groups whose options differ. "
            "Put them in one group, or keep the others dense with `exclude=`."
        )
    if first.get("weight_decay"):
        warnings.warn(
            f"weight_decay={first['weight_decay']:g} of {type(template).__name__} is not applied to Zampling's scores, "
            "since it would pull every probability to 0; it applies to dense parameters only.",
            SpectralWarning,
            stacklevel=3,
        )


def check_unchanged(drawn: Sequence[CompressedWeight], found: Sequence[CompressedWeight]) -> None:
    """Raise ``ValueError`` unless the probabilities were drawn for the weights that are compressed now."""
    if changed := sorted({weight.name for weight in set(drawn) ^ set(found)}):
        raise ValueError(
            f"Zampling's probabilities were drawn when the module was wrapped, and {', '.join(changed)} changed since: "
            "parameters were frozen, unfrozen, added or removed. Build layers in `__init__` rather than in `setup`, "
            "freeze or unfreeze them first, and then wrap the module in a new FederatedModule, which draws new "
            "probabilities."
        )


def check_none_untrained(compressed: Sequence[str], untrained: Collection[str]) -> None:
    """Raise ``ValueError`` if no optimizer steps a compressed weight: it would lose its value for a random one."""
    if lost := [name for name in compressed if name in untrained]:
        raise ValueError(
            f"Zampling replaces {', '.join(lost)} with random weights, which your optimizer does not hold and would "
            "not train; give it all parameters of the module, or list the layers in `exclude` to leave them as they "
            "are."
        )
