"""What a user's steps may take, return and log."""

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, seeded
from torch import nn
from torchmetrics import MeanMetric

import lightning_spectral as ls


def test_what_clients_log_is_weighted_by_their_examples(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("size", float(len(batch[0])))
            return super().training_step(batch, batch_idx)

    data = ls.FederatedDataModule(toy, ls.NaturalPartitioner([0] * 90 + [1] * 30), batch_size=1000)
    history = fit(Lit(), data, max_epochs=1, clients_per_round=2).history
    assert history.column("size") == [pytest.approx((90 * 90 + 30 * 30) / 120)]


def test_a_layer_that_the_first_batch_skips_still_takes_part(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        batch_of_all_layers = 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                return None
            layers = self.net if batch_idx == self.batch_of_all_layers else nn.Sequential(self.net[0], self.net[5])
            return nn.functional.cross_entropy(layers(batch[0]), batch[1])

    class Never(Lit):
        batch_of_all_layers = -1

    ls.algorithms.spectral_start(lit := Lit(), 0.5)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    assert not torch.equal(fit(lit, data).module.net[2].weight, before)
    with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient to these sharded layers: net\.2\."):
        fit(Never(), data)


def test_outputs_of_a_step_are_what_lightning_gives(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[dict[str, Any]] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx).reshape(1)
            return [loss, UserDict(loss=loss, more=7), None][batch_idx]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    fit(Lit(), data, max_epochs=1, clients_per_round=1)  # batches of 4, 4 and 2
    assert [sorted(outputs) for outputs in seen] == [["loss"], ["loss", "more"], []]
    assert not any(outputs["loss"].requires_grad for outputs in seen[:2])


@pytest.mark.parametrize(
    ("output", "message"),
    [({"train_loss": 1.0}, r"mapping without 'loss' \(keys: train_loss\)"), (3.0, "must return a tensor.*got float")],
)
def test_an_output_without_a_loss_is_refused(output: Any, message: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    lit = type("Lit", (lit_mlp,), {"training_step": lambda self, batch, batch_idx: output})
    with pytest.raises(ls.ClientError, match=message):
        fit(lit(), data)


@pytest.mark.parametrize("form", ["args", "keyword only", "keywords"])
def test_signatures_of_steps(form: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    def step(self: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    kinds: dict[str, Any] = {
        "args": lambda self, *args: step(self, args[0]),
        "keyword only": lambda self, batch, *, extra=None: step(self, batch),
        "keywords": lambda self, batch, **more: {"loss": step(self, batch), "more": 1},
    }
    lit = type("Lit", (lit_mlp,), {"training_step": kinds[form], "validation_step": kinds[form]})
    assert fit(lit(), data, max_epochs=1).history.column("fl/loss")[0] > 0


def test_evaluation_data_of_any_kind(lit_mlp: Any, data: Any, toy: Any, quiet: Any) -> None:
    class Plain:
        def __len__(self) -> int:
            return len(toy)

        def __getitem__(self, index: int) -> Any:
            return toy[index]

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    kind = type("Lit", (lit_mlp,), {"validation_step": validation_step})
    scores = []
    for val in (toy, Plain(), torch.utils.data.DataLoader(toy, batch_size=64), [toy, Plain()]):
        data.val = val
        model = ls.FederatedModule(seeded(kind), clients_per_round=2)
        (*_, last) = pl.Trainer(**quiet).validate(model, data, verbose=False)
        scores.append(next(value for name, value in last.items() if name.startswith("val_loss")))
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-5)


def test_metrics_of_a_client_never_sync_over_processes(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[bool] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.train_acc.distributed_available_fn = lambda: True

        def on_train_epoch_end(self) -> None:
            seen.append(self.train_acc.distributed_available_fn())

    fit(Lit(), data, max_epochs=1)
    assert seen == [False] * 3


def test_a_metric_that_is_no_part_of_the_module_starts_empty_for_each_client(lit_mlp: Any, data: Any, fit: Fit) -> None:
    counts: list[list[int]] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.listed, self.named, self.pair = [MeanMetric()], {"a": [MeanMetric()]}, (0, MeanMetric())
            self.beside = SimpleNamespace(mean=MeanMetric())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            metrics = [self.listed[0], self.named["a"][0], self.pair[1], self.beside.mean]
            for metric in metrics:
                metric.update(1.0)
            counts.append([metric.update_count for metric in metrics])
            return super().training_step(batch, batch_idx)

    fit(Lit(), data, max_epochs=1)
    assert counts == [[step] * 4 for _ in range(3) for step in (1, 2, 3)]  # three clients of three batches


def test_a_value_under_the_name_of_the_federations_own_metric_is_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("fl/loss", 7.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="`training_step` logs fl/loss, under which the federation logs"):
        fit(Lit(), data)
