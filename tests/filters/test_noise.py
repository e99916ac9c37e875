"""A device that hides its updates from the server: what leaves it, and how the round goes on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_line import line_of, remote, toy_client_data
from federation import Fit, same_state, seeded
from other_process import toy_data
from torch import Tensor, nn
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.device import DeviceTurn, Instructions
from lightning_spectral.client.masking import Parties
from lightning_spectral.errors import DeviceError
from lightning_spectral.filters import Filter
from lightning_spectral.filters.noise import NoiseEnd
from lightning_spectral.network import ClientData, LocalNoise
from lightning_spectral.network.line import Question
from lightning_spectral.network.messages import record_of
from lightning_spectral.protocol.records import Download, LoggedValue, Upload, WorkUnit
from lightning_spectral.protocol.rng import SecretNormals

CLIENT = WorkUnit(0)
SHAPES = {"weight": (3, 4), "bias": (5,)}
NO_NOISE = partial(torch.zeros, dtype=torch.float64)
SETTINGS: dict[str, Any] = {"clients_per_round": 12, "local_epochs": 2, "seed": 3, "max_epochs": 2}
BARELY = LocalNoise(clip=1e3, noise_multiplier=1e-9)  # shortens nothing, and moves nothing that a test sees


def drawn(scale: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def turn_of(sent: dict[str, Tensor], buffers: Sequence[str] = ()) -> DeviceTurn:
    """The turn of a client that was sent some tensors, in a module with some buffers."""
    client = nn.Module()
    for name in buffers:
        client.register_buffer(name, sent[name])
    return DeviceTurn(client, Download(CLIENT, 1.0, sent), {}, Parties())


def left(noise: LocalNoise, sent: dict[str, Tensor], upload: Upload, buffers: Sequence[str] = ()) -> Upload:
    """What leaves the device in place of an upload."""
    upload, kept = NoiseEnd(noise).leave(turn_of(sent, buffers), upload)
    assert kept == {}
    return upload


def hidden(noise: LocalNoise, change: dict[str, Tensor], normals: Callable[[int], Tensor] | None = NO_NOISE) -> Tensor:
    """What a device sends after a change, minus what it was sent."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    upload = Upload(CLIENT, {name: value.double() for name, value in change.items()})
    upload = left(noise, zeros, upload) if normals is None else NoiseEnd(noise).hidden(turn_of(zeros), upload, normals)
    return torch.cat([upload.tensors[name].flatten() for name in sorted(SHAPES)])


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.1, 1.0, 1e6])
def test_a_change_is_shortened_over_all_tensors_together(scale: float) -> None:
    noise = LocalNoise(clip=0.5, noise_multiplier=2.0)
    change = drawn(scale, seed=1)
    vector = torch.cat([change[name].flatten() for name in sorted(SHAPES)]).double()
    found = hidden(noise, change)
    expected = vector * min(1.0, 0.5 / max(float(vector.norm()), 1e-300))
    assert float(found.norm()) <= 0.5
    assert float((found - expected).abs().max()) <= 2.0**-19  # one step of the grid, of noise with deviation 1


@pytest.mark.slow
def test_noise_has_its_deviation_in_every_coordinate() -> None:
    """Five deviations of the estimates themselves."""
    noise, count, normals = LocalNoise(clip=0.5, noise_multiplier=3.0), 4000, SecretNormals(b"key")
    found = torch.stack([hidden(noise, drawn(0.0, 0), normals) for _ in range(count)]) / 1.5
    assert float(found.mean(0).abs().max()) < 5 / math.sqrt(count)
    covariance = found.T @ found / count
    assert float((covariance.diagonal() - 1).abs().max()) < 5 * math.sqrt(2 / count)
    assert float(covariance.fill_diagonal_(0).abs().max()) < 5 / math.sqrt(count)


def test_values_are_on_a_grid_that_no_change_decides() -> None:
    for scale in (0.0, 1e-9, 0.3, 100.0):
        steps = hidden(LocalNoise(clip=0.5, noise_multiplier=2.0), drawn(scale, 2), normals=None) * 2.0**19
        assert torch.equal(steps, steps.round())


