"""Digests of what tiny federated runs end with, to compare a refactoring bit for bit.

``python benchmarks/golden.py record FILE.json`` does all runs, in half a minute on one core, and writes for each the
SHA-256 of the weights of the user's module, of `FederatedModule.state`, and of the losses and metrics of every round.
``python benchmarks/golden.py compare FILE.json`` does them again, prints what differs, and exits with 1 if anything
does. ``--only PATTERN`` restricts both to the cases whose name matches. To run the code of another checkout, set
``PYTHONPATH`` to it; the network within one process is that of its tests. A run that fails is recorded with its error.
Digests hold for one machine and one set of versions.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import random
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.trainer import silence, silent_trainer

SIZES = (20, 18, 16, 14, 12, 10, 10, 8, 6, 6)  # examples of each client; no batch of four leaves a single one over
FEATURES, SIDE, CLASSES = 36, 6, 4
TESTS = Path(ls.__file__).parents[1] / "tests"
OWN_METRICS = (
    "train_loss",
    "train_loss_epoch",
    "train_accuracy",
    "epochs_ended",
    "val_loss",
)  # logged by modules below
COHORT = {"clients_per_round": 5, "seed": 3}
MIXED = {0.25: 0.5, 0.5: 0.5}

Record = dict[str, Any]
Case = Callable[[], Record]


class Skip(Exception):
    """The code has no such option any more."""


# ---------------------------------------------------------------------------------------------------------- modules


class Net(pl.LightningModule):
    """Any network, trained by cross-entropy and plain SGD."""

    example_input_array = torch.zeros(2, FEATURES)

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        return F.cross_entropy(self(x), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(Net):
    """Linear layers alone."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()),
            *(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, CLASSES)),
        )


class MLP(Net):
    """BatchNorm, dropout, momentum, weight decay and a schedule."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.2), nn.ReLU()),
            *(nn.Linear(16, 12), nn.BatchNorm1d(12, momentum=None), nn.ReLU(), nn.Linear(12, CLASSES)),
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class Conv(Net):
    """Convolutions with GroupNorm and BatchNorm, of which one is grouped, and AdamW."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.02)


class Transformer(Net):
    """A block of attention on six tokens, with dropout; two groups of parameters, Nesterov's momentum."""

    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (SIDE, SIDE)), nn.Linear(SIDE, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.net(x)).mean(1))
        return scores

    def configure_optimizers(self) -> Any:
        whole = {"params": [*self.net.parameters(), *self.head.parameters()]}
        return torch.optim.SGD(
            [whole, {"params": self.block.parameters(), "lr": 0.05}], lr=0.1, momentum=0.5, nesterov=True
        )


class Recurrent(Net):
    """Two layers of an LSTM, and Adam."""

    def __init__(self) -> None:
        super().__init__(nn.Unflatten(1, (SIDE, SIDE)))
        self.lstm = nn.LSTM(SIDE, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.net(x))[0][:, -1])
        return scores

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Words(Net):
    """An embedding, a GRU and RMSprop."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 8))
        self.gru, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, SIDE, SIDE).mean(2).mul(4).add(2).clamp(0, 4).long()
        scores: Tensor = self.head(self.gru(self.net(tokens))[0].mean(1))
        return scores

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=0.01, alpha=0.9)


class Logging(MLP):
    """Logs metrics, and has hooks that change gradients and keep an account of them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", torch.zeros(2))
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        scores = self(x)
        loss = F.cross_entropy(scores, labels)
        self.train_accuracy(scores, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"train_accuracy": self.train_accuracy})
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms[0] += torch.stack([g.norm() for g in gradients]).sum()
        for gradient in gradients:
            gradient.mul_(0.9)

    def on_train_epoch_end(self) -> None:
        self.norms[1] += 1
        self.log("epochs_ended", self.norms[1])


class Adagrad(Plain):
    """With an optimizer whose constructor makes state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)


class Teacher(Plain):
    """A teacher follows by hand, and is averaged over clients."""

    averaged_parameters = ("teacher.*",)

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        scores = self(x)
        return F.cross_entropy(scores, labels) + 0.1 * F.mse_loss(scores, self.teacher(x))

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for own, of in zip(self.teacher, self.net, strict=True):
            if isinstance(own, nn.Linear):
                own.weight.lerp_(of.weight, 0.3)
                own.bias.lerp_(of.bias, 0.3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)


class Partly(Plain):
    """The first layer is frozen, and the second one has a weight that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net[4].parameters(), *self.net[6].parameters()], lr=0.1, momentum=0.5)


