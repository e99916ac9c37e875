"""Noise that a device adds to its own updates, so that not even the server sees them without."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.filter import Filter, Fit, Plan
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import DeviceEnd, DeviceTurn
from lightning_spectral.errors import DeviceError
from lightning_spectral.filters.private_sums import Normals
from lightning_spectral.functional.privacy import grid_of, shortened
from lightning_spectral.participation import Sampler
from lightning_spectral.protocol.records import Tensors, Upload
from lightning_spectral.protocol.rng import SecretNormals


@dataclass(frozen=True, kw_only=True)
class LocalNoise(Filter):
    r"""Local differential privacy: a device shortens its change and adds noise before anything leaves it.

    A client whose turn moves what it sends back by :math:`\Delta` sends

    .. math::
        \Delta \min(1, C / \|\Delta\|_2) + \mathcal{N}(0, (z C)^2 I)

    instead, over all tensors together, and says nothing else of its turn: no loss, nothing that it logs, no seconds.
    Other data could have moved it by at most 2 C from there, so n turns have the epsilon of the Gaussian mechanism with
    half of the multiplier, without sampling: `epsilon(1.0, z / 2, n, delta)`.

    Args:
        clip: Bound C on the norm of a turn's change, in units of the weights.
        noise_multiplier: Standard deviation of the noise z, in units of ``clip``.

    Note:
        The noise of single clients adds up, so this needs far more clients than `ClientPrivacy` for the same accuracy.
        The owner of a device elsewhere can ask for it alone, with ``ClientData(local_noise=...)``.

    Reference:
        Duchi et al. (2013), Local privacy and statistical minimax rates; Dwork and Roth (2014), appendix A.

    Example:
        >>> LocalNoise(clip=0.5, noise_multiplier=4.0)
        LocalNoise(clip=0.5, noise_multiplier=4.0)
    """

    needs: ClassVar[Sequence[str]] = ("new_values", "values_alone")

    clip: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_fields(self, clip=Number(above=0), noise_multiplier=Number(above=0))

    def check(self, plan: Plan) -> None:
        if isinstance(plan.participation, Sampler) and plan.participation.figure == "loss":
            raise ValueError(
                f"LocalNoise hides the losses of clients, by which {type(plan.participation).__name__} draws them; use "
                "`clients_per_round`, or Uniform."
            )
        if callback := plan.callback_that("reads_clients"):
            raise ValueError(f"LocalNoise hides the data of clients, of which {callback} would learn; leave one out.")

    def device(self, half: ServerHalf) -> "NoiseEnd":
        return NoiseEnd(self)

    def server(self, fit: Fit) -> None:
        """Only check, since nothing acts at the server, that no buffers would be sent back, which get no noise."""
        fit.refuse_averages("LocalNoise")


@dataclass(frozen=True)
class NoiseEnd(DeviceEnd):
    """Hides what a client has changed."""

    says_nothing: ClassVar[bool] = True

    choice: LocalNoise

    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        return self.hidden(turn, upload, SecretNormals(secrets.token_bytes(32))), {}

    def sized(self, turn: DeviceTurn, upload: Upload) -> Upload:
        return upload

    @torch.no_grad()
    def hidden(self, turn: DeviceTurn, upload: Upload, normals: Normals) -> Upload:
        """An upload whose change is shortened and has noise; it is left out if it is not finite."""
        if upload.left_out is not None:
            return replace(upload, tensors={})
        names, before, buffers = sorted(upload.tensors), turn.download.tensors, dict(turn.client.named_buffers())
        for name in names:
            after, is_buffer = upload.tensors[name], name in buffers
            if is_buffer or name not in before or before[name].shape != after.shape or not after.is_floating_point():
                what = "a buffer: leave it at the server" if is_buffer else "no new value of what this device was sent"
                raise DeviceError(f"`LocalNoise` cannot hide {name}, {what}; or use FedAvg or SpectralSharding.")
        if not names:
            return upload
        start, end = (torch.cat([of[n].double().flatten() for n in names]).cpu() for of in (before, upload.tensors))
        std = self.choice.noise_multiplier * self.choice.clip
        if (steps := shortened(end - start, self.choice.clip, grid := grid_of(std))) is None:
            return replace(upload, tensors={}, left_out="not_finite")
        hidden = start + steps.add_(normals(len(steps)).mul_(std / grid).round_()).mul_(grid)
        parts = torch.split(hidden, [upload.tensors[name].numel() for name in names])
        like = ((name, upload.tensors[name], part) for name, part in zip(names, parts, strict=True))
        return replace(upload, tensors={name: part.view_as(own).to(own) for name, own, part in like})
