"""What cannot work is refused early, with the rule, the value and the remedy."""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, seeded
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from toy_models import LitSmall

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


class TestConstructor:
    def test_a_module_that_is_federated_already(self, lit: Any) -> None:
        with pytest.raises(TypeError, match="`module` must be your own LightningModule, got a FederatedModule"):
            ls.FederatedModule(ls.FederatedModule(lit), clients_per_round=1)

    def test_a_module_that_is_no_lightning_module(self) -> None:
        with pytest.raises(TypeError, match=r"must be a lightning\.pytorch\.LightningModule, got Linear: wrap it"):
            ls.FederatedModule(nn.Linear(2, 2), clients_per_round=1)  # type: ignore[arg-type]

    def test_a_module_of_the_other_lightning_package(self) -> None:
        kind = type("LitOther", (nn.Module,), {"__module__": "pytorch_lightning.core"})
        with pytest.raises(TypeError, match=r"derives from `pytorch_lightning`.*change the import"):
            ls.FederatedModule(kind(), clients_per_round=1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"clients_per_round": 0}, r"`clients_per_round` must be in \[1, 1048576\], or None, got 0"),
            ({"local_epochs": -1}, "`local_epochs` must be at least 0, got -1"),
            ({"clients_per_round": 2.5}, r"`clients_per_round` must be a whole number, or None, got 2\.5"),
            ({"local_epochs": 1.5}, r"`local_epochs` must be a whole number, got 1\.5"),
            ({"algorithm": ls.FedAvg}, r"got the class FedAvg; write FedAvg\(\.\.\.\)"),
            ({"algorithm": ls.Collective()}, r"got the strategy Coll.*; write SpectralSharding\(strategy=Collective\("),
            ({"algorithm": ls.Collective}, r"write SpectralSharding\(strategy=Collective\(\.\.\.\)\)"),
            ({"server_optimizer": 3}, "must be a function from parameters to an optimizer, got 3"),
            (
                {"server_optimizer": SGD([torch.zeros(1)], lr=1.0)},
                r"got SGD of .*; write lambda parameters: torch.*SGD",
            ),
            ({"algorithm": "FedAvg"}, "got the string 'FedAvg'; pass an object, not its name"),
            ({"local_hooks": ls.client.GradientClip(1.0)}, r"got one hook; write local_hooks=\[GradientClip\("),
            (
                {"local_hooks": [BatchNormEstimation()]},
                r"is a callback; write Trainer\(callbacks=\[BatchNormEstimation\(",
            ),
            ({"algorithm": nn.Sequential(nn.Linear(2, 2))}, r"must be an instance of Algorithm, got a Sequential\.$"),
            ({"local_epochs": torch.eye(2)}, r"`local_epochs` must be a whole number, got a Tensor\.$"),
            ({"server_optimizer": ls.server.FedAdam}, r"got the class FedAdam; write FedAdam\(\.\.\.\)"),
            ({"clients_per_round": True}, "`clients_per_round` must be a whole number, or None, got True; write 1"),
            ({"local_epochs": True}, "`local_epochs` must be a whole number, got True; write 1"),
            ({"seed": 1.5}, "`seed` must be a whole number, got 1.5"),
        ],
    )
    def test_invalid_arguments_are_refused(self, options: dict[str, Any], message: str, lit: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            ls.FederatedModule(lit, **{"clients_per_round": 2, **options})

    def test_a_module_with_no_layer_to_shard(self) -> None:
        class LitTiny(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

            def training_step(self, batch: Any) -> None: ...

        with pytest.raises(ValueError, match="No layer of this module can be sharded"):
            ls.FederatedModule(LitTiny(), algorithm=ls.SpectralSharding(), clients_per_round=1)

    @pytest.mark.parametrize(
        "hook", ["lr_scheduler_step", "train_dataloader", "configure_model", *(f"{s}_epoch_end" for s in STAGES)]
    )
    def test_a_hook_that_cannot_be_honoured(self, hook: str, lit_mlp: Any) -> None:
        kind = type("LitHooked", (lit_mlp,), {hook: lambda self, *args: None})
        with pytest.raises(ValueError, match=f"LitHooked cannot be trained in a federation as it is:\n  - `{hook}`: "):
            ls.FederatedModule(kind(), clients_per_round=1)

    def test_all_problems_in_one_report(self, lit_mlp: Any) -> None:
        kind = type("LitHooked", (lit_mlp,), {"lr_scheduler_step": None, "train_dataloader": None})
        with pytest.raises(ValueError, match=r"(?s)`lr_scheduler_step`.*`train_dataloader`"):
            ls.FederatedModule(kind(), clients_per_round=1)

    def test_sizes_of_batches(self, toy: Any) -> None:
        with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
            ls.FederatedDataModule(toy, ls.IIDPartitioner(2), batch_size=0)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_workers": -1}, "`num_workers` must be at least 0, got -1"),
            ({"num_workers": "2"}, "`num_workers` must be a whole number, got '2'; write 2"),
            ({"batch_size": 2.5}, r"`batch_size` must be a whole number, got 2\.5"),
            ({"batch_size": "8"}, "`batch_size` must be a whole number, got '8'; write 8"),
            ({"batch_size": True}, "`batch_size` must be a whole number, got True; write 1"),
            ({"batch_size": None}, "`batch_size` must be a whole number, got None"),
            ({"eval_batch_size": 0}, "`eval_batch_size` must be at least 1, or None, got 0"),
            ({"eval_batch_size": 8.0}, r"`eval_batch_size` must be a whole number, or None, got 8\.0; write 8"),
            ({"train": {"train": [1], "test": [2]}}, r"dict of 'train', 'test'; pass one.*splits\['train'\], part"),
            ({"labels": [0, 1]}, r"one class per example, shape \(120,\), got shape \(2,\)"),
            ({"drop_last": 1}, "`drop_last` must be True or False, got 1"),
            ({"seed": 1.5}, r"`seed` must be a whole number, got 1\.5"),
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


class Relabelled(Dataset[Any]):
    """Examples whose labels are not the ones that it stores."""

    def __init__(self, toy: TensorDataset, stored: torch.Tensor) -> None:
        self.toy, self.targets = toy, stored

    def __len__(self) -> int:
        return len(self.toy)

    def __getitem__(self, index: int) -> Any:
        return self.toy[index]


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
        kinds = ls.DirichletPartitioner(num_clients=4, alpha=1.0)
        other_order = Relabelled([(a, int(b), "name", 7) for a, b in zip(x, y, strict=True)], y)  # type: ignore[arg-type]
        soft = Relabelled(TensorDataset(x, nn.functional.one_hot(y).float()), y)
        shifted = Relabelled(TensorDataset(x, y + 1), y)
        shifted.target_transform = lambda label: label + 1  # type: ignore[attr-defined]
        part = torch.utils.data.Subset(agreeing, range(119, -1, -1))
        for train in (agreeing, part, other_order, soft, shifted):
            ls.FederatedDataModule(train, kinds).setup("fit")

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
            (
                lambda x, y: (x, y.float()),
                r"batch of float32 \(4, 6\), float32 \(4,\)\. Cross-entropy takes classes as i",
            ),
            (
                lambda x, y: (x, y.int()),
                r"batch of float32 \(4, 6\), int32 \(4,\)\. Cross-entropy takes classes as i",
            ),
            (
                lambda x, y: (x, y[:, None]),
                r"int64 \(4, 1\)\. Cross-entropy takes one class per example",
            ),
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

    def test_targets_of_another_shape_than_the_outputs(self, lit: Any, toy: Any, fit: Fit) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits
        lit.training_step = lambda batch, batch_idx: loss(lit.net(batch[0]), batch[1].float())
        with pytest.raises(ls.ClientError, match=r"Target size .*int64 \(4,\)\. This loss takes targets of the shape"):
            fit(lit, ls.FederatedDataModule(toy, ls.IIDPartitioner(4), batch_size=4))


class Reading(pl.Callback):
    """A callback of ordinary training, which reads what a federation has elsewhere."""

    def __init__(self, **reads: Any) -> None:
        for hook, read in reads.items():
            setattr(self, hook, lambda trainer, module, *args, read=read: read(module, *args))


class TestTrainer:
    @pytest.mark.parametrize(
        ("callback", "error", "message"),
        [
            (
                Reading(on_train_batch_start=lambda _, batch, i: [*batch]),
                TypeError,
                r"`batch\[0\]`\. A round",
            ),
            (
                Reading(on_train_batch_end=lambda _, out, batch, i: batch["x"]),
                TypeError,
                r"`batch\['x'\]`\. A",
            ),
            (
                Reading(on_train_batch_start=lambda _, batch, i: batch.shape),
                AttributeError,
                r"`batch\.shape`\. A",
            ),
            (
                Reading(on_train_batch_end=lambda _, out, batch, i: out["loss"]),
                KeyError,
                r"`outputs\['loss'\]`\.",
            ),
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
        class Lit(lit_mlp):
            def configure_optimizers(self):
                optimizer = SGD(self.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=500)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        with caplog.at_level("INFO", logger="lightning.pytorch"):
            fit(Lit(), data, local_epochs=0, max_epochs=2)
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
    def test_more_clients_per_round_than_clients(self, lit: Any, data: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match=r"`clients_per_round` must be at most num_clients=12, got 13"):
            fit(lit, data, clients_per_round=13)

    def test_more_clients_than_examples(self, lit: Any, toy: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match=r"num_clients=500.*got 120 examples"):
            fit(lit, ls.FederatedDataModule(toy, ls.IIDPartitioner(500)))

    def test_clients_without_examples(self, lit: Any, toy: Any, fit: Fit) -> None:
        class Lazy(ls.partition.Partitioner):
            num_clients = 3

            def split(self, num_examples: int, labels: Any, generator: Any) -> Any:
                from lightning_spectral.partition import Partition

                return Partition.from_lists([[0, 1], [], [2]])

        with pytest.raises(ValueError, match=r"1 of 3 clients have no examples \(clients 1\); use fewer"):
            fit(lit, ls.FederatedDataModule(toy, Lazy()), clients_per_round=1)

    def test_data_without_a_length(self, lit: Any, fit: Fit) -> None:
        class Stream(Dataset[Any]):
            def __getitem__(self, index: int) -> Any:
                return torch.zeros(1)

        with pytest.raises(ValueError, match="Stream has no length"):
            fit(lit, ls.FederatedDataModule(Stream(), ls.IIDPartitioner(2)), clients_per_round=1)

    def test_a_list_of_examples_is_one_validation_set(self, lit: Any, toy: Any, fit: Fit) -> None:
        whole, listed = (ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=val) for val in (toy, list(toy)))
        logged = fit(copy.deepcopy(lit), whole).logged
        assert fit(lit, listed).logged == pytest.approx(logged)

    def test_data_that_is_not_federated(self, lit: Any, toy: Any, quiet: Any) -> None:
        trainer = pl.Trainer(max_epochs=1, **quiet)
        loader = torch.utils.data.DataLoader(toy, num_workers=0)
        with pytest.raises(TypeError, match=r"needs clients: call trainer\.fit.*, got dataloaders, or nothing"):
            trainer.fit(ls.FederatedModule(lit, clients_per_round=1), loader, loader)

    def test_federated_data_for_an_ordinary_module(self, lit: Any, data: Any, quiet: Any) -> None:
        with pytest.raises(TypeError, match="feeds clients, not batches, but LitMLP trains on batches; wrap it"):
            pl.Trainer(max_epochs=1, **quiet).fit(lit, data)

    def test_several_optimizers(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class LitTwo(lit_mlp):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[2].parameters())]

        with pytest.raises(ValueError, match=r"LitTwo.configure_optimizers must return one torch optimizer, got 2"):
            fit(LitTwo(), data)

    @pytest.mark.parametrize(
        ("configure", "message"),
        [
            (pl.LightningModule.configure_optimizers, r"^`Lit\.configure_optimizers` is missing; define it and return"),
            (lambda self: None, r"^Lit\.configure_optimizers returned None; return the optimizer that clients use"),
        ],
        ids=["missing", "none"],
    )
    def test_no_optimizer(self, configure: Any, message: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match=message):
            fit(type("Lit", (lit_mlp,), {"configure_optimizers": configure})(), data)

    def test_a_class_in_place_of_a_module(self, lit_mlp: Any) -> None:
        with pytest.raises(TypeError, match=r"`module` must be a LightningModule, got the class LitMLP; write LitMLP"):
            ls.FederatedModule(lit_mlp, clients_per_round=1)
        with pytest.raises(TypeError, match=r"`module` must be .*, got the class LitMLP; write LitMLP"):
            ls.validate(lit_mlp)

    def test_swapped_and_wrong_arguments_of_load_user_module(self, lit_mlp: Any) -> None:
        swapped: Any = (lit_mlp, "last.ckpt")
        with pytest.raises(TypeError, match=r"write load_user_module\('last\.ckpt', LitMLP\)"):
            ls.plugin.load_user_module(*swapped)
        with pytest.raises(TypeError, match=r"`kind` must be the class of your LightningModule.*, got a LitMLP"):
            ls.plugin.load_user_module("last.ckpt", lit_mlp())

    @pytest.mark.parametrize(
        "algorithm", [ls.SpectralSharding(), ls.FIARSE(), ls.LoRA(rank=2), ls.Zampling(2, degree=2)], ids=repr
    )
    def test_layers_made_in_setup_come_too_late_for_sub_models(self, algorithm: Any, lit_mlp: Any) -> None:
        lit = lit_mlp()
        del lit.net
        with pytest.raises(ValueError, match=r"^LitMLP has no parameters yet, .* in `__init__`, rather than in `setu"):
            ls.FederatedModule(lit, algorithm=algorithm, clients_per_round=1)

    def test_layers_made_in_setup_are_trained_densely(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def setup(self, stage: str) -> None:
                self.net.append(seeded(nn.Linear, 3, 3))

        trained = fit(Lit(), data).module.net[6].weight
        assert not torch.equal(trained, seeded(nn.Linear, 3, 3).weight)

    @pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding()], ids=["dense", "sharded"])
    def test_sparse_buffers(self, algorithm: Any, lit: Any, data: Any, fit: Fit) -> None:
        lit.register_buffer("adjacency", torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match=r"^Sparse buffers .*: `adjacency` is torch\.sparse_coo; register"):
            fit(lit, data, algorithm=algorithm)

    def test_validation_data_without_a_validation_step(self, toy: Any, fit: Fit) -> None:
        class LitBlind(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(6, 3)

            def training_step(self, batch: Any) -> Any:
                return self.net(batch[0]).mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        data = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), val=toy)
        with pytest.raises(ValueError, match="LitBlind needs `validation_step` for `val`; define it"):
            fit(LitBlind(), data)
        data.val = None
        before = (lit := LitBlind()).net.weight.detach().clone()
        assert not torch.equal(fit(lit, data).module.net.weight, before)

    def test_nothing_to_train(self, lit: Any, data: Any, fit: Fit) -> None:
        lit.requires_grad_(False)
        with pytest.raises(ValueError, match="LitMLP has no trainable parameter in its optimizer"):
            fit(lit, data)

    def test_a_weight_that_is_zero(self, lit: Any) -> None:
        nn.init.zeros_(lit.net[2].weight)
        with pytest.raises(ValueError, match=r"(?s)No layer .* can be sharded.*net\.2 .*its weight is zero"):
            ls.FederatedModule(lit, algorithm=ls.SpectralSharding(), clients_per_round=1)

    def test_lazy_layers(self, lit: Any, data: Any, fit: Fit) -> None:
        lit.net.append(nn.LazyLinear(3))
        with pytest.raises(ValueError, match=r"Lazy layers have no weight yet: net\.\d\.weight, net\.\d\.bias; run"):
            fit(lit, data)

    def test_complex_parameters(self, lit: Any, data: Any, fit: Fit) -> None:
        lit.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match="Complex parameters are not averaged: phase"):
            fit(lit, data)

    def test_testing_without_a_test_step(self, lit_mlp: Any, data: Any, quiet: Any) -> None:
        lit = type("LitUntested", (lit_mlp,), {"test_step": pl.LightningModule.test_step})()
        with pytest.raises(ValueError, match=r"`Trainer.test` needs `LitUntested.test_step`"):
            pl.Trainer(**quiet).test(ls.FederatedModule(lit, clients_per_round=1), data)

    @pytest.mark.parametrize("stage", ["validate", "test"])
    def test_evaluation_without_data(self, stage: str, lit: Any, toy: Any, quiet: Any) -> None:
        trainer, data = pl.Trainer(**quiet), ls.FederatedDataModule(toy, ls.IIDPartitioner(2))
        message = rf"`Trainer\.{stage}` needs data; give FederatedDataModule\(\.\.\., {stage[:3]}"
        with pytest.raises(ValueError, match=message):
            getattr(trainer, stage)(ls.FederatedModule(lit, clients_per_round=1), data)

    @pytest.mark.parametrize("stage", ["validate", "test"])
    def test_evaluation_on_a_loader_after_a_fit_without_evaluation_data(self, stage, lit, toy, quiet):
        trainer, data = pl.Trainer(max_epochs=1, **quiet), ls.FederatedDataModule(toy, ls.IIDPartitioner(2))
        model = ls.FederatedModule(lit, clients_per_round=1)
        trainer.fit(model, data)
        (found,) = getattr(trainer, stage)(model, DataLoader(toy, batch_size=30), verbose=False)
        assert found

    def test_a_sharded_layer_outside_the_forward_pass(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class LitUnused(lit_mlp):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.forgotten, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

        sharding = ls.SpectralSharding()
        with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient .*: forgotten\. If .*exclude="):
            fit(LitUnused(), data, algorithm=sharding)
        dense = ls.SpectralSharding(exclude=["forgotten"])
        lit = fit(LitUnused(), data, algorithm=dense).module
        assert list(dense.plan(lit).sharded) == ["net.2", "net.5"]

    def test_a_trainer_of_several_processes_that_share_gradients(self) -> None:
        # a stand-in, because a second process cannot be had in every test run
        trainer: Any = SimpleNamespace(world_size=2, strategy=DDPStrategy(), max_epochs=1, callbacks=[])
        message = r"Trainer\(strategy='client_parallel'\), got 2 processes of DDPStrategy; use that, or devices=1"
        with pytest.raises(ValueError, match=message):
            check_trainer(trainer)

    def test_a_cohort_cut_to_nobody_or_larger_than_can_be_summed(self, lit: Any, data: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match=r"limit_train_batches=0.2 of 3 clients trains none; raise it"):
            fit(lit, data, clients_per_round=3, trainer={"limit_train_batches": 0.2})
        with pytest.raises(ValueError, match=r"`clients_per_round` must be in \[1, 1048576\], or None, got 1048577"):
            ls.FederatedModule(lit, clients_per_round=1048577)

    def test_a_list_of_keep_ratios_for_other_clients(self, lit: Any, data: Any, fit: Fit) -> None:
        with pytest.raises(ValueError, match="lists 2 values for 12 clients"):
            fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=[0.3, 0.5]))

    def test_a_checkpoint_of_an_ordinary_run(self, lit_mlp, toy, data, quiet, fit, tmp_path):
        trainer = pl.Trainer(max_epochs=1, log_every_n_steps=1, **quiet)
        loader = torch.utils.data.DataLoader(toy, batch_size=60)
        trainer.fit(lit_mlp(), loader, loader)
        trainer.save_checkpoint(tmp_path / "plain.ckpt")
        with pytest.raises(ValueError, match="was not written by a FederatedModule"):
            fit(lit_mlp(), data, max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")


class LitPoisoned(pl.LightningModule):
    """The loss is NaN if a feature in the batch is NaN; training fails if one is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch: Any) -> Any:
        if bool(torch.isinf(batch[0]).any()):
            raise RuntimeError("the sensor is broken")
        loss = self.net(batch[0]).square().mean()
        self.log("seen", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


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
            fitted = fit(seeded(LitPoisoned), data, algorithm=algorithm, clients_per_round=3)
        (row,) = fitted.rows
        assert bool(torch.isfinite(fitted.weights).all())
        assert (row["fl/clients"], row["fl/clients_left_out"], row["fl/examples"]) == (2.0, 1.0, 8.0)
        assert math.isfinite(row["fl/loss"])
        assert math.isfinite(row["seen"])
        if isinstance(algorithm, ls.FedAvg):  # no draw depends on the cohort: the others' average is the same
            others = fit(seeded(LitPoisoned), poisoned_data([1.0, 2.0]), algorithm=algorithm, clients_per_round=2)
            torch.testing.assert_close(fitted.weights, others.weights, rtol=1e-6, atol=1e-7)

    def test_a_round_without_any_finite_update_stops_the_run_and_changes_nothing(self, fit: Fit) -> None:
        module = LitPoisoned()
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        message = r"Round 0: 2 of 2 clients are left out \(clients 0 and 1: update not finite or too"
        with pytest.warns(ls.SpectralWarning), pytest.raises(ls.errors.RoundError, match=message):
            fit(module, poisoned_data([math.nan, math.nan]), clients_per_round=2)
        assert torch.equal(before, nn.utils.parameters_to_vector(module.parameters()).detach())

    def test_a_failure_names_the_round_the_client_and_the_stage(self, fit: Fit) -> None:
        data = poisoned_data([1.0, 2.0, math.inf])
        with pytest.raises(ls.ClientError, match=r"Round 0, client 2, .*: RuntimeError: the sensor is broken") as error:
            fit(LitPoisoned(), data, clients_per_round=3)
        assert isinstance(error.value.__cause__, RuntimeError)

    @pytest.mark.parametrize(
        ("wrong", "remedy"),
        [(lambda loss: loss[None].expand(3), "return one number"), (torch.detach, "depends on noth")],
    )
    def test_a_loss_that_cannot_be_trained_on(self, wrong: Any, remedy: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class LitWrong(lit_mlp):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return wrong(super().training_step(batch, batch_idx))

        with pytest.raises(ls.ClientError, match=rf"local training: RuntimeError: .*{remedy}"):
            fit(LitWrong(), data)

    def test_server_weights_that_are_not_finite_are_refused_by_layer(self, fit: Fit) -> None:
        module = LitPoisoned()
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
EXCLUDING = ("FIARSE", "Zampling", "WidthSharding", "SpectralSharding")
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
    if name in EXCLUDING:
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
