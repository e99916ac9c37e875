"""Federations from the command line: the entry point, Lightning's own, and what their checkpoints say."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from federation import Fit, same_state
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.__main__ import main

pytest.importorskip("jsonargparse", reason="comes with the `test` extra")
from jsonargparse import Namespace, dict_to_namespace
from lightning.pytorch.cli import LightningCLI

from lightning_spectral.plugin.cli import FederatedCLI, report_differences

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/cli.md"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods by their old names


class LitToy(pl.LightningModule):
    """A user's module whose width is saved in its checkpoints."""

    def __init__(self, width: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3))

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def points(num_points: int) -> TensorDataset:
    x = torch.randn(num_points, 6, generator=torch.Generator().manual_seed(num_points))
    return TensorDataset(x, x[:, :3].argmax(1))


class Clients(ls.FederatedDataModule):
    """A data module that creates its own data."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(points(40), ls.IIDPartitioner(num_clients), val=points(20))


def part(kind: Any, **options: Any) -> dict[str, Any]:
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return {"class_path": name, "init_args": options}


SHARDING = part("SpectralSharding", keep_ratio={0.2: 0.5, 0.4: 0.5}, spectral_start=None)
SHARDED_MORE = part("SpectralSharding", keep_ratio=0.4, spectral_start=None)
MODEL = {"module": part(LitToy, width=8), "algorithm": SHARDING}
DATA = {
    "train": part(points, num_points=40),
    "val": part(points, num_points=20),
    "partitioner": part("IIDPartitioner", num_clients=4),
}
ONE = {"model": {**MODEL, "clients_per_round": 2}, "data": DATA}
TWO = {
    "model": {"models": {"a": MODEL, "b": MODEL}, "participation": part("LossVarianceReduced", active=3)},
    "data": {"modules": {"a": DATA, "b": part(Clients, num_clients=4)}},
}
CASES = {"the entry point, two models": (FederatedCLI, TWO, "b"), "the entry point, one model": (FederatedCLI, ONE, "")}


SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", **dict.fromkeys(SILENT, False)}


class Command:
    """A command line with a config, in a folder of its own, and the checkpoint of its first run, of one round."""

    def __init__(self, folder: Path, cli: Any, config: dict[str, Any], name: str) -> None:
        self.start, self.config, self.name = cli, config, name
        self._folder = folder
        self.cli = self.run("fit")
        self.checkpoint = folder / "first.ckpt"
        self.cli.trainer.save_checkpoint(self.checkpoint)

    def run(self, command: str, *, max_epochs: int = 1, **options: Any) -> Any:
        trainer = {**QUIET, "max_epochs": max_epochs, "default_root_dir": str(self._folder)}
        config = {**self.config, "trainer": trainer, **options}
        return self.start(args={"subcommand": command, command: config})

    @property
    def model(self) -> Any:
        return self.cli.model

    @property
    def module(self) -> Any:
        return self.model.members[self.name].module


@pytest.fixture(scope="module", autouse=True)
def _from_the_root(command_line: pytest.MonkeyPatch) -> None:
    command_line.syspath_prepend(ROOT)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Command(tmp_path_factory.mktemp("cli"), *request.param)


@pytest.mark.sampled(1)
def test_a_checkpoint_is_resumed_and_validated(command: Command) -> None:
    assert command.run("fit", max_epochs=2, ckpt_path=str(command.checkpoint)).trainer.global_step == 2
    validated = command.run("validate", ckpt_path=str(command.checkpoint))
    assert same_state(validated.model.state_dict(), command.model.state_dict())


@pytest.mark.slow
def test_other_arguments_than_the_checkpoints_are_refused_or_not_used(command: Command) -> None:
    given = command.config["model"]
    model = {**given, "local_epochs": 3}
    if command.name:
        model = {**given, "models": {**given["models"], command.name: {**MODEL, "local_epochs": 3}}}
    changed = {"model": model, "ckpt_path": str(command.checkpoint)}
    differs = rf"\n  - model\.{f'models.{command.name}.' * bool(command.name)}local_epochs: 1 in the checkpoint, 3 now$"
    with pytest.raises(ValueError, match=rf"(?s)another configuration.*:{differs}"):
        command.run("fit", max_epochs=2, **changed)
    with pytest.warns(ls.SpectralWarning, match=rf"The checkpoint's model is used.*:{differs}"):
        assert command.run("validate", **changed).model.configuration() == command.model.configuration()


@pytest.mark.parametrize(
    ("now", "named"), [(SHARDED_MORE, r"algorithm\.keep_ratio: .*, 0\.4"), (None, "algorithm.*: .*, None")]
)
def test_a_difference_is_named_where_it_begins(now: Any, named: str) -> None:
    def arguments(algorithm: Any) -> Any:
        return Namespace(class_path="ls.FederatedModule", init_args=dict_to_namespace({"algorithm": algorithm}))

    with pytest.raises(ValueError, match=rf"(?s)another configuration.*:\n  - model\.{named} now$"):
        report_differences(arguments(SHARDING), arguments(now), "fit")


@pytest.mark.slow
def test_what_print_config_shows_loads(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(command.config))
    with pytest.raises(SystemExit):
        command.start(args=["fit", "--config", str(tmp_path / "run.yaml"), "--print_config"])
    parser = command.cli._parser("fit")
    again = parser.instantiate_classes(parser.parse_string(capsys.readouterr().out)).model
    assert again.configuration() == command.model.configuration()
    assert "spectral_start=None" in str(again.configuration())


def test_a_checkpoint_of_the_command_line_says_how_to_build_the_federation(command: Command) -> None:
    loaded = type(command.model).load_from_checkpoint(command.checkpoint)
    assert loaded.configuration() == command.model.configuration()
    assert same_state(loaded.state_dict(), command.model.state_dict())


def test_a_users_module_comes_back_from_a_checkpoint(command: Command) -> None:
    loaded = ls.plugin.load_user_module(command.checkpoint, LitToy, command.name, lr=0.5)
    assert (loaded.hparams["width"], loaded.hparams["lr"]) == (8, 0.5)
    assert same_state(loaded.state_dict(), command.module.state_dict())


def test_a_model_that_is_not_in_the_checkpoint_is_refused(command: Command) -> None:
    remedy = "give the name of one of them: a, b" if command.name else "leave the name out"
    with pytest.raises(ValueError, match=f"no model 'c'; {remedy}"):
        ls.plugin.load_user_module(command.checkpoint, LitToy, "c")
    if command.name:
        with pytest.raises(ValueError, match=f"of several models; {remedy}"):
            ls.plugin.load_user_module(command.checkpoint, LitToy)


def test_other_checkpoints_name_the_missing_argument(fit: Fit, tmp_path: Path) -> None:
    fitted = fit(LitToy(8), ls.FederatedDataModule(points(40), ls.IIDPartitioner(4)), clients_per_round=2)
    fitted.trainer.save_checkpoint(path := tmp_path / "python.ckpt")
    with pytest.raises(TypeError, match=r"'module': pass it, FederatedModule\.load_from_checkpoint"):
        ls.FederatedModule.load_from_checkpoint(path)
    loaded = ls.FederatedModule.load_from_checkpoint(path, module=LitToy(8))
    assert same_state(loaded.state_dict(), fitted.model.state_dict())
    assert same_state(ls.plugin.load_user_module(path, LitToy).state_dict(), fitted.state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors would be loaded onto the GPU, as they should")
def test_a_users_module_comes_back_without_its_device(fit: Fit, tmp_path: Path, monkeypatch: Any) -> None:
    fitted = fit(LitToy(8), ls.FederatedDataModule(points(40), ls.IIDPartitioner(4)), clients_per_round=2)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # as if it was on a GPU
    fitted.trainer.save_checkpoint(path := tmp_path / "gpu.ckpt")
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(path, weights_only=True)
    assert same_state(ls.plugin.load_user_module(path, LitToy).state_dict(), fitted.state)


def test_entries_of_a_users_own_go_with_the_module(fit: Fit, tmp_path: Path) -> None:
    kind = variant(
        LitToy,
        on_save_checkpoint=lambda self, checkpoint: checkpoint.update(words=["to", "be"]),
        on_load_checkpoint=lambda self, checkpoint: setattr(self, "words", checkpoint["words"]),
    )
    fitted = fit(kind(8), ls.FederatedDataModule(points(40), ls.IIDPartitioner(4)), clients_per_round=2)
    fitted.trainer.save_checkpoint(path := tmp_path / "words.ckpt")
    assert ls.plugin.load_user_module(path, kind).words == ["to", "be"]


def test_a_checkpoint_without_federation_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="not written by a federation"):
        ls.plugin.load_user_module(tmp_path / "plain.ckpt", LitToy)


def test_an_optimizer_of_lightning_cli_is_refused(quiet: dict[str, Any]) -> None:
    trainer = {**quiet, "default_root_dir": str(quiet["default_root_dir"]), "max_epochs": 1}
    config = {**ONE, "seed_everything": 0, "trainer": trainer, "optimizer": part("torch.optim.Adam")}
    with (
        pytest.warns(UserWarning, match="will be overridden"),
        pytest.raises(ValueError, match=r"model\.server_optimizer"),
    ):
        LightningCLI(ls.FederatedModule, ls.FederatedDataModule, args={"subcommand": "fit", "fit": config})


@pytest.mark.slow
@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
def test_every_config_of_the_page_builds_a_federation(block: str, quiet: dict[str, Any]) -> None:
    pytest.importorskip("mlxtend", reason="comes with the `examples` extra")
    shown = yaml.safe_load(block)
    needed: dict[str, Any] = {"module": part(LitToy, width=32)}
    if not {"clients_per_round", "participation"} & shown["model"].keys():
        needed["clients_per_round"] = 2
    quiet = {**quiet, "enable_progress_bar": True, "default_root_dir": str(quiet["default_root_dir"])}
    trainer = {**quiet, **shown.get("trainer", {})}
    config = {"data": DATA, **shown, "model": {**needed, **shown["model"]}, "trainer": trainer}
    assert FederatedCLI(args=config, run=False, save_config_callback=None).model.members.keys() == {""}


@pytest.mark.parametrize("option", ["--model.help=MultiModelModule", "--model.algorithm.help=SpectralSharding"])
def test_classes_have_a_help(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        FederatedCLI(args=["fit", option])
    assert f"Help for --{option.split('.')[-2].strip('-')}.help=lightning_spectral." in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nothing", ["null", "None"])
def test_a_part_of_an_algorithm_may_be_nothing(nothing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = part("SpectralSharding", keep_ratio={0.1: 0.6, 0.3: 0.4})
    config = {**ONE, "model": {**ONE["model"], "algorithm": started}, "trainer": QUIET}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", str(tmp_path / "run.yaml"), f"--model.algorithm.spectral_start={nothing}"]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    algorithm = FederatedCLI(run=False, save_config_callback=None).model.algorithm
    assert isinstance(algorithm, ls.SpectralSharding)
    assert algorithm.spectral_start is None
    assert algorithm.keep_ratio == {0.1: 0.6, 0.3: 0.4}  # as in the config


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("config", sorted((ROOT / "examples/configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_run_with_the_command_they_show(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlxtend", reason="comes with the `examples` extra")
    assert f"-m lightning_spectral fit --config examples/configs/{config.name}" in config.read_text()
    assert "version:" not in config.read_text()  # a second run would delete the first's metrics, and then be refused
    toy_size = ["--trainer.max_epochs=1", "--trainer.limit_val_batches=1", "--trainer.enable_model_summary=false"]
    monkeypatch.setattr(sys, "argv", ["lightning_spectral", "fit", "--config", str(config), *toy_size])
    monkeypatch.chdir(tmp_path)
    main()
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert torch.load(checkpoint)["global_step"] == 1
    assert (checkpoint.parents[1] / "config.yaml").exists()


def test_without_jsonargparse_the_command_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spectral.__main__.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["lightning_spectral", "fit"])
    with pytest.raises(SystemExit, match=re.escape('pip install "lightning-spectral[cli]"')):
        main()


@pytest.mark.slow
def test_the_package_itself_does_not_need_jsonargparse(tmp_path: Path) -> None:
    code = "import sys; sys.modules['jsonargparse'] = None; import lightning_spectral"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [("--help", 0, "`network`"), ("", 2, "doctor, network"), ("fit -c no.yaml", 2, "no.yaml")],
)
def test_help_and_mistakes_import_nothing(given: str, status: int, said: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from lightning_spectral.__main__ import main; main()"
    told = subprocess.run([sys.executable, "-c", code, *given.split()], capture_output=True, text=True, check=False)
    assert told.returncode == status
    assert said in told.stdout + told.stderr
    assert "Traceback" not in told.stderr


def test_usage_says_what_to_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "fit", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("usage: python -m lightning_spectral [options] fit ")


def test_predict_is_no_command_of_a_federation() -> None:
    assert set(FederatedCLI.subcommands()) == {"fit", "validate", "test"}


def test_a_fit_writes_its_record_and_one_that_is_resumed_has_all_rounds(tmp_path: Path) -> None:
    from lightning_spectral.report.runs import read_runs

    logged = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    trainer = {**QUIET, "default_root_dir": str(tmp_path), "logger": logged}

    def fit(max_epochs: int, callbacks: Any = None, **options: Any) -> Any:
        config = {**ONE, "trainer": {**trainer, "max_epochs": max_epochs, "callbacks": callbacks}, **options}
        return FederatedCLI(args={"subcommand": "fit", "fit": config}, save_config_callback=None)

    listed = fit(1, callbacks=[part("RoundHistory")]).trainer
    assert sum(isinstance(callback, ls.RoundHistory) for callback in listed.callbacks) == 1, "the config's own"
    listed.save_checkpoint(tmp_path / "first.ckpt")
    resumed = fit(2, ckpt_path=str(tmp_path / "first.ckpt"))
    histories = [callback for callback in resumed.trainer.callbacks if isinstance(callback, ls.RoundHistory)]
    assert len(histories) == 1
    (run,), left_out = read_runs([tmp_path])
    assert [row["fl/round"] for row in run.rows] == [0, 1]
    assert [*run.rows] == histories[0].rows
    assert len(left_out) == 1
