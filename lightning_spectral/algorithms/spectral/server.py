"""Spectral sharding, bound to the server's module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_spectral.algorithms.base import Moment, ServerHalf
from lightning_spectral.algorithms.spectral.device import SpectralSide
from lightning_spectral.algorithms.spectral.planned_module import PlannedModule, naming_layer
from lightning_spectral.algorithms.spectral.round import LayerRound, Sampling, SpectralRound
from lightning_spectral.algorithms.spectral.start import SpectralStart, move_energy
from lightning_spectral.functional.spectra import singular_terms
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.validate import untraced_ends
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.records import RoundSummary


class SpectralHalf(ServerHalf):
    """Factorises the sharded matrices of a module in every round.

    Args:
        planned: The module and how clients hold its layers.
        device_half: The half on devices.
        sampling: How terms are drawn and averaged.
        start: The spectral start, with its keep ratio; ``None`` for none.
        started: The matrices that it has changed, in a run that goes on.
    """

    rounds_are_alike: ClassVar[bool] = True

    def __init__(
        self,
        planned: PlannedModule,
        device_half: SpectralSide,
        sampling: Sampling,
        start: SpectralStart | None,
        started: Collection[str] = (),
    ) -> None:
        super().__init__(planned.module, buffers=planned.buffers)
        self.planned = planned
        self.sampling = sampling
        self.start = start
        self.started = frozenset(started)
        self._device_half = device_half

    @property
    def plan(self) -> ModulePlan:
        return self.planned.plan

    @property
    def device_half(self) -> SpectralSide:
        return self._device_half

    @property
    def decisions(self) -> Mapping[str, Any]:
        """Also which layers stay whole because their initial weights lack rank, and which matrices were changed."""
        decided = {**super().decisions, "missing_rank": dict(self.plan.missing_rank), "started": sorted(self.started)}
        return {name: found for name, found in decided.items() if found}

    def initialize(self, workers: SharesWork) -> str:
        if not self.plan.sharded:
            return ""
        said = [untraced_ends(self.server, self.plan)]
        if self.start is not None:
            report = move_energy(self.planned, self.start, workers)
            self.started = frozenset(report.changed)
            said.append(str(report))
        return "\n".join(filter(None, said))

    def open(self, cohort: Cohort) -> SpectralRound:
        terms = self.planned.of_each_matrix(lambda _, matrix: singular_terms(matrix), cohort.workers)
        layers = {name: self._open(name, found, cohort) for name, found in terms.items()}
        return SpectralRound(self.planned, cohort, layers, starts_random=self.start is None)

    def _open(self, name: str, terms: tuple[Tensor, ...], cohort: Cohort) -> LayerRound:
        with naming_layer(name):
            return self.sampling.open(self.plan.blocks[name], terms, cohort, started=name in self.started)

    def advice(self, moment: Moment, summary: RoundSummary | None = None) -> Sequence[str]:
        """The remedy for flat losses is given only after a spectral start: trained weights may have little to learn."""
        if moment is Moment.UNUSED_LAYERS:
            return ["keep them dense with `SpectralSharding(exclude=[...])`"]
        if moment is Moment.LARGE_UPDATES and self.device_half.clip_weight_lr > 1:
            return ["bound the steps along large terms and multipliers with `clip_weight_lr=1`"]
        if moment is Moment.FLAT_LOSSES and self.started:
            ask = "see whether `FedAvg()` learns on the same clients"
            return [f"{ask}; if it does, try twice and four times its learning rate, then a larger keep ratio"]
        return ()
