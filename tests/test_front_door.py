"""The front door: names are found on first use, typed, listed, and nothing heavy is imported before it is needed."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from public_names import PUBLIC

import lightning_spectral as ls
from lightning_spectral.front_door import INSTEAD


def run(script: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_type_checkers_see_the_names_that_there_are() -> None:
    rooms, stub = dict.fromkeys(ls._ROOMS, "lightning_spectral"), Path(ls.__file__).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    typed = {str(alias.asname): str(node.module) for node in imports for alias in node.names}
    assert typed == {**rooms, **{name: f"lightning_spectral.{place}" for name, place in ls._PLACES.items()}}


def test_a_name_is_what_its_package_has() -> None:
    for name, place in ls._PLACES.items():
        package = importlib.import_module(f"lightning_spectral.{place}")
        assert getattr(ls, name) is getattr(package, name)
        assert name in package.__all__


def test_the_interface_is_listed() -> None:
    assert {*ls.__all__, *ls._ROOMS, "__version__"} <= {*dir(ls)}
    assert {name for name in dir(ls) if not name.startswith("__")} == {*ls.__all__, *ls._ROOMS}
    assert all(getattr(ls, room).__name__ == f"lightning_spectral.{room}" for room in ls._ROOMS)
    everything: dict[str, object] = {}
    exec("from lightning_spectral import *", everything)
    assert everything.keys() - {"__builtins__"} == {*ls.__all__}


def test_a_wrong_name_is_refused_with_what_may_have_been_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError, match="module 'lightning_spectral' has no attribute 'FedAvgg'") as caught:
        _ = ls.FedAvgg
    assert (caught.value.name, caught.value.obj) == ("FedAvgg", ls)  # from which Python makes its proposal
    sys.__excepthook__(caught.type, caught.value, None)
    assert "Did you mean: 'FedAvg'?" in capsys.readouterr().err
    with pytest.raises(ImportError, match="cannot import name 'FedAvgg'"):
        exec("from lightning_spectral import FedAvgg")
    with pytest.raises(AttributeError, match=r": write ls\.plugin\.callbacks\.BatchNormEstimation$"):
        _ = ls.BatchNormEstimation


def test_importing_the_package_imports_no_other() -> None:
    heavy = "lightning", "numpy", "pytorch_lightning", "scipy", "torch", "torchmetrics", "wandb"
    refused = f"import sys; sys.modules.update(dict.fromkeys({heavy}))  # importing any of these fails\n"
    run(refused + "import lightning_spectral as ls\nassert ls.__version__ and len(dir(ls)) > 60")
    run("import sys, lightning_spectral as ls\nassert not hasattr(ls, 'FedAvgg') and 'torch' not in sys.modules")


STRATEGY = """
waiting = sum(type(finder).__module__.startswith("lightning_spectral") for finder in sys.meta_path)
names = [name for name in lightning.pytorch.strategies.StrategyRegistry if name.startswith("client_parallel")]
trainer = lightning.pytorch.Trainer(strategy="client_parallel", accelerator="cpu", devices=1, logger=False)
say(waiting, len(names), type(trainer.strategy).__name__)
"""
FORKED = {
    "ours first": f"import lightning_spectral, lightning.pytorch\n{STRATEGY}",
    "ours last": f"import lightning.pytorch, lightning_spectral\n{STRATEGY}",
    "a part of ours first": f"import lightning_spectral.plugin, lightning.pytorch\n{STRATEGY}",
    "functional": "import lightning_spectral as ls; say(ls.functional.zampling.__name__)",
    "federation": """
