"""Secure sums in a simulation: the bits of plain sums, whoever drops out, and nothing else of single clients."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client_parallel_runs import WithLimits, uneven_data
from federation import Fit, check_resumes, same_state, seeded
from other_process import toy_data
from toy_models import LitMLP, LitSmall, Remembering, Renamed, variant

pytest.importorskip("cryptography", reason="masks need the extra `secure`")

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.filters.secure_sums import MaskEnd
from lightning_spectral.plugin.callbacks import BatchNormEstimation, UpdateAlignment
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor, SequentialExecutor


class UploadsMore(ls.FedAvg):
    """Says nothing of its device half."""

    side = type("OtherSide", (DenseSide,), {})


SETTINGS: dict[str, Any] = {"clients_per_round": 6, "local_epochs": 2, "seed": 3, "max_epochs": 3}
SECURE = ls.SecureSums(threshold=0.6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lies_in", [0, 2])
def test_a_round_with_a_lie_changes_nothing(lies_in: int, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, options = MaskEnd.leave, {**SETTINGS, "filters": [SECURE], "clients_per_round": 12}
    before = fit(seeded(LitMLP), toy_data(), **{**options, "max_epochs": lies_in}) if lies_in else None

    def lies(end: MaskEnd, turn: Any, upload: Upload) -> Any:
        said, kept = leave(end, turn, upload)
        moved = 2**58 if (turn.download.round_idx, turn.download.unit.client_id) == (lies_in, 5) else 0
        return replace(said, tensors={name: steps + moved for name, steps in said.tensors.items()}), kept

    monkeypatch.setattr(MaskEnd, "leave", lies)
    with pytest.warns(ls.SpectralWarning, match=rf"Round {lies_in}: the mean change of clients 0, 1, .*, 11 has norm"):
        fitted = fit(seeded(LitMLP), toy_data(), **{**options, "max_epochs": lies_in + 1})
    assert same_state(fitted.state, seeded(LitMLP).state_dict() if before is None else before.state)


class LitDiverges(LitMLP):
    """Some clients' updates are not finite, and some take no step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        kind = int(batch[0].abs().sum() * 1000) % 40  # of the batch
        return None if kind == 1 else super().training_step(batch, batch_idx) * (torch.nan if kind == 2 else 1.0)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "everybody": (LitMLP, {}),
    "batch norm": (LitSmall, {}),
    "dropouts": (LitMLP, {"dropout": ls.ClientDropout(0.15)}),
    "diverging clients": (LitDiverges, {}),
    "half precision": (LitMLP, {"trainer": {"precision": "bf16-true"}}),
    "a server optimizer": (LitMLP, {"server_optimizer": ls.FedAdam(lr=0.01)}),
    "an unbiased sampler": (LitMLP, {"clients_per_round": None, "participation": ls.Uniform(active=6)}),
    "a subclass that changes nothing": (LitMLP, {"algorithm": Renamed()}),
    "personal layers": (LitMLP, {"filters": [ls.Personal(["net.5.*"])]}),
    "Ditto": (LitMLP, {"algorithm": ls.Ditto()}),
    "no local epochs": (LitMLP, {"local_epochs": 0}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*is left out of the average")
def test_sums_have_the_bits_of_those_without_masks(name: str, fit: Fit) -> None:
    lit, options = CASES[name]
    options = {"filters": [], **SETTINGS, **options}
    plain = fit(seeded(lit), toy_data(), **options)
    secure = fit(seeded(lit), toy_data(), **{**options, "filters": [*options["filters"], SECURE]})
    assert same_state(secure.tensors, plain.tensors)
    assert [row["fl/clients_left_out"] for row in secure.rows] == [row["fl/clients_left_out"] for row in plain.rows]
    assert any(row["fl/clients_left_out"] for row in plain.rows) == (name in ("dropouts", "diverging clients"))


class Watching(SequentialExecutor):
    """Keeps what devices are sent and what they send."""

    uploads: list[Upload]

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for upload in super().run(downloads):
            self.uploads.append(upload)
            yield upload


class Watched(ls.FederatedModule):
    def make_executor(self, engine: Any) -> Executor:
        executor: Any = super().make_executor(engine)
        watching = Watching(executor.device)
        watching.uploads = self.uploads = []
        self.parties = executor.device.parties
        return watching


def test_uploads_hold_masked_numbers_and_nothing_of_single_examples(fit: Fit) -> None:
    """Sixteen bytes of every tensor at least, so that a masked number is never one that the change alone would give."""
    makes: dict[str, Any] = {"clients_per_round": 6, "seed": 3}
    plain, secure = (Watched(seeded(LitMLP), filters=choice, **makes) for choice in ([], [SECURE]))
    rows = [fit(model, toy_data()).rows[0] for model in (plain, secure)]
    assert rows[0].keys() - rows[1].keys() == {"fl/loss", "train_loss", "train_acc"}
    assert not any("values_not_finite" in name for name in rows[1])
    for ours, theirs in zip(secure.uploads, plain.uploads, strict=True):
        assert ours.num_steps == theirs.num_steps > 0
        assert (ours.logged, ours.untrained_rows) == ({}, {})
        assert ours.loss != ours.loss
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, steps in ours.tensors.items():
            assert (steps.dtype, steps.shape) == (torch.int64, theirs.tensors[name].shape)
    numbers = torch.cat([steps.flatten() for upload in secure.uploads for steps in upload.tensors.values()])
    assert len(numbers.unique()) == len(numbers)
    small = (numbers.abs() < 2**58).double().mean()  # those of changes all are; of uniform numbers one in 32
    assert abs(float(small) - 1 / 32) < 5 * (1 / 32 * 31 / 32 / len(numbers)) ** 0.5


def test_secrets_are_forgotten_once_they_are_used_or_another_round_begins(fit: Fit) -> None:
    """Clients that drop out reveal nothing, and keep theirs until the next round."""
    model = Watched(
        seeded(LitMLP), clients_per_round=6, dropout=ls.ClientDropout(0.15), filters=[SECURE], seed=SETTINGS["seed"]
    )
    dropped = [int(row["fl/left_out_dropped_out"]) for row in fit(model, toy_data(), max_epochs=3).rows]
    assert len(model.parties._parties) == dropped[-1] < sum(dropped)


def test_the_virtual_clock_counts_the_bytes_of_masked_uploads(fit: Fit) -> None:
    slow = ls.simulation.DeviceProfile(downlink=math.inf, uplink=1e3, macs_per_second=math.inf)
    options = {**SETTINGS, "max_epochs": 1, "clock": ls.VirtualClock(slow)}
    plain, secure = (
        fit(seeded(LitMLP), toy_data(), filters=choice, **options).history.rows[0] for choice in ([], [SECURE])
    )
    assert secure["fl/virtual_seconds"] == 2 * plain["fl/virtual_seconds"] > 0
    assert secure["fl/bytes_up"] == 2 * plain["fl/bytes_up"]


def test_a_client_that_moves_too_far_is_left_out(fit: Fit) -> None:
    """Its change needs a second sum, which has no masks; without them it counts."""

    def far(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = LitMLP.training_step(self, batch, batch_idx)
        return loss + (1e6 * self.net[5].bias.sum() if batch[0].max() > 4.0 else 0.0)

    lit_far = variant(LitMLP, training_step=far)
    options = {**SETTINGS, "max_epochs": 1, "clients_per_round": 12}
    assert not any(row["fl/clients_left_out"] for row in fit(seeded(lit_far), toy_data(), **options).rows)
    with pytest.warns(ls.SpectralWarning, match=r"client \d+ is left out .* too large to be summed"):
        secure = fit(seeded(lit_far), toy_data(), filters=[SECURE], **options)
    assert secure.rows[0]["fl/left_out_not_finite"] == 1


@pytest.mark.filterwarnings("ignore:.*is left out of the average")
def test_a_round_with_too_few_clients_fails_and_leaves_the_weights(fit: Fit) -> None:
    module = seeded(LitMLP)
    words = r"Round 0: \d of 6 clients have reported, and secure sums need 6 \(\d dropped out\); the server"
    with pytest.raises(ls.errors.RoundError, match=words):
        fit(module, toy_data(), filters=[ls.SecureSums(1.0)], dropout=ls.ClientDropout(0.5), **SETTINGS)
    assert same_state(module.state_dict(), seeded(LitMLP).state_dict())


def test_a_resumed_run_equals_an_uninterrupted_one(fit: Fit, tmp_path: Path) -> None:
    options = {name: value for name, value in SETTINGS.items() if name != "max_epochs"}
    check_resumes(fit, LitMLP, toy_data(), tmp_path, filters=[SECURE], **options)


def test_several_models_each_have_sums_of_their_own(quiet: Any) -> None:
    def weights(choice: Any) -> dict[str, torch.Tensor]:
        models = {name: ls.FederatedModule(seeded(LitMLP), filters=choice) for name in ("one", "two")}
        model = ls.MultiModelModule(models, participation=ls.Uniform(active=8), seed=5)
        trainer = ls.plugin.trainer.silent_trainer(max_epochs=2, accelerator="cpu", devices=1)
        trainer.fit(model, ls.MultiModelDataModule({name: toy_data() for name in models}))
        return dict(model.state_dict())

    assert same_state(weights([SECURE]), weights([]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sharding": (
        {"algorithm": ls.SpectralSharding()},
        "SecureSums needs an algorithm whose clients are needed for nothing but the sum of their changes, which "
        r"SpectralSharding does not promise: use another algorithm, such as FedAvg\.",
    ),
    "packing after masks": ({"filters": [SECURE, ls.TopK(0.1)]}, "SecureSums masks what TopK reads: leave one out"),
    "SCAFFOLD": (
        {"algorithm": ls.Scaffold()},
        "nothing but the sum of their changes, which Scaffold does not promise: use another",
    ),
    "a store": ({"algorithm": ls.StaleUpdates()}, "which StaleUpdates does not promise"),
    "FIARSE": ({"algorithm": ls.FIARSE()}, "which FIARSE does not promise"),
    "LoRA": ({"algorithm": ls.LoRA(1)}, "which LoRA does not promise"),
    "a subclass's uploads": (
        {"algorithm": UploadsMore()},
        r"which UploadsMore does not promise: .*let UploadsMore say so: `promises = Promises\(",
    ),
    "a subclass's sums": (
        {"algorithm": Remembering()},
        r"which Remembering does not promise: .*let Remembering say so: `promises = Promises\(",
    ),
    "smallest values": ({"module": WithLimits}, "cannot hide smallest and largest values, which low would follow"),
    "losses": (
        {"clients_per_round": None, "participation": ls.LossVarianceReduced(active=3)},
        "SecureSums hides the losses and updates of single clients, by which LossVarianceReduced draws them",
    ),
    "norms": (
        {"clients_per_round": None, "participation": ls.UpdateVarianceReduced(active=3)},
        "by which UpdateVarianceReduced draws them",
    ),
    "one client": ({"clients_per_round": 1}, "at least two clients a round"),
    "evaluation": (
        {"callbacks": [ls.ClientEvaluation()], "held_out": 0.3},
        "SecureSums hides single clients, and ClientEvaluation reads their data, figures or updates",
    ),
    "estimation": ({"module": LitSmall, "callbacks": [BatchNormEstimation()]}, "BatchNormEstimation reads"),
    "alignment": ({"callbacks": [UpdateAlignment()]}, "UpdateAlignment reads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_single_clients_is_refused_before_the_first_round(name: str, fit: Fit) -> None:
    options, message = REFUSED[name]
    options = {"clients_per_round": 6, "module": LitMLP, "filters": [SECURE], **options}
    make, data = options.pop("module"), uneven_data(client_val_fraction=options.pop("held_out", 0.0))
    with pytest.raises(ValueError, match=message):
        fit(seeded(make), data, **options)


def test_an_executor_that_carries_no_messages_says_so(fit: Fit) -> None:
    class Elsewhere(Executor):
        def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
            raise AssertionError

    class Sent(ls.FederatedModule):
        def make_executor(self, engine: Any) -> Executor:
            return Elsewhere()

    with pytest.raises(NotImplementedError, match="Elsewhere carries no messages of secure sums; define its method"):
        fit(Sent(seeded(LitMLP), clients_per_round=4, filters=[SECURE]), toy_data())


def test_what_is_missing_is_said_once(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(seeded(LitMLP), toy_data(), filters=[SECURE], **SETTINGS)
    assert caplog.text.count("clients keep their losses and what they log: there is no `fl/loss`") == 1


@pytest.mark.parametrize("number", range(2, 40))
@pytest.mark.parametrize("threshold", [0.51, 0.6, 0.7, 2 / 3, 1.0])
def test_the_fewest_clients_are_the_share_and_more_than_half(threshold: float, number: int) -> None:
    least = ls.SecureSums(threshold).least(number)
    assert number < 2 * least <= 2 * max(number, 2)
    assert least - 1 < threshold * number + 1e-6
    assert least >= threshold * number - 1e-6
