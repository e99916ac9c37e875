"""Saves what federated LoRA has learned for a plain module as a PEFT adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_spectral.algorithms import LoRA
from lightning_spectral.algorithms.lora import ALPHA
from lightning_spectral.algorithms.lora_checks import changes_base
from lightning_spectral.algorithms.lora_state import adapters_of
from lightning_spectral.errors import check_is
from lightning_spectral.extras import from_extra
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.plugin.module import FederatedModule

Tensors = Mapping[str, Tensor]
PREFIX = "base_model.model."  # of all names in PEFT's files


def save_peft_adapter(model: FederatedModule, folder: str | PathLike[str], submodule: str = "") -> None:
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
        TypeError: If ``model`` is not a `FederatedModule`.
        ValueError: If it has another algorithm; if its module brings adapters of PEFT, which has its own
            ``save_pretrained``; if the aggregation changes the base; or if something that is trained is not part of
            ``submodule``, or cannot be named in PEFT's configuration.

    Example:
        >>> import tempfile
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> model = ls.FederatedModule(lit, algorithm=ls.LoRA(2), clients_per_round=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ls.save_peft_adapter(model, folder, submodule="model")
        ...     config = json.loads((Path(folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["use_rslora"], config["target_modules"]
        (2, 8.0, True, 'hidden\\.0|head')
    """
    check_is("model", model, FederatedModule)
    algorithm = model.algorithm
    if not isinstance(algorithm, LoRA):
        raise ValueError(f"An adapter is what LoRA trains, and this federation has {type(algorithm).__name__}.")
    server = model.module
    layers = algorithm.adapted(server)
    _check(algorithm, layers)
    names = dict(_inside(submodule, [layer.name for layer in layers]))
    whole = _modules(server, submodule, algorithm.prepare(server).trained_whole(server), layers)
    tensors = {name: t for module in whole for name, t in _tensors_of(server, submodule, module)}
    for layer, adapter in zip(layers, adapters_of(model.state), strict=True):
        for part in ("A", "B"):
            tensors[f"{names[layer.name]}.lora_{part}.weight"] = adapter.get_parameter(part)
    _write(Path(folder), _config(algorithm, layers, list(names.values()), whole), tensors)


def _check(algorithm: LoRA, layers: Sequence[AdaptedLayer]) -> None:
    """Raise ``ValueError`` unless the module is a base with an adapter of our own."""
    if any(layer.brings_factors for layer in layers):
        raise ValueError("The module brings adapters of PEFT: save it with its own `save_pretrained`.")
    if changes_base(algorithm.aggregation, algorithm.merge_every):
        what = "`merge_every`" if algorithm.merge_every else type(algorithm.aggregation).__name__
        raise ValueError(
            f"{what} changes the base, so that an adapter alone is not what was learned; save the module's "
            "`state_dict`."
        )


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


def _tensors_of(server: nn.Module, submodule: str, module: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in server.get_submodule(submodule).get_submodule(module).state_dict().items():
        yield f"{module}.{name}", tensor


def _config(
    algorithm: LoRA, layers: Sequence[AdaptedLayer], names: Sequence[str], whole: Sequence[str]
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": algorithm.max_rank,
        "lora_alpha": ALPHA if algorithm.alpha is None else algorithm.alpha,
        "use_rslora": True,
        "target_modules": "|".join(map(re.escape, names)),  # a pattern, which PEFT matches with the whole name
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "modules_to_save": list(whole) or None,
        "inference_mode": True,
    }


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    with from_extra("peft"):
        from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    values = {PREFIX + name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
