"""What cannot work is refused early, with the rule, the value and the remedy."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, seeded
from lightning.pytorch.strategies import DDPStrategy
from one_by_one import OneByOne
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from toy_models import LitNet, LitSmall, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Known
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.plugin.callbacks import BatchNormEstimation
from lightning_spectral.plugin.checks import check_trainer

STAGES = "training", "validation", "test"


class Measured(IterableDataset[Any]):
    """Has a length, but its examples have no indices."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        yield torch.zeros(1)


@dataclass
class Given:
    """What a mistake is made with: the fixtures, and what is often called wrongly."""

    lit: Any
    lit_mlp: Any
    toy: Any
    data: Any
    fit_with: Fit
    quiet: dict[str, Any]

    def federated(self, algorithm: Any = None, module: Any = None) -> ls.FederatedModule:
        return ls.FederatedModule(self.lit if module is None else module, algorithm=algorithm, clients_per_round=1)

    def trainer(self) -> pl.Trainer:
        return pl.Trainer(max_epochs=1, **self.quiet)

    def fit(self, data: Any = None, **options: Any) -> None:
        self.fit_with(self.lit, self.data if data is None else data, **options)

    def fit_variant(self, **members: Any) -> None:
        self.fit_with(variant(self.lit_mlp, **members)(), self.data)

    def split(self, train: Any = None, partitioner: Any = None, **options: Any) -> ls.FederatedDataModule:
        partitioner = partitioner or ls.IIDPartitioner(2)
        return ls.FederatedDataModule(self.toy if train is None else train, partitioner, **options)


class Lazy(ls.partition.Partitioner):
    num_clients = 3

    def split(self, num_examples: int, labels: Any, generator: Any) -> Any:
        return ls.partition.Partition.from_lists([[0, 1], [], [2]])


class Stream(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1)


def two_sgds(self: Any) -> Any:
    return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[2].parameters())]


def without_layers(given: Given, algorithm: Any) -> None:
    del given.lit.net
    given.federated(algorithm)


def with_sparse_buffer(given: Given, algorithm: Any) -> None:
    given.lit.register_buffer("adjacency", torch.eye(3).to_sparse())
    given.fit(algorithm=algorithm)


def with_integer_targets(given: Given) -> None:
    loss = nn.functional.binary_cross_entropy_with_logits
    given.lit.training_step = lambda batch, batch_idx: loss(given.lit.net(batch[0]), batch[1].float())
    given.fit(given.split(partitioner=ls.IIDPartitioner(4), batch_size=4))


