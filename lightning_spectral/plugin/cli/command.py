"""FederatedCLI: federations from YAML and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.cli.checkpoint import check_path, report_differences
from lightning_spectral.plugin.cli.errors import OneLineParser
from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.multi_model import MultiModelDataModule
from lightning_spectral.plugin.federated_hooks import FederatedHooks
from lightning_spectral.plugin.lightning.checkpoint_files import check_loadable
from lightning_spectral.plugin.lightning.saved_modules import ARGUMENTS
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule


class FederatedCLI(LightningCLI):
    """LightningCLI for a federation of one model or of several; needs jsonargparse, the ``cli`` extra.

    ``model`` and ``data`` take the arguments of `FederatedModule` and `FederatedDataModule`, or those of
    `MultiModelModule` and `MultiModelDataModule`, or a ``class_path`` of a subclass with its ``init_args``.

    Args:
        args: Arguments, as on the command line or as a mapping; ``None`` for those of the command line.
        **options: As for LightningCLI. ``seed_everything`` is 0 by default, so that runs are repeatable.
    """

    def __init__(self, args: ArgsType = None, **options: Any) -> None:
        defaults = {"seed_everything_default": 0, "auto_configure_optimizers": False, "parser_class": OneLineParser}
        super().__init__(
            FederatedHooks,  # the common base, whose subclasses remember what they were built from, for checkpoints
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=args,
            **{**defaults, **options},
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, without ``predict``: a federation's data module has no data for it."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def _parse_ckpt_path(self) -> None:
        """Take the federation's arguments from ``ckpt_path``, unless those given differ; there is no public hook.

        Lightning's own would take those of the user's module, which stand where any checkpoint has its arguments.
        """
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        check_path(path)
        if not path or not Path(path).is_file():
            return
        check_loadable(path)
        saved = torch.load(path, weights_only=True, map_location="cpu").get(ARGUMENTS, {})
        saved.pop("_instantiator", None)
        if not saved:
            return
        given = self.config[command].model.clone()
        # LightningCLI itself, which knows only one class, does not name it
        plain = f"{FederatedModule.__module__}.{FederatedModule.__name__}"
        model = {"class_path": saved.pop("_class_path", plain), "dict_kwargs": saved}
        self.config = self.parser.parse_object({command: {"model": model}}, self.config)
        report_differences(self.config[command].model, given, command)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        """Let every run keep its record, for a report; there is no public hook after the config's own callbacks."""
        own = config.get("callbacks") or []
        if not any(isinstance(one, RoundHistory) for one in (own if isinstance(own, list) else [own])):
            callbacks = [*callbacks, RoundHistory()]
        trainer: pl.Trainer = super()._instantiate_trainer(config, callbacks)
        return trainer

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        for key, classes in {
            "model": (FederatedModule, MultiModelModule),
            "data": (FederatedDataModule, MultiModelDataModule),
        }.items():
            parser.add_subclass_arguments(classes, key, fail_untyped=False, required=True)
