"""The device half of Zampling: scores that are trained through samples, and one packed bit for each to send back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_spectral.client.side import ClientSide, StepActions
from lightning_spectral.functional.zampling import (
    InfluenceMatrix,
    Link,
    coordinated_uniforms,
    draw_bits,
    pack_bits,
    unpack_levels,
)
from lightning_spectral.nn.zampling.compressed import CompressedWeight
from lightning_spectral.nn.zampling.sampled_weights import NAME, SampledWeights
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, LoggedValue, Options, Upload
from lightning_spectral.protocol.rng import derived_generator

PROBS, PLACE, BITS = "zampling.probs", "zampling.place", "zampling.bits"  # what travels: two names down, one up
MOVED = "fl/probs_moved"  # what every client logs
SCORES = f"{NAME}.scores"  # name of the sub-model's parameter


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