class Fragile(MLP):
    """Raises for some clients, diverges for others and makes no step for yet others; the data says which these are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        client = round(float(batch[0][0, 0]))
        if client in (3, 7):
            raise ArithmeticError("a broken sensor")
        loss = super().training_step(batch, batch_idx)
        return None if client in (1, 5) else loss * math.inf if client in (2, 6) else loss


class Manual(Plain):
    """Steps its two optimizers by hand, one of them every second batch, each with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        front, back = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        front.zero_grad()
        back.zero_grad()
        self.manual_backward(loss)
        back.step()
        if batch_idx % 2 == 0:
            front.step()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        front = torch.optim.SGD(self.net[:4].parameters(), lr=0.1, momentum=0.9)
        back = torch.optim.Adam(self.net[4:].parameters(), lr=0.01)
        return [{"optimizer": half, "lr_scheduler": StepLR(half, 1, 0.5)} for half in (front, back)]


# ------------------------------------------------------------------------------------------------------------- runs


def examples() -> TensorDataset:
    """Noise, and one of four labels that follows from it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), FEATURES, generator=generator)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1))


def client_data(by_label: bool = False, numbered: bool = False, **options: Any) -> ls.FederatedDataModule:
    """Ten clients with 6 to 20 examples each: of few classes (``by_label``), with the client's number as a feature."""
    x, labels = examples().tensors
    order = labels.argsort(stable=True) if by_label else torch.arange(len(x))
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    if numbered:
        x[:, 0] = torch.tensor(owners)
    settings = {"batch_size": 4, **options}
    return ls.FederatedDataModule(TensorDataset(x[order], labels[order]), ls.NaturalPartitioner(owners), **settings)


def seeded(make: Callable[[], Any]) -> Any:
    """What a function makes if all global generators have just been seeded."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return make()


def federated(make: Callable[[], Any], **options: Any) -> ls.FederatedModule:
    """A federation of a user's module, from the same weights each time."""
    return ls.FederatedModule(seeded(make), **({} if "participation" in options else COHORT), **options)


def train(
    model: Any, data: Any, rounds: int = 3, ckpt: Path | None = None, **settings: Any
) -> tuple[pl.Trainer, ls.RoundHistory]:
    """Fit in silence."""
    history = ls.RoundHistory()
    settings["callbacks"] = [history, *settings.get("callbacks", [])]
    here = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "default_root_dir": tempfile.gettempdir()}
    plain = {"weights_only": True} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
    with silence():
        trainer = silent_trainer(**{**here, **settings}, max_epochs=rounds)
        trainer.fit(model, data, ckpt_path=ckpt, **({} if ckpt is None else plain))
    return trainer, history


def fit(
    make: Callable[[], Any] = MLP,
    *,
    data: Any = None,
    rounds: int = 3,
    trainer: Mapping[str, Any] | None = None,
    **federation: Any,
) -> Record:
    """The digests of one run."""
    model = federated(make, **federation)
    _, history = train(model, client_data() if data is None else data, rounds, **(trainer or {}))
    return digests(model, history)


def resumed(make: Callable[[], Any] = MLP, **federation: Any) -> Record:
    """The digests of two rounds, a checkpoint, and two more rounds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "two.ckpt")
        trainer, _ = train(federated(make, **federation), client_data(), 2)
        with silence():
            trainer.save_checkpoint(path)
        model = federated(make, **federation)
        _, history = train(model, client_data(), 4, path)
    return digests(model, history)


def several(models: Mapping[str, Any], sampler: Any, make: Callable[[], Any] = Plain, **options: Any) -> Record:
    """The digests of a run of several models, which have an algorithm each."""
    members = {name: ls.FederatedModule(seeded(make), algorithm=choice) for name, choice in models.items()}
    model = ls.MultiModelModule(members, participation=sampler, seed=3, **options)
    data = ls.MultiModelDataModule({name: client_data(seed=i) for i, name in enumerate(models)})
    return digests(model, train(model, data)[1])


class LineNet:
    """Stands for the module of the tests' network."""


def over_the_line(make: Any = LineNet, hazards: int | None = None, **federation: Any) -> Record:
    """The digests of a run whose clients are reached over the tests' network."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    fake_line, toy_models = __import__("fake_line"), __import__("toy_models")
    line = fake_line.toy_line(toy_models.LitMLP, hazards=hazards)
    return fit(toy_models.LitMLP, data=fake_line.remote(line), rounds=2, **federation)


def in_trainers(make: Callable[[], Any] = MLP, **federation: Any) -> Record:
    """The digests of a run whose clients each train in a Trainer of their own, while that is an option."""
    if "client_engine" in inspect.signature(ls.FederatedModule.__init__).parameters:
        return fit(make, client_engine="trainer", **federation)
    if make is not Manual:
        raise Skip("there is no `client_engine`")
    return fit(make, **federation)


def in_two_processes(run: Callable[..., Record], make: Callable[[], Any] = MLP, **options: Any) -> Record:
    """The digests of a run that two processes share; both must end with the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(one_process, (port, folder, partial(run, make), options), nprocs=2, start_method="fork")
        one, two = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    if one != two:
        raise AssertionError("two processes end with different weights, state or losses")
    return dict(one)


