"""Nothing is lost: runs that are interrupted anywhere, and resumed, end with the bits of the uninterrupted run.

    python benchmarks/interruptions.py --number 100 --seed 0 --processes 1,2,3

Small federated fits are interrupted at random, several times each, and every time resumed from the latest checkpoint:
by a signal at any moment, by one that a hook sends to its own process, by Ctrl-C pressed every few milliseconds, or by
an exception in a hook of the module, of a client or of a callback. In the end, weights, algorithm's state, rows of the
history and of the ledger, the values in the CSV files of all parts together, and what the Trainer logged last are
compared with those of the uninterrupted run in one process; timings are left out. After every part, the weights in its
checkpoints, and what lasts besides them, are compared with those of the same round, and the classes of the module's
parts with those before. It prints a line for each run, then a table, and exits with status 1 if any differs. It takes
about three minutes; ``--only`` repeats single runs, and ``--folder`` keeps the files.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning_spectral as ls
from lightning_spectral.plugin.checkpoint_files import saved_progress
from lightning_spectral.tables import aligned

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ports import free_port
from toy_models import LitMLP, toy_examples

ROUNDS, CLIENTS_PER_ROUND = 5, 4
PATIENCE = 20  # seconds that a process waits for the others
GRACE = 6  # seconds that processes may outlive one that failed
HANGS = 150  # seconds after which a part counts as hung
MOST_PARTS = 12  # of one run, those that are interrupted

# -- where a run may be interrupted

CLIENT = ["on_train_batch_start", "training_step", "on_before_zero_grad", "on_after_backward"]
CLIENT += ["on_before_optimizer_step", "on_train_batch_end"]
VALIDATION = [f"on_validation_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end")]
VALIDATION += ["on_validation_epoch_end", "on_validation_end"]
OF_MODULE = [*CLIENT, *VALIDATION, "validation_step", "setup", "on_fit_start", "on_train_start", "on_train_end"]
OF_MODULE += ["on_save_checkpoint", "on_load_checkpoint"]
OF_ROUNDS = ["on_round_start", "on_client_start", "on_client_end", "on_cohort_end", "on_round_end"]
OF_CALLBACKS = ["setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start"]
OF_CALLBACKS += ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", *VALIDATION]
OF_CALLBACKS += ["on_train_epoch_end", "on_train_end", "on_save_checkpoint", "on_load_checkpoint", "on_fit_end"]
PLACES = [f"module.{hook}" for hook in OF_MODULE] + [f"local hook.{hook}" for hook in ("start_client", "step")]
PLACES += [f"{place}.{hook}" for place in ("first", "last") for hook in (*OF_CALLBACKS, *OF_ROUNDS)]


@dataclass(eq=False)
class Trap:
    """Acts once, at one call of one hook in one process, or in all."""

    place: str = ""
    calls: int = 0
    act: Callable[[], None] = lambda: None
    rank: int | None = None
    is_set: bool = True

    def passed(self, place: str) -> None:
        """Note that a hook is called."""
        if (
            self.is_set
            and place == self.place
            and (self.rank is None or str(self.rank) == os.environ.get("LOCAL_RANK", "0"))
        ):
            self.calls -= 1
            if self.calls == 0:
                self.act()


trap = Trap()


def fail() -> None:
    raise RuntimeError("an exception in user code")


def send(kind: signal.Signals) -> None:
    os.kill(os.getpid(), kind)


def press_for_a_second() -> None:
    """Ctrl-C every few milliseconds, from another thread, beginning now."""

    def press() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            send(signal.SIGINT)
            time.sleep(0.003)

    threading.Thread(target=press, daemon=True).start()


def passing(place: str, hooks: Sequence[str]) -> Callable[[type[Any]], type[Any]]:
    """Have methods of a class note that they are called, before they do what they do."""

    def decorate(kind: type[Any]) -> type[Any]:
        for hook in hooks:
            setattr(kind, hook, _noted(place, hook, getattr(kind, hook, None)))
        return kind

    return decorate


def _noted(place: str, hook: str, own: Any) -> Any:
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if hook != "on_round_end":
            trap.passed(f"{place}.{hook}")
            return own(self, *args, **options)
        own(self, *args, **options)  # a callback that fails in it does not hear of that round again
        trap.passed(f"{place}.{hook}")

    return noted


# -- what is trained


class Net(LitMLP):
    """A module with batch norm, dropout, momentum, metrics, a schedule that follows validation, and attributes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.net.insert(1, nn.BatchNorm1d(12))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trap.passed("module.training_step")
        self.seen.append(len(batch[0]))
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        trap.passed("module.validation_step")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "strict": False}}