OtherLightning = type("LitOther", (nn.Module,), {"__module__": "pytorch_lightning.core"})
REFUSED: dict[str, tuple[Callable[[Given], Any], type[Exception], str]] = {
    # the module
    "a module that is federated already": (
        lambda given: given.federated(module=ls.FederatedModule(given.lit)), TypeError,
        "`module` must be your own LightningModule, got a FederatedModule",
    ),
    "a module that is no Lightning module": (
        lambda given: given.federated(module=nn.Linear(2, 2)), TypeError,
        r"must be a lightning\.pytorch\.LightningModule, got Linear: wrap it",
    ),
    "a module of the other Lightning package": (
        lambda given: given.federated(module=OtherLightning()), TypeError,
        r"derives from `pytorch_lightning`.*change the import",
    ),
    "a class in place of a module": (
        lambda given: given.federated(module=given.lit_mlp), TypeError,
        r"`module` must be a LightningModule, got the class LitMLP; write LitMLP",
    ),
    "a class in place of a module, to validate": (
        lambda given: ls.validate(given.lit_mlp), TypeError, r"`module` must be .*, got the class LitMLP; write LitMLP",
    ),
    "a module with no layer to shard": (
        lambda given: given.federated(ls.SpectralSharding(), LitNet(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))),
        ValueError, "No layer of this module can be sharded",
    ),
    "several problems in one report": (
        lambda given: given.federated(module=variant(given.lit_mlp, lr_scheduler_step=None, train_dataloader=None)()),
        ValueError, r"(?s)`lr_scheduler_step`.*`train_dataloader`",
    ),
    "a weight that is zero": (
        lambda given: (nn.init.zeros_(given.lit.net[2].weight), given.federated(ls.SpectralSharding())), ValueError,
        r"(?s)No layer .* can be sharded.*net\.2 .*its weight is zero",
    ),
    **{
        f"layers made in setup, too late for {type(algorithm).__name__}": (
            partial(without_layers, algorithm=algorithm), ValueError,
            r"^LitMLP has no parameters yet, .* in `__init__`, rather than in `setu",
        )
        for algorithm in [ls.SpectralSharding(), ls.FIARSE(), ls.LoRA(rank=2), ls.Zampling(2, degree=2)]
    },
    **{
        f"sparse buffers, with {type(algorithm).__name__}": (
            partial(with_sparse_buffer, algorithm=algorithm), ValueError,
            r"^Sparse buffers .*: `adjacency` is torch\.sparse_coo; register",
        )
        for algorithm in (ls.FedAvg(), ls.SpectralSharding())
    },
    "nothing to train": (
        lambda given: (given.lit.requires_grad_(False), given.fit()), ValueError,
        "LitMLP has no trainable parameter in its optimizer",
    ),
    "lazy layers": (
        lambda given: (given.lit.net.append(nn.LazyLinear(3)), given.federated(algorithm=ls.FedDyn())), ValueError,
        r"Lazy layers have no weight yet: net\.\d\.weight, net\.\d\.bias; run",
    ),
    "complex parameters": (
        lambda given: (
            given.lit.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64))), given.fit()
        ),
        ValueError, "Complex parameters are not averaged: phase",
    ),
    "targets of another shape than the outputs": (
        with_integer_targets, ls.ClientError, r"Target size .*int64 \(4,\)\. This loss takes targets of the shape",
    ),
    # its optimizers
    "several optimizers": (
        lambda given: given.fit_variant(configure_optimizers=two_sgds), ValueError,
        r"Lit.configure_optimizers must return one torch optimizer, got 2",
    ),
    "no method for optimizers": (
        lambda given: given.fit_variant(configure_optimizers=pl.LightningModule.configure_optimizers), ValueError,
        r"^`Lit\.configure_optimizers` is missing; define it and return",
    ),
    "no optimizer": (
        lambda given: given.fit_variant(configure_optimizers=lambda self: None), ValueError,
        r"^Lit\.configure_optimizers returned None; return the optimizer that clients use",
    ),
    # clients and data
    "sizes of batches": (
        lambda given: given.split(batch_size=0), ValueError, "`batch_size` must be at least 1, got 0",
    ),
    "more clients per round than clients": (
        lambda given: given.fit(clients_per_round=13), ValueError,
        r"`clients_per_round` must be at most num_clients=12, got 13",
    ),
    "a cohort larger than can be summed": (
        lambda given: ls.FederatedModule(given.lit, clients_per_round=1048577), ValueError,
        r"`clients_per_round` must be in \[1, 1048576\], got 1048577",
    ),
    "a cohort cut to nobody": (
        lambda given: given.fit(clients_per_round=3, trainer={"limit_train_batches": 0.2}), ValueError,
        r"limit_train_batches=0.2 of 3 clients trains none; raise it",
    ),
    "more clients than examples": (
        lambda given: given.fit(given.split(partitioner=ls.IIDPartitioner(500))), ValueError,
        r"num_clients=500.*got 120 examples",
    ),
    "clients without examples": (
        lambda given: given.fit(given.split(partitioner=Lazy()), clients_per_round=1), ValueError,
        r"1 of 3 clients have no examples \(clients 1\); use fewer",
    ),
    "a list of keep ratios for other clients": (
        lambda given: given.fit(algorithm=ls.SpectralSharding(keep_ratio=[0.3, 0.5])), ValueError,
        "lists 2 values for 12 clients",
    ),
    "data without a length": (
        lambda given: given.split(Stream()), TypeError, "data set, with `__len__` and `__getitem__`, got <",
    ),
    "data that is not federated": (
        lambda given: given.trainer().fit(given.federated(), *[DataLoader(given.toy, num_workers=0)] * 2), TypeError,
        r"needs clients: call trainer\.fit.*, got dataloaders, or nothing",
    ),
    "federated data for an ordinary module": (
        lambda given: given.trainer().fit(given.lit, given.data), TypeError,
        "feeds clients, not batches, but LitMLP trains on batches; wrap it",
    ),
    # evaluation, loading, processes
    "testing without a test step": (
        lambda given: given.trainer().test(
            given.federated(module=variant(given.lit_mlp, test_step=pl.LightningModule.test_step)()), given.data
        ),
        ValueError, r"`Trainer.test` needs `Lit.test_step`",
    ),
    "validation without data": (
        lambda given: given.trainer().validate(given.federated(), given.split()), ValueError,
        r"`Trainer\.validate` needs data; give FederatedDataModule\(\.\.\., val",
    ),
    "testing without data": (
        lambda given: given.trainer().test(given.federated(), given.split()), ValueError,
        r"`Trainer\.test` needs data; give FederatedDataModule\(\.\.\., tes",
    ),
    "swapped arguments of load_user_module": (
        lambda given: ls.plugin.load_user_module(given.lit_mlp, "last.ckpt"), TypeError,
        r"write load_user_module\('last\.ckpt', LitMLP\)",
    ),
    "a module to load into in place of its class": (
        lambda given: ls.plugin.load_user_module("last.ckpt", given.lit), TypeError,
        r"`kind` must be the class of your LightningModule.*, got a LitMLP",
    ),
    "processes that share gradients": (  # a stand-in, because a second process cannot be had in every test run
        lambda given: check_trainer(
            SimpleNamespace(world_size=2, strategy=DDPStrategy(), max_epochs=1, callbacks=[])  # type: ignore[arg-type]
        ),
        ValueError, r"Trainer\(strategy='client_parallel'\), got 2 processes of DDPStrategy; use that, or devices=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_work_is_refused(wrong, lit, lit_mlp, toy, data, fit, quiet):
    call, error, message = REFUSED[wrong]
    with pytest.raises(error, match=message):
        call(Given(lit, lit_mlp, toy, data, fit, quiet))


class TestConstructor:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"clients_per_round": 0}, r"`clients_per_round` must be in \[1, 1048576\], got 0"),
            ({"local_epochs": -1}, "`local_epochs` must be at least 0, got -1"),
            ({"clients_per_round": 2.5}, r"`clients_per_round` must be a whole number, got 2\.5; or a share"),
            ({"local_epochs": 1.5}, r"`local_epochs` must be a whole number, got 1\.5"),
            ({"algorithm": ls.FedAvg}, r"got the class FedAvg; write FedAvg\(\.\.\.\)"),
            ({"algorithm": ls.Collective()}, r"got Coll.*; write algorithm=SpectralSharding\(strategy=Collective\("),
            (
                {"algorithm": ls.Collective},
                r"got Coll.*; write algorithm=SpectralSharding\(strategy=Collective\(\.\.\.\)\)",
            ),
            ({"server_optimizer": 3}, "must be a function from parameters to an optimizer, got 3"),
            (
                {"server_optimizer": SGD([torch.zeros(1)], lr=1.0)},
                r"got SGD of .*; write lambda parameters: torch.*SGD",
            ),
            ({"algorithm": "FedAvg"}, "got the string 'FedAvg'; pass an object, not its name"),
            ({"local_hooks": ls.GradientClip(1.0)}, r"got one entry; write local_hooks=\[GradientClip\("),
            ({"local_hooks": [BatchNormEstimation()]}, r"; write Trainer\(callbacks=\[BatchNormEstimation\("),
            (
                {"local_hooks": [ls.TopK(0.1)]},
                r"`local_hooks` must be .* LocalHook, got TopK.*; write filters=\[TopK\(",
            ),
            ({"local_hooks": ls.TopK(0.1)}, r"; write filters=\[TopK\("),
            ({"algorithm": ls.FedAdam(lr=0.1)}, r"; write server_optimizer=FedAdam\("),
            ({"algorithm": ls.Krum(1)}, r"; write filters=\[Robust\(Krum\("),
            ({"filters": [ls.ProximalTerm(0.1)]}, r"; write local_hooks=\[ProximalTerm\("),
            ({"filters": "int8"}, "got the string 'int8'; pass an object, not its name"),
            ({"server_optimizer": ls.Krum(1)}, r"; write filters=\[Robust\(Krum\("),
            ({"faults": ls.LeaveOut()}, r"; write faults=Faults\(on_error=LeaveOut\("),
            ({"clients_per_round": None, "participation": ls.Faults()}, r"; write faults=Faults\("),
            ({"faults": ls.FullParticipation()}, r"; write participation=FullParticipation\("),
            ({"algorithm": nn.Sequential(nn.Linear(2, 2))}, r"must be an instance of Algorithm, got a Sequential\.$"),
            ({"local_epochs": torch.eye(2)}, r"`local_epochs` must be a whole number, got a Tensor\.$"),
            ({"server_optimizer": ls.FedAdam}, r"got the class FedAdam; write FedAdam\(\.\.\.\)"),
            ({"clients_per_round": True}, "`clients_per_round` must be a whole number, got True; write 1"),
            ({"local_epochs": True}, "`local_epochs` must be a whole number, got True; write 1"),
            ({"clients_per_round": 1.0}, r"got 1\.0; write 1 for one client, or participation=FullParticip"),
            ({"clients_per_round": -0.1}, r"`clients_per_round` must be a whole number, got -0\.1; or a share"),
            ({"seed": 1.5}, "`seed` must be a whole number, got 1.5"),
        ],
    )
    def test_invalid_arguments_are_refused(self, options: dict[str, Any], message: str, lit: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            ls.FederatedModule(lit, **{"clients_per_round": 2, **options})

    @pytest.mark.parametrize(
        "hook", ["lr_scheduler_step", "train_dataloader", "configure_model", *(f"{s}_epoch_end" for s in STAGES)]
    )
    def test_a_hook_that_cannot_be_honoured(self, hook: str, lit_mlp: Any) -> None:
        kind = variant(lit_mlp, **{hook: lambda self, *args: None})
        with pytest.raises(ValueError, match=f"Lit cannot be trained in a federation as it is:\n  - `{hook}`: "):
            ls.FederatedModule(kind(), clients_per_round=1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_workers": "2"}, "`num_workers` must be a whole number, got '2'; write 2"),
            ({"batch_size": "8"}, "`batch_size` must be a whole number, got '8'; write 8"),
            ({"batch_size": True}, "`batch_size` must be a whole number, got True; write 1"),
            ({"eval_batch_size": 8.0}, r"`eval_batch_size` must be a whole number, or None, got 8\.0; write 8"),
            ({"train": {"train": [1], "test": [2]}}, r"dict of 'train', 'test'; pass one.*splits\['train'\], part"),
            ({"labels": [0, 1]}, r"one class per example, shape \(120,\), got shape \(2,\)"),
            ({"partitioner": ls.IIDPartitioner}, r"got the class IIDPartitioner; write IIDPartitioner\(\.\.\.\)"),
            ({"train": ls.IIDPartitioner(2), "partitioner": []}, "the data set comes first: FederatedDataModule"),
            ({"train": Measured()}, "`train` must be a map-style data set, .*, got Measured, which cannot be dealt"),
            ({"val": {"a": [1]}}, r"`val` must be a data set, .* got a dict; write val=list\(data\.values\(\)\)"),
            ({"val": 3}, r"`val` must be a data set, a dataloader or a list of them, got 3\."),
            ({"train": (torch.zeros(4, 2), torch.zeros(4))}, r"got a tuple of Tensors; write .*Dataset\(\*train\)"),
            (
                {"train": (np.zeros((4, 2)), np.zeros(4))},
                r"tuple of ndarrays; write .*\(\*map\(torch.from_numpy, train\)\)",
            ),
            ({"val": (torch.zeros(4, 2), torch.zeros(4))}, r"got a tuple of Tensors; write .*TensorDataset\(\*val\)"),
            ({"train": [torch.zeros(4, 2), torch.zeros(4)]}, r"got a list of Tensors; write .*Dataset\(\*train\)"),
            ({"test": {"a": [1]}}, "`test` must be a data set, .* got a dict"),
            ({"train": DataLoader([1, 2])}, r"got a DataLoader; write FederatedDataModule\(loader\.dataset, part"),
        ],
    )
    def test_invalid_arguments_of_data_are_refused(self, options: dict[str, Any], message: str, toy: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            ls.FederatedDataModule(**{"train": toy, "partitioner": ls.IIDPartitioner(2), **options})

    def test_an_optimizer_class_of_torch_is_a_function_from_parameters(self, lit: Any) -> None:
        ls.FederatedModule(lit, clients_per_round=2, server_optimizer=torch.optim.Adam)


class Relabelled(OneByOne):
    """Examples whose labels are not the ones that it stores."""

    def __init__(self, toy: TensorDataset, stored: torch.Tensor) -> None:
        super().__init__(toy)
        self.targets = stored


def relabelled(toy: TensorDataset, change: Any) -> TensorDataset:
    x, y = toy.tensors
    return TensorDataset(x, change(y))


class TestLabels:
    @pytest.mark.parametrize("change", [lambda y: y.roll(1), lambda y: (y + 1) % 3, lambda y: y.flip(0)])
    def test_stored_labels_that_are_not_those_of_the_examples(self, change: Any, toy: Any) -> None:
        stored = Relabelled(toy, change(toy.tensors[1]))
        before = torch.random.get_rng_state()
        data = ls.FederatedDataModule(stored, ls.DirichletPartitioner(num_clients=4, alpha=1.0))
        with pytest.raises(ValueError, match=r"^Example \d+ of Relabelled has the label \d, but .* say \d, .*labels="):
            data.setup("fit")
        assert torch.equal(torch.random.get_rng_state(), before)
        given = ls.FederatedDataModule(stored, ls.DirichletPartitioner(num_clients=4, alpha=1.0), labels=toy.tensors[1])
        assert given.num_clients == 4

    def test_stored_labels_that_may_differ(self, toy: Any) -> None:
        """Parts and subsets, a label before another part, examples without one, and a transformed label."""
        x, y = toy.tensors
        agreeing = Relabelled(toy, y)
        other_order = Relabelled([(a, int(b), "name", 7) for a, b in zip(x, y, strict=True)], y)  # type: ignore[arg-type]
        soft = Relabelled(TensorDataset(x, nn.functional.one_hot(y).float()), y)
        shifted = Relabelled(TensorDataset(x, y + 1), y)
        shifted.target_transform = lambda label: label + 1  # type: ignore[attr-defined]
        for train in (agreeing, torch.utils.data.Subset(agreeing, range(119, -1, -1)), other_order, soft, shifted):
            ls.FederatedDataModule(train, ls.DirichletPartitioner(num_clients=4, alpha=1.0)).setup("fit")

    @pytest.mark.parametrize(
        ("change", "message"),
        [(lambda y: y - 1, r"examples have labels \(-1\) .*LitMLP, 0 to 2"), (lambda y: y + 2, r"labels \(3, 4\)")],
    )
    def test_labels_that_the_modules_metrics_do_not_count(self, change, message, lit, toy, fit):
        data = ls.FederatedDataModule(relabelled(toy, change), ls.IIDPartitioner(4), batch_size=4)
        refused = pytest.raises(ls.ClientError, match=r"Target -?\d is .*batch of float32 \(4, 6\), int64 \(4,\)\. Cla")
        with pytest.warns(ls.SpectralWarning, match=message), refused:
            fit(lit, data)

    def test_labels_that_a_metric_ignores(self, lit, toy, fit):
        lit.train_acc.ignore_index = -100
        lit.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(lit.net(batch[0]), batch[1])
        ignored = relabelled(toy, lambda y: torch.where(y == 1, -100, y))
        fit(lit, ls.FederatedDataModule(ignored, ls.IIDPartitioner(4), batch_size=60))  # a warning is an error

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x, y.float()), r"batch of float32 \(4, 6\), float32 \(4,\)\. Cross-entropy takes int64 c"),
            (lambda x, y: (x, y.int()), r"batch of float32 \(4, 6\), int32 \(4,\)\. Cross-entropy takes int64 classes"),
            (lambda x, y: (x, y[:, None]), r"int64 \(4, 1\)\. Cross-entropy takes one class per example"),
            (lambda x, y: (x.double(), y), r"float64 \(4, 6\), int64 \(4,\)\. Inputs need the type of the weights"),
            (lambda x, y: (x[:, :5], y), r"float32 \(4, 5\), int64 \(4,\)\. The first layer that fails takes another"),
        ],
    )
    def test_batches_that_do_not_suit_the_module(self, change: Any, message: str, lit: Any, toy: Any, fit: Fit) -> None:
        data = ls.FederatedDataModule(TensorDataset(*change(*toy.tensors)), ls.IIDPartitioner(4), batch_size=4)
        with pytest.raises(ls.ClientError, match=rf"^Round 0, client \d, local training: RuntimeError: .*{message}"):
            fit(lit, data)

    @pytest.mark.parametrize(
        ("example", "message"),
        [
            (torch.zeros(2, 7), r"LitMLP cannot run its example input, float32 \(2, 7\): mat1 and mat2 shapes"),
            (torch.zeros(2, 6, dtype=torch.int64), r"int64 \(2, 6\): mat1 and mat2 must have the same dtype"),
            ((torch.zeros(2, 6), torch.zeros(2)), r"float32 \(2, 6\), float32 \(2,\): .*takes 2 positional"),
        ],
    )
    def test_an_example_input_that_the_module_cannot_run(self, example: Any, message: str, lit: Any) -> None:
        with pytest.raises(ValueError, match=rf"{message}.*a tuple of its arguments"):
            ls.validate(lit, example)


