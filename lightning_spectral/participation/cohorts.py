"""The clients of a model, and the cohort of each round, drawn by a sampler from what earlier rounds have shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_spectral.client.batches import examples_per_epoch
from lightning_spectral.designs import JointDesign
from lightning_spectral.functional.figures import sampled_update_variance, sampled_variance, step_size_variance
from lightning_spectral.participation.samplers import Assignment, FullParticipation, Population, Sampler
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import ClientOutcome, WorkUnit
from lightning_spectral.protocol.rng import derived_generator

MOST_PROCESSORS = 4096  # of a population for which joint probabilities are computed: their matrix takes 134 MB
MARGIN = 4.0  # standard deviations of a Poisson variable by which a random cohort may be larger than its mean


@dataclass(frozen=True, eq=False)
class ClientDirectory:
    """The clients of one model, numbered from 0. The server reads it and never sees their data.

    A simulation fills it from its data set: `FederatedDataModule.client_directory`. Clients elsewhere are asked.

    Attributes:
        sizes: Number of training examples of each client, int64, shape ``(num_clients,)``.
        capacities: Keep ratio of each client.
        available: Which clients can train this model if they have examples, bool, ``(num_clients,)``; by default all.
        batch_sizes: Examples per local step of each client; ``None`` if only devices know.
        drop_last: Whether a client drops a smaller last batch of an epoch.

    Example:
        >>> from lightning_spectral.protocol.per_client import assign
        >>> sizes = torch.tensor([30, 0, 12])
        >>> clients = ClientDirectory(sizes, assign([0.5, 0.5, 1.0], 3, 0, "keep ratios"))
        >>> clients.sizes_of([2, 0]), clients.capacity_of(2), clients.num_examples
        ([12, 30], 1.0, 42)
    """

    sizes: Tensor
    capacities: Assigned[float]
    available: Tensor | None = None
    batch_sizes: Assigned[int] | None = None
    drop_last: bool = False

    def begin_round(self, round_idx: int) -> None:
        """Refresh which clients are available before a round's cohort is drawn; in a simulation, all are."""

    @property
    def num_clients(self) -> int:
        """Number of clients, including those without examples."""
        return len(self.sizes)

    @cached_property
    def num_examples(self) -> int:
        """Number of training examples of all clients that can train this model."""
        return int((self.sizes if self.available is None else self.sizes[self.available]).sum())

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of training examples of each given client."""
        return self.sizes[torch.tensor(client_ids, dtype=torch.int64)].tolist()

    def epoch_of(self, client_id: int) -> int:
        """Number of examples that a client trains on in a local epoch."""
        size, sizes = int(self.sizes[client_id]), self.batch_sizes
        return size if sizes is None else examples_per_epoch(size, sizes.of(client_id), self.drop_last)

    def passes_of(self, client_id: int, local_epochs: int, local_steps: int | None = None) -> float:
        """Passes over a client's data in a turn; in so many batches one, if only devices know how large they are."""
        if local_steps is None or self.batch_sizes is None:
            return local_epochs
        examples, size = max(1, self.epoch_of(client_id)), self.batch_sizes.of(client_id)
        whole, rest = divmod(local_steps, -(-examples // size))
        return whole + rest * size / examples

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client."""
        return float(self.capacities.of(client_id))


class SampledCohorts:
    """The cohorts of one run, drawn by a sampler; in their units, models have the names ``keys``.

    Attributes:
        figures: The figures that the sampler uses: the last known loss or update norm of each client and model, NaN
            where none is known, shape ``(N, S)``, float64.
        units: The cohort that was drawn last.
        drawn: The round for which it was drawn, and how it came about; ``None`` before the first.
        measured: The turns that were measured before this round, by model.

    Raises:
        ValueError: If the sampler cannot serve this population.
    """

    def __init__(self, sampler: Sampler, population: Population, keys: Sequence[str], seed: int) -> None:
        sampler.check(population)
        self.sampler, self.population, self.seed, self.keys = sampler, population, seed, tuple(keys)
        self.figures = torch.full(population.num_examples.shape, math.nan, dtype=torch.float64)
        self.units: list[WorkUnit] = []
        self.drawn: tuple[int, Assignment] | None = None
        self.measured: dict[int, Sequence[ClientOutcome]] = {}

    @property
    def usual_size(self) -> int:
        """Number of units in a round; if that is random, a number that is rarely exceeded."""
        possible, active = int((self.population.shares > 0).sum()), self.sampler.active
        if self.sampler.design is not None or active >= possible:
            return int(min(possible, active))
        return min(possible, math.ceil(active + MARGIN * math.sqrt(active)))

    def draw(self, round_idx: int, most: int | None = None) -> None:
        """Draw the cohort of a round; if it has more than ``most`` units, only the first ``most`` take part."""
        generator = derived_generator(self.seed, "participation", round_idx)
        figures = self.figures if self.sampler.figure else None
        drawn = self.sampler.assign(self.population, figures, round_idx, generator)
        triples = zip(drawn.clients, drawn.models, drawn.coefficients, strict=True)
        self.units = [WorkUnit(client, self.keys[model], weight) for client, model, weight in triples][:most]
        self.drawn = round_idx, drawn

    def due(self, round_idx: int, model: int) -> list[WorkUnit]:
        """The units whose figure for one model is to be measured before a round."""
        self.measured.pop(model, None)
        able, how = (self.population.shares[:, model] > 0).nonzero().squeeze(1), self.sampler.measure
        if how == "last":
            return []
        if how != "all":
            generator = derived_generator(self.seed, "measuring", round_idx, model)
            able = able[torch.randperm(len(able), generator=generator)[:how]].sort().values
        return [WorkUnit(client, self.keys[model], 0.0) for client in able.tolist()]

    def note(self, model: int, outcomes: Sequence[ClientOutcome]) -> None:
        """Remember the figures of the clients that trained, up to a million medians; those not finite are ignored."""
        which = "loss" if self.sampler.figure == "loss" else "update_norm"
        known = {outcome.client_id: float(getattr(outcome, which)) for outcome in outcomes if not outcome.left_out}
        known = {client: figure for client, figure in known.items() if math.isfinite(figure)}
        if self.sampler.figure and known:
            (column := self.figures[:, model])[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
            column.clamp_(max=1e6 * float(column.nanmedian()) or math.inf)  # or others would count for none

    def diagnostics(self, model: int, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        """Metrics of this round's draw and its outcome, for one model.

        - ``active_processors``: processors that drew this model.

        Unless the sampler normalizes, so that all steps have the same length:

        - ``step_size``: sum of the coefficients of the clients that reported, |H|_1, with expectation 1 if all do.
        - ``step_size_variance``: E(|H|_1 - 1)^2, computed exactly, if the design knows its joint probabilities and
          there are at most 4096 processors.
        - ``sampled_loss_variance``, or ``sampled_update_variance`` for independent draws: variance of the estimate of
          the mean loss or update, as far as figures are known.
        """
        assert self.drawn is not None
        drawn = self.drawn[1]
        active = {"active_processors": float(drawn.active[model])}
        if self.sampler.normalize:
            return active
        size = math.fsum(outcome.unit.coefficient for outcome in outcomes if not outcome.left_out)
        found, design = {**active, "step_size": size}, self.sampler.design
        is_known = design is None or (isinstance(design, JointDesign) and len(drawn.probs) <= MOST_PROCESSORS)
        if isinstance(self.sampler, FullParticipation) or not is_known:
            return found
        joint = None if design is None else self.sampler.joint_probs(drawn.probs, model)
        weights, probs = self.population.weights[:, model], drawn.probs[:, model]
        found["step_size_variance"] = step_size_variance(weights, probs, joint)
        known = self.figures[self.population.owner, model].nan_to_num(nan=0.0) * weights
        if self.sampler.figure == "loss":
            found["sampled_loss_variance"] = sampled_variance(known, probs, joint)
        elif self.sampler.figure and joint is None:
            found["sampled_update_variance"] = sampled_update_variance(known, probs)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The known figures of clients, for the checkpoint; empty if the sampler uses none."""
        return {"figures": self.figures} if self.sampler.figure else {}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.figures, self.drawn = state_dict.get("figures", self.figures).clone(), None
