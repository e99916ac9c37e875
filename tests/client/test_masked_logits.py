"""Masked logits are those of the published loss, act on one client alone, and are refused where they cannot act."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from masked_heads import (
    ALGORITHMS,
    OWN,
    LitHead,
    LitPresent,
    LitZeros,
    check_by_hand,
    clients,
    device_of,
    masked,
    present,
    train_by_hand,
    turn,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from toy_models import step_by_hand

import lightning_spectral as ls
from lightning_spectral.protocol.records import Download, WorkUnit

INF = math.inf


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds in which all clients take part for two epochs."""
    return partial(fit, max_epochs=2, local_epochs=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_is_that_of_a_module_that_masks_by_hand(name: str, fit: Fit) -> None:
    check_by_hand(fit, LitZeros, ls.MaskedLogits(), algorithm=ALGORITHMS[name])


def test_minus_infinity_is_the_loss_of_the_present_classes_alone(fit: Fit) -> None:
    data = clients()
    data.train.tensors = (data.train.tensors[0].double(), data.train.tensors[1])
    fits = [
        fit(seeded(lit).double(), data, local_hooks=hooks).weights
        for lit, hooks in (
            (LitHead, [ls.MaskedLogits(absent=-INF)]),
            (LitPresent, []),
            (LitHead, [ls.MaskedLogits(absent=0.0)]),
        )
    ]
    assert torch.isfinite(fits[0]).all()
    # exp(-inf) adds zeros to the same sums, perhaps in another order: some 50 steps of a few roundings of 1e-16 each
    torch.testing.assert_close(fits[0], fits[1], rtol=0.0, atol=1e-13)
    assert (fits[0] - fits[2]).abs().max() > 1e-3


def test_one_clients_steps_written_out() -> None:
    """Without the package's loop: batches, masked loss, gradient, step."""
    data, lit = clients(), seeded(LitHead)
    device = device_of(lit, data, ls.MaskedLogits())
    for client_id in (0, 3, 2):  # all train in the same memory in turn
        asked = Download(WorkUnit(client_id), 1.0, {}, local_epochs=2)
        upload = turn(device, asked)
        net, absent = seeded(LitHead), sorted(set(range(5)) - set(OWN[client_id]))
        mask = partial(torch.index_fill, dim=1, index=torch.tensor(absent), value=0.0)
        train_by_hand(net, data, asked, mask)
        assert same_state(dict(upload.tensors), dict(net.state_dict()))
        assert {name: rows.tolist() for name, rows in upload.untrained_rows.items()} == {
            "head.weight": absent,
            "head.bias": absent,
        }
        assert torch.equal(upload.tensors["head.weight"][absent], lit.head.weight[absent])  # no gradient, no decay
        assert not lit.head._forward_hooks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*ALGORITHMS, "width"])
def test_clients_with_all_classes_train_as_without_the_hook(name: str, fit: Fit) -> None:
    data, algorithm = partial(clients, [range(5)] * 4), ALGORITHMS.get(name, ls.WidthSharding(keep_ratio=0.5))
    plain = fit(seeded(LitHead), data(), algorithm=algorithm)
    for absent in (0.0, -INF):
        ours = fit(seeded(LitHead), data(), algorithm=algorithm, local_hooks=[ls.MaskedLogits(absent=absent)])
        assert same_state(ours.tensors, plain.tensors)
        assert ours.rows == plain.rows


@pytest.mark.parametrize("hook", [ls.MaskedLogits(), ls.CalibratedLogits(rounds=5)])
def test_evaluation_sees_the_logits_as_they_are_and_nothing_stays_behind(hook: Any, fit: Fit) -> None:
    data = clients(client_val_fraction=0.3)
    evaluation = ls.ClientEvaluation()
    fitted = fit(seeded(LitHead), data, local_hooks=[hook], callbacks=[evaluation])
    x, y = data.train.tensors
    with torch.no_grad():
        assert fitted.logged["val_loss"] == pytest.approx(float(F.cross_entropy(fitted.module(x), y)), rel=1e-6)
        assert evaluation.table is not None
        for row in evaluation.table.rows:
            held_out = data.held_out[row.client_id]
            own = F.cross_entropy(fitted.module(x[held_out]), y[held_out])
            assert row.metrics["val_loss"] == pytest.approx(float(own), rel=1e-6)
    assert not any(layer._forward_hooks for layer in fitted.module.modules())