class Reading(pl.Callback):
    """A callback of ordinary training, which reads what a federation has elsewhere."""

    def __init__(self, **reads: Any) -> None:
        for hook, read in reads.items():
            setattr(self, hook, lambda trainer, module, *args, read=read: read(module, *args))


class TestTrainer:
    @pytest.mark.parametrize(
        ("callback", "error", "message"),
        [
            (Reading(on_train_batch_start=lambda _, batch, i: [*batch]), TypeError, r"`batch\[0\]`\. A round"),
            (Reading(on_train_batch_end=lambda _, out, batch, i: batch["x"]), TypeError, r"`batch\['x'\]`\. A"),
            (Reading(on_train_batch_start=lambda _, batch, i: batch.shape), AttributeError, r"`batch\.shape`\. A"),
            (Reading(on_train_batch_end=lambda _, out, batch, i: out["loss"]), KeyError, r"`outputs\['loss'\]`\."),
            (
                Reading(on_train_epoch_start=lambda module: module.hparams.lr),
                AttributeError,
                "no hyper-parameter 'lr'; those of your own module are `pl_module.module.hparams`",
            ),
        ],
    )
    def test_callbacks_that_read_batches_outputs_and_hyper_parameters(self, callback, error, message, lit, data, fit):
        with pytest.raises(error, match=message):
            fit(lit, data, callbacks=[callback])

    def test_hyper_parameters_can_be_read_and_set(self, lit: Any) -> None:
        model = ls.FederatedModule(lit, clients_per_round=1)
        model.hparams.note = 3
        assert (model.hparams.note, model.hparams.user_module["lr"], model.module.hparams.lr) == (3, 0.1, 0.1)
        assert copy.deepcopy(model).hparams == model.hparams

    @pytest.mark.parametrize("interval", [0.25, 100])
    def test_validation_within_a_round(self, interval: Any, lit: Any, data: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match=rf"`val_check_interval={interval}` would .*`check_val_every_n_epoch=n`"):
            fit(lit, data, trainer={"val_check_interval": interval})
        rounds = {"val_check_interval": 2, "check_val_every_n_epoch": None}  # counted over epochs
        assert "val_loss" in fit(lit, data, max_epochs=2, trainer=rounds).rows[1]

    def test_remarks_on_what_may_not_be_meant(self, lit_mlp, data, fit, caplog):
        def warm_up(self):
            optimizer = SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=500)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        with caplog.at_level("INFO", logger="lightning.pytorch"):
            fit(variant(lit_mlp, configure_optimizers=warm_up)(), data, local_epochs=0, max_epochs=2)
        assert [caplog.text.count(said) for said in ("clients train nothing", "steps once per round here")] == [1, 1]
        caplog.clear()
        with caplog.at_level("INFO", logger="lightning.pytorch"):
            fit(lit_mlp(), data)
        assert "clients train nothing" not in caplog.text
        assert "once per round" not in caplog.text

    def test_a_folder_that_cannot_be_written(self, lit, data, fit, tmp_path):
        (tmp_path / "file").touch()
        message = r"file/rounds.jsonl cannot be written: .*Choose another folder: .*RoundHistory\(path\)"
        fitted = fit(lit, data)
        with pytest.raises(OSError, match=message):
            fitted.history.save(tmp_path / "file" / "rounds.jsonl")
        with pytest.raises(OSError, match=r"file/a\.ckpt cannot be written: .*ModelCheckpoint\(dirpath=\.\.\.\)"):
            fitted.trainer.save_checkpoint(tmp_path / "file" / "a.ckpt")


