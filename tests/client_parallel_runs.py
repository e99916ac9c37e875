"""Small federated runs whose outcome must not depend on the number of processes; `main` does them in several."""

import os
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_versions import SAVE_ON_EXCEPTION
from ternary import Ternary
from torch import nn
from torch.multiprocessing import start_processes
from toy_models import LitHalves, LitMLP, LitSmall, Remembering, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral.functional.spectra import singular_terms
from lightning_spectral.server.processes import Processes

SIZES = (30, 24, 20, 17, 13, 12, 9, 8, 6, 5, 3, 3)
BATCH_SIZE = 4


def uneven_data(batch_size: Any = BATCH_SIZE, **options: Any) -> ls.FederatedDataModule:
    """Clients with 3 to 30 examples each, which train on all or some of them."""
    toy = toy_examples(sum(SIZES))
    partitioner = ls.NaturalPartitioner([client_id for client_id, size in enumerate(SIZES) for _ in range(size)])
    return ls.FederatedDataModule(toy, partitioner, val=toy, batch_size=batch_size, **options)


def noisy(example: Any, client: int) -> Any:
    return example[0] + client / 10 * torch.randn(6), example[1]


class WithLimits(LitMLP):
    """A running minimum that starts at infinity, a flag and a counter."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("has_begun", torch.tensor(False))
        self.register_buffer("num_steps", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.low = torch.minimum(self.low, batch[0].min())
        self.has_begun.fill_(True)
        self.num_steps += 1
        return super().training_step(batch, batch_idx)


WithBatchNorm = partial(variant(LitSmall, lambda lit: setattr(lit.net[1], "momentum", None)), dropout=0.3)


class Levelled(LitMLP):
    """Trains on a level that a callback raises at the server, and on numbers of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.noise = 1.0, random.Random(7)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.level_seen = self.level
        return self.level * super().training_step((x + self.noise.random(), y), batch_idx)


class RaisesLevel(ls.RoundCallback):
    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        pl_module.module.level += 0.5


class WithExperts(LitMLP):
    """Two layers, of which each client uses one, chosen by its first example, and a third that no client uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx == 0:
            self.own = int(x[0, 0] > 0)
        return super().training_step((self.experts[self.own](x), y), batch_idx)


def fail_on_example_0(lit: Any, batch: Any) -> None:
    """In round 1; it belongs to client 0."""
    if lit.trainer.current_epoch == 1 and bool((batch[0] == uneven_data().train.tensors[0][0]).all(1).any()):
        raise FloatingPointError("example 0")


# One layer is frozen.
FailsForClient = variant(LitMLP, lambda lit: lit.net[0].requires_grad_(False), before_step=fail_on_example_0)


class DivergesForSome(LitMLP):
    """Returns a bias that is not finite if a client's last batch has a single example."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) == 1:
            with torch.no_grad():
                self.net[0].bias.fill_(float("nan"))


class FailsBetweenTurns(pl.Callback):
    """Fails in one process, outside any client's turn, where no round can share the error."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            raise KeyError("mine alone")


class Leaves(ls.RoundCallback):
    """Ends a process during a client's turn, or pauses it for a few seconds."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
        if turn.round_idx == 1 and trainer.global_rank == self.rank:
            if not self.seconds:
                os._exit(0)
            time.sleep(self.seconds)


class FailsInOneProcess(ls.RoundCallback):
    def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            raise KeyError("mine")


