"""Zampling: a short vector of probabilities goes down, and one bit for each comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import UNKNOWN, Algorithm, Known, Moment, Observed, Promises, Round, Setting
from lightning_spectral.algorithms.capacities import Capacities
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound
from lightning_spectral.arguments import Number, as_patterns, check_fields, each, flag
from lightning_spectral.client.device import ClientSide, StepActions
from lightning_spectral.client.user_optimizer import StandIn
from lightning_spectral.errors import check_is, warn
from lightning_spectral.functional.checks import has_values
from lightning_spectral.functional.zampling import (
    BYTES_PER_ENTRY,
    Clip,
    InfluenceMatrix,
    Link,
    Sigmoid,
    Values,
    draw_bits,
    pack_bits,
    uniforms,
    unpack_bits,
)
from lightning_spectral.nn.cost import Cost, CostsBesides
from lightning_spectral.nn.torch_modules import keeping_type
from lightning_spectral.nn.zampling import (
    COMPRESSION,
    DOWNLINK_BITS,
    NAME,
    CompressedWeight,
    Compression,
    Compressions,
    Init,
    SampledWeights,
    split_weights,
)
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, LoggedValue, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums import RunningMean

LEAST_MOVE = 0.3  # below it, accuracy is far below that of a larger learning rate: studies/zampling/rates.py
BELOW_ONE = 1.0 - 2.0**-53
GRID = 2.0**24  # probabilities are multiples of 1 / GRID, so that float32 adds and subtracts them exactly
PROBS, PLACE, BITS = "zampling.probs", "zampling.place", "zampling.bits"  # what travels: two names down, one up
MOVED = "fl/probs_moved"  # what every client logs
SCORES = f"{NAME}.scores"  # name of the sub-model's parameter


@dataclass(frozen=True)
class Zampling(Algorithm):
    r"""Weights are sparse random combinations w = Qz of bits, and clients train the probabilities of these bits.

    Q is derived from the run's seed and never sent. A client gets the n probabilities p and trains scores that start
    from them, with new bits in each local step and the straight-through gradient :math:`Q^T \nabla_w`. It returns one
    draw of bits, eight to a byte. The new p is the mean of the clients' bits, and the server's module holds Qp.

    Weights and biases of affine layers and embeddings are compressed. Everything else is sent whole and averaged as in
    `FedAvg`: parameters of normalisation layers, buffers, and modules that this package does not know. All clients
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
        exclude: Shell-style patterns of the names of parameters that are sent whole.
        memory: Number of bytes of Q that a process may keep, eight for each of its m d entries and four for each row;
            what does not fit is drawn again in every product.

    Reference:
        Villani, Natale & Mallmann-Trenn, Trading-off accuracy and communication cost in federated learning.

    Example:
        >>> Zampling(compression=8).new_state(nn.Linear(30, 10), seed=0).probs.shape
        torch.Size([39])
    """

    promises: ClassVar[Promises] = Promises(clients_may_join=True, draws_networks=True)

    compression: float = 32
    degree: int | None = 10
    init: Init = "he"
    sampled: bool = True
    smoothing: float = 0.0
    link: Link = field(default_factory=Clip)
    values: Values = "normal"
    downlink_bits: int | None = None
    exclude: Sequence[str] = ()
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
            sigmoid clips the mean of the bits to these values instead, and optimizers start anew in every round.
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

    @property
    def capacities(self) -> OneCompression:
        return OneCompression(self)

    def scheme(self) -> Compression:
        """How weights are compressed."""
        options = (self.degree, self.init, self.sampled, self.values, self.exclude, self.memory, self.gain)
        return Compression(self.compression, *options)

    def check(self, plan: Setting) -> None:
        if not plan.optimizers:
            how = self.scheme()
            how.matrix(how.weights_of(plan.module), seed=0)
        for template in plan.optimizers:
            self._check_optimizer(template, plan.module)

    def _check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """One optimizer steps all scores with the same options; warn that weight decay does not reach them."""
        wanted = {id(server.get_parameter(weight.name)) for weight in self.scheme().weights_of(server)}
        groups = [group for group in template.param_groups if any(id(p) in wanted for p in group["params"])]
        if not groups:
            return
        held = {id(p) for group in groups for p in group["params"]} & wanted
        first, *others = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        if held != wanted or any(options != first for options in others):
            raise ValueError(
                "Zampling trains one vector of scores for all compressed weights, so one optimizer must step them with "
                f"the same options; your {type(template).__name__} holds only some of them, or in groups whose options "
                "differ. Put them in one group, or keep the others dense with `exclude=`."
            )
        if first.get("weight_decay"):
            warn(
                f"weight_decay={first['weight_decay']:g} of {type(template).__name__} is not applied to Zampling's "
                "scores, since it would pull every probability to 0; it applies to dense parameters only."
            )

    def new_state(self, server: nn.Module, seed: int) -> ZamplingState:
        how = self.scheme()
        weights = how.weights_of(server)
        first = how.first_probs(weights, seed)
        if self.normal_scores:
            generator = derived_generator(seed, "probabilities")
            first = self.link.probs(torch.randn(len(first), generator=generator, dtype=torch.float32))
        return ZamplingState(first, weights, how.matrix(weights, seed))

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> ZamplingHalf:
        assert isinstance(state, ZamplingState), "Zampling is bound together with the state that `new_state` returned"
        weights = self.scheme().weights_of(server)
        if lost := [weight.name for weight in weights if weight.name in known.untrained]:
            raise ValueError(
                f"Zampling replaces {', '.join(lost)} with random weights, which your optimizer does not hold and "
                "would not train; give it all parameters of the module, or list the layers in `exclude` to leave them "
                "as they are."
            )
        state.check_unchanged(weights)
        return ZamplingHalf(self, server, state, known.rules)


@dataclass(frozen=True)
class OneCompression(Capacities[Zampling]):
    """All clients of Zampling train the whole model, and share one compression."""

    name: ClassVar[str] = "compression"

    def choices(self, capacities: Sequence[float]) -> dict[float, tuple[Zampling, float]]:
        factors = each("capacities", capacities, COMPRESSION["compression"])
        return {factor: (replace(self.choice, compression=factor), 1.0) for factor in factors}

    def all_of(self, server: nn.Module) -> Compressions:
        """The compressions at which there is another probability, from as many as the degree to one for each weight."""
        weights = replace(self.choice, compression=1.0).scheme().weights_of(server)
        return Compressions(sum(weight.num_values for weight in weights), self.choice.degree or 1)

    def counts(self, server: nn.Module) -> Callable[[int], Sequence[int]]:
        return lambda place: [place + (self.choice.degree or 1)]  # probabilities


class ZamplingHalf(DenseHalf):
    """Zampling bound to a module. In one process the device half shares the rows of Q with the state."""

    def __init__(
        self, choice: Zampling, server: nn.Module, state: ZamplingState, rules: BufferRules | None = None
    ) -> None:
        super().__init__(server, rules)
        self.state, self.choice = state, choice
        self.apart = frozenset(weight.name for weight in state.weights)

    @cached_property
    def client_side(self) -> ZamplingSide:
        choice, state = self.choice, self.state
        dense = tuple(self.returned())
        return ZamplingSide(state.matrix, state.weights, choice.link, dense, choice.sampled, choice.downlink_bits)

    @property
    def costs_besides(self) -> CostsBesides:
        """The products Qz and Q^T g of a local step, and all of Q; an accelerator keeps its transpose as well."""
        entries = self.state.matrix.num_rows * (self.state.matrix.degree or 1)
        return CostsBesides(Cost(step_macs=2 * entries, held_bytes=BYTES_PER_ENTRY * entries))

    def initialize(self, workers: Workers) -> str:
        return (
            f"Zampling: {self.state.matrix.num_rows:,} weights in {len(self.state.weights)} tensors become random "
            f"combinations of {len(self.state.probs):,} bits; the values they had, trained or not, are not used."
        )

    def open(self, cohort: Cohort) -> ZamplingRound:
        return ZamplingRound(self, cohort)

    @torch.no_grad()
    def settle(self) -> None:
        """Bring probabilities back into [0, 1] and onto the grid, which a server optimizer may have left; write Qp."""
        self.state.probs.copy_(on_grid(self.state.probs))
        load_tensors(self.server, self.state.network())

    def advice(self, moment: Moment, opened: Round | None = None, summary: RoundSummary | None = None) -> Sequence[str]:
        if summary is not None and (moved := summary.logged.get(MOVED)) is not None:
            return hardly_moved(moved.value, len(summary.averaged))
        return super().advice(moment, opened, summary)


class ZamplingRound(DenseRound):
    """One open round.

    Attributes:
        probs: The probabilities as they arrive at clients, after rounding, shape ``(n,)``.
        bits: Running mean of the clients' bits.
    """

    half: ZamplingHalf

    def __init__(self, half: ZamplingHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        sent = self.probs = half.state.probs.detach()
        if half.choice.downlink_bits is not None:
            generator = derived_generator(cohort.seed, "downlink rounding", cohort.round_idx)
            sent = pack_levels(sent, half.choice.downlink_bits, generator)
            self.probs = half.client_side.received(sent).to(self.probs)
        self.tensors = {PROBS: sent, **self.tensors}
        self.bits = MeanBits(self.probs, sum(map(len, cohort.groups.values())))

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        tensors = self.tensors
        if self.half.choice.coordinated:
            tensors = {**tensors, PLACE: torch.tensor(self.cohort.place_of(unit), dtype=torch.int32)}
        return Download(unit, 1.0, tensors), Receipt(unit, 1.0)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add a client's bits, which count the same for each client, and its dense tensors."""
        self.bits.add(unpack_bits(upload.tensors[BITS], len(self.probs)), 1.0)
        super().add(receipt, upload)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.bits, self.mean]

    def close(self) -> None:
        """Set the pseudo-gradients: with learning rate 1 the new probabilities are exactly the mean of the bits."""
        probs = self.half.state.probs
        probs.grad = probs.detach() - on_grid(self.bits.finish(self.half.choice.smoothing)).to(probs)
        super().close()

    def observed(self) -> Observed:
        """Entropy of the mean of the bits, share on which all agree, how far two clients differ, share of p settled."""
        histograms, count = {"probs": self.half.state.probs}, self.bits.weights.num_terms
        if count == 0:
            return Observed(histograms=histograms)
        mean = self.bits.finish()
        pairs = 2 * mean * (1 - mean) * (count / (count - 1) if count > 1 else 1.0)
        figures = {
            "bit_entropy": float(bit_entropy(mean).mean()),
            "bits_agreed": float(((mean == 0) | (mean == 1)).double().mean()),
            "bit_disagreement": float(pairs.mean()),
            "probs_settled": float(((self.probs <= 0) | (self.probs >= 1)).double().mean()),
        }
        return Observed(figures, histograms=histograms)


