"""Models of single clients, of all data, of federations and of the others: against plain calls, and interrupted."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Subset
from toy_models import LitMLP, LitNet, cross_entropy, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral.plugin.trainer import silent_trainer
from lightning_spectral.protocol.rng import isolated_rng
from lightning_spectral.report.compared import group_runs
from lightning_spectral.report.runs import read_runs
from lightning_spectral.report.sections import Contents, clients_section
from lightning_spectral.sweep.plan import SweepError

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|no `val_dataloader`)")
NAMES, TRAIN, TRAINER = ("Ulm", "Graz", "Bern"), toy_examples(60), {"max_epochs": 2, "accelerator": "cpu"}
HELD_OUT = {"client_val_fraction": 0.2, "client_test_fraction": 0.25, "stratified": True}
DATA = ls.FederatedDataModule(TRAIN, ls.NaturalPartitioner(NAMES * 20), batch_size={4: 0.5, 8: 0.5}, **HELD_OUT)
two, steps, pulled = partial(ls.FederatedModule, clients_per_round=2), list[int](), [0]


def count(lit: Any, batch: Any) -> None:
    steps.append(len(batch[0]))
    assert len(steps) != pulled[0], "pulled plug"


LitDropout = variant(LitMLP, before_step=count)


def plainly(*members: int, federate: Any = None) -> list[float]:
    """The loss, on each client's examples, of the model that plain calls of a Trainer make of some clients' data."""
    indices = torch.cat([DATA.partition[client] for client in members]).tolist()
    sizes, train = [DATA.batch_sizes.of(client) for client in members], Subset(TRAIN, indices)
    with isolated_rng(5):
        module, fit = LitDropout(), silent_trainer(pl.Trainer, **TRAINER).fit
        if federate is None:
            fit(module, DataLoader(train, max(sizes), shuffle=True))
        else:
            owners = ls.NaturalPartitioner([index % 3 for index in indices])
            fit(federate(module), ls.FederatedDataModule(train, owners, batch_size=sizes))
    return [cross_entropy(module.eval(), TRAIN[own]).item() for own in DATA.parts[2]]


def test_every_model_is_what_plain_calls_make_and_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    ways = {"two": two, "heads": partial(two, filters=[ls.Personal(["net.5.*"])])}
    compare = partial(ls.compare_clients, LitDropout, DATA, trainer=TRAINER, federated=ways, seed=5)
    tables, num_steps = compare(tmp_path / "whole"), len(steps)
    found, alone = tables["val_loss"], [plainly(0), plainly(1), plainly(2)]
    own, rest = [alone[c][c] for c in range(3)], [plainly(*{0, 1, 2} - {c}, federate=two)[c] for c in range(3)]
    of_all = {"pooled": plainly(0, 1, 2), "two": plainly(0, 1, 2, federate=two)}
    for kind, values in {"alone": own, **of_all, "of the others": rest}.items():
        assert list(found.column(f"val_loss, {kind}").values()) == values, kind
    assert [list(tables["val_loss, cross-site"].column(name).values()) for name in NAMES] == alone
    assert (found.rows[2].name, found.rows[2].num_examples, found.metrics[3]) == ("Bern", 5, "own/val_loss, heads")
    steps.clear()
    for pulled[0] in (num_steps // 3, num_steps - 3):
        with pytest.raises((AssertionError, ls.ClientError), match="pulled plug"):
            compare(tmp_path / "again")
    assert compare(tmp_path / "again") == tables
    (tmp_path / "again/two/finished").unlink()  # as if it had been killed before its evaluation
    assert compare(tmp_path / "again") == tables
    assert len(steps) < 1.3 * num_steps, "what is finished is not trained again"
    whole, first = (group_runs(read_runs([tmp_path / name])[0])[0] for name in ("whole", "whole/two"))
    assert sorted(len(group.runs) for group in whole) == [1, 1, 3], "two, heads, and those of the others"
    section = clients_section(Contents(first, "val_loss", True))
    assert [caption.split("two, ")[1] for caption, _ in section.tables] == [f"{name}, round 2" for name in tables]
    (matrix, _) = [axes.images[0].get_array() for axes in section.picture.drawn().axes if axes.images]
    assert matrix.T.tolist() == [pytest.approx(values, rel=1e-3) for values in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": ls.FederatedDataModule(TRAIN, ls.IIDPartitioner(3))}, "hold out examples, got 3 and 0; write Fed"),
        ({"clients": ["Bonn"]}, r"held-out examples \(Ulm, Graz, Bern\), got 'Bonn'"),
        ({"federated": [two]}, "`federated` maps identifiers"),
        ({"federated": two}, r"got functools.partial.*; write federated={'mine': \.\.\.}"),
        ({"federated": {"pooled": two}}, "other than 'alone' and 'pooled', got 'pooled'"),
        ({"federated": {"all": partial(two, clients_per_round=3)}}, "at most num_clients=2, got 3; lower it"),
        ({"make": LitDropout()}, "write make=YourModule, without"),
        ({"make": partial(LitNet, torch.nn.Linear(6, 3))}, "new weights each time"),
        ({"trainer": {**TRAINER, "devices": 2}}, "One process .* got 2; write"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_step(tmp_path: Path, options: Any, message: str) -> None:
    steps.clear()
    with pytest.raises((ValueError, TypeError), match=message):
        ls.compare_clients(**{"make": LitDropout, "data": DATA, "folder": tmp_path, "trainer": TRAINER, **options})
    assert not steps


def test_a_folder_has_settings_once_something_was_trained_there(tmp_path: Path) -> None:
    compare = partial(ls.compare_clients, data=DATA, folder=tmp_path, clients=[0])
    trainer: dict[str, Any] = {**TRAINER, "max_epochs": 1, "callbacks": pl.Callback(), "limit_val_batches": 0}
    moved = variant(LitDropout, lambda lit: lit.net[0].bias.data.add_(1.0))
    with pytest.raises(ValueError, match="One process"):
        compare(LitDropout, trainer={**trainer, "devices": 2})
    assert len(compare(LitDropout, trainer=trainer)["val_loss"].rows) == 3, "held-out examples are no validation"
    with pytest.raises(SweepError, match="weights is"):
        compare(moved, trainer=trainer)