def test_noise_is_a_secret_that_is_drawn_anew() -> None:
    noise = LocalNoise(clip=0.5, noise_multiplier=1.0)
    torch.manual_seed(0)
    first = hidden(noise, drawn(0.0, 0), normals=None)
    torch.manual_seed(0)
    assert not torch.equal(hidden(noise, drawn(0.0, 0), normals=None), first)


def test_nothing_but_the_values_is_said() -> None:
    values = {"w": torch.zeros(2)}
    told = Upload(
        CLIENT,
        values,
        num_steps=3,
        loss=0.4,
        logged={"acc": LoggedValue(1.0, prog_bar=False, logger=True)},
        seconds={"train": 2.0},
        unreached=("w",),
        untrained_rows={"w": torch.tensor([0])},
        discarded=("w",),
        put_back=("w",),
        loss_before=0.5,
    )
    assert Instructions(DenseSide(("w",)), {"LocalNoise": NoiseEnd(BARELY)}).says_nothing
    found = left(BARELY, values, told).without_figures()  # as a device sends it that says nothing
    assert repr(replace(found, tensors={})) == repr(Upload(CLIENT, {}))


def test_an_upload_that_is_left_out_has_no_values() -> None:
    after = {name: value.double() for name, value in drawn(1.0, 0).items()}
    upload = Upload(CLIENT, after, left_out="no_update")
    assert left(LocalNoise(clip=0.5, noise_multiplier=2.0), after, upload).tensors == {}


def test_a_change_that_is_not_finite_is_left_out() -> None:
    after = Upload(CLIENT, {"w": torch.tensor([1.0, math.nan])})
    found = left(LocalNoise(clip=1.0, noise_multiplier=1.0), {"w": torch.zeros(2)}, after)
    assert (found.left_out, dict(found.tensors)) == ("not_finite", {})


@pytest.mark.parametrize(
    ("tensors", "buffers", "words"),
    [
        ({"w:levels": torch.zeros(2)}, [], "no new value of what this device was sent"),
        ({"w": torch.zeros(3)}, [], "no new value of what this device was sent"),
        ({"w": torch.zeros(2, dtype=torch.int8)}, [], "no new value"),
        ({"w": torch.zeros(2)}, ["w"], "a buffer: leave it at the server"),
    ],
)
def test_what_cannot_be_hidden_is_refused(tensors: Any, buffers: Any, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        left(LocalNoise(clip=1.0, noise_multiplier=1.0), {"w": torch.zeros(2)}, Upload(CLIENT, tensors), buffers)


def test_a_device_that_hides_its_updates_does_not_evaluate() -> None:
    examples = toy_client_data()[0]
    with pytest.raises(ValueError, match="leave one out"):
        ClientData(examples, val=examples, local_noise=BARELY)
    with pytest.raises(TypeError, match="LocalNoise"):
        ClientData(examples, local_noise=0.5)  # type: ignore[arg-type]


def noisy_line(noise: LocalNoise, lit: Any = LitMLP, spoil: Any = None) -> Any:
    datas = [ClientData(examples, batch_size=4, local_noise=noise) for examples in toy_client_data()]
    return line_of([{"": lit}] * 12, [{"": data} for data in datas], **({} if spoil is None else {"spoil": spoil}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), ls.SpectralSharding(ls.TopN(), keep_ratio=0.4), ls.Ditto(), ls.LoRA(2)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_fit_is_that_of_the_simulation_but_for_the_noise(algorithm: Any, fit: Fit) -> None:
    theirs = fit(seeded(LitMLP), toy_data(), algorithm=algorithm, **SETTINGS)
    answers: list[Upload] = []

    def note(question: Question, answer: dict[str, bytes]) -> dict[str, bytes]:
        answers.append(record_of(answer, Upload))
        return answer

    ours = fit(seeded(LitMLP), remote(noisy_line(BARELY, spoil=note)), algorithm=algorithm, **SETTINGS)
    torch.testing.assert_close(ours.tensors, theirs.tensors, rtol=0, atol=1e-4)
    assert not same_state(ours.tensors, theirs.tensors)
    assert len(answers) == 24
    for upload in answers:
        assert repr(replace(upload, tensors={})) == repr(Upload(upload.unit, {}))
    louder = LocalNoise(clip=1e3, noise_multiplier=5e-5)
    loud = fit(seeded(LitMLP), remote(noisy_line(louder)), algorithm=algorithm, **SETTINGS)
    apart = [(loud.tensors[n] - t).abs().max() for n, t in theirs.tensors.items() if t.dtype.is_floating_point]
    assert max(apart) > 0.005


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": ls.QFedAvg(), "clients_per_round": 12},
        {"participation": ls.LossVarianceReduced(active=5, measure="all"), "clients_per_round": None},
    ],
    ids=["algorithm", "sampler"],
)
def test_a_server_that_needs_losses_is_told_that_there_are_none(options: dict[str, Any], fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"hides its loss .`local_noise`.* such as FedAvg and Uniform"):
        fit(seeded(LitMLP), remote(noisy_line(BARELY)), **{**SETTINGS, **options})


