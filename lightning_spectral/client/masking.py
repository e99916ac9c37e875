"""What a device says, and what it hides, in rounds with secure sums."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.records import Download, Handshake, Key, Upload, WorkUnit
from lightning_spectral.sums import MeanChange

if TYPE_CHECKING:
    from lightning_spectral.sums.masks import Party


def context_of(unit: WorkUnit, round_idx: int) -> bytes:
    """What a round's masks are for: secrets of one round and model are of no use for another."""
    return f"{round_idx} {unit.model}".encode()


def flat(mean: MeanChange) -> Tensor:
    """All steps of a sum in one vector on the CPU, by the names of its tensors."""
    return torch.cat([steps.reshape(-1).cpu() for _, steps in sorted(mean.steps.items())])


def unflat(mean: MeanChange, values: Tensor) -> dict[str, Tensor]:
    """The parts of such a vector, by name, in the tensors' shapes."""
    shapes = {name: steps.shape for name, steps in sorted(mean.steps.items())}
    parts = torch.split(values, [shape.numel() for shape in shapes.values()])
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


@dataclass(eq=False)
class Parties:
    """The secrets of a device's clients in their last round of secure sums; they leave it only as shares."""

    _parties: dict[Key, Party] = field(default_factory=dict, init=False)

    def answer(self, asked: Handshake) -> Handshake:
        """Answer a question of the server's, with nothing if the client's secrets are gone or were used.

        Raises:
            RecordError: If the client, by what it knows, must not answer.
        """
        unit = asked.unit
        try:
            if asked.step == "keys":
                from lightning_spectral.sums.masks import Party

                context = context_of(unit, asked.round_idx)
                for key in [k for k, p in self._parties.items() if k[1] == unit.model and p.context != context]:
                    del self._parties[key]  # secrets of the model's earlier rounds are forgotten
                party = self._parties[unit.key] = Party(unit.client_id, context, asked.threshold)
                return replace(asked, said={unit.client_id: party.keys()})
            if (found := self._party(unit, asked.round_idx)) is None:
                return replace(asked, said={})
            if asked.step == "reveal":
                del self._parties[unit.key]
            return replace(asked, said=getattr(found, asked.step)(asked.said))
        except ValueError as error:
            raise RecordError(str(error)) from error

    def masked(self, download: Download, upload: Upload) -> Upload:
        """An upload whose tensors are the weighted changes that the server would add, in steps of its grid, masked.

        What the client says of single examples stays here: its loss, what it logged, and which rows it trained. A
        change that is not finite, or is more than 4096 times the size of its tensor and so needs a second sum, cannot
        be masked: the client is left out.

        Raises:
            RecordError: If the client must not use its secrets.
        """
        assert download.masking is not None, "a device masks if it is asked to"
        # all that may leave the device; what records gain is withheld until it is listed here
        names = ("unit", "num_steps", "left_out", "failure", "unreached", "discarded", "put_back", "client_state")
        said = Upload(tensors={}, **{name: getattr(upload, name) for name in names})
        if upload.left_out is not None:
            return said
        if (party := self._party(download.unit, download.round_idx)) is None:  # restarted since they agreed
            return replace(said, left_out="dropped_out")
        mean = MeanChange({name: download.tensors[name] for name in upload.tensors}, download.masking.total)
        try:
            mean.add(upload.tensors, download.unit.coefficient, upload.largest)
            values = flat(mean)
            if not mean.coarse:
                party.mask(values, download.masking.members)
        except OverflowError:
            return replace(said, left_out="not_finite")
        except ValueError as error:
            raise RecordError(str(error)) from error
        return replace(said, left_out="not_finite") if mean.coarse else replace(said, tensors=unflat(mean, values))

    def _party(self, unit: WorkUnit, round_idx: int) -> Party | None:
        """A client that has secrets for a round."""
        party = self._parties.get(unit.key)
        return None if party is None or party.context != context_of(unit, round_idx) else party
