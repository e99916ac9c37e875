"""Noise that a device adds to its own updates, so that not even the server sees them without."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from lightning_spectral.arguments import Number, check_fields, first_of
from lightning_spectral.errors import DeviceError
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.sums.private import SLACK, Normals, SecretNormals

FINENESS = 20  # bits of the noise's standard deviation that are on its grid


@dataclass(frozen=True, kw_only=True)
class LocalNoise:
    r"""Local differential privacy: a device shortens its change and adds noise before anything leaves it.

    A client whose turn moves what it sends back by :math:`\Delta` sends

    .. math::
        \Delta \min(1, C / \|\Delta\|_2) + \mathcal{N}(0, (z C)^2 I)

    instead, over all tensors together, and says nothing else of its turn: no loss, nothing that it logs, no seconds.
    Other data could have moved it by at most 2 C from there, so n turns have the epsilon of the Gaussian mechanism with
    half of the multiplier, without sampling: ``server.privacy.epsilon(1.0, z / 2, n, delta)``.

    Args:
        clip: Bound C on the norm of a turn's change, in units of the weights.
        noise_multiplier: Standard deviation of the noise z, in units of ``clip``.

    Note:
        The noise of single clients adds up: a mean over m of them has the noise of one, divided by the root of m, while
        `ClientPrivacy` needs that of one client for all. So this needs far more clients for the same accuracy.

    Reference:
        Duchi et al. (2013), Local privacy and statistical minimax rates; Dwork and Roth (2014), appendix A.

    Example:
        >>> LocalNoise(clip=0.5, noise_multiplier=4.0)
        LocalNoise(clip=0.5, noise_multiplier=4.0)
    """

    clip: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_fields(self, clip=Number(above=0), noise_multiplier=Number(above=0))

    @torch.no_grad()
    def hide(
        self, download: Download, upload: Upload, buffers: Collection[str] = (), normals: Normals | None = None
    ) -> Upload:
        """What leaves the device in place of an upload; its change is left out if it is not finite.

        Args:
            download: What the client was sent.
            upload: What it would send back.
            buffers: Names of the module's buffers.
            normals: Where the noise comes from; ``None`` for a secret of the system's generator.

        Raises:
            DeviceError: If the upload is not made of new values of parameters.
        """
        upload = upload.without_figures()
        if upload.left_out is not None or upload.missing:
            return replace(upload, tensors={})
        if averaged := sorted(upload.tensors.keys() & set(buffers)):
            raise DeviceError(
                f"`local_noise` hides parameters, and this device would send back the buffers {first_of(averaged, 3)}; "
                'leave them at the server, with the algorithm\'s `buffers={"*": "server"}`, or use GroupNorm.'
            )
        names, before = sorted(upload.tensors), download.tensors
        for name in names:
            after = upload.tensors[name]
            if name not in before or before[name].shape != after.shape or not after.is_floating_point():
                raise DeviceError(
                    f"`local_noise` cannot hide {name}, which is no new value of what this device was sent: the "
                    "algorithm packs its uploads, or sends something else. Use FedAvg or SpectralSharding, without "
                    "`compression`."
                )
        if not names:
            return upload
        start, end = (torch.cat([of[n].double().flatten() for n in names]).cpu() for of in (before, upload.tensors))
        change = end - start
        norm, limit, std = float(change.norm()), self.clip * SLACK, self.noise_multiplier * self.clip
        if not math.isfinite(norm):
            return replace(upload, tensors={}, left_out="not_finite")
        grid = 2.0 ** (math.frexp(std)[1] - FINENESS)  # gaps between floating-point numbers would show what is hidden
        steps = change.mul_(limit / max(norm, limit) / grid).trunc_()
        normals = normals or SecretNormals(secrets.token_bytes(32))
        hidden = start + steps.add_(normals(len(steps)).mul_(std / grid).round_()).mul_(grid)
        parts = torch.split(hidden, [upload.tensors[name].numel() for name in names])
        like = ((name, upload.tensors[name], part) for name, part in zip(names, parts, strict=True))
        return replace(upload, tensors={name: part.view_as(own).to(own) for name, own, part in like})