passing("module", [hook for hook in OF_MODULE if hook not in ("training_step", "validation_step")])(Net)


class Alternating(Net):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss is not None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        first, second = self.net[:3].parameters(), self.net[3:].parameters()
        halves = [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.01)]
        return halves, [torch.optim.lr_scheduler.StepLR(half, 2, 0.5) for half in halves]


class Alignment(ls.plugin.callbacks.UpdateAlignment):
    """Trains clients once more in ``on_round_end``; if one of them failed there, the round would lack this value."""

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        trap.is_set = False
        super().on_round_end(trainer, pl_module, summary)
        trap.is_set = True


@dataclass(frozen=True)
class Interrupted(ls.client.LocalHook):
    """A local hook that changes nothing."""

    def start_client(self, client: Any, optimizer: Any) -> Any:
        trap.passed("local hook.start_client")
        return lambda: trap.passed("local hook.step")


class Counts(ls.RoundCallback):
    """A user's callback with state, which logs what it has counted."""

    place = ""

    def __init__(self) -> None:
        self.counts = {"rounds": 0, "validations": 0, "epochs": 0}
        self.has_begun = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.has_begun = True

    @property
    def state_key(self) -> str:
        return type(self).__name__

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        self.counts["rounds"] += 1
        name = f"rounds of the {self.place}"
        pl_module.log(name, float(self.counts["rounds"]), on_step=False, on_epoch=True, batch_size=1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.counts["validations"] += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.counts["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


@passing("first", [*OF_CALLBACKS, *OF_ROUNDS])
class First(Counts):
    place = "first"


@passing("last", [*OF_CALLBACKS, *OF_ROUNDS])
class Last(Counts):
    place = "last"


def fed_adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.02)


MIXED = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})
Make = Callable[[], dict[str, Any]]
FEDERATIONS: dict[str, Make] = {
    "FedAvg": lambda: {"callbacks": [Alignment(2)]},
    "FedAvg, averaged": lambda: {"callbacks": [EMAWeightAveraging(decay=0.5), EarlyStopping("val_loss", patience=99)]},
    "FedAvg, stopped early": lambda: {
        "callbacks": [EarlyStopping("fl/round", mode="max", patience=9, stopping_threshold=2.5)]
    },
    "spectral": lambda: {
        "algorithm": MIXED,
        "server_optimizer": fed_adam,
        "dropout": ls.ClientDropout(0.2),
        "callbacks": [Alignment(2), ls.plugin.callbacks.SpectralDiagnostics()],
    },
    "spectral, two optimizers": lambda: {"algorithm": MIXED, "module": Alternating},
    "LoRA, averaged": lambda: {
        "algorithm": ls.LoRA({1: 0.5, 3: 0.5}, aggregation=ls.StackedProducts(), train=["net.6"]),
        "server_optimizer": ls.FedAdam(lr=0.01),
        "callbacks": [EMAWeightAveraging(decay=0.5)],
    },
    "Zampling": lambda: {
        "algorithm": ls.Zampling(4, degree=3),
        "callbacks": [ls.plugin.callbacks.SampledNetworks(3), ls.plugin.callbacks.BatchNormEstimation()],
    },
    "stale updates": lambda: {
        "algorithm": ls.StaleUpdates(unseen="mean"),
        "callbacks": [ls.ClientEvaluation(clients=3)],
    },
    "filters": lambda: {"filters": [ls.Personal(["net.6.*"]), ls.UsualUpdateNorm(), ls.TopK(0.2)]},
    "several models": lambda: {"models": {"dense": ls.FedAvg(), "spectral": MIXED}},
}
Savers = Callable[[Path], list[Callback]]
SAVERS: dict[str, Savers] = {
    "every round": lambda folder: [ModelCheckpoint(folder, save_last=True)],
    "every round and exceptions": lambda folder: [ModelCheckpoint(folder, save_last=True, save_on_exception=True)],
    "every round, exceptions beside": lambda folder: [
        ModelCheckpoint(folder, save_last=True),
        OnExceptionCheckpoint(folder),
    ],
    "the last two, exceptions beside": lambda folder: [
        OnExceptionCheckpoint(folder),
        ModelCheckpoint(folder, monitor="fl/round", mode="max", save_top_k=2),
    ],
    "every step and after validation": lambda folder: [
        ModelCheckpoint(folder, "step", every_n_train_steps=1),
        ModelCheckpoint(folder, "validated", save_on_train_epoch_end=False, save_on_exception=True),
    ],
    "exceptions alone": lambda folder: [OnExceptionCheckpoint(folder)],
}
WHOLE = "all rounds"
ALL_SAVERS: dict[str, Savers] = {**SAVERS, WHOLE: lambda folder: [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]}


