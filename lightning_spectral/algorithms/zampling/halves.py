"""The two halves of Zampling: the server counts the bits that come back; devices train scores through samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.algorithms.fed_avg import dense_mean
from lightning_spectral.client.device import ClientSide, StepActions
from lightning_spectral.functional.zampling import (
    BYTES_PER_ENTRY,
    InfluenceMatrix,
    Link,
    bit_entropy,
    coordinated_uniforms,
    draw_bits,
    pack_bits,
    pack_levels,
    unpack_bits,
    unpack_levels,
)
from lightning_spectral.nn.cost import Cost
from lightning_spectral.nn.torch_modules import keeping_type
from lightning_spectral.nn.zampling import NAME, CompressedWeight, SampledWeights, split_weights
from lightning_spectral.protocol.buffer_rules import NO_RULES, BufferRules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    load_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, LoggedValue, Options, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums import MeanBits, RunningMean

LEAST_MOVE = 0.3  # below it, accuracy is far below that of a larger learning rate: studies/zampling/rates.py
GRID = 2.0**24  # probabilities are multiples of 1 / GRID, so that float32 adds and subtracts them exactly
PROBS, PLACE, BITS = "zampling.probs", "zampling.place", "zampling.bits"  # what travels: two names down, one up
MOVED = "fl/probs_moved"  # what every client logs
SCORES = f"{NAME}.scores"  # name of the sub-model's parameter


class ZamplingHalf(ServerHalf):
    """Zampling bound to a module. In one process the device half shares the rows of Q with the state."""

    state: ZamplingState

    def __init__(
        self,
        server: nn.Module,
        state: ZamplingState,
        side: ZamplingSide,
        *,
        smoothing: float = 0.0,
        coordinated: bool = False,
        buffers: BufferRules = NO_RULES,
    ) -> None:
        super().__init__(server, state, buffers)
        self.side = side
        self.smoothing = smoothing
        self.coordinated = coordinated
        self.compressed = frozenset(weight.name for weight in state.weights)

    @property
    def device_half(self) -> ZamplingSide:
        return self.side

    @property
    def cost_besides(self) -> Cost:
        """The products Qz and Q^T g of a local step, and all of Q; an accelerator keeps its transpose as well."""
        entries = self.state.matrix.num_rows * (self.state.matrix.degree or 1)
        return Cost(step_macs=2 * entries, held_bytes=BYTES_PER_ENTRY * entries)

    def initialize(self, workers: Workers) -> str:
        return (
            f"Zampling: {self.state.matrix.num_rows:,} weights in {len(self.state.weights)} tensors become random "
            f"combinations of {len(self.state.probs):,} bits; the values they had, trained or not, are not used."
        )

    def open(self, cohort: Cohort) -> ZamplingRound:
        return ZamplingRound(self, cohort)

    def settle(self) -> None:
        """Bring probabilities back into [0, 1], which a server optimizer may have left, and write Qp."""
        self.state.settle()
        load_tensors(self.server, self.state.network())

    def advice(self, moment: Moment, summary: RoundSummary | None = None) -> Sequence[str]:
        moved = summary.logged.get(MOVED) if summary and moment is Moment.AFTER_TRAINING else None
        return hardly_moved(moved.value, len(summary.averaged)) if summary and moved else ()


class ZamplingRound(Round):
    """One open round.

    Attributes:
        tensors: What every client is sent: probabilities and dense tensors, by name.
        probs: The probabilities as they arrive at clients, after rounding, shape ``(n,)``.
        bits: Running mean of the clients' bits.
        dense: Running mean of the changes of dense tensors.
    """

    def __init__(self, half: ZamplingHalf, cohort: Cohort) -> None:
        self.half, self.cohort = half, cohort
        sent = self.probs = half.state.probs.detach()
        if half.side.downlink_bits is not None:
            generator = derived_generator(cohort.seed, "downlink rounding", cohort.round_idx)
            sent = pack_levels(sent, half.side.downlink_bits, generator)
            self.probs = half.side.received(sent).to(self.probs)
        self.tensors = {PROBS: sent, **travelling_tensors(half.server, half.compressed)}
        num_clients = sum(map(len, cohort.groups.values()))
        self.bits = MeanBits(len(self.probs), num_clients, self.probs.device)
        self.dense = dense_mean(half.server, averaged_tensors(half.server, half.compressed, half.buffers), cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        place = {PLACE: torch.tensor(self.cohort.place_of(unit), dtype=torch.int32)} if self.half.coordinated else {}
        return Download(unit, 1.0, {**self.tensors, **place}), Receipt(unit, 1.0)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add a client's bits, which count the same for each client, and its dense tensors."""
        self.bits.add(unpack_bits(upload.tensors[BITS], len(self.probs)), 1.0)
        self.dense.add(upload.tensors, receipt.unit.coefficient, upload.largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.bits, self.dense]

    def close(self) -> None:
        """Set the pseudo-gradients: with learning rate 1 the new probabilities are exactly the mean of the bits."""
        probs = self.half.state.probs
        probs.grad = probs.detach() - on_grid(self.bits.finish(self.half.smoothing)).to(probs)
        apply_mean_change(self.half.server, self.dense.finish())

    def metrics(self) -> Mapping[str, float]:
        """Entropy of the mean of the bits, share on which all agree, how far two clients differ, share of p settled."""
        count = self.bits.weights.num_terms
        if count == 0:
            return {}
        mean = self.bits.finish()
        pairs = 2 * mean * (1 - mean) * (count / (count - 1) if count > 1 else 1.0)
        return {
            "bit_entropy": float(bit_entropy(mean).mean()),
            "bits_agreed": float(((mean == 0) | (mean == 1)).double().mean()),
            "bit_disagreement": float(pairs.mean()),
            "probs_settled": float(((self.probs <= 0) | (self.probs >= 1)).double().mean()),
        }


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

    @torch.no_grad()
    def network(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The compressed weights Qz for bits z that ``generator`` draws, by name; without one Qp, the expected ones."""
        probs = self.probs.detach()
        z = probs if generator is None else draw_bits(probs, generator).to(probs.dtype)
        parts = split_weights(self.matrix.expand(z), [weight.shape for weight in self.weights])
        return {weight.name: values for weight, values in zip(self.weights, parts, strict=True)}

    @torch.no_grad()
    def settle(self) -> None:
        """Bring probabilities back into [0, 1] and onto the grid, which a server optimizer may have left."""
        self.probs.copy_(on_grid(self.probs))

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
        dense: Names of the tensors that travel back whole.
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

    def origin(self, name: str) -> str:
        return self.weights[0].name if name == SCORES else name

    def overrides(self, name: str, options: Options) -> Options:
        return {"weight_decay": 0.0} if name == SCORES else {}

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
        if not bool(torch.isfinite(weights.scores).all()):
            return Upload(download.unit, {}, left_out="not_finite")
        trained, probs = weights.probs, self.received(download.tensors[PROBS])
        moved = float((trained - probs).square().mean().sqrt())
        logged = {MOVED: LoggedValue(moved, prog_bar=False, logger=True)}
        bits = pack_bits(_drawn(trained, download))
        return Upload(download.unit, {BITS: bits, **select_tensors(client, self.dense)}, logged=logged)

    def watched(self, client: nn.Module) -> dict[str, nn.Parameter]:
        return {"the compressed weights": sampled_weights(client).scores}

    def received(self, sent: Tensor) -> Tensor:
        """Probabilities as they arrive, from what was sent of them."""
        if self.downlink_bits is None:
            return sent
        return unpack_levels(sent, self.matrix.num_columns, self.downlink_bits)


def _drawn(probs: Tensor, download: Download) -> Tensor:
    """The bits to send: drawn independently of other clients', unless the server gives the client a place."""
    own = derived_generator(download.seed, "uploaded bits", *download.ids)
    if PLACE not in download.tensors:
        return draw_bits(probs, own)
    place, num_places = download.tensors[PLACE].tolist()
    shared = derived_generator(download.seed, "strata of bits", download.round_idx, download.unit.model)
    numbers = coordinated_uniforms(len(probs), place, num_places, shared, own)
    return (numbers < probs.cpu()).to(probs.device)


def sampled_weights(client: nn.Module) -> SampledWeights:
    """The module that makes a sub-model's weights."""
    found = getattr(client, NAME)
    assert isinstance(found, SampledWeights)
    return found
