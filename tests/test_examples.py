"""The examples run as their docstrings say: as scripts, from a clean folder, with every warning an error."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_files import EXAMPLES, study_files

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Finished:
    """An example that ran in a folder of its own, with a home of its own."""

    def __init__(self, folder: Path, script: str, *arguments: str, path: str = "") -> None:
        self.folder = folder
        self.home = folder.with_name(f"{folder.name} home")
        for new in (self.folder, self.home):
            new.mkdir()
        command = [sys.executable, "-W", "error", EXAMPLES / script, *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        caches = {"MPLCONFIGDIR": str(folder.with_name("matplotlib")), "PYTHONDONTWRITEBYTECODE": "1"}
        env = {**kept, **caches, "HOME": str(self.home), "PYTHONPATH": path}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self.errors = done.stderr
        self.output = done.stdout.replace("\r", "\n")

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def percentage(self, pattern: str) -> float:
        found = re.search(pattern, self.output)
        assert found is not None, self.output
        return float(found[1])


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("toy") / "quickstart", "quickstart.py", "--rounds", "2")


def made_up_images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(64, 1, 14, 14), torch.arange(64) % 10


SAYINGS = {(("macbeth", "as-you-like-it")[i == 0], f"SPEAKER {i}"): "so foul and fair a day " * 120 for i in range(7)}
LORA: dict[str, tuple[str, str, dict[str, Any]]] = {  # what it prints, and the module that its data comes from
    "lora_shakespeare": (
        r"perplexity \d+\.\d+ before and \d+\.\d+ after 1 rounds",
        "plays",
        {"SYMBOLS": " abcdefghijklmnopqrstuvwxyz", "shakespeare": lambda: SAYINGS},
    ),
    "lora_vit": (
        r"accuracy \d+\.\d % before and \d+\.\d % after 1 rounds",
        "images",
        {
            "mnist": made_up_images,
            "whole_fashion_mnist": lambda: (
                *(part.repeat_interleave(8, 0) for part in made_up_images()),
                *made_up_images(),
            ),
        },
    ),
}


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Callable[..., str]]:
    """Runs an example in this process, which has already imported what takes longest, and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed: str = capsys.readouterr().out
        return printed

    with study_files(EXAMPLES, (), tmp_path):
        yield run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LORA)
def test_lora_fine_tunes_and_leaves_an_adapter(name, tmp_path, monkeypatch, run_here):
    pytest.importorskip("peft", reason="comes with the `peft` extra")
    pytest.importorskip("transformers", reason="the networks are GPT-2 and ViT of transformers")
    line, module, data = LORA[name]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**data))
    assert re.search(rf"^{line}$", run_here(name, "--rounds", "1", "--steps", "1"), re.MULTILINE)
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert f"outputs/{name}/adapter/adapter_model.safetensors" in files
    assert all(file.startswith(f"outputs/{name}/") for file in files)


@pytest.mark.slow
def test_hospitals_compare_five_models_and_leave_a_page(tmp_path):
    pytest.importorskip("dp_accounting", reason="comes with the `privacy` extra")
    done = Finished(tmp_path / "hospitals", "hospitals.py", "--rounds", "3")
    kinds = ("alone", "pooled", "together", "hidden", "of the others")
    found = {kind: done.percentage(rf"(\d+\.\d)% of all held-out patients: val_accuracy, {kind}/") for kind in kinds}
    assert found.pop("hidden") > 0  # the noise of so few rounds may hide everything
    assert min(found.values()) > 70, found  # 63 % are benign
    rows = [line.split()[:3] for line in done.output.splitlines()[1:9]]
    assert rows[0] == ["0", "Ulm", "8"]
    assert rows[-1] == ["7", "Paris", "60"]
    assert "outputs/hospitals/report.html" in done.files()


@pytest.mark.slow
def test_quickstart_leaves_a_picture_and_an_offline_wandb_run(quickstart):
    picture = quickstart.folder / "outputs/quickstart/accuracy.png"
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    (run,) = (quickstart.folder / "outputs/quickstart/wandb").glob("offline-run-*/run-*.wandb")
    assert run.stat().st_size > 0