class TestSetup:
    def test_a_list_of_examples_is_one_validation_set(self, lit: Any, toy: Any, fit: Fit) -> None:
        whole, listed = (ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=val) for val in (toy, list(toy)))
        logged = fit(copy.deepcopy(lit), whole).logged
        assert fit(lit, listed).logged == pytest.approx(logged)

    def test_layers_made_in_setup_are_trained_densely(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        deeper = variant(lit_mlp, setup=lambda self, stage: self.net.append(seeded(nn.Linear, 3, 3)))
        assert not torch.equal(fit(deeper(), data).module.net[6].weight, seeded(nn.Linear, 3, 3).weight)

    def test_validation_data_without_a_validation_step(self, toy: Any, fit: Fit) -> None:
        data, lit = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=toy), LitNet(nn.Linear(6, 3))
        with pytest.raises(ValueError, match="LitNet needs `validation_step` for `val`; define it"):
            fit(lit, data)
        data.val = None
        before = lit.net.weight.detach().clone()
        assert not torch.equal(fit(lit, data).module.net.weight, before)

    @pytest.mark.parametrize("stage", ["validate", "test"])
    def test_evaluation_on_a_loader_after_a_fit_without_evaluation_data(self, stage, lit, toy, quiet):
        trainer, data = pl.Trainer(max_epochs=1, **quiet), ls.FederatedDataModule(toy, ls.IIDPartitioner(2))
        model = ls.FederatedModule(lit, clients_per_round=1)
        trainer.fit(model, data)
        (found,) = getattr(trainer, stage)(model, DataLoader(toy, batch_size=30), verbose=False)
        assert found

    def test_a_sharded_layer_outside_the_forward_pass(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        def prepare(lit: Any) -> None:
            lit.forgotten, lit.last = nn.Linear(5, 5), nn.Linear(5, 5)

        unused, sharding = variant(lit_mlp, prepare), ls.SpectralSharding()
        with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient .*: forgotten\. If .*exclude="):
            fit(unused(), data, algorithm=sharding)
        dense = ls.SpectralSharding(exclude=["forgotten"])
        lit = fit(unused(), data, algorithm=dense).module
        assert list(dense.plan(lit).sharded) == ["net.2", "net.5"]

    def test_a_checkpoint_of_an_ordinary_run(self, lit_mlp, toy, data, quiet, fit, tmp_path):
        trainer = pl.Trainer(max_epochs=1, log_every_n_steps=1, **quiet)
        loader = torch.utils.data.DataLoader(toy, batch_size=60)
        trainer.fit(lit_mlp(), loader, loader)
        trainer.save_checkpoint(tmp_path / "plain.ckpt")
        with pytest.raises(ValueError, match="was not written by a FederatedModule"):
            fit(lit_mlp(), data, max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")


def poisoned() -> LitNet:
    """The loss is NaN if a feature in the batch is NaN; training fails if one is infinite."""

    def loss(lit: Any, batch: Any) -> Any:
        if bool(torch.isinf(batch[0]).any()):
            raise RuntimeError("the sensor is broken")
        lit.log("seen", value := lit(batch[0]).square().mean())
        return value

    return LitNet(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)), lr=0.01, loss=loss)