class BreaksWeights(torch.optim.SGD):
    """A server optimizer whose step leaves weights that are not finite."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(float("inf"))


ADAM, BREAKING = partial(torch.optim.Adam, lr=0.01), partial(BreaksWeights, lr=1.0)
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)
SPECTRAL = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, layers=EVERY_LAYER)
COORDINATED = ls.SpectralSharding(ls.Unbiased(), keep_ratio=0.4, design=ls.designs.Coordinated(), layers=EVERY_LAYER)


class Gathers(LitMLP):
    """Asks other processes in its steps, as contrastive losses do: there are none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not torch.distributed.is_initialized()
        assert self.trainer.world_size == 1
        assert self.trainer.global_rank == self.global_rank == 0
        self.trainer.strategy.barrier()
        everywhere = self.all_gather(batch[0], sync_grads=True)
        assert everywhere.shape == batch[0].shape
        self.log("same", self.trainer.strategy.reduce(everywhere.mean()), sync_dist=True)
        shown = self.trainer.num_training_batches, self.trainer.is_last_batch, self.global_step
        self.log_dict({f"shown {index}": float(value) for index, value in enumerate(shown)})
        return super().training_step((everywhere, batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.distributed.is_initialized() == (self.trainer.world_size > 1)
        return super().validation_step(batch, batch_idx)


RUNS: dict[str, dict[str, Any]] = {
    "a step that gathers": {"module": Gathers},
    "dense": {"loader": True},
    "dense, Adam at the server, two clients": {"clients_per_round": 2, "server_optimizer": ADAM},
    "batch norm": {"module": WithBatchNorm, "clients_per_round": 5},
    "limits": {"buffers": {"has_begun": "max", "num_steps": "max"}, "module": WithLimits, "clients_per_round": 5},
    "batch norm, estimated": {
        "buffers": {"*.running_*": "server"},
        "module": WithBatchNorm,
        "clients_per_round": 5,
        "trainer": {"callbacks": [ls.plugin.callbacks.BatchNormEstimation()]},
    },
    "spectral": {"algorithm": SPECTRAL, "watched": True},
    "levels and noise": {
        "algorithm": SPECTRAL,
        "module": Levelled,
        "clients_per_round": 5,
        "trainer": {"callbacks": [RaisesLevel()]},
    },
    "experts": {"algorithm": SPECTRAL, "module": WithExperts, "clients_per_round": 4},
    "the start alone": {
        "algorithm": replace(SPECTRAL, aggregation=ls.algorithms.TermMeans()),
        "clients_per_round": 3,
        "local_epochs": 0,
        "rounds": 1,
    },
    "spectral, FedAdam": {
        "algorithm": SPECTRAL,
        "clients_per_round": 5,
        "server_optimizer": ls.FedAdam(lr=0.01),
    },
    "two optimizers, FedYogi": {
        "algorithm": SPECTRAL,
        "module": LitHalves,
        "clients_per_round": 5,
        "local_hooks": [ls.ProximalTerm(0.5)],
        "server_optimizer": ls.FedYogi(lr=0.01),
    },
    "coordinated, one client": {"algorithm": COORDINATED, "clients_per_round": 1},
    "cut cohort": {"algorithm": COORDINATED, "trainer": {"limit_train_batches": 4}},
    "secure sums": {"module": WithBatchNorm, "filters": [ls.SecureSums()]},
    "clients left out": {"module": DivergesForSome},
    "a store of clients": {"algorithm": Remembering(), "clients_per_round": 9, "rounds": 3},
    "truncated stale updates, clients left out": {
        "algorithm": ls.StaleUpdates(beta=0.5, num_terms=1),
        "module": DivergesForSome,
        "clients_per_round": 9,
        "rounds": 3,
    },
    "LoRA, stacked, FedAdam": {
        "algorithm": ls.LoRA({1: 0.5, 3: 0.5}, aggregation=ls.StackedProducts(), train=["net.5"]),
        "clients_per_round": 5,
        "server_optimizer": ls.FedAdam(lr=0.01),
    },
    "width": {
        "algorithm": ls.WidthSharding(ls.RollingChannels(), keep_ratio={0.25: 0.5, 0.5: 0.5}),
        "module": WithBatchNorm,
        "local_hooks": [ls.MaskedLogits("net.6")],
        "dashboard": True,
    },
    "outputs cut": {
        "algorithm": ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, output_ratio=0.4),
        "module": WithBatchNorm,
    },
    "matrices averaged": {
        "algorithm": ls.SpectralSharding(ls.TopN(), {0.3: 0.5, 0.6: 0.5}, aggregation=ls.algorithms.MatrixMeans()),
        "module": WithBatchNorm,
    },
    "Zampling": {"algorithm": ls.Zampling(4, degree=3), "module": WithBatchNorm},
    "robust": {"algorithm": SPECTRAL, "filters": [ls.Robust(ls.Median())], "rounds": 3},
    "a stranger's filter": {"filters": [ls.UsualUpdateNorm(0.9), Ternary(0.5)], "rounds": 3},
    "work divided": {"filters": [ls.FedNova()], "local_epochs": [1, 3] * 6, "module": WithBatchNorm, "rounds": 3},
    "steps, batches and inputs by client, a share of the clients": {
        "clients_per_round": 0.6,
        "local_steps": {2: 0.5, 5: 0.5},
        "data": {"batch_size": {2: 0.5, 5: 0.5}, "client_transform": noisy},
        "rounds": 3,
    },
    "largest changes": {"filters": [ls.TopK(0.1)], "rounds": 3},
    "stale updates": {"algorithm": ls.StaleUpdates(unseen="mean"), "rounds": 3},
    "private": {
        "algorithm": ls.SpectralSharding(ls.TopN(), keep_ratio=0.4, layers=EVERY_LAYER),
        "participation": ls.Uniform(active=5),
        "filters": [ls.ClientPrivacy(clip=0.5, noise_multiplier=0.45, delta=1e-3, clip_quantile=0.5, noise_seed=1)],
        "rounds": 3,
    },
    "private examples": {
        "filters": [ls.ExamplePrivacy(clip=0.5, noise_multiplier=0.5, delta=1e-2, target_epsilon=9.0, noise_seed=1)],
        "rounds": 3,
    },
    "FIARSE": {"algorithm": ls.FIARSE({0.25: 0.5, 1.0: 0.5}), "module": WithBatchNorm, "rounds": 3},
    "Ditto": {"algorithm": ls.Ditto(), "module": WithBatchNorm, "rounds": 3},
    "FedBuff": {"algorithm": ls.FedBuff(9), "module": WithBatchNorm, "clients_per_round": 4, "rounds": 4},
    "q-FedAvg": {"algorithm": ls.QFedAvg(q=2.0), "module": WithBatchNorm, "rounds": 3},
    "SCAFFOLD": {"algorithm": ls.Scaffold(), "module": partial(LitMLP, momentum=0.0), "rounds": 3},
    "LoRA": {"algorithm": ls.LoRA({1: 0.5, 3: 0.5}), "rounds": 3},
    "LoRA, truncated": {
        "algorithm": ls.LoRA({1: 0.5, 3: 0.5}, aggregation=ls.TruncatedProducts()),
        "clients_per_round": 5,
    },
    "width of each step": {
        "algorithm": ls.WidthSharding(keep_ratio={0.25: 0.5, 0.5: 0.5}, step_widths=(0.25, 0.5)),
        "module": WithBatchNorm,
        "rounds": 3,
    },
    "averages of each width": {
        "algorithm": ls.WidthSharding(
            keep_ratio={0.25: 0.5, 0.75: 0.5}, step_widths=(0.25, 0.5, 0.75), averages_per_width=True
        ),
        "module": WithBatchNorm,
        "rounds": 3,
    },
    "errors, dropout and over-selection": {
        "module": FailsForClient,
        "clients_per_round": 12,
        "faults": ls.Faults(on_error=ls.LeaveOut()),
        "dropout": ls.ClientDropout([0.0, *[0.3] * 11]),  # client 0 has to take part, and fails
        "clock": ls.VirtualClock([ls.simulation.DeviceProfile(1e6, 1e6, 1e9 / 4**n) for n in range(12)], keep_first=7),
    },
    "sampled networks": {
        "algorithm": ls.Zampling(compression=3, degree=4, coordinated=True),
        "trainer": {"callbacks": [ls.plugin.callbacks.SampledNetworks(3)]},
    },
    "evaluation on clients": {
        "clients_per_round": 5,
        "data": {"client_val_fraction": 0.3},
        "trainer": {"callbacks": [ls.ClientEvaluation(clients=7)]},
    },
    "several models": {
        "models": {"dense": ls.FedAvg(), "spectral": SPECTRAL, "bits": ls.Zampling(4, degree=3)},
        "dashboard": True,
    },
    "a client fails": {"module": FailsForClient, "clients_per_round": 10},
    "the server's step fails, dense": {"server_optimizer": BREAKING},
    "the server's step fails, spectral": {"algorithm": SPECTRAL, "server_optimizer": BREAKING},
    "a sum fails": {"filters": [ls.Attack("scale", 1e30, [2])], "clients_per_round": 12},
    "a callback fails": {"trainer": {"callbacks": [FailsInOneProcess()]}},
}
WITH_THREE = {
    *("dense", "dense, Adam at the server, two clients", "spectral, FedAdam", "coordinated, one client"),
    *("a client fails", "the server's step fails, dense", "the server's step fails, spectral", "a callback fails"),
}
ONLY_WITH_TWO = RUNS.keys() - WITH_THREE  # three processes have to take turns on small machines
RESUMED = "spectral, FedAdam"
QUICK = (RESUMED, "clients left out", "secure sums", "private", "several models", "the start alone")
# which process leaves, for how long (0: for good), and how long the others wait
LOST = {"the last ends": (-1, 0.0, 60.0), "the first ends": (0, 0.0, 60.0), "the last is away": (-1, 6.0, 4.0)}


def several_models(algorithms: dict[str, ls.Algorithm], seed: int) -> tuple[Any, Any]:
    """A model for each algorithm; clients are drawn by losses that all processes must measure alike."""
    models = {name: ls.FederatedModule(LitMLP(), algorithm=algorithm) for name, algorithm in algorithms.items()}
    models["dense"].module.net[0].requires_grad_(False)
    sampler = ls.LossVarianceReduced(active=5, measure=7)
    model = ls.MultiModelModule(models, participation=sampler, processors={2: 0.5, 1: 0.5}, seed=seed)
    return model, ls.MultiModelDataModule({name: uneven_data() for name in algorithms})


def run(
    folder: Path,
    *,
    module: type[LitMLP] = LitMLP,
    watched: bool = False,
    rounds: int = 2,
    seed: int = 3,
    ckpt: Path | None = None,
    loader: bool = False,
    trainer: dict[str, Any] | None = None,
    num_processes: int = 1,
    patience: float = 60.0,
    models: dict[str, ls.Algorithm] | None = None,
    data: dict[str, Any] | None = None,
    dashboard: bool = False,
    **federation: Any,
) -> dict[str, Any]:
    """The outcome of a run, in plain tensors and numbers; of seven clients a round, unless it says otherwise."""
    torch.manual_seed(0)
    lit: Any = module()
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    callbacks = ls.plugin.callbacks
    watchers = [callbacks.SpectralDiagnostics(), callbacks.UpdateAlignment(every_n_rounds=2)] if watched else []
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    options = {"logger": False, **(trainer or {})}
    if dashboard:
        rank = os.environ.get("LOCAL_RANK", 0)
        options["logger"] = CSVLogger(folder.parent, name=None, version=f"{folder.name}, process {rank}")
        watchers.append(ls.RoundDashboard(every_n_rounds=1))
    timeout = timedelta(seconds=patience)  # a process that waits any longer would wait for ever
    several = {"strategy": ls.plugin.ClientParallelStrategy(timeout=timeout), "devices": num_processes}
    runner = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, "callbacks": [history, ledger, saver, *watchers, *options.get("callbacks", [])]},
        **(several if num_processes > 1 else {}),
    )
    error, tested, model = None, None, None
    try:
        clients = uneven_data(**(data or {}))
        if loader:
            clients.val = torch.utils.data.DataLoader(clients.train, batch_size=7)
        if models is not None:
            model, clients = several_models(models, seed)
            lit = model
        else:
            who = {} if "participation" in federation else {"clients_per_round": 7}
            model = ls.FederatedModule(lit, seed=seed, **{**who, **federation})
        runner.fit(model, clients, ckpt_path=ckpt)
        if loader:
            tested = runner.test(model, clients.val, verbose=False)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    state = getattr(model, "state", None)  # the algorithm's; several models have theirs in `lit`
    between_rounds = {} if state is None else {f"state: {name}": value for name, value in state.state_dict().items()}
    return {
        "weights": {name: value.clone() for name, value in {**lit.state_dict(), **between_rounds}.items()},
        "history": [{name: v for name, v in row.items() if "seconds" not in name} for row in history.rows],
        "ledger": [tuple(row) for row in ledger.rows],
        "metrics": {n: float(v) for n, v in runner.callback_metrics.items() if "seconds" not in n},
        "global_step": runner.global_step,
        "error": error,
        "tested": tested,
        "unreached": [member.first_rounds.state_dict() for member in model.members.values()],
    }