import lightning.pytorch
before = {*sys.modules}
import lightning_spectral as ls; name = ls.plugin.callbacks.__name__; ls.FederatedModule
say(name, *({*sys.modules} - before))
""",
}
# What all of these import is imported once: it is neither ours nor Lightning.
FORKING = """
import os, sys, torch._dynamo, torchmetrics
for name, script in {scripts!r}.items():
    if os.fork() == 0:
        exec(script, {{"sys": sys, "say": lambda *words: print(name, *words, sep="\\t", flush=True)}})
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What each of the scripts says in a process in which neither our package nor Lightning was imported."""
    if not hasattr(os, "fork"):
        pytest.skip("the scripts run in forks")
    lines = [line.split("\t") for line in run(FORKING.format(scripts=FORKED)).splitlines()]
    return {name: words for name, *words in lines if name in FORKED}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "ours last", "a part of ours first"])
def test_lightning_knows_the_strategy_by_name_in_any_order_of_imports(order: str, said: dict[str, list[str]]) -> None:
    assert said[order] == ["0", "4", "ClientParallelStrategy"]


@pytest.mark.slow
def test_a_package_inside_a_package_is_found_from_the_top(said: dict[str, list[str]]) -> None:
    assert said["functional"] == ["lightning_spectral.functional.zampling"]
    assert said["federation"][0] == "lightning_spectral.plugin.callbacks"


@pytest.mark.slow
def test_a_federation_imports_every_choice_but_no_logger_and_no_other_lightning(said: dict[str, list[str]]) -> None:
    """jsonargparse finds a class without a dotted path if it has been imported."""
    assert {"pytorch_lightning", "wandb", "matplotlib", "mlxtend"}.isdisjoint(said["federation"])
    choices = [choice for choice in PUBLIC.values() if choice is not ls.compare_clients]  # a function of many runs
    assert {choice.__module__ for choice in choices} <= {*said["federation"]}


@pytest.mark.parametrize("name", INSTEAD)
def test_names_from_elsewhere_are_answered_with_a_line_that_works(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': write ") as said:
        getattr(ls, name)
    line = str(said.value).partition("write ")[2]
    first, _, value = line.partition("=")
    code = value if first.isidentifier() else line
    if "..." not in code:
        eval(code, {"ls": ls})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.ClientPrivacy(clip=1, delta=0.1, epsilon=8), "Privacy has no argument `epsilon`: write target_"),
        (lambda: ls.FedAvg(mu=0.1), r"no argument `mu`: write FederatedModule\(\.\.\., local_hooks=\[ls\.Prox"),
        (lambda: ls.FederatedModule(None, strategy=None), r"no argument `strategy`: write algorithm=ls\.Spectral"),
        (lambda: ls.FederatedModule(None, num_rounds=9), r"no argument `num_rounds`: write Trainer\(max_epochs=100\)"),
        (lambda: ls.FederatedModule(None, lr=0.1), "no argument `lr`: write the rate into the optimizer"),
        (lambda: ls.FederatedModule(None, fraction_fit=0.1), "no argument `fraction_fit`: write clients_per_round=0.1"),
        (lambda: ls.IIDPartitioner(num_partitions=4), "IIDPartitioner has no argument `num_partitions`: write num_cli"),
        (lambda: ls.LabelsPerClient(4, sizes=[1.0]), r"LabelsPerClient has .* `sizes`: write IIDPartitioner\(.*sizes="),
        (lambda: ls.FederatedDataModule([], None, num_clients=4), r"`num_clients`: write a partitioner: IIDPart"),
        (lambda: ls.FederatedDataModule([], None, val_fraction=0.1), "write client_val_fraction=0.1, for examples of"),
        (
            lambda: ls.FederatedModule(None, num_clients=3),
            r"write IIDPartitioner\(num_clients=10\) for all, clients_per",
        ),
        (lambda: ls.NaturalPartitioner(partition_by="user"), r"write NaturalPartitioner\(table\['user'\]\) for a col"),
        (lambda: ls.ClientPrivacy(clipping_norm=1.0), "`clipping_norm`: write clip=1.0"),
        (lambda: ls.SpectralSharding(local_epochs=2), "no argument `local_epochs`: write FederatedModule"),
    ],
)
def test_arguments_from_elsewhere_are_answered_likewise(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
