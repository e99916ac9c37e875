"""A filter as a separate package would have it: changes are shortened, and sent as -1, 0 or 1 times a scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_spectral.filters import DeviceEnd, Filter, Form, Unpacking


@dataclass(frozen=True)
class TernaryEnd(DeviceEnd):
    clip: float

    def leave(self, turn: Any, upload: Any) -> Any:
        sent, packed = turn.download.tensors, {}
        for name, after in upload.tensors.items():
            change = after - sent[name]
            change = change * (self.clip / change.norm()).clamp(max=1.0)
            scale = change.abs().mean().clamp(min=1e-12)
            packed[f"{name}:signs"] = (change / scale).round().clamp(-1, 1).to(torch.int8)
            packed[f"{name}:scale"] = scale
        return replace(upload, tensors=packed), {}

    def unpack(self, download: Any, upload: Any) -> Any:
        tensors, names = upload.tensors, {name.rpartition(":")[0] for name in upload.tensors}
        changes = {name: tensors[f"{name}:signs"] * tensors[f"{name}:scale"] for name in names}
        return replace(upload, tensors={name: download.tensors[name] + own for name, own in changes.items()})


@dataclass(frozen=True)
class Ternary(Filter):
    gives: ClassVar[Form | None] = Form.PACKED
    needs: ClassVar[Sequence[str]] = ("new_values",)

    clip: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.clip, float) or not self.clip > 0:
            raise ValueError(f"`clip` must be positive, got {self.clip!r}.")

    def device(self, half: Any) -> TernaryEnd:
        return TernaryEnd(self.clip)

    def server(self, fit: Any) -> Unpacking:
        return Unpacking(self.device(fit.half))
