"""A run, and the import of the package, leave nothing behind and say little."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

QUIET_RUN = """
    import warnings
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    import sys
    sys.path.insert(0, {tests!r})
    import lightning.pytorch as pl, torch
    from torch.utils.data import TensorDataset
    import lightning_spectral as ls
    from toy_models import LitMLP
    x = torch.randn(120, 6)
    toy = TensorDataset(x, x[:, :3].argmax(1))
    data = ls.FederatedDataModule(toy, ls.DirichletPartitioner(12, alpha=1.0), val=toy, batch_size=4)
    sharding = ls.SpectralSharding(keep_ratio={{0.3: 0.5, 0.6: 0.5}})
    model = ls.FederatedModule(LitMLP(), algorithm=sharding, clients_per_round=4)
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    print("---", flush=True); print("---", file=sys.stderr, flush=True)
    trainer.fit(model, data)
    print("---", flush=True); print("---", file=sys.stderr, flush=True)
"""


def test_a_run_says_how_it_planned_and_started_and_leaves_no_file(tmp_path: Path) -> None:
    script = textwrap.dedent(QUIET_RUN).format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    said = [line for text in (done.stdout, done.stderr) for line in text.split("---")[1].splitlines() if line.strip()]
    lightning_says = (
        "weights_only",
        "GPU available",
        "TPU available",
        "HPU available",
        "`Trainer.fit` stopped",
        "Tip:",
        "💡",
    )
    ours = [line for line in said if not any(words in line for words in lightning_says)]
    assert ours == [
        "LitMLP has no `example_input_array`, so its layers were planned without a forward pass, as if all of them "
        "ran, in the order of registration; first and last, and so dense: net.0, net.5.",
        "Spectral start: the energy of 1 of 1 sharded matrices is now in 30% of the terms.",
    ]
    assert list(tmp_path.iterdir()) == []


def test_import_changes_nothing_in_the_process(tmp_path: Path) -> None:
    script = (
        "import lightning.pytorch, torchmetrics, scipy.optimize, sys, random, torch, warnings\n"
        "known = set(lightning.pytorch.strategies.StrategyRegistry)\n"
        "before = (torch.get_rng_state().sum(), random.getstate(), list(warnings.filters), torch.get_num_threads())\n"
        "heavy = {'wandb', 'matplotlib', 'mlxtend'} - sys.modules.keys()\n"
        "import lightning_spectral\n"
        "after = (torch.get_rng_state().sum(), random.getstate(), list(warnings.filters), torch.get_num_threads())\n"
        "assert before == after\n"
        "names = lightning.pytorch.strategies.StrategyRegistry  # the one table that importing adds to\n"
        "assert all(name.startswith('client_parallel') for name in names.keys() - known)\n"
        "assert heavy.isdisjoint(sys.modules), heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
