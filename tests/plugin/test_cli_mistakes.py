"""A mistake on the command line is reported in one line, which says what and where it is."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spectral.__main__ import main

pytest.importorskip("jsonargparse", reason="comes with the `test` extra")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods by their old names

CODE = """
import torch
from lightning_spectral.models import MLP, LitClassifier
from torch.utils.data import TensorDataset

def points(num_points: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(num_points, 6), torch.arange(num_points) % 3)

def untyped():
    return points()


class LitPoints(LitClassifier):
    def __init__(self, width: int = 4, fail: bool = False):
        if fail:
            raise ValueError("of the user's own")
        super().__init__(MLP(6, [width, width], 3), num_classes=3)
"""
RUN = """
model:
  module: my_points.LitPoints
  algorithm: {class_path: SpectralSharding, init_args: {keep_ratio: 0.2, spectral_start: null}}
  clients_per_round: 2
data:
  train: my_points.points
  partitioner: {class_path: DirichletPartitioner, init_args: {num_clients: 4, alpha: 1.0}}
trainer: {accelerator: cpu, logger: false, enable_checkpointing: false, max_epochs: 1}
"""
TWO = """
model:
  models: {a: {module: my_points.LitPoints}, b: {module: my_points.LitPoints}}
  participation: FullParticipation
data:
  modules: {a: ONE, b: ONE}