def test_losses_that_a_sampler_measures_are_masked(fit: Fit) -> None:
    sampled = {"clients_per_round": None, "participation": ls.LossVarianceReduced(active=2)}
    check_by_hand(fit, LitZeros, ls.MaskedLogits(), **sampled)


def test_a_failure_leaves_no_mask() -> None:
    head = nn.Linear(2, 3)
    with pytest.raises(KeyError), ls.MaskedLogits("").while_training(head, present(0)):
        raise KeyError
    assert not head._forward_hooks


def test_classes_are_where_a_layer_has_its_outputs() -> None:
    """A linear layer has them last; others have them in dimension 1, as the cross-entropy does."""
    with torch.no_grad():
        found = masked(nn.Linear(2, 4), torch.ones(3, 5, 2), 1, 3) == 7
        assert torch.equal(found.all(1).all(0), torch.tensor([True, False, True, False]))
        found = masked(nn.Conv1d(2, 4, 1), torch.ones(3, 2, 5), 1, 3, -100) == 7  # -100 is ignored by losses
        assert torch.equal(found.all(2).all(0), torch.tensor([True, False, True, False]))
        assert int(found.sum()) == 3 * 2 * 5


class LitManual(LitHead):
    """Two optimizers, stepped by hand; counts the hooks of the head in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> Tensor:
        COUNTS.append(len(self.head._forward_hooks))
        loss = super().training_step(batch)
        step_by_hand(self, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.3) for part in (self.net, self.head)]


COUNTS: list[int] = []


def test_a_client_with_several_optimizers_is_masked_once(fit: Fit) -> None:
    COUNTS.clear()
    hooks = [ls.MaskedLogits()]
    ours = fit(seeded(LitManual), clients(), local_hooks=hooks)
    assert set(COUNTS) == {1}
    loop = fit(seeded(LitHead), clients(), local_hooks=hooks)
    assert same_state(ours.state, loop.state)


def test_a_run_with_masked_logits_resumes(fit: Fit, tmp_path: Path) -> None:
    options = {"local_hooks": [ls.MaskedLogits(absent=-INF)], "algorithm": ls.WidthSharding(keep_ratio=0.5)}
    check_resumes(fit, LitHead, clients(), tmp_path, **options)


@pytest.mark.parametrize(("absent", "expected"), [(-1e9, -65504.0), (1e9, 65504.0), (0.5, 0.5), (-INF, -INF)])
def test_a_constant_that_half_precision_lacks_is_its_largest_number(absent: float, expected: float) -> None:
    head = nn.Linear(2, 3).half()
    with ls.MaskedLogits(layer="", absent=absent).while_training(head, present(0, 2)):
        assert head(torch.ones(1, 2).half())[0, 1] == expected


def test_each_of_several_models_masks_by_the_labels_of_its_own_data(quiet: Any) -> None:
    def fitted(lit: Any, hooks: Any) -> Any:
        models = {name: ls.FederatedModule(seeded(lit), local_hooks=hooks) for name in ("one", "two")}
        federation = ls.MultiModelModule(models, participation=ls.FullParticipation())
        other = clients([range(4)] * 4) if hooks else clients()
        data = ls.MultiModelDataModule({"one": clients(), "two": other})
        pl.Trainer(max_epochs=2, num_sanity_val_steps=0, **quiet).fit(federation, data)
        return models["one"].module.state_dict()

    assert same_state(fitted(LitHead, [ls.MaskedLogits()]), fitted(LitZeros, []))


def test_a_hook_of_a_users_own_may_have_start_client_alone(fit: Fit) -> None:
    class Zero(ls.client.LocalHook):
        def start_client(self, module: nn.Module, optimizer: Any) -> Callable[[], None]:
            return optimizer.zero_grad

    lit = seeded(LitHead)
    with warnings.catch_warnings():
        assert same_state(fit(lit, clients(), local_hooks=[Zero()]).state, seeded(LitHead).state_dict())


class Letters(Dataset[Any]):
    """Stores labels from 1 on, as EMNIST does its letters, and its examples have them from 0 on."""

    def __init__(self, examples: TensorDataset) -> None:
        self.x, labels = examples.tensors
        self.targets = labels + 1

    def target_transform(self, label: int) -> int:
        return label - 1

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], self.target_transform(int(self.targets[index]))


def test_the_classes_are_those_after_the_target_transform(fit: Fit) -> None:
    plain = clients()
    stored_otherwise = ls.FederatedDataModule(
        Letters(plain.train), plain.partitioner, val=plain.val, batch_size=plain.batch_size
    )
    fits = [fit(seeded(LitHead), data, local_hooks=[ls.MaskedLogits()]) for data in (plain, stored_otherwise)]
    assert same_state(fits[0].state, fits[1].state)
    assert torch.equal(stored_otherwise.labels, plain.labels + 1)  # the partition is that of what is stored


def with_targets(target: Tensor) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(TensorDataset(torch.zeros(12, 7), target), ls.IIDPartitioner(4))


@pytest.mark.parametrize(
    ("hook", "data", "message"),
    [
        (ls.MaskedLogits("haed"), clients, r"LitHead has no layer 'haed'; it has 'head'"),
        (ls.MaskedLogits("net.0.weight"), clients, r"has no layer 'net\.0\.weight'; it has 'net\.0'"),
        (
            ls.MaskedLogits(),
            lambda: clients([(0, 5), (5,), (1,), (2,)]),
            r"the layer 'head' has 5 outputs, and there are examples of class 5; name the layer that makes the logits",
        ),
        (
            ls.MaskedLogits(),
            lambda: ls.FederatedDataModule([{"x": torch.zeros(7), "y": 0}] * 12, ls.IIDPartitioner(4)),
            r"MaskedLogits needs the class of .*labels=\.\.\.\)\. Examples of list must be",
        ),
        *(
            (ls.MaskedLogits(), partial(with_targets, target), "must be one integer per example, .*several classes, or")
            for target in (torch.rand(12), torch.rand(12, 5), torch.ones(12, 5).long(), torch.ones(12, 2, 2).long())
        ),
    ],
)
def test_what_cannot_be_masked_is_refused_before_training(hook: Any, data: Any, message: str, fit: Fit) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitHead), data(), local_hooks=[hook])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3)), r"the layer '' has 3 outputs, and there are examples of class 4"),
        (
            nn.Linear(2, 1),
            r"'' has one output, .* of class 4; a single logit cannot be changed by class: leave the hook out",
        ),
        (nn.LSTM(2, 5), r"the output of '' is tuple; name the layer that makes the logits"),
        (nn.Flatten(0), r"the output of '' is a tensor of shape \(4,\)"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(layer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked(layer, torch.ones(2, 2), 0, 4)


def test_a_layer_that_nobody_calls_is_warned_of(fit: Fit) -> None:
    lit = seeded(LitHead)
    lit.idle = nn.Linear(12, 5)
    with pytest.warns(ls.SpectralWarning, match="has changed nothing: the layer 'idle' was not called"):
        fit(lit, clients(), local_hooks=[ls.MaskedLogits("idle")])


def test_clients_that_take_no_steps_call_no_layer(fit: Fit) -> None:
    lit = seeded(LitHead)
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    fitted = fit(lit, clients(), local_epochs=0, local_hooks=[ls.MaskedLogits()])  # a warning is an error
    assert same_state(fitted.state, before)


def test_a_layer_inside_of_a_compiled_part_is_refused() -> None:
    lit = LitHead()
    lit.net, lit.head = (torch.compile(part, backend="eager") for part in (lit.net, lit.head))
    hook = ls.MaskedLogits("net._orig_mod.2")
    with pytest.raises(ValueError, match=r"inside of 'net', which is compiled"):
        hook.check(lit, lambda: torch.zeros(1, dtype=torch.int64))
    ls.MaskedLogits().check(lit, lambda: torch.zeros(1, dtype=torch.int64))
