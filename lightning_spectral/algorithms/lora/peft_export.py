"""Writes what federated LoRA has learned for a plain module in PEFT's format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from lightning_spectral.algorithms.lora.algorithm import ALPHA, LoRA, LoRAState
from lightning_spectral.errors import from_extra
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.records import Tensors

PREFIX = "base_model.model."  # of all names in PEFT's files


def save_peft_adapter(model: Any, folder: str | PathLike[str], submodule: str = "") -> None:
    r"""Save what `LoRA` has learned for a plain module in PEFT's format.

    `PeftModel.from_pretrained(base, folder)` then computes the same as the server's module, up to rounding, if ``base``
    has the weights with which the first fit began. The configuration includes rank, alpha and the square root. Layers
    that contain anything named by ``train`` are saved whole, as PEFT's ``modules_to_save``.

    This needs the package ``safetensors``, which comes with PEFT (the ``peft`` extra).

    Args:
        model: The federation, after a fit.
        folder: Where ``adapter_config.json`` and ``adapter_model.safetensors`` are written; created if necessary.
        submodule: Name of the part of your module that PEFT is to adapt, such as ``"net"``; by default all of it.

    Raises:
        ValueError: If the federation has another algorithm; if its module brings adapters of PEFT, which has its own
            ``save_pretrained``; if the aggregation changes the base; or if something that is trained is not part of
            ``submodule``, or cannot be named in PEFT's configuration.

    Example:
        >>> import json, tempfile
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> model = ls.FederatedModule(lit, algorithm=ls.LoRA(2), clients_per_round=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ls.algorithms.save_peft_adapter(model, folder, submodule="model")
        ...     config = json.loads((Path(folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["use_rslora"], config["target_modules"]
        (2, 8.0, True, 'hidden\\.0|head')
    """
    algorithm, server, state = (getattr(model, name, None) for name in ("algorithm", "module", "state"))
    if not (isinstance(algorithm, LoRA) and isinstance(server, nn.Module) and isinstance(state, LoRAState)):
        raise ValueError(f"Only a federation with LoRA has an adapter, got {type(algorithm or model).__name__}.")
    if algorithm.changes_base:
        what = "`merge_every`" if algorithm.merge_every else type(algorithm.aggregation).__name__
        raise ValueError(
            f"{what} changes the base, so that an adapter alone is not what was learned; save the module's "
            "`state_dict`."
        )
    layers = state.layers
    if any(layer.brings_factors for layer in layers):
        raise ValueError("The module brings adapters of PEFT: save it with its own `save_pretrained`.")
    names = dict(_inside(submodule, [layer.name for layer in layers]))
    whole = _modules(server, submodule, algorithm.whole_of(server, layers), layers)
    part = server.get_submodule(submodule)
    tensors = {f"{module}.{n}": t for module in whole for n, t in part.get_submodule(module).state_dict().items()}
    for layer, adapter in state.pairs:
        for factor in ("A", "B"):
            tensors[f"{names[layer.name]}.lora_{factor}.weight"] = adapter.get_parameter(factor)
    config = {
        "r": algorithm.max_rank,
        "lora_alpha": ALPHA if algorithm.alpha is None else algorithm.alpha,
        "peft_type": "LORA",
        "use_rslora": True,
        "target_modules": "|".join(map(re.escape, names.values())),  # a pattern, which PEFT matches with whole names
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "modules_to_save": whole or None,
        "inference_mode": True,
    }
    with from_extra("peft"):
        from safetensors.torch import save_file

    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    values = {PREFIX + name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _inside(submodule: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names, each with its form inside the submodule."""
    prefix = f"{submodule}." if submodule else ""
    for name in names:
        if not name.startswith(prefix):
            raise ValueError(
                f"`submodule`: {name!r} is trained but not part of {submodule!r}; give a module that contains all that "
                "is trained, and narrow it with `layers` and `train`."
            )
        yield name, name.removeprefix(prefix)


def _modules(server: nn.Module, submodule: str, trained: Tensors, layers: Sequence[AdaptedLayer]) -> list[str]:
    """The modules that PEFT is to save whole, by their names inside the submodule.

    PEFT finds them by the end of their names and wraps them, so none may be or contain an adapted layer.
    """
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
    found = [inside for _, inside in _inside(submodule, owners)]
    known = [name for name, _ in server.get_submodule(submodule).named_modules()]
    for name, inside in zip(owners, found, strict=True):
        like = [other for other in known if other.endswith(inside) and other != inside]
        adapted = [layer.name for layer in layers if f"{layer.name}.".startswith(f"{name}.")]
        if like or adapted:
            why = f"{adapted[0]!r} has an adapter" if adapted else f"PEFT would take {like[0]!r} for it, too"
            raise ValueError(
                f"PEFT cannot save {name!r} whole, of which `train` names tensors, since {why}. Save the module's "
                "`state_dict`."
            )
    return found