""".replace("ONE", "{train: my_points.points, partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 4}}}")
KEEP_RATOI = "model.algorithm: Option 'keep_ratoi' is not accepted; did you mean 'keep_ratio'?"
ON_THE_COMMAND_LINE = {
    "--model.algorithm.keep_ratoi=0.4": KEEP_RATOI,
    "--model.algorithm.keep_ratio=1.5": "`keep_ratio` must be in (0, 1], got 1.5; it is the share",
    "--model.algorithm.keep_ratio=lots": "model.algorithm.keep_ratio: Expected a <class 'float'>; Expected",
    "--data.partitioner.alpha=-1": "`alpha` must be positive and finite, got -1.0; towards infinity it",
    "--model.keep_ratio=0.1": "model: Option 'keep_ratio' is not accepted; in Python: algorithm=ls.SpectralSharding(",
    "--model.local_hooks=MaskedLogits": "Got value: MaskedLogits; write a list, as in [TopK]",
    "--model.server_optimizer.lr=1": "model.server_optimizer: Name a class first; choose from BoundedMomentum, Fed",
    "--model.algorithm=FedAvgg": "model.algorithm: There is no class 'FedAvgg'; did you mean 'FedAvg'?",
    "--model.algorithm=spectrall": "model.algorithm: There is no class 'spectrall'; did you mean 'SpectralSharding'?",
    "--data.partitioner=Dirichle": "data.partitioner: There is no class 'Dirichle'; did you mean 'DirichletPart",
    "--model.algorithm.strategy=Xyz": "model.algorithm.strategy: There is no class 'Xyz'; choose from Collective,",
    "--trainer.callbacks=ModelCheckpont": "trainer.callbacks: There is no class 'ModelCheckpont'; did you mean 'Model",
    "--trainer.logger=WandbLoger": "trainer.logger: There is no class 'WandbLoger'; did you mean 'WandbLogger'?",
    "--model.algorithm.layers.split.x=3.5": "model.algorithm.layers.split: Expected a <class 'int'>. Got value: 3.5",
    "--model.participation=FullParticipation": "`clients_per_round=2` and `participation=FullParticipation",
    "--trainer.callbacks=RoundHistori": "trainer.callbacks: There is no class 'RoundHistori'; did you mean 'RoundH",
    "--trainer.max_epochs=three": "trainer.max_epochs: Expected a <class 'int'>; Expected a <class 'NoneType'>. Got",
    "--trainer.max_epohcs=3": "unrecognized arguments: --trainer.max_epohcs=3; did you mean 'max_epochs'?",
    "--trainer.strategy=dpp": "You selected an invalid strategy name: `strategy='dpp'`",
    "--modle.clients_per_round=3": "unrecognized arguments: --modle.clients_per_round=3; did you mean 'model'?",
    "--model.clients_per_round=5": "`clients_per_round` must be at most num_clients=4, got 5",
    "--seed_everything=x": "seed_everything: Expected a <class 'bool'>; Expected a <class 'int'>. Got value: x",
    "--ckpt_path=gone.ckpt": "`ckpt_path`: there is no file gone.ckpt.",
    "--ckpt_path=run.yaml": "run.yaml is empty or not a whole checkpoint",
    "more": "unrecognized arguments: more",
}
IN_THE_FILE = {
    ("keep_ratio", "keep_ratoi"): KEEP_RATOI,
    ("clients_per", "client_per"): "model: Option 'client_per_round' is not accepted; did you mean 'clients_per_",
    ("data:", "dta:"): "does not accept option 'dta.partitioner.init_args.num_clients'; did you mean 'data'?",
    ("LitPoints", "LitPonts"): "model.module: module 'my_points' has no attribute 'LitPonts'",
    ("my_points.L", "my_point.L"): "model.module: No module named 'my_point'",
    ("Dirichlet", "Dirchlet"): "data.partitioner: There is no class 'DirchletPartitioner'; did you mean 'Dir",
    ("my_points.points", "my_points.LitPoints"): "data.train: Import path my_points.LitPoints does not corr",
    ("my_points.points", "my_points.untyped"): "data.train: Import path my_points.untyped does not corresp",
    ("module: my_points.LitPoints", ""): "model: the following arguments are required: module",
    (RUN, "model: {a: [1, 2"): "changed.yaml: Problems parsing config: while parsing a flow sequence",
    (RUN, "just text"): "changed.yaml: Unexpected config: just text",
    (RUN, ""): "changed.yaml: Unexpected config:",
    (RUN, TWO.replace("part", "prat", 1)): "model: Option 'praticipation' is not accepted; did you mean 'partici",
    (RUN, TWO.replace("LitPoints}", "LitPoints, local_epohcs: 2}", 1)): "did you mean 'local_epochs'?",
}
OTHERS = {
    "fti --config run.yaml": "there is no command 'fti'; choose from fit, validate, test, sweep, report, doctor, ne",
    "": "no command is given; choose from fit, validate, test, sweep, report, doctor, network",
    "--trainer.max_epochs=1": "no command is given; choose from fit, validate, test, sweep, report, doctor, network",
    "fit": "the following arguments are required: fit.data, fit.model",
    "fit --config": "argument -c/--config: expected one argument",
    "fit --config gone.yaml": "there is no config gone.yaml",
    "sweep --config=gone.yaml --seeds 0,1": "there is no config gone.yaml",
    "fit --config gone": 'Parser key "config": File does not exist:',
}


@pytest.fixture(scope="module", autouse=True)
def folder(command_line: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a config and a user's module, in which the command line is started."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "my_points.py").write_text(CODE)
    (folder / "run.yaml").write_text(RUN)
    command_line.chdir(folder)
    command_line.syspath_prepend(folder)
    yield folder
    sys.modules.pop("my_points", None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def start(line: str) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning_spectral", *line.split()])
        main()

    return start


@pytest.fixture
def error(started: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What a command line says after ``error: ``."""

    def of(line: str) -> str:
        with pytest.raises(SystemExit) as ended:
            started(line)
        assert ended.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(INFORMATION)]
        assert len(lines) == 1
        return lines[0].removeprefix("error: ")

    return of


INFORMATION = ("Seed set", "GPU available", "TPU available", "💡")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("option", "message"), ON_THE_COMMAND_LINE.items())
def test_of_options(option: str, message: str, error: Callable[[str], str]) -> None:
    assert message in error(f"fit --config run.yaml {option}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "message"), IN_THE_FILE.items(), ids=range(len(IN_THE_FILE)))
def test_of_configs(change: tuple[str, str], message: str, error: Callable[[str], str]) -> None:
    assert change[0] in RUN
    Path("changed.yaml").write_text(RUN.replace(*change))
    assert message in error("fit --config changed.yaml")


@pytest.mark.parametrize(("line", "message"), OTHERS.items())
def test_of_commands(line: str, message: str, error: Callable[[str], str]) -> None:
    assert error(line).startswith(message)


def test_an_error_of_a_users_own_has_its_traceback(started: Callable[[str], None]) -> None:
    with pytest.raises(ValueError, match="of the user's own"):
        started("fit --config run.yaml --model.module.fail=true")


def test_a_variable_shows_the_traceback_of_all(started: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(ValueError, match=re.escape("`keep_ratio` must be in (0, 1], got 1.5")):
        started("fit --config run.yaml --model.algorithm.keep_ratio=1.5")
