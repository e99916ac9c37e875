"""What travels in federated LoRA: bases, factors, and what is trained whole beside them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_spectral.algorithms.adapter_round import Adapter
from lightning_spectral.nn.adapters import AdaptedLayer, factors_of, matches
from lightning_spectral.protocol.exchange import averaged_tensors, travelling_tensors
from lightning_spectral.protocol.records import Upload


def sent_to_all(server: nn.Module, layers: Sequence[AdaptedLayer], adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """What every client is sent: bases in place of adapted weights, and the rest of the module except factors."""
    bases = [(layer.weight, adapter.base) for layer, adapter in zip(layers, adapters, strict=True)]
    whole = travelling_tensors(server, without=factors_of(layers))
    return {**whole, **{name: base.detach() for name, base in bases if base is not None}}


def trained_whole(
    server: nn.Module, layers: Sequence[AdaptedLayer], train: Sequence[str], keep_buffers: Sequence[str]
) -> dict[str, Tensor]:
    """Parameters and averaged buffers that are trained beside the factors.

    Args:
        server: The server's module.
        layers: Its adapted layers. If PEFT has made their factors, all that it has not frozen is trained, too.
        train: Patterns of the names of what is trained whole.
        keep_buffers: Patterns of the names of buffers that keep the server's value.
    """
    by_peft = any(layer.brings_factors for layer in layers)
    if not train and not by_peft:
        return {}
    factors, averaged = factors_of(layers), averaged_tensors(server, keep_buffers=keep_buffers)
    beside = {name for name, _ in server.named_parameters() if by_peft and name in averaged}
    chosen = {name for name in averaged if name in beside or matches(name, train)}
    return {name: tensor for name, tensor in averaged.items() if name in chosen - factors}


def sent_back(upload: Upload, layer: AdaptedLayer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The factors of one layer that a client sent back, and the largest magnitude of each."""
    sent = {part: name for part, name in layer.factors.items() if name in upload.tensors}
    tensors = {part: upload.tensors[name] for part, name in sent.items()}
    return tensors, {part: upload.largest[name] for part, name in sent.items()}