def say_and_share(processes: Processes) -> dict[str, Any]:
    """Exchange results between processes, and return what this one receives."""
    weights = [torch.randn(n, n + 3, generator=torch.Generator().manual_seed(n)) for n in (7, 2, 5, 4, 9)]

    def fails_on_the_largest(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(weight) == 9:
            raise ArithmeticError("too large")
        return singular_terms(weight)

    terms = processes.share_out(weights, singular_terms, lambda weight: weight.numel())
    error = ""
    try:
        processes.share_out(weights, fails_on_the_largest, lambda weight: weight.numel())
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"

    def fails_in_the_last() -> int:
        if processes.rank == processes.size - 1:
            raise ls.ClientError("client 7")
        return processes.rank

    not_gathered = ""
    try:
        processes.gather_results(fails_in_the_last, ls.ClientError)
    except ls.ClientError as caught:
        not_gathered = str(caught)
    sums = [
        torch.full((3,), 1.0 + processes.rank).double(),
        torch.full((2**22 + 1,), 0.5).double(),
        torch.ones(()).double(),
    ]
    processes.add_up(sums)
    return {
        "gathered": processes.gather_results(lambda: processes.rank, ls.ClientError),
        "not gathered": not_gathered,
        "terms": terms,
        "error": error,
        "sums": [t.max() for t in sums],
    }


def group_of(name: str) -> str:
    """Whether a run is quick enough to be done in several processes by default."""
    return "quick" if name in QUICK or "fails" in name else "slow"


def begin(rank: int, num_processes: int, port: int, folder: Path) -> Callable[[str, dict[str, Any]], None]:
    """Set up the rendezvous of the processes, and return a function that writes this one's result of a run."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
    return lambda name, result: torch.save(result, folder / f"{name} {num_processes} {rank}.pt")


def one_process(rank: int, num_processes: int, port: int, folder: Path, group: str) -> None:
    """Do a group of runs as one of several processes, and write its result of each."""
    keep, mine = begin(rank, num_processes, port, folder), folder / str(num_processes)

    for name, options in RUNS.items():
        if group == group_of(name) and (num_processes == 2 or name not in ONLY_WITH_TWO):
            keep(name, run(mine / name, num_processes=num_processes, **options))
    if group != "quick":
        return
    keep("said", say_and_share(Processes(rank, num_processes)))
    keep("other seeds", run(mine, num_processes=num_processes, seed=rank, clients_per_round=3))
    ckpt = folder / "1" / RESUMED / "0.ckpt"
    keep("resumed", run(mine / "resumed", ckpt=ckpt, num_processes=num_processes, **RUNS[RESUMED]))
    alone = {"clients_per_round": 3, "trainer": {"callbacks": [FailsBetweenTurns()]}}
    keep("hung up", run(mine, num_processes=num_processes, **alone))


def a_lost_process(rank: int, num_processes: int, port: int, folder: Path, name: str) -> None:
    """Do a run that one of its processes leaves, and write what the others save."""
    keep, mine = begin(rank, num_processes, port, folder), folder / name / str(num_processes)
    leaves, seconds, patience = LOST[name]
    saver = ModelCheckpoint(mine, "saved", every_n_epochs=9, **SAVE_ON_EXCEPTION)
    trainer = {"callbacks": [Leaves(leaves % num_processes, seconds), saver]}
    options = {"clients_per_round": 7, "num_processes": num_processes, "patience": patience}
    keep(name, run(mine, trainer=trainer, **options))


def main(folder: Path, num_processes: int, port: int, group: str) -> None:
    """Do a group of runs in forks of this process."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    warnings.filterwarnings("ignore", category=ls.SpectralWarning)
    warnings.filterwarnings("ignore", message=".*exists and is not empty|The dirpath has changed|.*num_workers")
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")  # each gets all data
    torch.set_num_threads(1)
    start_processes(one_process, (num_processes, port, folder, group), nprocs=num_processes, start_method="fork")
    for name in [*LOST][: 5 - num_processes] if group == "quick" else ():
        arguments = (num_processes, port, folder, name)
        start_processes(a_lost_process, arguments, nprocs=num_processes, start_method="fork")
