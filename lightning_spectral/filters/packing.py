"""Packed uploads: a device sends its largest changes, or all in eight bits, and what is left in a later turn."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.filter import Filter, Fit, Form, Unpacking
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import DeviceEnd, DeviceTurn
from lightning_spectral.protocol.buffer_rules import averaged_parameters
from lightning_spectral.protocol.exchange import wide
from lightning_spectral.protocol.records import Download, Tensors, Upload, num_bytes


class Packing(Filter):
    """How devices pack the changes of their parameters for the upload, with losses that error feedback makes up for.

    What packing loses, a device keeps and adds to its next upload, so each client keeps one number per parameter; where
    it seldom takes part, much comes late, or never. Downloads, buffers, and what it would not shrink, are sent whole.
    """

    gives: ClassVar[Form | None] = Form.PACKED
    needs: ClassVar[Sequence[str]] = ("new_values", "same_tensors")

    @abstractmethod
    def pack(self, change: Tensor) -> dict[str, Tensor]:
        """Pack a tensor with at least one entry, float32 or float64.

        Names, types and shapes of the parts, by which uploads are checked, follow from the tensor's type and shape.
        """

    @abstractmethod
    def unpack(self, parts: Tensors, shape: torch.Size) -> Tensor:
        """The change that such parts stand for, of a shape and of the type that was packed.

        Raises:
            ValueError: If the parts have the right form, but no tensor is packed like this.
        """

    def device(self, half: ServerHalf) -> "ErrorFeedback":
        buffers = {name for name, _ in half.server.named_buffers()}
        return ErrorFeedback(self, tuple(sorted(buffers | averaged_parameters(half.server))))

    def server(self, fit: Fit) -> Unpacking:
        return Unpacking(self.device(fit.half))


@dataclass(frozen=True)
class TopK(Packing):
    """The entries of largest magnitude of each tensor, with their places: 8 bytes an entry in single precision.

    Args:
        share: Share of the entries of each tensor that are sent, in (0, 0.5], to the nearest number, and at least one.

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
        places = flat.abs().topk(max(1, round(self.share * len(flat))), sorted=False).indices.sort().values
        return {"places": places.int(), "values": flat[places]}

    def unpack(self, parts: Tensors, shape: torch.Size) -> Tensor:
        places, values, size = parts["places"].long(), parts["values"], math.prod(shape)
        if not bool((places[:1] >= 0).all() & (places.diff() > 0).all() & (places[-1:] < size).all()):
            raise ValueError(f"its places must ascend, from 0 to at most {size - 1}")
        return values.new_zeros(size).index_copy_(0, places, values).view(shape)


@dataclass(frozen=True)
class Int8(Packing):
    """Every entry as a whole number from -127 to 127, rounded to the nearest, times a scale for each row.

    A row is a slice of the first dimension: the weights of one output. Tensors of one dimension are one row.

    Note:
        Error feedback makes up for the bias of rounding to the nearest, if that is a contraction: if fewer than
        254² = 64516 entries share a scale.

    Reference:
        Seide et al. (2014), 1-bit SGD, with a scale for each column and error feedback. Alistarh et al. (2017), QSGD.

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
class ErrorFeedback(DeviceEnd):
    r"""Packs uploads on a device, which remembers what the server does not get.

    A client that moved its parameters by :math:`\Delta` packs :math:`\Delta + e`, and keeps what the server does not
    get of it, :math:`e \leftarrow \Delta + e - C(\Delta + e)`, for its next turn; e begins at zero.

    Reference:
        Karimireddy et al. (2019), Error feedback fixes SignSGD, Algorithm 2.
    """

    keeps: ClassVar[bool] = True

    packing: Packing
    whole: tuple[str, ...] = ()  # names of the tensors that are sent as they are

    @torch.no_grad()
    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        """Pack what is due; keep what the server still lacks once it has unpacked that, rounded as it rounds it."""
        if upload.left_out is not None:
            return upload, {}
        sent, due = turn.download.tensors, self._due(turn, upload)
        left = replace(upload, tensors=self._packed(upload.tensors, due))
        received = self.unpack(turn.download, left).tensors
        residuals = {name: own - (received[name] - wide(sent[name])) for name, own in due.items()}
        return left, {**turn.kept, **residuals}

    def sized(self, turn: DeviceTurn, upload: Upload) -> Upload:
        return replace(upload, tensors=self._packed(upload.tensors, self._due(turn, upload)))

    def unpack(self, download: Download, upload: Upload) -> Upload:
        """New values, in at least single precision."""
        values, parts = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for name, tensor in upload.tensors.items():
            owner, _, part = name.rpartition(":")
            if owner in download.tensors and name not in download.tensors:
                parts.setdefault(owner, {})[part] = tensor
            else:
                values[name] = tensor
        for name, own in parts.items():
            before = wide(download.tensors[name])
            try:
                values[name] = before + self.packing.unpack(own, before.shape).to(before.device)
            except ValueError as error:
                raise ValueError(f"{name} cannot be unpacked: {error}") from error
        return replace(upload, tensors=values)

    def _packed(self, after: Tensors, due: Tensors) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in after.items() if name not in due}
        for name, change in due.items():
            tensors |= {f"{name}:{part}": tensor for part, tensor in self.packing.pack(change).items()}
        return tensors

    @torch.no_grad()
    def _due(self, turn: DeviceTurn, upload: Upload) -> dict[str, Tensor]:
        """What the server does not have yet, by the parameters' names: this turn's change, and earlier residuals."""
        sent = turn.download.tensors
        return {
            name: wide(after) - wide(sent[name]) + turn.kept.get(name, 0.0)
            for name, after in upload.tensors.items()
            if name in sent and name not in self.whole and saves(self.packing, after.dtype, after.shape)
        }


@lru_cache(maxsize=4096)
def saves(packing: Packing, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether packing makes a tensor smaller."""
    tensor = torch.zeros(shape, dtype=dtype)
    return dtype.is_floating_point and tensor.numel() > 0 and num_bytes(packing.pack(wide(tensor))) < tensor.nbytes