def poisoned_data(values: list[float]) -> ls.FederatedDataModule:
    """One client per value, with four examples; all of their features have that value."""
    x = torch.tensor(values).repeat_interleave(4)[:, None].expand(-1, 2).contiguous()
    clients = ls.NaturalPartitioner([i // 4 for i in range(len(x))])
    return ls.FederatedDataModule(TensorDataset(x), clients, batch_size=2)


class TestClients:
    @pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5)], ids=repr)
    def test_an_update_that_is_not_finite_is_left_out_reported_and_counted(self, algorithm: Any, fit: Fit) -> None:
        data = poisoned_data([1.0, 2.0, math.nan])
        with pytest.warns(ls.SpectralWarning, match="Round 0: client 2 is left out of the average: update not finite"):
            fitted = fit(seeded(poisoned), data, algorithm=algorithm, clients_per_round=3)
        (row,) = fitted.rows
        assert bool(torch.isfinite(fitted.weights).all())
        assert (row["fl/clients"], row["fl/clients_left_out"], row["fl/examples"]) == (2.0, 1.0, 8.0)
        assert math.isfinite(row["fl/loss"])
        assert math.isfinite(row["seen"])
        if isinstance(algorithm, ls.FedAvg):  # no draw depends on the cohort: the others' average is the same
            others = fit(seeded(poisoned), poisoned_data([1.0, 2.0]), algorithm=algorithm, clients_per_round=2)
            torch.testing.assert_close(fitted.weights, others.weights, rtol=1e-6, atol=1e-7)

    def test_a_round_without_any_finite_update_stops_the_run_and_changes_nothing(self, fit: Fit) -> None:
        module = poisoned()
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        message = r"Round 0: 2 of 2 clients are left out \(clients 0 and 1: update not finite or too"
        with pytest.warns(ls.SpectralWarning), pytest.raises(ls.errors.RoundError, match=message):
            fit(module, poisoned_data([math.nan, math.nan]), clients_per_round=2)
        assert torch.equal(before, nn.utils.parameters_to_vector(module.parameters()).detach())

    def test_a_failure_names_the_round_the_client_and_the_stage(self, fit: Fit) -> None:
        data = poisoned_data([1.0, 2.0, math.inf])
        with pytest.raises(ls.ClientError, match=r"Round 0, client 2, .*: RuntimeError: the sensor is broken") as error:
            fit(poisoned(), data, clients_per_round=3)
        assert isinstance(error.value.__cause__, RuntimeError)

    @pytest.mark.parametrize(
        ("wrong", "remedy"),
        [(lambda loss: loss[None].expand(3), "return one number"), (torch.detach, "depends on noth")],
    )
    def test_a_loss_that_cannot_be_trained_on(self, wrong: Any, remedy: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        kind = variant(lit_mlp, training_step=lambda self, *args: wrong(lit_mlp.training_step(self, *args)))
        with pytest.raises(ls.ClientError, match=rf"local training: RuntimeError: .*{remedy}"):
            fit(kind(), data)

    def test_server_weights_that_are_not_finite_are_refused_by_layer(self, fit: Fit) -> None:
        module = poisoned()
        with torch.no_grad():
            module.net[1].weight.fill_(math.inf)
        with pytest.raises(ls.errors.RoundError, match=r"Round 0: the server's weights .* 'net.1.weight'") as error:
            fit(module, poisoned_data([1.0]), algorithm=ls.SpectralSharding(), clients_per_round=1)
        assert "Layer 'net.1' cannot be factorised" in str(error.value.__cause__)


# Patterns that match nothing, whichever algorithm they are given to

ALGORITHMS: dict[str, Callable[..., Any]] = {
    **{cls.__name__: cls for cls in (ls.FedAvg, ls.Scaffold, ls.StaleUpdates, ls.FIARSE, ls.WidthSharding)},
    "LoRA": partial(ls.LoRA, 2),
    "Zampling": partial(ls.Zampling, 8, degree=2),
    "SpectralSharding": lambda **choices: ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(**choices)),
}
BUFFER = r"`buffers` pattern 'nope' matches no buffer; known names: net\.1\.running_mean, "