def federation(module: type[Net] = Net, models: Any = None, **options: Any) -> tuple[Any, Any]:
    """A federation and its data."""
    examples = toy_examples(72)

    def data() -> Any:
        return ls.FederatedDataModule(
            examples, ls.IIDPartitioner(num_clients=8), val=examples, batch_size=4, client_val_fraction=0.2
        )

    hooks = [Interrupted()]
    if models is None:
        return ls.FederatedModule(module(), clients_per_round=CLIENTS_PER_ROUND, local_hooks=hooks, **options), data()
    parts = {name: ls.FederatedModule(module(), algorithm=one, local_hooks=hooks) for name, one in models.items()}
    sampler = ls.LossVarianceReduced(active=4, measure=5)
    model = ls.MultiModelModule(parts, participation=sampler, processors={2: 0.5, 1: 0.5})
    return model, ls.MultiModelDataModule({name: data() for name in models})


# -- one part of a run, in a process of its own


def train(name: str, saver: str, folder: Path, num_processes: int) -> None:
    """Fit from the latest checkpoint, if there is one, and write the outcome."""
    torch.manual_seed(0)
    options = FEDERATIONS[name]()
    callbacks = options.pop("callbacks", [])
    model, data = federation(**options)
    forms = forms_of(model)
    timeout = timedelta(seconds=PATIENCE)
    several = {"strategy": ls.plugin.ClientParallelStrategy(timeout=timeout), "devices": num_processes}
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    counts = First(), Last()
    own = [history, ledger, counts[0], LearningRateMonitor(), *callbacks, counts[1]]
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=CSVLogger(folder, name="csv"),
        callbacks=[*own, *ALL_SAVERS[saver](folder / "checkpoints")],
        enable_progress_bar=False,
        enable_model_summary=False,
        **(several if num_processes > 1 else {}),
    )
    try:
        trainer.fit(model, data, ckpt_path=ls.latest_checkpoint(folder / "checkpoints"))
    finally:
        if forms_of(model) != forms:
            (folder / "forms.txt").write_text(f"{forms_of(model)} instead of {forms}\n")
    if not counts[
        0
    ].has_begun:  # nothing was left to train, so Lightning calls no `on_train_end`, where averages are set
        for callback in callbacks:
            if isinstance(callback, EMAWeightAveraging):
                callback.on_train_end(trainer, model)
    if trainer.global_rank == 0:
        states = {n: m.state for n, m in model.federation.members.items() if m.state is not None}
        result = {
            "weights": {n: v.clone() for n, v in model.state_dict().items()},
            "state": {f"{n}.{k}": v for n, state in states.items() for k, v in state.state_dict().items()},
            "history": [repr(sorted(without_seconds(row).items())) for row in history.rows],
            "ledger": [repr(tuple(row)) for row in ledger.rows],
            "last logged": without_seconds({n: repr(float(v)) for n, v in trainer.callback_metrics.items()}),
            "counts": [repr(one.counts) for one in counts],
            "rounds": [repr((trainer.global_step, trainer.current_epoch))],
        }
        torch.save(result, folder / "part.pt")
        (folder / "part.pt").rename(folder / "result.pt")