@pytest.mark.slow
def test_quickstart_writes_nothing_outside_its_output_folder(quickstart):
    assert all(name.startswith("outputs/quickstart/") for name in quickstart.files())
    assert list(quickstart.home.rglob("*")) == []


@pytest.mark.slow
def test_quickstart_says_nothing_beside_its_rounds_and_its_table(quickstart):
    assert [line for line in quickstart.errors.splitlines() if not line.startswith("Round ")] == []
    ours = r"Training: .*|Epoch [01]: .*|Round \d/2: .*|Validation.*|accuracy .*|a client's turn .*|keep ratio .*"
    ours += r"|dense model .*|written to outputs/quickstart"
    lines = [re.sub(r"\x1b\[A", "", line).strip() for line in quickstart.output.splitlines()]
    assert [line for line in lines if line and not re.fullmatch(ours, line)] == []


@pytest.mark.slow
def test_quickstart_draws_no_bar_where_the_output_is_not_a_terminal(quickstart):
    assert "Round 2/2" not in quickstart.output  # the bar itself: tests/plugin/callbacks/test_progress.py


@pytest.mark.slow
def test_quickstart_table_counts_every_tensor_that_travels(quickstart):
    convolutions, hidden = 4 * [(32, 32 * 3 * 3)], [(128, 32 * 7 * 7)]  # the sharded layers: c_out, c_in k
    norms, stem, head = 5 * 2 * 32 + 2 * 128, 32 * 5 * 5 + 32, 128 * 10 + 10
    whole = norms + stem + head + 128  # the last number is the hidden layer's bias
    dense = 4 * (whole + sum(rows * columns for rows, columns in convolutions + hidden))
    assert f"dense model {dense:>21,} {dense:>11,}       100%" in quickstart.output
    for keep_ratio, terms in ((0.2, {32: 7, 128: 26}), (0.4, {32: 13, 128: 52})):  # ceil(r N)
        up = 4 * (whole + sum(terms[min(shape)] * sum(shape) for shape in convolutions + hidden))
        down = up + 4 * sum(terms[min(shape)] for shape in convolutions + hidden)  # a multiplier with each term
        share = f"{(down + up) / (2 * dense):.0%}"
        row = rf"keep ratio {keep_ratio} +{down:,} +{up:,} +{share}\n"
        assert re.search(row, quickstart.output)


@pytest.mark.slow
def test_quickstart_runs_without_wandb_and_says_so_in_one_line(tmp_path):
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError('not installed')")
    done = Finished(tmp_path / "bare", "quickstart.py", "--rounds", "1", path=str(tmp_path))
    assert re.findall(r".*wandb.*", done.output) == ["wandb is not installed, so this run is not logged"]
    assert done.files() == {"outputs/quickstart/accuracy.png"}


@pytest.mark.slow
def test_quickstart_reaches_the_accuracy_that_its_docstring_states(tmp_path):
    """Rounding differs between machines, so the run is a new draw: it may be three standard deviations lower."""
    docstring = (EXAMPLES / "quickstart.py").read_text().split('"""')[1]
    stated = [float(figure) for figure in re.findall(r"\d\d\.\d", docstring)]
    assert len(stated) == 3
    done = Finished(tmp_path / "full", "quickstart.py")
    assert done.percentage(r"accuracy after 100 rounds: (\d+\.\d)%") >= mean(stated) - 3 * stdev(stated)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("timm", r"[\d.]+% of the test images"),
        ("transformers", r"[\d.]+% of the other lines"),
        ("pytorch_forecasting", r"mean absolute error \d\.\d+"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of other packages, there are some
def test_programs_of_other_packages_are_federated(package: str, says: str, tmp_path: Path, run_here: Any) -> None:
    pytest.importorskip(package, reason=f"its example needs {package}", exc_type=ImportError)
    assert re.search(says, run_here(f"federated_{package.removeprefix('pytorch_')}", "--rounds", "1"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
