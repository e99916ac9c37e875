"""What a federation has learned, in the forms that only some algorithms have: PEFT's adapters, and narrower models."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from lightning_spectral.algorithms.lora.peft_export import save_adapter
from lightning_spectral.algorithms.width import narrowed
from lightning_spectral.errors import check_is
from lightning_spectral.plugin.module import FederatedModule


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
        ...     ls.plugin.save_peft_adapter(model, folder, submodule="model")
        ...     config = json.loads((Path(folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["use_rslora"], config["target_modules"]
        (2, 8.0, True, 'hidden\\.0|head')
    """
    check_is("model", model, FederatedModule)
    save_adapter(model.algorithm, model.module, model.state, Path(folder), submodule)


def narrow_model(model: FederatedModule, width: float) -> Any:
    """Return your module at a smaller width, to evaluate or save: the first ceil(r N) of each layer's N channels.

    The result is an ordinary module of your class, with smaller parameters under the same names and layers that know
    their sizes. With ``averages_per_width`` it has the running averages of that width. Otherwise it has the first
    entries of the whole module's averages, which are those of other inputs, and may evaluate badly.

    Args:
        model: The federation, after a fit with `WidthSharding`.
        width: Keep ratio r of the channels, in (0, 1].

    Returns:
        A copy, without a Trainer.

    Raises:
        ValueError: If the federation has another algorithm, channels other than the first ones, or ``scaler``; if
            ``width`` is out of range, or each width has its own averages and ``width`` is not among ``step_widths``.

    Example:
        >>> import torch
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> lit.example_input_array = torch.zeros(2, 6)
        >>> model = ls.FederatedModule(lit, algorithm=ls.WidthSharding(), clients_per_round=2)
        >>> ls.plugin.narrow_model(model, 0.25).model.head
        Linear(in_features=2, out_features=3, bias=True)
    """
    check_is("model", model, FederatedModule)
    return narrowed(model.algorithm, model.module, model.state, width)