def forms_of(model: Any) -> list[str]:
    """The classes of a module's parts, and the names and shapes of its tensors."""
    parts = [f"{name}: {type(part).__name__}" for name, part in model.named_modules()]
    return parts + [f"{name}: {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "seconds" not in name}


def fork(work: Callable[[], None], log: Path) -> int:
    """Do some work in a fork of this process, which ends with status 0, or 1 if that failed."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            work()
            status = 0
        except BaseException:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(status)


def start(name: str, saver: str, folder: Path, num_processes: int, set_trap: Trap) -> list[int]:
    """Begin a part of a run; return its processes."""
    port = free_port()

    def work(rank: int) -> Callable[[], None]:
        def begin() -> None:
            if num_processes > 1:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
            vars(trap).update(vars(set_trap))
            train(name, saver, folder, num_processes)

        return begin

    return [fork(work(rank), folder / f"log {rank}.txt") for rank in range(num_processes)]


def wait(pids: Sequence[int], seconds: float) -> list[int] | None:
    """The exit statuses of all, or nothing if they hang, after which they are killed.

    Processes that outlive one that failed are killed after a while, as a launcher would do.
    """
    end, statuses = time.monotonic() + seconds, {}
    while len(statuses) < len(pids) and time.monotonic() < end:
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] != 0:
                    end = min(end, time.monotonic() + GRACE)
        time.sleep(0.005)
    is_hung = not any(statuses.values()) and len(statuses) < len(pids)
    for pid in set(pids) - statuses.keys():
        os.kill(pid, signal.SIGKILL)
        statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if is_hung else [statuses[pid] for pid in pids]


# -- interruptions

AT_ANY_MOMENT = {f"{kind.name}, any moment": kind for kind in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)}
IN_A_HOOK: dict[str, Callable[[], None]] = {
    "SIGKILL, in a hook": lambda: send(signal.SIGKILL),
    "SIGTERM, in a hook": lambda: send(signal.SIGTERM),
    "SIGINT, in a hook": lambda: send(signal.SIGINT),
    "SIGINT, every few ms": press_for_a_second,
    "exception, in a hook": fail,
}
IN_A_CLIENT: dict[str, Callable[[], None]] = {
    "SIGINT, in a client": lambda: send(signal.SIGINT),
    "exception, in a client": fail,
}
KINDS = [*AT_ANY_MOMENT, *IN_A_HOOK, *IN_A_CLIENT]
BEYOND_A_ROUND = {"setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_end", "on_fit_end"}
BEYOND_A_ROUND |= {"on_load_checkpoint"}


@dataclass
class Runs:
    """All runs, with what the uninterrupted ones have left.

    Attributes:
        folder: Where they write.
        seconds: How long parts that were not interrupted took, by the number of processes.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.seconds: dict[int, list[float]] = defaultdict(list)

    def whole(self, name: str) -> Path:
        """The folder of the uninterrupted run of a federation."""
        folder = self.folder / f"{name}, whole"
        if not folder.exists():
            folder.mkdir()
            began = time.monotonic()
            statuses = wait(start(name, WHOLE, folder, 1, Trap()), HANGS)
            self.seconds[1].append(time.monotonic() - began)
            if statuses != [0]:
                raise RuntimeError(f"{name}: {(folder / 'log 0.txt').read_text()}")
        return folder

    def part(self, case: Case, kind: str, chance: random.Random) -> tuple[bool, str]:
        """Run until it ends or is interrupted; return whether it was, and how."""
        number = case.num_processes
        ranks = chance.sample(range(number), chance.randint(1, number))
        place, act = "", IN_A_HOOK.get(kind, IN_A_CLIENT.get(kind, lambda: None))
        calls = 0
        if kind in IN_A_HOOK:
            is_in_client = kind == "SIGINT, every few ms" and chance.random() < 0.5
            place = f"module.{chance.choice(CLIENT)}" if is_in_client else chance.choice(PLACES)
            calls = 1 if place.partition(".")[2] in BEYOND_A_ROUND else chance.randint(1, 4)
        elif kind in IN_A_CLIENT:
            place, calls = f"module.{chance.choice(CLIENT)}", chance.randint(1, 30)
        rank = chance.choice([None, *range(number)])
        usual = statistics.median(self.seconds[number] or [1.5 + number])
        moment = chance.uniform(0.0, usual)
        pids = start(case.name, case.saver, case.folder, number, Trap(place, calls, act, rank))
        began = time.monotonic()
        if kind in AT_ANY_MOMENT:
            time.sleep(moment)
            for one in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pids[one], AT_ANY_MOMENT[kind])
        statuses = wait(pids, HANGS)
        if statuses == [0] * number:
            self.seconds[number].append(time.monotonic() - began)
        how = f"{kind} {f'{place}, call {calls}, process {rank}' if place else f'after {moment:.2f} s, {ranks}'}"
        if statuses is None:
            raise Hung(how)
        return statuses != [0] * number, f"{how} -> {statuses}"


