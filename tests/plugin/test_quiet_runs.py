"""The import of the package, and a run, leave nothing behind and say little; a device needs few packages."""

import logging
import os
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from forks import finished
from toy_models import LitMLP, toy_examples

REFUSED = "lightning", "lightning_fabric", "pytorch_lightning", "scipy", "torchmetrics", "wandb"
TORCH = "torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "tqdm", "typing_extensions"
HEAVY = ("wandb", "matplotlib", "mlxtend")
LIGHTNING_SAYS = re.compile("weights_only|[GTH]PU available|`Trainer.fit` stopped|Tip:|💡")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Lightning is imported once, and the process forks")


def device() -> None:
    """Import what a device runs as if nothing but torch, and what it brings, had been imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] not in {*sys.stdlib_module_names, *TORCH}]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(REFUSED))  # type: ignore[arg-type]  # importing any of these fails
    from lightning_spectral.client.local_loop import metrics_of

    print(metrics_of(torch.nn.Linear(2, 2)))


def test_a_device_needs_neither_lightning_nor_torchmetrics_nor_scipy(tmp_path: Path) -> None:
    assert (finished(tmp_path / "said", 60, device), (tmp_path / "said").read_text()) == (0, "[]\n")


def imported_anew() -> Any:
    """The package, as if nothing had imported it, or what it may do without, in this process."""
    names = pl.strategies.StrategyRegistry  # the one table that importing adds to
    known = {name for name in names if not name.startswith("client_parallel")}
    for name in names.keys() - known:
        names.remove(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in (*HEAVY, "lightning_spectral")]:
        del sys.modules[name]

    def state() -> Any:
        return torch.get_rng_state().sum(), random.getstate(), [*warnings.filters], torch.get_num_threads()

    before = state()
    import lightning_spectral as ls

    assert state() == before
    assert all(name.startswith("client_parallel") for name in names.keys() - known)
    assert {*HEAVY}.isdisjoint(sys.modules)
    return ls


def run(folder: Path) -> None:
    """A fit that says what it would in a process of its own."""
    warnings.resetwarnings()
    for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", hidden)  # as Python does
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").handlers = [logging.StreamHandler(sys.stderr)]
    os.chdir(folder)
    ls, toy = imported_anew(), toy_examples()
    print("---")
    data = ls.FederatedDataModule(toy, ls.DirichletPartitioner(12, alpha=1.0), val=toy, batch_size=4)
    mixed = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=3, accelerator="cpu", **silent).fit(
        ls.FederatedModule(LitMLP(), algorithm=mixed, clients_per_round=4), data
    )


def test_import_changes_nothing_and_a_run_says_how_it_planned_and_started_and_leaves_no_file(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    code = finished(tmp_path / "said", 60, run, folder)
    imported, _, said = (tmp_path / "said").read_text().partition("---\n")
    assert (code, imported) == (0, ""), said
    ours = [line for line in said.splitlines() if line.strip() and not LIGHTNING_SAYS.search(line)]
    assert [re.sub(r", which held \d+% of it", "", line) for line in ours] == [
        "LitMLP has no `example_input_array`, so no forward pass was traced: the plan assumes that all layers run, in "
        "the order in which they are registered. Its first and last layers stay dense: net.0, net.5.",
        "Spectral start: the energy of 1 of 1 sharded matrices is now in 30% of the terms.",
    ]
    assert list(folder.iterdir()) == []