def hardly_moved(moved: float, num_clients: int) -> Sequence[str]:
    r"""A warning if clients' bits say more about chance than about training; ``moved`` is a root mean square.

    Drawing the bits of K clients moves their mean by some :math:`0.4 / \sqrt{K}`. This adds up over rounds: after some
    K of them, most bits have settled by chance, unless training has moved the probabilities by then.
    """
    if moved * num_clients >= LEAST_MOVE:
        return ()
    return (
        f"clients move their probabilities by only {moved:.2g} a round (root mean square), and drawing their bits "
        "moves the mean by more, so chance decides what is learned. Raise the learning rate: it applies to scores, "
        "which have to travel from 0 to 1, not to weights. The paper uses Adam with 0.1. During a warm-up, this is "
        "expected.",
    )


class ZamplingState(nn.Module):
    """The probabilities, and the weights that follow from them.

    Attributes:
        probs: Probabilities p, shape ``(n,)``, float32.
        weights: The weights that are compressed.
        matrix: Q, whose rows follow from the run's seed.
    """

    def __init__(self, probs: Tensor, weights: Sequence[CompressedWeight], matrix: InfluenceMatrix) -> None:
        super().__init__()
        self.probs = nn.Parameter(on_grid(probs))
        self.weights = tuple(weights)
        self.matrix = matrix

    def check_unchanged(self, weights: Sequence[CompressedWeight]) -> None:
        """Raise ``ValueError`` unless the probabilities were drawn for the weights that are compressed now."""
        if changed := sorted({weight.name for weight in {*self.weights} ^ {*weights}}):
            raise ValueError(
                f"Zampling's probabilities were drawn when the module was wrapped, and {', '.join(changed)} changed "
                "since: parameters were frozen, unfrozen, added or removed. Build layers in `__init__` rather than in "
                "`setup`, freeze or unfreeze them first, and then wrap the module in a new FederatedModule, which "
                "draws new probabilities."
            )

    @torch.no_grad()
    def network(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The compressed weights Qz for bits z that ``generator`` draws, by name; without one Qp, the expected ones."""
        probs = self.probs.detach()
        z = probs if generator is None else draw_bits(probs, generator).to(probs.dtype)
        parts = split_weights(self.matrix.expand(z), [weight.shape for weight in self.weights])
        return {weight.name: values for weight, values in zip(self.weights, parts, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZamplingState:
        """Move to another device, but stay in float32, whatever the Trainer's precision: the grid needs it."""
        super()._apply(keeping_type(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def on_grid(probs: Tensor) -> Tensor:
    """The nearest probabilities on the grid, in float32."""
    return ((probs.double().clamp(0.0, 1.0) * GRID).round() / GRID).float()


@dataclass(frozen=True)
class ZamplingSide(ClientSide):
    """Sub-models whose weights are samples.

    Attributes:
        matrix: Q. Its rows are drawn on first use, in each process that uses them; they are never pickled.
        weights: The compressed weights.
        link: From scores to probabilities.
        dense: Names of the tensors that are sent back whole.
        sampled: Whether local steps use bits, or else probabilities.
        downlink_bits: Number of bits per probability in the download; ``None`` for a float.
    """

    matrix: InfluenceMatrix = field(repr=False)
    weights: tuple[CompressedWeight, ...]
    link: Link
    dense: tuple[str, ...]
    sampled: bool = True
    downlink_bits: int | None = None

    def take_form(self, module: nn.Module, capacity: float) -> None:
        SampledWeights(module, self.weights, self.matrix, self.link, self.sampled)

    def load(self, client: nn.Module, download: Download) -> None:
        tensors = dict(download.tensors)
        sampled_weights(client).set_probs(self.received(tensors.pop(PROBS)))
        tensors.pop(PLACE, None)
        load_tensors(client, tensors)

    def stand_ins(self, client: nn.Module) -> dict[str, StandIn]:
        return {SCORES: StandIn(self.weights[0].name, lambda _: {"weight_decay": 0.0}, "the compressed weights")}

    def start(self, client: nn.Module, download: Download) -> StepActions:
        weights = sampled_weights(client)
        generator = derived_generator(download.seed, "local bits", *download.ids)
        return StepActions(before_forward=lambda: weights.draw(generator))

    def collect(self, client: nn.Module, download: Download) -> Upload:
        """One more draw, packed, and dense tensors. Scores that are not finite have no bits: the client is left out.

        The client logs how far its probabilities moved, root mean square.
        """
        weights = sampled_weights(client)
        weights.rest()
        trained, probs, logged = weights.probs, self.received(download.tensors[PROBS]), {}
        if has_values(trained):
            if not bool(torch.isfinite(weights.scores).all()):
                return Upload(download.unit, {}, left_out="not_finite")
            moved = float((trained - probs).square().mean().sqrt())
            logged = {MOVED: LoggedValue(moved, prog_bar=False, logger=True)}
        own = derived_generator(download.seed, "uploaded bits", *download.ids)
        if PLACE in download.tensors:  # with bits that depend on those of other clients
            place, num_places = download.tensors[PLACE].tolist()
            shared = derived_generator(download.seed, "strata of bits", download.round_idx, download.unit.model)
            numbers = coordinated_uniforms(len(trained), place, num_places, shared, own)
            drawn = (numbers < trained.cpu()).to(trained.device)
        else:
            drawn = draw_bits(trained, own)
        bits = pack_bits(drawn)
        return Upload(download.unit, {BITS: bits, **select_tensors(client, self.dense)}, logged=logged)

    def received(self, sent: Tensor) -> Tensor:
        """Probabilities as they arrive, from what was sent of them."""
        if self.downlink_bits is None:
            return sent
        return unpack_levels(sent, self.matrix.num_columns, self.downlink_bits)


def sampled_weights(client: nn.Module) -> SampledWeights:
    """The module that makes a sub-model's weights."""
    found = getattr(client, NAME)
    assert isinstance(found, SampledWeights)
    return found


def coordinated_uniforms(
    num_entries: int, place: int, num_places: int, shared: torch.Generator, own: torch.Generator
) -> Tensor:
    r"""Draw numbers in [0, 1) for one of K clients, such that no two clients' numbers for an entry share a stratum.

    There are P strata, where P is the least prime that is at least K. The k-th client's stratum for an entry is
    a + s k modulo P, where a and s > 0 are random and the same for all clients. So each number is uniform on its own,
    and the strata of two clients are uniform over all pairs of distinct strata. This takes two random integers per
    entry, whatever K is. ``place`` is the client's number k from 0 to K - 1; the generator ``shared`` has the same
    state for all clients of a round, ``own`` is the client's. The numbers are float64, on the CPU.

    Let the bit of client k be 1 if its number is below :math:`p_k`. The bits of two clients then have covariance
    :math:`-\mathrm{cov}(m_k, m_l) / (P - 1)`, where :math:`m_k` is the mean of the bit in a stratum drawn at random.
    For every client these means fall from stratum to stratum, so no covariance of bits is positive: the variance of the
    mean of the bits is never larger than with independent draws. With equal p and K = P it is
    :math:`f(1 - f)/K^2`, where f is the fractional part of K p, as opposed to :math:`p(1 - p)/K` for independent draws.

    Reference:
        McKay, Beckman & Conover (1979), Latin hypercube sampling, whose strata are drawn by a random permutation.
    """
    strata = next(n for n in count(max(num_places, 2)) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
    first = torch.randint(strata, (num_entries,), generator=shared)
    step = torch.randint(1, strata, (num_entries,), generator=shared)
    within = torch.rand(num_entries, generator=own, dtype=torch.float64)
    numbers = (((first + step * place) % strata) + within) / strata
    return numbers.clamp(max=BELOW_ONE)  # the last stratum may round up


def pack_levels(probs: Tensor, num_bits: int, generator: torch.Generator | None = None) -> Tensor:
    """Round probabilities to 2**k levels, at random and without bias, and pack the k bits of each.

    0 and 1 are levels. The result has one row of `pack_bits` for each of the k <= 16 binary digits, highest first.
    """
    top = 2**num_bits - 1
    scaled = probs.double() * top + uniforms(probs, torch.float64, generator)
    levels = scaled.floor().clamp(max=top).long()  # the sum may round up to the next whole
    return torch.stack([pack_bits((levels >> k) & 1) for k in reversed(range(num_bits))])


def unpack_levels(packed: Tensor, num_probs: int, num_bits: int) -> Tensor:
    """Undo `pack_levels`, up to its rounding."""
    if len(packed) != num_bits:
        raise ValueError(f"{num_bits} digits travel as {num_bits} rows of bytes, got {len(packed)}.")
    digits = torch.stack([unpack_bits(row, num_probs) for row in packed])
    values = 2 ** torch.arange(num_bits - 1, -1, -1, dtype=torch.float64, device=packed.device)
    levels: Tensor = (digits * values[:, None]).sum(0) / (2**num_bits - 1)
    return levels


def bit_entropy(probs: Tensor) -> Tensor:
    """Entropy of a bit that is 1 with probability p, in bits, float64: the least that it costs to send."""
    p = probs.double()
    nats: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return nats / math.log(2)


class MeanBits(RunningMean):
    """Weighted mean over clients of vectors of n bits, of the shape and on the device of ``like``.

    Weights are whole numbers of steps (`Weights`), so sums of them are exact.

    Example:
        >>> mean = MeanBits(torch.zeros(2), total_weight=4)
        >>> mean.add(torch.tensor([True, False]), weight=1)
        >>> mean.add(torch.tensor([True, True]), weight=3)
        >>> mean.finish().tolist()
        [1.0, 0.75]
    """

    def __init__(self, like: Tensor, total_weight: float) -> None:
        super().__init__(total_weight)
        self.ones = torch.zeros_like(like, dtype=torch.int64)

    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        """For each bit, the weight of the clients in which it is 1, in steps."""
        return [self.ones]

    def add(self, bits: Tensor, weight: float) -> None:
        """Add one client's bits, booleans of shape ``(n,)``, with its weight; errors as for `Weights.add`."""
        if bits.shape != self.ones.shape:
            raise ValueError(f"Bits of shape {tuple(self.ones.shape)} are averaged, got {tuple(bits.shape)}.")
        self.ones.add_(bits, alpha=self.weights.add(weight))

    def finish(self, prior: float = 0.0) -> Tensor:
        r"""The mean of the bits, shape ``(n,)``, float64, or its posterior mean.

        ``prior`` is the pseudo-count :math:`\lambda` of a symmetric Beta prior: with K clients the mean is
        :math:`(K \bar z + \lambda) / (K + 2 \lambda)`, which is never 0 or 1.
        """
        mean = self.ones.double() / max(self.weights.sum, 1)
        clients = self.weights.num_terms
        return mean if prior == 0.0 else (clients * mean + prior) / (clients + 2 * prior)