@dataclass(frozen=True)
class Thief(Filter):
    """A server's filter with the name of the owner's noise, and next to no noise."""

    @property
    def name(self) -> str:
        return "noise of the owner"

    def device(self, half: Any) -> Any:
        return NoiseEnd(BARELY)


def test_a_server_cannot_replace_the_noise_of_the_owner(fit: Fit) -> None:
    loud = LocalNoise(clip=1e3, noise_multiplier=1e-3)
    with pytest.raises(ls.ClientError, match="which is this device's own"):
        fit(seeded(LitMLP), remote(noisy_line(loud)), filters=[Thief()], **SETTINGS)


@pytest.mark.slow
def test_noise_is_added_before_masks(fit: Fit) -> None:
    pytest.importorskip("cryptography", reason="masks need the extra `secure`")
    theirs = fit(seeded(LitMLP), toy_data(), **SETTINGS)
    for multiplier, is_near in ((1e-9, True), (1e-3, False)):
        line = noisy_line(LocalNoise(clip=1e3, noise_multiplier=multiplier))
        ours = fit(seeded(LitMLP), remote(line), filters=[ls.SecureSums()], **SETTINGS)
        farthest = max(float((ours.tensors[n] - t).abs().max()) for n, t in theirs.tensors.items())
        assert (farthest < 1e-4) == is_near


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [ls.FedAvg(), ls.SpectralSharding(ls.TopN(), keep_ratio=0.4)], ids=["all", "terms"]
)
def test_a_federation_can_ask_all_its_clients_for_noise(algorithm: Any, fit: Fit) -> None:
    theirs = fit(seeded(LitMLP), toy_data(), algorithm=algorithm, **SETTINGS)
    ours = fit(seeded(LitMLP), toy_data(), algorithm=algorithm, filters=[BARELY], **SETTINGS)
    torch.testing.assert_close(ours.tensors, theirs.tensors, rtol=0, atol=1e-4)
    assert not same_state(ours.tensors, theirs.tensors)
    assert theirs.rows[0].keys() - ours.rows[0].keys() == {"fl/loss", "train_loss", "train_acc"}
    assert not any("fl/loss" in row for row in ours.rows)


@pytest.mark.parametrize(
    ("lit", "options", "words"),
    [
        (LitMLP, {"algorithm": ls.Scaffold()}, "send back nothing but new values .* Scaffold does not promise"),
        (LitMLP, {"algorithm": ls.QFedAvg()}, "send back nothing but new values .* QFedAvg does not promise"),
        (
            LitMLP,
            {"participation": ls.LossVarianceReduced(active=5), "clients_per_round": None},
            "LocalNoise hides the losses of clients, by which LossVarianceReduced draws them",
        ),
        (LitSmall, {}, r"would send back the buffers net\.1\.running_mean.* GroupNorm"),
        (LitMLP, {"callbacks": [ls.ClientEvaluation()]}, "hides the data of clients, of which ClientEvaluation would"),
        (LitMLP, {"algorithm": ls.Zampling(4, degree=3)}, "LocalNoise needs an algorithm .* Zampling does not promise"),
    ],
)
def test_a_federation_that_its_noise_does_not_suit_is_refused(lit: Any, options: Any, words: str, fit: Fit) -> None:
    with pytest.raises(ValueError, match=words):
        fit(seeded(lit), toy_data(), **{**SETTINGS, "filters": [BARELY], **options})