class Hung(Exception):
    pass


@dataclass
class Case:
    """One run: what it trains, what saves it, and in how many processes."""

    name: str
    saver: str
    num_processes: int
    folder: Path


def differences(found: Any, expected: Any) -> list[str]:
    """Names of what differs between the outcomes of two runs, with an example."""
    shown = []
    for what, values in expected.items():
        other = found[what]
        if isinstance(values, list):
            values, other = dict(enumerate(values)), dict(enumerate(other))
        if len(values) != len(other) and what in ("history", "ledger"):
            shown.append(f"{what}: {len(other)} rows, not {len(values)}")
        for key in [*values, *(key for key in other if key not in values)]:
            if not _same(values.get(key), other.get(key)):
                is_tensor = isinstance(values.get(key), torch.Tensor)
                shown.append(
                    f"{what}: {key}" if is_tensor else f"{what}: {key}: {other.get(key)}, not {values.get(key)}"
                )
    return shown


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return {**found, "files": logged(folder)}


def logged(folder: Path) -> dict[str, str]:
    """The values in the CSV files of all parts, by round and name; one round that was repeated has the same."""
    values: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("csv/*/metrics.csv")):
        for row in csv.DictReader(path.read_text().splitlines()):
            for name, value in row.items():
                if value and name and "seconds" not in name and name != "step":
                    values[f"{row.get('epoch') or row.get('step')}, {name}"].add(value)
    return {key: " or ".join(sorted(found)) for key, found in values.items()}


def wrong_weights(folder: Path, whole: Path) -> Iterator[str]:
    """Checkpoints whose weights, or what lasts besides, are not those of the whole run after as many rounds."""
    right = {saved_progress(path)[0]: path for path in whole.glob("checkpoints/*.ckpt")}
    for path in folder.glob("checkpoints/*.ckpt"):
        saved = torch.load(path, weights_only=True)
        rounds = saved_progress(path)[0]
        if rounds not in right:
            continue
        expected = torch.load(right[rounds], weights_only=True)
        names = ["federation_lasting", "current_model_state" if "current_model_state" in expected else "state_dict"]
        if "current_model_state" in expected and "current_model_state" not in saved:
            expected["state_dict"] = expected["current_model_state"]
            names = ["federation_lasting", "state_dict"]
        for name in names:
            if not _all_same(saved.get(name), expected.get(name)):
                yield f"{path.name} after {rounds} rounds: {name}"