def bind(algorithm: Any, buffers: Any = MappingProxyType({})) -> None:
    """Do what is done before the first round."""
    plan = Plan(server := seeded(LitSmall), algorithm, buffers=buffers)
    algorithm.check(plan)
    algorithm.bind(server, algorithm.new_state(server, 0), Known(plan.rules()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_pattern_that_matches_nothing_is_refused_also_next_to_one_that_does(name: str) -> None:
    make, server = ALGORITHMS[name], "server"
    for buffers in ({"nope": server}, {"net.1.*": server, "nope": server}):
        with pytest.raises(ValueError, match=BUFFER):
            bind(make(), buffers)
    bind(make(), {"net.1.*": server})
    if name in ("FIARSE", "Zampling", "WidthSharding", "SpectralSharding"):
        what = "parameter" if name in ("FIARSE", "Zampling") else "layer"
        for exclude in (["nope"], ["net.0*", "nope"]):
            with pytest.raises(ValueError, match=f"`exclude` pattern 'nope' matches no {what}"):
                bind(make(exclude=exclude))
        bind(make(exclude=["net.0*"]))


def test_a_fit_and_tables_of_costs_refuse_them_too(data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=BUFFER):
        fit(seeded(LitSmall), data, buffers={"nope": "server"})
    for algorithm in (ls.Zampling(degree=2), ls.LoRA()):
        with pytest.raises(ValueError, match=BUFFER):
            ls.cost_table(seeded(LitSmall), algorithm, [2], buffers={"nope": "server"})
