"""The import of the package, and a run, leave nothing behind and say little; a device needs few packages."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

Done = tuple[subprocess.CompletedProcess[str], Path]
SCRIPT = """
    import os, random, sys, torch, warnings
    if os.fork() == 0:
        refused = "lightning", "lightning_fabric", "pytorch_lightning", "scipy", "torchmetrics", "wandb"
        sys.modules.update(dict.fromkeys(refused))  # importing any of these fails
        import lightning_spectral.client.device
        import lightning_spectral.algorithms  # with what each does on a device
        from lightning_spectral.client.local_loop import metrics_of
        print(metrics_of(torch.nn.Linear(2, 2)), flush=True)
        os._exit(0)
    os.wait()
    def separate():
        print("---", flush=True)
        print("---", file=sys.stderr, flush=True)
    separate()
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    import lightning.pytorch as pl, torchmetrics, scipy.optimize
    known = set(pl.strategies.StrategyRegistry)
    def state():
        return torch.get_rng_state().sum(), random.getstate(), list(warnings.filters), torch.get_num_threads()
    before, heavy = state(), {{"wandb", "matplotlib", "mlxtend"}} - sys.modules.keys()

    import lightning_spectral as ls

    assert state() == before
    names = pl.strategies.StrategyRegistry  # the one table that importing adds to
    assert all(name.startswith("client_parallel") for name in names.keys() - known)
    assert heavy.isdisjoint(sys.modules), heavy
    separate()
    sys.path.insert(0, {tests!r})
    from torch.utils.data import TensorDataset
    from toy_models import LitMLP
    x = torch.randn(120, 6)
    toy = TensorDataset(x, x[:, :3].argmax(1))
    data = ls.FederatedDataModule(toy, ls.DirichletPartitioner(12, alpha=1.0), val=toy, batch_size=4)
    sharding = ls.SpectralSharding(keep_ratio={{0.3: 0.5, 0.6: 0.5}})
    model = ls.FederatedModule(LitMLP(), algorithm=sharding, clients_per_round=4)
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    separate()
    trainer.fit(model, data)
"""
LIGHTNING_SAYS = (
    "weights_only",
    "GPU available",
    "TPU available",
    "HPU available",
    "`Trainer.fit` stopped",
    "Tip:",
    "💡",
)


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and the process forks")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A process that imports the package and trains with it, and the folder where it did so."""
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parents[1]))
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False), folder


def test_a_device_needs_neither_lightning_nor_torchmetrics_nor_scipy(done: Done) -> None:
    process, _ = done
    assert [text.split("---")[0] for text in (process.stdout, process.stderr)] == ["[]\n", ""]


def test_import_changes_nothing_in_the_process(done: Done) -> None:
    process, _ = done
    assert process.returncode == 0, process.stderr
    assert [text.split("---")[1].strip() for text in (process.stdout, process.stderr)] == ["", ""]


def test_a_run_says_how_it_planned_and_started_and_leaves_no_file(done: Done) -> None:
    process, folder = done
    said = [line for text in (process.stdout, process.stderr) for line in text.split("---")[3].splitlines()]
    ours = [line for line in said if line.strip() and not any(words in line for words in LIGHTNING_SAYS)]
    assert [re.sub(r", which held \d+% of it", "", line) for line in ours] == [
        "LitMLP has no `example_input_array`, so no forward pass was traced: the plan assumes that all layers run, in "
        "the order in which they are registered. Its first and last layers stay dense: net.0, net.5.",
        "Spectral start: the energy of 1 of 1 sharded matrices is now in 30% of the terms.",
    ]
    assert list(folder.iterdir()) == []