def _all_same(one: Any, two: Any) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_all_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_all_same, one, two))
    return _same(one, two)


Table = dict[tuple[str, int], list[int]]  # by kind and processes: interruptions, runs, differing weights and records


def one_run(runs: Runs, seed: str, processes: Sequence[int], kinds: Sequence[str], table: Table) -> int:
    """Interrupt a run again and again, let it end, and compare; return the number of interruptions."""
    chance = random.Random(seed)
    name, saver, number = chance.choice([*FEDERATIONS]), chance.choice([*SAVERS]), chance.choice(processes)
    whole, case = runs.whole(name), Case(name, saver, number, runs.folder / seed)
    case.folder.mkdir()
    wanted, happened, kinds_seen = chance.randint(1, 4), [], []
    records: list[str] = []
    try:
        for _ in range(MOST_PARTS):
            kind = chance.choice(kinds)
            was_interrupted, how = (
                runs.part(case, kind, chance) if len(happened) < wanted else runs.part(case, "", chance)
            )
            records += [f"{wrong} ({how})" for wrong in wrong_weights(case.folder, whole)]
            if (case.folder / "forms.txt").exists():
                records.append(f"{(case.folder / 'forms.txt').read_text()[:300]} ({how})")
                (case.folder / "forms.txt").unlink()
            if not was_interrupted:
                break
            happened.append(how)
            if len(happened) > wanted:
                raise RuntimeError("it failed without an interruption: " + tail(case.folder))
            kinds_seen.append(kind)
        found, expected = outcome(case.folder), outcome(whole)
        records += differences(found, expected)
    except Hung as hung:
        records.append(f"hung: {hung}")
    except (RuntimeError, OSError) as error:
        records.append(str(error))
    weights = any(line.startswith(("weights", "state")) for line in records)
    others = any(not line.startswith(("weights", "state")) for line in records)
    for kind in {*kinds_seen}:
        for row in ((kind, number), ("all", number)) if kind == kinds_seen[0] else ((kind, number),):
            entry = table.setdefault(row, [0, 0, 0, 0])
            entry[0] += kinds_seen.count(kind) if row[0] != "all" else len(kinds_seen)
            entry[1], entry[2], entry[3] = entry[1] + 1, entry[2] + weights, entry[3] + others
    verdict = "differs" if records else "equal"
    print(f"run {seed}: {name}; {saver}; {number} processes; {len(kinds_seen)} interruptions; {verdict}", flush=True)
    if records:
        print(*(f"    {how}" for how in happened), sep="\n")
        print(*(f"  ! {line[:400]}" for line in records[:12]), sep="\n", flush=True)
    else:
        shutil.rmtree(case.folder)
    return len(kinds_seen)


def tail(folder: Path) -> str:
    return " | ".join(path.read_text()[-600:] for path in sorted(folder.glob("log *.txt")))


def shown(table: Table) -> Iterator[str]:
    head = ["interrupted by", "processes", "interruptions", "runs", "differing weights", "differing records"]
    order = [*KINDS, "all"]
    rows = sorted(table.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    yield from aligned([head, *([kind, str(number), *map(str, entry)] for (kind, number), entry in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="interruptions in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", default="1,2,3", help="numbers of processes, one of which each run has")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the runs to do, in place of all")
    parser.add_argument("--folder", type=Path, help="an empty folder for files, which are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    processes = [int(number) for number in options.processes.split(",")]
    table: Table = {}
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(options.folder or Path(temporary))
        runs.folder.mkdir(parents=True, exist_ok=True)
        done = 0
        numbers = iter(options.only) if options.only else iter(range(sys.maxsize))
        for number in numbers:
            if done >= options.number:
                break
            done += one_run(runs, f"{options.seed}.{number}", processes, options.kinds, table)
    print(*shown(table), sep="\n")
    sys.exit(any(sum(entry[2:]) for entry in table.values()))


if __name__ == "__main__":
    main()
