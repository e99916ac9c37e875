"""What a user's steps may take, return and log, and what their runs draw and average."""

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from observed_runs import acting
from torch import nn
from torchmetrics import MeanMetric
from toy_models import variant

import lightning_spectral as ls


def test_what_clients_log_is_weighted_by_their_examples(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    kind = variant(lit_mlp, before_step=lambda lit, batch: lit.log("size", float(len(batch[0]))))
    data = ls.FederatedDataModule(toy, ls.NaturalPartitioner([0] * 90 + [1] * 30), batch_size=1000)
    history = fit(kind(), data, max_epochs=1, clients_per_round=2).history
    assert history.column("size") == [pytest.approx((90 * 90 + 30 * 30) / 120)]


def test_a_layer_that_the_first_batch_skips_still_takes_part(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return None
        layers = self.net if batch_idx == self.batch_of_all_layers else nn.Sequential(self.net[0], self.net[5])
        return nn.functional.cross_entropy(layers(batch[0]), batch[1])

    lit, never = (variant(lit_mlp, training_step=training_step, batch_of_all_layers=i)() for i in (1, -1))
    ls.algorithms.spectral_start(lit, 0.5)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    assert not torch.equal(fit(lit, data).module.net[2].weight, before)
    with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient to these sharded layers: net\.2\."):
        fit(never, data)


def test_outputs_of_a_step_are_what_lightning_gives(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[dict[str, Any]] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = lit_mlp.training_step(self, batch, batch_idx).reshape(1)
        return [loss, UserDict(loss=loss, more=7), None][batch_idx]

    kind = variant(
        lit_mlp, training_step=training_step, on_train_batch_end=lambda self, outputs, *_: seen.append(outputs)
    )
    fit(kind(), data, max_epochs=1, clients_per_round=1)  # batches of 4, 4 and 2
    assert [sorted(outputs) for outputs in seen] == [["loss"], ["loss", "more"], []]
    assert not any(outputs["loss"].requires_grad for outputs in seen[:2])


@pytest.mark.parametrize(
    ("output", "message"),
    [({"train_loss": 1.0}, r"mapping without 'loss' \(keys: train_loss\)"), (3.0, "must return a tensor.*got float")],
)
def test_an_output_without_a_loss_is_refused(output: Any, message: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    lit = variant(lit_mlp, training_step=lambda self, batch, batch_idx: output)
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
    lit = variant(lit_mlp, training_step=kinds[form], validation_step=kinds[form])
    assert fit(lit(), data, max_epochs=1).history.column("fl/loss")[0] > 0


def test_evaluation_data_of_any_kind(lit_mlp: Any, data: Any, toy: Any, quiet: Any) -> None:
    class Plain:
        def __len__(self) -> int:
            return len(toy)

        def __getitem__(self, index: int) -> Any:
            return toy[index]

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    scores = []
    for val in (toy, Plain(), torch.utils.data.DataLoader(toy, batch_size=64), [toy, Plain()]):
        data.val = val
        model = ls.FederatedModule(seeded(variant(lit_mlp, validation_step=validation_step)), clients_per_round=2)
        (*_, last) = pl.Trainer(**quiet).validate(model, data, verbose=False)
        scores.append(next(value for name, value in last.items() if name.startswith("val_loss")))
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-5)


def test_metrics_of_a_client_never_sync_over_processes(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[bool] = []
    kind = variant(
        lit_mlp,
        lambda lit: setattr(lit.train_acc, "distributed_available_fn", lambda: True),
        on_train_epoch_end=lambda self: seen.append(self.train_acc.distributed_available_fn()),
    )
    fit(kind(), data, max_epochs=1)
    assert seen == [False] * 3


def test_a_metric_that_is_no_part_of_the_module_starts_empty_for_each_client(lit_mlp: Any, data: Any, fit: Fit) -> None:
    counts: list[list[int]] = []

    def prepare(lit: Any) -> None:
        lit.listed, lit.named, lit.pair = [MeanMetric()], {"a": [MeanMetric()]}, (0, MeanMetric())
        lit.beside = SimpleNamespace(mean=MeanMetric())

    def update(lit: Any, batch: Any) -> None:
        metrics = [lit.listed[0], lit.named["a"][0], lit.pair[1], lit.beside.mean]
        for metric in metrics:
            metric.update(1.0)
        counts.append([metric.update_count for metric in metrics])

    fit(variant(lit_mlp, prepare, before_step=update)(), data, max_epochs=1)
    assert counts == [[step] * 4 for _ in range(3) for step in (1, 2, 3)]  # three clients of three batches


def test_a_value_under_the_name_of_the_federations_own_metric_is_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    kind = variant(lit_mlp, before_step=lambda lit, batch: lit.log("fl/loss", 7.0))
    with pytest.raises(ValueError, match="`training_step` logs fl/loss, under which the federation logs"):
        fit(kind(), data)


def test_batch_norm_statistics_are_the_mean_of_clients_and_counters_the_servers(
    lit_mlp: Any, data: Any, fit: Fit
) -> None:
    module = lit_mlp(norm=True)
    means: list[torch.Tensor] = []
    keep = acting(
        on_client_end=lambda trainer, model, turn: means.append(turn.upload.tensors["net.1.running_mean"].clone())
    )
    fit(module, data, max_epochs=1, callbacks=[keep])
    torch.testing.assert_close(module.net[1].running_mean, torch.stack(means).mean(0))
    assert module.net[1].num_batches_tracked == 0


def test_dropout_draws_do_not_touch_the_global_generators(lit: Any, data: Any, fit: Fit) -> None:
    state = torch.get_rng_state()
    data.val = None
    fit(lit, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_runs_with_one_seed_agree_and_with_two_do_not(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(0)
        module = lit_mlp(dropout=0.5)
        torch.manual_seed(noise)  # the global state outside must not matter
        return fit(module, data, seed=seed).weights

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


def test_one_algorithm_object_serves_two_runs(lit_mlp: Any, data: Any, fit: Fit) -> None:
    used = ls.SpectralSharding(keep_ratio=0.5)
    fit(seeded(lit_mlp, width=12), data, algorithm=used)
    again, fresh, other = (
        fit(seeded(lit_mlp, width=20), data, algorithm=algorithm).state
        for algorithm in (used, ls.SpectralSharding(keep_ratio=0.5), ls.SpectralSharding(keep_ratio=0.3))
    )
    assert same_state(again, fresh)
    assert not same_state(again, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("design", [None, ls.ConditionalPoisson(), ls.SuccessiveSampling()], ids=repr)
@pytest.mark.parametrize("strategy", [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()], ids=repr)
def test_every_strategy_trains_with_every_design(strategy: Any, design: Any, lit: Any, data: Any, fit: Fit) -> None:
    ls.algorithms.spectral_start(lit, 0.3)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    assert len(fit(lit, data, algorithm=ls.SpectralSharding(strategy, {0.3: 0.5, 0.6: 0.5}, design=design)).rows) == 2
    assert not torch.equal(before, lit.net[2].weight)
    assert bool(torch.isfinite(lit.net[2].weight).all())


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5)])
def test_a_spectral_norm_has_unit_vectors_after_a_run(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = seeded(lit_mlp, lr=0.3, width=16)
    module.net[0] = seeded(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)))
    module.net.insert(1, seeded(nn.Linear, 16, 16))
    normed = fit(module, data, algorithm=algorithm, max_epochs=5).module.eval().net[0]
    for vector in normed.parametrizations.weight[0].buffers():
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)