def one_process(rank: int, port: int, folder: str, run: Callable[..., Record], options: Mapping[str, Any]) -> None:
    """Take part in a run as one of two processes, and write its digests."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
    record = run(trainer={"strategy": "client_parallel", "devices": 2}, **options)
    Path(folder, f"{rank}.json").write_text(json.dumps(record))


# ---------------------------------------------------------------------------------------------------------- digests


def digests(model: Any, history: ls.RoundHistory) -> Record:
    """Digests of the weights, the state and the metrics of a finished run."""
    weights, state = {}, {}
    for name, member in model.members.items():
        weights.update({f"{name}.{key}": value for key, value in member.module.state_dict().items()})
        kept = getattr(member, "state", None)
        state.update({f"{name}.{key}": value for key, value in ({} if kept is None else kept.state_dict()).items()})
    rows = [{name: repr(float(value)) for name, value in row.items() if is_compared(name)} for row in history.rows]
    return {"weights": digest(weights), "state": digest(state) if state else None, "history": digest(rows)}


def is_compared(name: str) -> bool:
    """Whether a metric is the same in every run: all that the federation logs except seconds."""
    return name.endswith(OWN_METRICS) or ("fl/" in name and "seconds" not in name)


def digest(value: Any) -> str:
    """SHA-256 of nested mappings, sequences, tensors and plain values."""
    found = hashlib.sha256()
    for part in parts_of(value):
        found.update(part)
    return found.hexdigest()


def parts_of(value: Any) -> Iterable[bytes]:
    """All that identifies a value, as bytes; the order of a mapping does not."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=str):
            yield f"key {key!r}".encode()
            yield from parts_of(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"sequence {len(value)}".encode()
        for entry in value:
            yield from parts_of(entry)
    else:
        yield f"plain {value!r}".encode()


# ------------------------------------------------------------------------------------------------------------ cases


def spectral(strategy: Any = None, keep_ratio: Any = None, **options: Any) -> Any:
    """Spectral sharding of mixed keep ratios, with the default strategy if none is given."""
    chosen = () if strategy is None else (strategy,)
    return ls.SpectralSharding(*chosen, **{"keep_ratio": keep_ratio or MIXED, **options})


def published(strategy: Any, keep_ratio: Any = None, **options: Any) -> Any:
    """As in the paper, so that terms are really drawn."""
    return ls.SpectralSharding.published(strategy, keep_ratio or MIXED, **options)


def built(
    choices: Mapping[str, Callable[[], Any]], run: Callable[..., Record] = fit, **options: Any
) -> dict[str, Case]:
    """A case for each algorithm, which is made only when the case runs."""

    def case(make: Callable[[], Any]) -> Record:
        return run(algorithm=make(), **options)

    return {name: partial(case, make) for name, make in choices.items()}


def dense_cases() -> dict[str, Case]:
    modules = (MLP, Conv, Transformer, Recurrent, Words, Logging, Adagrad, Teacher, Partly)
    return {
        **{f"FedAvg/{module.__name__}": partial(fit, module) for module in modules},
        "FedAvg/two local epochs, drop_last": lambda: fit(data=client_data(drop_last=True), local_epochs=2),
        "FedAvg/kept buffers": lambda: fit(buffers={"*.running_*": "server"}),
        "FedAvg/examples in a list": lambda: fit(data=listed_data(), local_epochs=2, rounds=2),
        "FedAvg/cut cohort": lambda: fit(trainer={"limit_train_batches": 3}),
        "FedAvg/validated": lambda: fit(Logging, data=client_data(val=examples())),
        "FedAvg/BatchNormEstimation": lambda: fit(
            buffers={"*.running_*": "server"},
            trainer={"callbacks": [ls.plugin.callbacks.BatchNormEstimation()]},
        ),
        "FedAvg/clients evaluated": lambda: fit(
            Logging,
            data=client_data(client_val_fraction=0.3, drop_last=True),
            trainer={"callbacks": [ls.ClientEvaluation()]},
        ),
        "FedAvg/bf16": lambda: fit(trainer={"precision": "bf16-mixed"}),
        "FedAvg/float64": lambda: fit(
            lambda: MLP().double(), data=double_data(), trainer={"precision": "64-true"}, rounds=2
        ),
        **built(
            {
                "StaleUpdates/default": lambda: ls.StaleUpdates(),
                "StaleUpdates/FedStale, mean": lambda: ls.StaleUpdates(beta=0.5, unseen="mean"),
                "StaleUpdates/MIFA": lambda: ls.StaleUpdates.mifa(),
                "StaleUpdates/one term": lambda: ls.StaleUpdates(beta=0.5, num_terms=1),
            },
            rounds=4,
        ),
        **built({"Scaffold/plain": lambda: ls.Scaffold()}, make=Plain, rounds=4, local_epochs=2),
    }


def listed_data() -> ls.FederatedDataModule:
    """Examples that a DataLoader has to collate."""
    return ls.FederatedDataModule(
        list(examples()), ls.DirichletPartitioner(10, alpha=1.0), batch_size=6, drop_last=True
    )


def double_data() -> ls.FederatedDataModule:
    x, labels = examples().tensors
    return ls.FederatedDataModule(TensorDataset(x.double(), labels), ls.IIDPartitioner(num_clients=10), batch_size=4)


def spectral_cases() -> dict[str, Case]:
    strategies: dict[str, Callable[[], Any]] = {
        "TopN": lambda: ls.TopN(),
        "PriSM": lambda: ls.PriSM(),
        "PriSM, compensated": lambda: ls.PriSM(exponent=1.0, compensation="wallenius"),
        "PriSM, Manly": lambda: ls.PriSM(compensation="wallenius", marginals="manly"),
        "Unbiased": lambda: ls.Unbiased(),
        "Collective": lambda: ls.Collective(),
        "Collective, joint": lambda: ls.Collective(cohort="joint"),
        "Collective, best": lambda: ls.Collective(cohort="best"),
        "EffectiveCohort": lambda: ls.EffectiveCohort(slack=0.1),
        "Schatten": lambda: ls.sharding.Schatten(4.0),
        "Scaled": lambda: ls.sharding.Scaled(ls.Unbiased()),
        "Schedule": lambda: ls.Schedule({0: ls.TopN(), 1: ls.Collective()}),
    }
    designs = (
        *("ConditionalPoisson", "Brewer", "MinimumSupport", "Systematic", "RandomSystematic"),
        *("SuccessiveSampling", "Coordinated"),
    )
    every_layer = {"layers": ls.LayerChoices(keep_first_and_last_dense=False)}
    modules = (Conv, Transformer, Words, Logging, Adagrad, Teacher, Partly)
    return {
        **built({"spectral/default": lambda: ls.SpectralSharding()}),
        **built({"spectral/mixed": spectral}),
        **{f"spectral/{m.__name__}": partial(lambda m: fit(m, algorithm=spectral()), m) for m in modules},
        **built(
            {
                f"spectral/published, {name}": partial(lambda make: published(make()), make)
                for name, make in strategies.items()
            }
        ),
        **built(
            {
                f"spectral/design, {name}": partial(
                    lambda name: published(ls.Unbiased(), design=getattr(ls.designs, name)()), name
                )
                for name in designs
            },
            rounds=2,
        ),
        **built({"spectral/published, Conv": lambda: published(ls.Collective(), 0.4)}, make=Conv),
        **built({"spectral/Recurrent": lambda: spectral(**every_layer)}, make=Recurrent),
        **built({"spectral/published, Recurrent": lambda: published(ls.Unbiased(), **every_layer)}, make=Recurrent),
        **built({"spectral/published, Transformer": lambda: published(ls.Unbiased())}, make=Transformer),
        **built(
            {
                "spectral/no decay, no clip": lambda: spectral(frobenius_decay=0.0, clip_tau=math.inf),
                "spectral/strong decay, tight clip": lambda: published(
                    ls.Unbiased(), frobenius_decay=0.05, clip_tau=1.1, clip_weight_lr=0.5
                ),
                "spectral/every layer": lambda: spectral(**every_layer),
                "spectral/excluded": lambda: spectral(exclude=["net.3"]),
                "spectral/outputs cut": lambda: spectral(output_ratio=0.5),
                "spectral/means of matrices": lambda: published(ls.TopN(), aggregation=ls.algorithms.MatrixMeans()),
                "spectral/means of terms after a start": lambda: spectral(
                    aggregation=ls.algorithms.TermMeans(), spectral_start=ls.SpectralStart(tail=0.3)
                ),
                "spectral/one ratio per client": lambda: spectral(keep_ratio=[0.2, 0.4, 0.6, 0.8, 1.0] * 2),
                "spectral/granularity": lambda: spectral(layers=ls.LayerChoices(term_granularity=4)),
            }
        ),
        **built(
            {"spectral/spatial convolutions": lambda: spectral(layers=ls.LayerChoices(convolutions="spatial"))},
            make=Conv,
        ),
    }


def width_cases() -> dict[str, Case]:
    channels = ("PrefixChannels", "RollingChannels", "RandomChannels")
    return {
        **built(
            {
                f"width/{name}": partial(lambda name: ls.WidthSharding(getattr(ls, name)(), keep_ratio=MIXED), name)
                for name in channels
            }
        ),
        **built(
            {
                "width/scaler": lambda: ls.WidthSharding(keep_ratio={0.5: 0.6, 1.0: 0.4}, scaler=True),
                "width/step widths": lambda: ls.WidthSharding(keep_ratio=MIXED, step_widths=(0.25, 0.5)),
                "width/averages per width": lambda: ls.WidthSharding(
                    keep_ratio={0.25: 0.5, 0.75: 0.5}, step_widths=(0.25, 0.5, 0.75), averages_per_width=True
                ),
            }
        ),
        **{
            f"width/{m.__name__}": partial(lambda m: fit(m, algorithm=ls.WidthSharding(keep_ratio=0.5), rounds=2), m)
            for m in (Conv, Transformer)
        },
        "width/excluded, buffers kept": lambda: fit(
            algorithm=ls.WidthSharding(keep_ratio=0.5, exclude=["net.3"]), buffers={"*.running_*": "server"}
        ),
        "width/MaskedLogits": lambda: fit(
            Plain,
            data=client_data(by_label=True),
            algorithm=ls.WidthSharding(ls.RollingChannels(step=2), keep_ratio=MIXED),
            local_hooks=[ls.MaskedLogits("net.6")],
        ),
        **built({"FIARSE/mixed": lambda: ls.FIARSE({0.25: 0.5, 1.0: 0.5}), "FIARSE/default": lambda: ls.FIARSE()}),
        **built({"FIARSE/Conv": lambda: ls.FIARSE(0.4, exclude=["net.1.*"])}, make=Conv, rounds=2),
    }


def lora_cases() -> dict[str, Case]:
    aggregations = (
        *("SampledTerms", "FoldedTerms", "PaddedFactors", "FrozenA", "AlternatingFactors", "OrthonormalA"),
        *("ParallelTerms", "RankedProducts", "StackedProducts", "TruncatedProducts"),
    )

    def mixed(name: str, rank: Any) -> Any:
        return ls.LoRA(rank, aggregation=getattr(ls.algorithms, name)(), train=["net.9", "net.1"])

    return {
        **built({f"LoRA/mixed, {name}": partial(mixed, name, {1: 0.5, 3: 0.5}) for name in aggregations}),
        **built({f"LoRA/equal, {name}": partial(mixed, name, 2) for name in aggregations[::3]}, rounds=2),
        **built(
            {
                "LoRA/merged": lambda: ls.LoRA({1: 0.5, 3: 0.5}, merge_every=2, alpha=4.0),
                "LoRA/some layers": lambda: ls.LoRA(
                    {2: 0.5, 4: 0.5},
                    layers=["net.3", "net.6"],
                    aggregation=ls.SampledTerms(ls.Unbiased(), ls.Systematic()),
                ),
            },
            rounds=4,
        ),
        **built({"LoRA/Transformer": lambda: ls.LoRA({1: 0.5, 2: 0.5}, train=["head"])}, make=Transformer),
    }


def zampling_cases() -> dict[str, Case]:
    return {
        **built(
            {
                "Zampling/compressed": lambda: ls.Zampling(4, degree=3),
                "Zampling/FedPM": lambda: ls.Zampling(1, degree=None, values="sign"),
                "Zampling/coordinated": lambda: ls.Zampling(3, degree=4, coordinated=True),
                "Zampling/downlink bits": lambda: ls.Zampling(4, degree=3, downlink_bits=4),
                "Zampling/not sampled, smoothed": lambda: ls.Zampling(
                    4, degree=3, sampled=False, smoothing=1.0, init="paper"
                ),
                "Zampling/gain": lambda: ls.Zampling(4, degree=3, gain=1.5),
                "Zampling/no memory, normal scores": lambda: ls.Zampling(4, degree=3, memory=0, normal_scores=True),
            }
        ),
        **{
            f"Zampling/{m.__name__}": partial(lambda m: fit(m, algorithm=ls.Zampling(4, degree=3), rounds=2), m)
            for m in (Conv, Words)
        },
    }


def participation_cases() -> dict[str, Case]:
    samplers: dict[str, Callable[[], Any]] = {
        "FullParticipation": lambda: ls.FullParticipation(),
        "Uniform": lambda: ls.Uniform(active=4),
        "Uniform, Systematic, normalised": lambda: ls.Uniform(active=4, design=ls.Systematic(), normalize=True),
        "RoundRobin": lambda: ls.RoundRobin(active=4),
        "LossVarianceReduced": lambda: ls.LossVarianceReduced(active=4),
        "LossVarianceReduced, all": lambda: ls.LossVarianceReduced(active=4, measure="all"),
        "LossVarianceReduced, some": lambda: ls.LossVarianceReduced(active=4, measure=6, design=ls.Brewer()),
        "UpdateVarianceReduced, all": lambda: ls.UpdateVarianceReduced(active=4, measure="all"),
        "UpdateVarianceReduced, last": lambda: ls.UpdateVarianceReduced(active=4, measure="last"),
    }

    def sampled(make: Callable[[], Any]) -> Record:
        return fit(participation=make(), seed=3)

    def models() -> dict[str, Any]:
        return {"dense": ls.FedAvg(), "spectral": spectral()}

    return {
        **{f"participation/{name}": partial(sampled, make) for name, make in samplers.items()},
        "participation/StaleUpdateVarianceReduced": lambda: fit(
            participation=ls.StaleUpdateVarianceReduced(active=4), algorithm=ls.StaleUpdates(), seed=3
        ),
        "participation/LossVarianceReduced, spectral": lambda: fit(
            participation=ls.LossVarianceReduced(active=4), algorithm=spectral(), seed=3
        ),
        "several models/losses": lambda: several(
            models(), ls.LossVarianceReduced(active=5, measure=6), processors={2: 0.5, 1: 0.5}
        ),
        "several models/update norms": lambda: several(models(), ls.UpdateVarianceReduced(active=5, measure="last")),
        "several models/RoundRobin, some unavailable": lambda: several(
            {**models(), "bits": ls.Zampling(4, degree=3)}, ls.RoundRobin(active=6), unavailable={1: ["dense"]}
        ),
        "several models/everybody": lambda: several(models(), ls.FullParticipation(), MLP),
        "several models/stale updates": lambda: several(
            {"one": ls.StaleUpdates(), "two": ls.StaleUpdates(beta=0.5)}, ls.StaleUpdateVarianceReduced(active=5)
        ),
    }


def settings_cases() -> dict[str, Case]:
    profiles = [(1e6, 1e6, 1e7 / 2**n) for n in range(len(SIZES))]

    def clock(**options: Any) -> Any:
        return ls.VirtualClock([ls.simulation.DeviceProfile(*speeds) for speeds in profiles], **options)

    def on_server(name: str, **options: Any) -> Record:
        return fit(server_optimizer=getattr(ls.server, name)(**options))

    def hooked(make: Callable[[], Any], algorithm: Callable[[], Any]) -> Record:
        hooks = [make()] if not isinstance(made := make(), list) else made
        return fit(Plain, data=client_data(by_label=True), algorithm=algorithm(), local_hooks=hooks)

    hooks: dict[str, Callable[[], Any]] = {
        "ProximalTerm": lambda: ls.ProximalTerm(0.5),
        "GradientClip": lambda: ls.GradientClip(0.5),
        "MaskedLogits": lambda: ls.MaskedLogits("net.6"),
        "MaskedLogits, -inf": lambda: ls.MaskedLogits("net.6", absent=-math.inf),
        "both": lambda: [ls.ProximalTerm(0.1), ls.GradientClip(1.0)],
    }
    return {
        **{f"hooks/{name}, FedAvg": partial(hooked, make, lambda: ls.FedAvg()) for name, make in hooks.items()},
        **{f"hooks/{name}, spectral": partial(hooked, make, spectral) for name, make in hooks.items()},
        "server/FedAdam": partial(on_server, "FedAdam", lr=0.01),
        "server/FedAvgM": partial(on_server, "FedAvgM", lr=0.5, momentum=0.5),
        "server/FedYogi": partial(on_server, "FedYogi", lr=0.01),
        "server/FedAdagrad": partial(on_server, "FedAdagrad", lr=0.01),
        "server/BoundedMomentum": partial(on_server, "BoundedMomentum"),
        "server/BoundedMomentum, spectral": lambda: fit(algorithm=spectral(), server_optimizer=ls.BoundedMomentum()),
        "server/FedAdam, spectral": lambda: fit(algorithm=spectral(), server_optimizer=ls.FedAdam(lr=0.01)),
        "server/update bound": lambda: fit(filters=[ls.MaxUpdateNorm(0.5)]),
        "server/update bound, spectral": lambda: fit(
            algorithm=published(ls.Collective()), filters=[ls.MaxUpdateNorm(0.5)]
        ),
        "faults/dropout": lambda: fit(dropout=ls.ClientDropout({0.0: 0.5, 0.5: 0.5})),
        "faults/deadline": lambda: fit(clock=clock(deadline=0.05)),
        "faults/over-selection, spectral": lambda: fit(
            algorithm=spectral(), clock=clock(keep_first=3), dropout=ls.ClientDropout(0.2)
        ),
        "faults/errors, divergence, no update": lambda: fit(
            Fragile,
            data=client_data(numbered=True),
            faults=ls.Faults(
                **dict.fromkeys(("on_error", "on_not_finite", "on_no_update"), ls.LeaveOut(max_share=1.0))
            ),
        ),
        "faults/an error ends the run": lambda: fit(Fragile, data=client_data(numbered=True)),
        **built({"resumed/FedAvg": lambda: ls.FedAvg(), "resumed/spectral": spectral}, run=resumed),
        **built({"resumed/StaleUpdates": lambda: ls.StaleUpdates()}, run=resumed),
        **built({"resumed/LoRA": lambda: ls.LoRA({1: 0.5, 3: 0.5}, merge_every=3)}, run=resumed),
        **built({"resumed/Zampling": lambda: ls.Zampling(4, degree=3)}, run=resumed),
        **built({"resumed/Scaffold": lambda: ls.Scaffold()}, run=resumed, make=Plain),
        "resumed/FedAdam": lambda: resumed(server_optimizer=ls.FedAdam(lr=0.01)),
    }


def elsewhere_cases() -> dict[str, Case]:
    every_layer = {"layers": ls.LayerChoices(keep_first_and_last_dense=False)}
    return {
        **built(
            {
                "line/FedAvg": lambda: ls.FedAvg(),
                "line/spectral": lambda: published(ls.Unbiased(), clip_tau=2.0, **every_layer),
                "line/LoRA": lambda: ls.LoRA({1: 0.5, 3: 0.5}),
                "line/Zampling": lambda: ls.Zampling(4, degree=3),
                "line/StaleUpdates": lambda: ls.StaleUpdates(beta=0.7, num_terms=1),
            },
            run=over_the_line,
        ),
        "line/FedAvg, hazards": lambda: over_the_line(hazards=1),
        **built({"trainer_engine/FedAvg": lambda: ls.FedAvg()}, run=in_trainers, rounds=2),
        **built({"trainer_engine/spectral": lambda: published(ls.Unbiased())}, run=in_trainers, rounds=2),
        **built({"trainer_engine/logging": lambda: ls.FedAvg()}, run=in_trainers, make=Logging, rounds=2),
        **built({"trainer_engine/manual": lambda: ls.FedAvg()}, run=in_trainers, make=Manual, rounds=2),
        **built({"trainer_engine/manual, spectral": spectral}, run=in_trainers, make=Manual, rounds=2),
    }


def process_cases() -> dict[str, Case]:
    run = partial(in_two_processes, fit)
    return {
        **built(
            {
                "two processes/FedAvg": lambda: ls.FedAvg(),
                "two processes/spectral": spectral,
                "two processes/LoRA": lambda: ls.LoRA({1: 0.5, 3: 0.5}, aggregation=ls.TruncatedProducts()),
                "two processes/Zampling": lambda: ls.Zampling(4, degree=3),
            },
            run=run,
        ),
        **{f"two processes/{name}": case for name, case in filtered(run).items()},
    }


def filtered(run: Callable[..., Record], make: Callable[[], Any] = MLP, least: bool = False) -> dict[str, Case]:
    """Cases of what happens to updates between the clients' training and their sum."""
    bound, few = ls.UsualUpdateNorm(times=0.9), ls.TopN()
    private = {"clip": 0.5, "delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 1}
    drawn = {"participation": ls.Uniform(active=5), "seed": 3}
    head, norms, buffers = ["net.9.*"], ["net.1.*", "net.7.*"], {"*": "server"}
    if make is not MLP:
        head, norms, buffers = ["net.5.*"], ["net.0.bias"], {}

    def case(*filters: Any, module: Any = make, **options: Any) -> Case:
        return lambda: run(module, filters=list(filters), **options)

    found: dict[str, Case] = {
        "personal head": case(ls.Personal(head)),
        "packed, TopK": case(ls.TopK(0.1)),
        "secure sums": case(ls.SecureSums()),
        "update bound": case(bound),
    }
    if least:
        return found
    return {
        **found,
        "personal, apart": case(ls.Personal(head, epochs=1)),
        "personal norms, spectral": case(ls.Personal(norms), algorithm=spectral()),
        "personal layer, spectral": case(ls.Personal(["net.3.*"], epochs=1), algorithm=spectral()),
        "personal, FedDyn, Int8": case(ls.Personal(head), ls.Int8(), algorithm=ls.FedDyn()),
        "packed, Scaffold": case(ls.TopK(0.2), module=Plain, algorithm=ls.Scaffold()),
        "packed, Ditto": case(ls.TopK(0.2), algorithm=ls.Ditto()),
        "packed, LoRA": case(ls.Int8(), algorithm=ls.LoRA(2, aggregation=ls.algorithms.FrozenA(), train=head)),
        "personal, secure sums": case(ls.Personal(head), ls.SecureSums()),
        "secure sums, Ditto": case(ls.SecureSums(0.8), algorithm=ls.Ditto()),
        "packed, update bound": case(bound, ls.Int8()),
        "privacy": case(ls.ClientPrivacy(**private), buffers=buffers, **drawn),
        "privacy, spectral": case(
            ls.ClientPrivacy(**private), algorithm=ls.SpectralSharding(few, 0.5), buffers=buffers, **drawn
        ),
        "privacy, LoRA, adapted clip": case(
            ls.ClientPrivacy(**{**private, "noise_multiplier": 0.3, "clip_quantile": 0.5}),
            module=Plain,
            algorithm=ls.LoRA(2, aggregation=ls.SampledTerms()),
            **drawn,
        ),
        "buffers": case(module=MLP, buffers={"*.num_batches_tracked": "max", "*.running_var": "min"}),
        "buffers, bounded": case(ls.MaxUpdateNorm(0.2), module=MLP, buffers={"*.running_var": "min"}),
        "frozen": case(module=Partly, algorithm=spectral()),
        "frozen, clock": case(
            ls.TopK(0.2),
            module=Partly,
            clock=ls.VirtualClock([ls.simulation.DeviceProfile(1e6, 1e6, 1e7)] * len(SIZES)),
        ),
        "personal, sampler": case(
            ls.Personal(head), participation=ls.UpdateVarianceReduced(active=4, measure="all"), seed=3
        ),
    }


def filter_cases() -> dict[str, Case]:
    line = filtered(over_the_line, make=LineNet, least=True)
    return {
        **{f"filters/{name}": case for name, case in filtered(fit).items()},
        **{f"filters, resumed/{name}": case for name, case in filtered(resumed).items() if name != "frozen, clock"},
        **{f"line/{name}": case for name, case in line.items()},
    }


def all_cases() -> dict[str, Case]:
    """Every case by name; those that fork come first, while this process has not trained."""
    rooms = (process_cases, dense_cases, spectral_cases, width_cases, lora_cases, zampling_cases, filter_cases)
    return {k: v for room in (*rooms, participation_cases, settings_cases, elsewhere_cases) for k, v in room().items()}


# ---------------------------------------------------------------------------------------------------------- command


def outcomes(only: str) -> dict[str, Record | None]:
    """The record of each case whose name matches; ``None`` for one that the code no longer has."""
    cases = {name: case for name, case in all_cases().items() if fnmatchcase(name, only)}
    found: dict[str, Record | None] = {}
    for name, case in cases.items():
        try:
            found[name] = seeded(case)
        except Skip:
            found[name] = None
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def record(file: Path, only: str) -> None:
    """Run, and write the records."""
    records = {name: outcome for name, outcome in outcomes(only).items() if outcome is not None}
    file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    failed = {name: outcome["error"] for name, outcome in records.items() if "error" in outcome}
    for name, error in failed.items():
        print(f"{name}: {error}")
    print(f"{len(records)} cases recorded, {len(failed)} of them errors")


def compare(file: Path, only: str) -> bool:
    """Run, print what differs from the records, and return whether nothing does."""
    before = {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if fnmatchcase(k, only)}
    now = outcomes(only)
    skipped = [name for name, outcome in now.items() if outcome is None]
    equal = [name for name, outcome in now.items() if outcome is not None and before.get(name) == outcome]
    different = sorted({*before, *now} - {*equal, *skipped})
    for name in different:
        print(f"{name}: {difference(before.get(name), now.get(name))}")
    for name in skipped:
        print(f"{name}: skipped")
    print(f"{len(equal)} cases equal, {len(different)} different, {len(skipped)} skipped")
    return not different


def difference(before: Record | None, now: Record | None) -> str:
    """What differs between two records of a case."""
    if before is None or now is None:
        return "not recorded" if before is None else "no such case"
    if "error" in before or "error" in now:
        return f"was {before.get('error', 'no error')!r}, is {now.get('error', 'no error')!r}"
    return ", ".join(part for part in before if before[part] != now.get(part))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell-style pattern of names of cases")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start = time.monotonic()
    same = (record if arguments.command == "record" else compare)(arguments.file, arguments.only)
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(same is False)


if __name__ == "__main__":
    main()
