"""Compressed uploads: a device sends its largest changes, or all in eight bits, and what is left in a later turn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.protocol.records import Download, Tensors, Upload, num_bytes

RESIDUAL = "residual:"  # before a parameter's name, in the state of a device: what it still owes the server


class Compression(ABC):
    """How a tensor of changes is packed for the upload, with losses that error feedback makes up for."""

    @abstractmethod
    def pack(self, change: Tensor) -> dict[str, Tensor]:
        """Pack a tensor with at least one entry, float32 or float64.

        Names, types and shapes of the parts, by which the server checks an upload, follow from the tensor's type and
        shape alone.
        """

    @abstractmethod
    def unpack(self, parts: Tensors, shape: torch.Size) -> Tensor:
        """The change that such parts stand for, of a shape and of the type that was packed.

        Raises:
            ValueError: If the parts have the right form, but no tensor is packed like this.
        """


@dataclass(frozen=True)
class TopK(Compression):
    """The entries of largest magnitude of each tensor, with their places: 8 bytes an entry in single precision.

    Args:
        share: Share of the entries of each tensor that are sent, in (0, 0.5]: rounded, and at least one. Half of them
            take as many bytes as all without places.

    Reference:
        Stich et al. (2018), Sparsified SGD with memory. Lin et al. (2018), Deep gradient compression,
        who also choose within each layer.

    Example:
        >>> parts = TopK(0.25).pack(torch.tensor([[0.1, -3.0, 0.2, 0.3], [2.0, 0.0, -0.1, 0.4]]))
        >>> parts["places"].tolist(), parts["values"].tolist()
        ([1, 4], [-3.0, 2.0])
        >>> TopK(0.25).unpack(parts, torch.Size([2, 4])).tolist()
        [[0.0, -3.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    """

    share: float

    def __post_init__(self) -> None:
        hint = "half of the entries, with their places, take as many bytes as all without"
        check_fields(self, share=Number(above=0, at_most=0.5, hint=hint))

    def pack(self, change: Tensor) -> dict[str, Tensor]:
        flat = change.reshape(-1)
        chosen = flat.abs().topk(max(1, round(self.share * len(flat))), sorted=False).indices
        places = chosen.sort().values
        return {"places": places.int(), "values": flat[places]}

    def unpack(self, parts: Tensors, shape: torch.Size) -> Tensor:
        places, values = parts["places"].long(), parts["values"]
        size = math.prod(shape)
        ascend = (places[:1] >= 0).all() & (places.diff() > 0).all() & (places[-1:] < size).all()
        if not bool(ascend):
            raise ValueError(f"its places must ascend, from 0 to at most {size - 1}")
        return values.new_zeros(size).index_copy_(0, places, values).view(shape)


@dataclass(frozen=True)
class Int8(Compression):
    """Every entry as a whole number from -127 to 127, rounded to the nearest, times a scale for each row.

    A row is a slice of the first dimension: the weights of one output. Tensors of one dimension are one row.

    Note:
        Rounding need not be random to be right in the mean, as QSGD's is: error feedback makes up for the bias, and the
        nearest number is never farther away. It needs a contraction, which rounding is if fewer than 254² = 64516
        entries share a scale; so a scale belongs to a row, and not to a whole tensor.

    Reference:
        Seide et al. (2014), 1-bit SGD, who have a scale for each column and feed back errors. Alistarh et al. (2017),
        QSGD.

    Example:
        >>> parts = Int8().pack(torch.tensor([[127.0, 3.4], [0.0, 0.0]]))
        >>> parts["levels"].tolist(), parts["scales"].tolist()
        ([[127, 3], [0, 0]], [1.0, 0.0])
    """

    def pack(self, change: Tensor) -> dict[str, Tensor]:
        rows = change.reshape(len(change) if change.ndim > 1 else 1, -1)
        scales = rows.abs().amax(1) / 127
        # clamped, because a scale among the smallest numbers there are is too coarse to be exact
        levels = (rows / scales.where(scales > 0, 1.0).unsqueeze(1)).round().clamp_(-127, 127)
        return {"levels": levels.to(torch.int8).view(change.shape), "scales": scales}

    def unpack(self, parts: Tensors, shape: torch.Size) -> Tensor:
        scales = parts["scales"]
        return (parts["levels"].reshape(len(scales), -1) * scales.unsqueeze(1)).view(shape)


@dataclass(frozen=True)
class ErrorFeedback:
    r"""Packed uploads, as the device half of an algorithm sees them.

    A client that moved its parameters by :math:`\Delta` packs :math:`\Delta + e`, and keeps what the server does not
    get of it, :math:`e \leftarrow \Delta + e - C(\Delta + e)`, for its next turn; e begins at zero.

    Attributes:
        compression: How changes are packed; ``None`` for not at all.
        names: The parameters that are packed. All other tensors are sent as they are.

    Reference:
        Karimireddy et al. (2019), Error feedback fixes SignSGD, Algorithm 2.
    """

    compression: Compression | None = None
    names: tuple[str, ...] = ()

    def packed(self, after: Tensors, download: Download) -> dict[str, Tensor]:
        """What is sent in place of a client's trained tensors."""
        tensors = dict(after)
        for name, due in self._due(after, download).items():
            assert self.compression is not None, "there are names"
            del tensors[name]
            tensors |= {f"{name}:{part}": tensor for part, tensor in self.compression.pack(due).items()}
        return tensors

    def opened(self, upload: Upload, download: Download) -> Upload:
        """An upload with the new values that its tensors stand for; errors as for `unpack`."""
        return replace(upload, tensors=self.unpacked(upload.tensors, download))

    def unpacked(self, tensors: Tensors, download: Download) -> dict[str, Tensor]:
        """The new values that packed tensors stand for, in at least single precision; errors as for `unpack`."""
        values, parts = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            owner, _, part = name.rpartition(":")
            if owner in self.names:
                parts.setdefault(owner, {})[part] = tensor
            else:
                values[name] = tensor
        for name, own in parts.items():
            assert self.compression is not None, "there are names"
            before = wide(download.tensors[name])
            try:
                values[name] = before + self.compression.unpack(own, before.shape).to(before.device)
            except ValueError as error:
                raise ValueError(f"{name} cannot be unpacked: {error}") from error
        return values

    @torch.no_grad()
    def residuals(self, after: Tensors, download: Download, tensors: Tensors) -> dict[str, Tensor]:
        """What a client still owes the server once that has unpacked its upload, rounded as the server rounds it."""
        due, received = self._due(after, download), self.unpacked(tensors, download)
        new = {f"{RESIDUAL}{n}": own - (received[n] - wide(download.tensors[n])) for n, own in due.items()}
        return {**{name: own for name, own in download.client_state.items() if name.startswith(RESIDUAL)}, **new}

    @torch.no_grad()
    def _due(self, after: Tensors, download: Download) -> dict[str, Tensor]:
        """What the server does not have yet, by the parameters' names: this turn's change, and earlier residuals."""
        return {
            name: wide(after[name]) - wide(download.tensors[name]) + download.client_state.get(f"{RESIDUAL}{name}", 0.0)
            for name in self.names
            if name in after  # the others are not trained in this round
        }


WHOLE = ErrorFeedback()


def error_feedback(compression: Compression | None, parameters: Mapping[str, Tensor]) -> ErrorFeedback:
    """Packed uploads of those parameters that become smaller.

    Example:
        >>> error_feedback(TopK(0.4), {"weight": torch.zeros(2, 5), "bias": torch.zeros(1)}).names
        ('weight',)
    """
    if compression is None:
        return WHOLE

    def saves(tensor: Tensor) -> bool:
        return tensor.numel() > 0 and num_bytes(compression.pack(wide(torch.zeros_like(tensor)))) < tensor.nbytes

    return ErrorFeedback(compression, tuple(name for name, tensor in parameters.items() if saves(tensor)))


def wide(tensor: Tensor) -> Tensor:
    """A tensor in at least single precision, in which small changes count."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
