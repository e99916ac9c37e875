"""Models of single clients, of all data in one place, of federations, and of the others: on each client's examples."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import ProgressBar
from torch.utils.data import DataLoader, Subset

from lightning_spectral.arguments import Whole, first_of, flag
from lightning_spectral.errors import check_is
from lightning_spectral.participation import FullParticipation
from lightning_spectral.partition import Partition
from lightning_spectral.plugin import FederatedDataModule, FederatedModule
from lightning_spectral.plugin.callbacks import ClientEvaluation, ClientRow, ClientTable, RoundCallback, RoundHistory
from lightning_spectral.plugin.callbacks.evaluation import OWN
from lightning_spectral.plugin.settings import as_config
from lightning_spectral.plugin.trainer import silence, silent_trainer
from lightning_spectral.protocol.exchange import digest
from lightning_spectral.protocol.rng import isolated_rng
from lightning_spectral.report.measures import CLIENT_TABLE, CROSS_SITE
from lightning_spectral.report.runs import NAME as RECORD
from lightning_spectral.report.runs import read_record, write_record
from lightning_spectral.sweep.plan import CHECKPOINT, FINISHED, LastCheckpoint, begin

__all__ = ["compare_clients"]
Federate = Callable[[pl.LightningModule], FederatedModule]
REPLACED = ProgressBar, RoundHistory, ClientEvaluation  # callbacks for which a comparison has its own, or none
KINDS = ALONE, POOLED, OTHERS = "alone", "pooled", "of the others"
EXPECTED = ".*(not have many workers|no `val_dataloader`|directory .* is not empty|logging interval)"  # of Lightning


def compare_clients(
    make: Callable[[], pl.LightningModule],
    data: FederatedDataModule,
    folder: str | Path,
    *,
    trainer: Mapping[str, Any],
    federated: Mapping[str, Federate] | None = None,
    clients: Sequence[int | str] | None = None,
    leave_out: bool = True,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, ClientTable]:
    """Compare models of single clients, a pooled one, federated ones, and those of the others, on clients' examples.

    - ``alone``: your module, trained by a plain Trainer on the examples of one client;
    - ``pooled``: the same on those of all clients;
    - each of ``federated``;
    - ``of the others``: the first of these, without the client on whose examples it is evaluated.

    All begin with the weights of ``make()`` after ``seed``, and are evaluated on the examples that ``data`` holds out,
    by ``client_test_fraction`` if that is given. If ``data`` has no ``val``, those of ``client_val_fraction`` take its
    place. The same call continues where it was interrupted: finished models are not trained again, and a federation
    goes on from its last round. `report` reads the folder.

    Args:
        make: Makes your module.
        data: The clients' data.
        folder: Where checkpoints, tables and records are kept.
        trainer: Arguments of every Trainer, whose epochs are rounds, or passes over examples; its callbacks are copied,
            and those of rounds are for federations alone.
        federated: Functions from your module to its federation, by name; by default FedAvg of all clients.
        clients: Ids or names of those that are trained alone and left out; by default all with held-out examples.
        leave_out: Whether to train a federation of the others for each of these clients.
        settings: What distinguishes this comparison from others in a report, such as ``{"alpha": 0.3}``.
        seed: Seed of initial weights and of plain training.

    Returns:
        A table for each metric M, with a column for each kind of model, such as ``"M, pooled"``. That of ``"M,
        cross-site"`` has a column for each client: the model that it trained alone, on the examples of all.

    Raises:
        ValueError: If a cohort needs the client that is left out, or the folder has models with other settings, initial
            weights or saved hyperparameters.
    """
    seed, leave_out = Whole()("seed", seed), flag("leave_out", leave_out)
    whole, val, held_out = check_is("data", data, FederatedDataModule).parts
    seen = data.examples  # by all clients, and by the copies below
    names = dict(enumerate(whole.names or map(str, range(len(whole)))))
    able = {client: name for client, name in names.items() if len(held_out[client])}
    if isinstance(make, pl.LightningModule) or not callable(make):
        raise TypeError(f"`make` must be a function, got {type(make).__name__}; write make=YourModule, without ().")
    with isolated_rng(seed):
        if {*(made := make()).parameters()} & {*make().parameters()}:
            raise ValueError("`make` must return new weights each time, got the same; make all layers in it.")
    if len(whole) < 2 or not able:
        raise ValueError(
            f"`data` must have two clients and hold out examples, got {len(whole)} and {held_out.num_assigned}; write "
            "FederatedDataModule(..., client_val_fraction=0.1, client_test_fraction=0.2)."
        )
    if unknown := {*(clients or ())} - {*able, *able.values()}:
        known = first_of(list(able.values()), 20)
        raise ValueError(f"`clients` must be among those with held-out examples ({known}), got {unknown.pop()!r}.")
    chosen = [client for client in able if clients is None or {client, able[client]} & {*clients}]
    if callable(federated):
        raise TypeError(f"`federated` must map names to functions, got {federated!r}; write federated={{'mine': ...}}.")
    federated = federated or {"federated": partial(FederatedModule, participation=FullParticipation())}
    if wrong := [name for name in federated if str(name).replace("_", " ") in KINDS or not str(name).isidentifier()]:
        raise ValueError(f"`federated` maps identifiers other than 'alone' and 'pooled', got {wrong[0]!r}.")
    check_is("trainer", trainer, Mapping)
    check_is("settings", settings, Mapping | None)
    weights = sha256("".join(map(digest, made.state_dict().values())).encode()).hexdigest()
    config = {**made.hparams, "seed": seed, "trainer": trainer, "weights": weights, "held_out": held_out.fingerprint}

    def new_trainer(place: Path, plain: bool, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        own = {"default_root_dir": place, **copy.deepcopy(dict(trainer)), **options, "enable_checkpointing": True}
        given, dropped = own.get("callbacks") or (), (*REPLACED, RoundCallback) if plain else REPLACED
        listed = [given] if isinstance(given, pl.Callback) else given
        own["callbacks"] = [*(one for one in listed if not isinstance(one, dropped)), *callbacks]
        if (made := silent_trainer(**own)).world_size > 1:
            raise ValueError(f"One process compares clients, got {made.world_size}; write trainer={{'devices': 1}}.")
        return made

    def rows(name: str, members: Sequence[int], federate: Federate | None = None) -> list[ClientRow]:
        """Train a model on some clients' examples, unless that is done, and evaluate it on those of all clients."""
        place = Path(folder) / name
        begin(place, yaml.safe_dump(as_config({**config, **data.configuration(), "federate": federate})))
        if not (done := place / FINISHED).is_file():
            called = [names[client] for client in members if whole.names]
            training = replace(Partition.from_lists([whole[client] for client in members]), names=called)
            own, view, evaluation = copy.copy(data), copy.copy(data), ClientEvaluation()
            vars(own)["parts"], vars(view)["parts"] = (training, training, training), (whole, held_out, held_out)
            view.val = Subset(seen, held_out.indices.tolist())
            sizes = [data.batch_sizes.of(client) for client in members]
            own.batch_size = sizes if len({*sizes}) > 1 else sizes[0]
            own.val = Subset(seen, val.indices.tolist()) if own.val is None and val.num_assigned else own.val
            last = LastCheckpoint(place, Path(CHECKPOINT).stem, enable_version_counter=False)
            history = RoundHistory(place / RECORD, {"sweep": {**(settings or {}), "model": name.partition("/")[0]}})
            made = new_trainer(place, federate is None, last, *[history] * (federate is not None))
            with isolated_rng(seed, [made.strategy.root_device]), silence(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", EXPECTED)
                module = make()
                if federate is None:
                    examples = Subset(seen, training.indices.tolist())
                    options: Any = {"collate_fn": own.collate_fn, "num_workers": own.num_workers}
                    drop_last = own.drop_last and len(examples) > max(sizes)  # as of clients in a round
                    loader = DataLoader(examples, max(sizes), shuffle=True, drop_last=drop_last, **options)
                    vars(own)["train_dataloader"] = lambda: loader
                    made.fit(module, datamodule=own)
                else:
                    model, start = federate(module), place / CHECKPOINT
                    made.fit(model, datamodule=own, ckpt_path=start if start.is_file() else None)
                if federate is None or len(members) < len(whole):
                    model = FederatedModule(module)  # that of the others numbers its clients in another way
                new_trainer(place, True, evaluation, limit_val_batches=1.0).validate(
                    model, datamodule=view, verbose=False
                )
            write_record(done, name, {}, [{"round": 0, **evaluation.state_dict()}])
        return [ClientRow(**row) for row in read_record(done).lines[0]["tables"][0]["rows"]]

    first, *_ = federated
    rest = {client: [other for other in names if other != client] for client in chosen if leave_out}
    # first of all, because a cohort of all clients is refused there
    others = {client: rows(f"of_the_others/{client}", of, federated[first]) for client, of in rest.items()}
    kinds = {ALONE: {client: rows(f"{ALONE}/{client}", [client]) for client in chosen}}
    kinds |= {POOLED: dict.fromkeys(able, rows(POOLED, [*names]))}
    kinds |= {name: dict.fromkeys(able, rows(name, [*names], federate)) for name, federate in federated.items()}
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for kind, models in {**kinds, OTHERS: others}.items():
        for client, row in ((client, row) for client, its in models.items() for row in its):
            for metric, value in row.metrics.items():
                if row.client_id == client:
                    found[metric.removeprefix(OWN)][client][f"{metric}, {kind}"] = value
                if kind == ALONE:
                    found[f"{metric}, {CROSS_SITE}"][row.client_id][names[client]] = value
    tables, shown, record = dict[str, ClientTable](), dict[str, Any](), Path(folder, first, RECORD)
    for name, of_client in found.items():
        cells = (replace(row, metrics=of_client[row.client_id]) for row in kinds[POOLED][min(able)])
        tables[name] = ClientTable(0, tuple(cells))
        head, *body = list(tables[name]._blocks()[0])
        shown[f"{name}/{CLIENT_TABLE}"] = {"columns": head, "rows": body}
    run, written, _ = read_record(record)
    if written[-1] != (line := {"round": written[-1]["round"], "tables": shown}):
        write_record(record, run["run"], run["config"], [*written, line])
    return tables
