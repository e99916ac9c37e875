"""Zampling: a short vector of probabilities goes down, and one bit for each comes back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.classic import ClassicAlgorithm
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.zampling_checks import check_none_untrained, check_score_groups, hardly_moved
from lightning_spectral.algorithms.zampling_round import (
    ZamplingRound,
    ZamplingState,
    check_weights,
    on_grid,
    own_state,
)
from lightning_spectral.algorithms.zampling_side import BITS, MOVED, PLACE, PROBS, MatrixCache, ZamplingSide, uploaded
from lightning_spectral.arguments import Number, as_patterns, check_fields, flag
from lightning_spectral.client.side import ClientSide
from lightning_spectral.errors import check_is
from lightning_spectral.functional.zampling.bits import bit_entropy, draw_bits, pack_levels, unpack_bits, unpack_levels
from lightning_spectral.functional.zampling.influence import Values
from lightning_spectral.functional.zampling.links import Clip, Link, Sigmoid
from lightning_spectral.nn.zampling.compressed import COMPRESSION, DOWNLINK_BITS, CompressedWeight, Compression, Init
from lightning_spectral.nn.zampling.sampled_weights import split_weights
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    kept_buffers,
    load_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import MeanBits, RunningMean


@dataclass(frozen=True)
class Zampling(ClassicAlgorithm[ZamplingRound]):
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
            becomes 0 or 1 if all clients' bits agree, and an absorbing `Clip` keeps it there; FedPM uses 1.
        link: From scores to probabilities; ``None`` for `Clip()`.
        values: Distribution of the entries of Q: ``"normal"``, or ``"sign"`` for plus or minus a constant.
        weigh_clients: Whether the mean of bits is weighted by numbers of examples; as published, each client counts the
            same.
        downlink_bits: Number of bits per probability in the download, from 1 to 16, rounded at random; ``None`` for a
            float.
        coordinated: Whether clients draw the bits that they send jointly, each with its own probabilities. The mean of
            the bits is then closer to that of the probabilities than with independent draws, which the paper uses. Each
            client is told its place in the round, in eight bytes.
        skip_settled: Whether to omit bits whose probability is 0 or 1, which the server knows, because an absorbing
            `Clip` never changes them. As published, all are sent.
        exclude: Shell-style patterns of the names of parameters that travel whole.
        include: Patterns of the names of further parameters, of two dimensions or more, to compress.
        keep_buffers: Patterns of the names of buffers that keep the server's value instead of the clients' average.
        memory: Number of bytes of Q that a process may keep, eight for each of its m d entries and four for each row;
            what does not fit is drawn again in every product.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, or patterns are not a sequence of strings.

    Reference:
        Villani, Natale & Mallmann-Trenn, Trading-off accuracy and communication cost in federated learning.

    Example:
        >>> Zampling(compression=8).start(nn.Linear(30, 10), seed=0).probs.shape
        torch.Size([39])
    """

    updates_have_norms: ClassVar[bool] = False

    compression: float = 32
    degree: int | None = 10
    init: Init = "he"
    sampled: bool = True
    smoothing: float = 0.0
    link: Link = field(default_factory=Clip)
    values: Values = "normal"
    weigh_clients: bool = False
    downlink_bits: int | None = None
    skip_settled: bool = False
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    keep_buffers: Sequence[str] = ()
    memory: int = 2**30
    gain: float = 1.0
    coordinated: bool = False
    _matrices: MatrixCache = field(default_factory=MatrixCache, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_is("link", self.link, Link)
        check_fields(
            self,
            **COMPRESSION,
            exclude=as_patterns,
            include=as_patterns,
            keep_buffers=as_patterns,
            smoothing=Number(at_least=0, hint="it is a pseudo-count"),
            weigh_clients=flag,
            downlink_bits=DOWNLINK_BITS,
            coordinated=flag,
            skip_settled=flag,
        )
        if self.skip_settled and self.link != Clip():
            raise ValueError(
                f"`skip_settled` needs scores that stay at 0 and 1, which those of `Clip()` do; got link={self.link!r}."
            )
        self.how()

    @classmethod
    def supermask(cls) -> Zampling:
        """The supermasks of Zhou et al. (2019): each weight is a random number that is either present or zero."""
        return cls(compression=1, degree=None, link=Sigmoid())

    @classmethod
    def fed_pm(cls, straight_through: bool = False) -> Zampling:
        """FedPM (Isik et al., 2023): signed constants, sigmoid scores, and the mean of a Beta(1, 1) posterior.

        Args:
            straight_through: Whether gradients pass through the draw unchanged. In FedPM's code they are multiplied by
                p.
        """
        return cls(compression=1, degree=None, link=Sigmoid(straight_through), values="sign", smoothing=1.0)

    def how(self) -> Compression:
        """How weights are compressed."""
        return Compression(
            self.compression,
            self.degree,
            self.init,
            self.sampled,
            self.values,
            self.exclude,
            self.include,
            self.memory,
            self.gain,
        )

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if nothing can be compressed, or there are fewer probabilities than the degree."""
        how = self.how()
        how.matrix(how.weights_of(server), seed=0)

    def prepare(self, server: nn.Module) -> Zampling:
        """Decide which buffers keep the server's value, once for all rounds."""
        return replace(self, keep_buffers=kept_buffers(server, self.keep_buffers))

    def leave_untrained(self, server: nn.Module, names: Collection[str]) -> Zampling:
        """Raise ``ValueError`` if one is a compressed weight, which would be random and stay so."""
        check_none_untrained([weight.name for weight in self.weights_of(server)], names)
        return self

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Check that one optimizer steps all scores with the same options, and warn about weight decay.

        Raises:
            ValueError: If compressed weights are in parameter groups of different options, or some are in none.
        """
        check_score_groups(template, [server.get_parameter(weight.name) for weight in self.weights_of(server)])

    def weights_of(self, server: nn.Module) -> tuple[CompressedWeight, ...]:
        """The weights that are compressed."""
        return self.how().weights_of(server)

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half; it draws the same Q from the seed of each download."""
        weights = self.weights_of(server)
        dense = averaged_tensors(server, {weight.name for weight in weights}, self.keep_buffers)
        return ZamplingSide(
            self.how(), weights, self.link, tuple(dense), self.downlink_bits, self.skip_settled, self._matrices
        )

    def start(self, server: nn.Module, seed: int) -> ZamplingState:
        """Draw the first probabilities, uniform in [0, 1]."""
        weights = self.weights_of(server)
        return ZamplingState(self.how().first_probs(weights, seed), seed, weights)

    def initialize(self, server: nn.Module, workers: SharesWork) -> str:
        """Say what becomes of the module's own weights, which `settle` overwrites."""
        weights = self.weights_of(server)
        num_weights = sum(weight.num_values for weight in weights)
        return (
            f"Zampling: {num_weights:,} weights in {len(weights)} tensors become random combinations of "
            f"{self.how().num_probs(weights):,} bits; the values they had, trained or not, are not used."
        )

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> ZamplingRound:
        """Collect what every client starts from; quantise the probabilities, the same for all."""
        check_weights(own_state(state), self.weights_of(server))
        probs = own_state(state).probs.detach()
        without = {weight.name for weight in self.weights_of(server)}
        sent, arrived = probs, probs
        if self.downlink_bits is not None:
            generator = derived_generator(cohort.seed, "downlink rounding", cohort.round_idx)
            sent = pack_levels(probs, self.downlink_bits, generator)
            arrived = unpack_levels(sent, len(probs), self.downlink_bits).to(probs)
        units = sum(map(len, cohort.groups.values()))
        return ZamplingRound(
            cohort,
            {PROBS: sent, **travelling_tensors(server, without)},
            arrived,
            MeanBits(len(probs), cohort.total if self.weigh_clients else float(units), probs.device),
            dense_mean(server, averaged_tensors(server, without, self.keep_buffers), cohort),
        )

    def send(self, opened: ZamplingRound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Send the same to every client, except for its place."""
        place = {PLACE: torch.tensor(opened.cohort.place_of(unit), dtype=torch.int32)} if self.coordinated else {}
        return Download(unit, 1.0, {**opened.tensors, **place}), Receipt(unit, 1.0)

    def add(self, opened: ZamplingRound, receipt: Receipt, upload: Upload) -> None:
        """Count the client's bits, and add the changes of dense tensors."""
        coefficient = receipt.unit.coefficient
        bits = opened.probs == 1
        asked = uploaded(opened.probs, self.skip_settled)
        bits[asked] = unpack_bits(upload.tensors[BITS], int(asked.sum()))
        opened.bits.add(bits, coefficient if self.weigh_clients else 1.0)
        opened.dense.add(upload.tensors, coefficient, upload.largest)

    def running_means(self, opened: ZamplingRound) -> Sequence[RunningMean]:
        """The counts of bits, and the sum over dense tensors."""
        return [opened.bits, opened.dense]

    def close(self, server: nn.Module, state: nn.Module | None, opened: ZamplingRound) -> None:
        """Set the pseudo-gradients: with learning rate 1 the new probabilities are exactly the mean of the bits."""
        probs = own_state(state).probs
        probs.grad = probs.detach() - on_grid(opened.bits.finish(self.smoothing)).to(probs)
        apply_mean_change(server, opened.dense.finish())

    @torch.no_grad()
    def settle(self, server: nn.Module, state: nn.Module | None) -> None:
        """Bring probabilities back into [0, 1], which a server optimizer may have left, and write Qp."""
        own = own_state(state)
        own.probs.copy_(on_grid(own.probs))
        load_tensors(server, self.network(server, own))

    @torch.no_grad()
    def network(
        self, server: nn.Module, state: nn.Module | None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The compressed weights of one network, by name.

        Args:
            server: The server's module.
            state: The server's state.
            generator: Draws bits z for the weights Qz of a sampled network; ``None`` for Qp, the expected one.
        """
        own, weights = own_state(state), self.weights_of(server)
        check_weights(own, weights)
        probs = own.probs.detach()
        z = probs if generator is None else draw_bits(probs, generator).to(probs.dtype)
        matrix = self._matrices.get(self.how().matrix(weights, own.seed))
        parts = split_weights(matrix.expand(z), [weight.shape for weight in weights])
        return {weight.name: values for weight, values in zip(weights, parts, strict=True)}

    def diagnostics(self, opened: ZamplingRound) -> Mapping[str, float]:
        """Entropy of the mean of the bits, share on which all agree, how far two clients differ, share of p settled."""
        count = opened.bits.weights.num_terms
        if count == 0:
            return {}
        mean = opened.bits.finish()
        pairs = 2 * mean * (1 - mean) * (count / (count - 1) if count > 1 else 1.0)
        return {
            "bit_entropy": float(bit_entropy(mean).mean()),
            "bits_agreed": float(((mean == 0) | (mean == 1)).double().mean()),
            "bit_disagreement": float(pairs.mean()),
            "probs_settled": float((~uploaded(opened.probs, skip_settled=True)).double().mean()),
        }

    def concerns_after(self, summary: RoundSummary) -> Sequence[str]:
        """A warning if clients hardly moved their probabilities."""
        moved = summary.logged.get(MOVED)
        return hardly_moved(moved.value, len(summary.averaged)) if moved else ()
