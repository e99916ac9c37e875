"""Packed uploads against bare loops, in bytes and bounds, and from devices that pack what cannot be."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, Fitted, check_resumes, said_during, seeded
from other_process import toy_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, LitNet, toy_examples

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import instructions
from lightning_spectral.client.device import DeviceTurn
from lightning_spectral.client.masking import Parties
from lightning_spectral.filters.packing import ErrorFeedback
from lightning_spectral.network.messages import Part, record_of, record_parts
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.server import Faults, LeaveOut
from lightning_spectral.simulation import DeviceProfile

BOTH = [ls.TopK(0.1), ls.Int8()]
LR = 0.5
KEPT: dict[str, Any] = {"aggregation": ls.algorithms.FrozenA()}
NOT_KEPT = (
    "Int8 needs an algorithm whose clients send back the same tensors in every round, .* which LoRA does not promise: "
    r"use factors of one rank that are kept, without `merge_every`: LoRA\(8, aggregation=FrozenA\(\)\)"
)


def small() -> LitNet:
    return LitNet(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)), lr=LR)


def largest_tenth(due: Tensor) -> Tensor:
    """By sorting all entries."""
    flat, sent = due.flatten().tolist(), [0.0] * due.numel()
    for place in sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[: max(1, round(0.1 * len(flat)))]:
        sent[place] = flat[place]
    return torch.tensor(sent, dtype=due.dtype).view(due.shape)


def eight_bits(due: Tensor) -> Tensor:
    """Row by row."""
    rows = due.reshape(len(due) if due.ndim > 1 else 1, -1)
    return torch.stack([(row / (row.abs().max() / 127)).round() * (row.abs().max() / 127) for row in rows]).view_as(due)


@pytest.mark.parametrize(
    ("packing", "by_hand"), [(ls.TopK(0.1), largest_tenth), (ls.Int8(), eight_bits)], ids=["TopK", "Int8"]
)
def test_rounds_are_those_of_a_bare_loop(packing: Any, by_hand: Callable[[Tensor], Tensor], fit: Fit) -> None:
    examples = toy_examples()
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(num_clients=3), batch_size=40)
    fitted = fit(seeded(small), data, filters=[packing], clients_per_round=2, max_epochs=6)
    module, residuals = seeded(small), dict[tuple[int, str], Tensor]()
    for round_idx in range(6):
        mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
        for client in [row.client_id for row in fitted.ledger.rows if row.round_idx == round_idx]:
            x, y = (tensor[data.partition[client]] for tensor in examples.tensors)
            gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), list(module.parameters()))
            for name, gradient in zip(mean, gradients, strict=True):
                due = residuals.get((client, name), 0.0) - LR * gradient
                sent = by_hand(due)
                residuals[client, name] = due - sent
                mean[name] += sent / 2  # of two clients of the same size
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.add_(mean[name].to(p))
    torch.testing.assert_close(fitted.state, module.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("aggregation", "parts"),
    [
        (ls.algorithms.FrozenA(), ("B", "B")),
        (ls.algorithms.PaddedFactors(), ("BA", "BA")),
        (ls.algorithms.AlternatingFactors(), ("B", "A")),
    ],
    ids=lambda choice: type(choice).__name__,
)
def test_factors_of_adapters_are_those_of_a_bare_loop(aggregation: Any, parts: tuple[str, str], fit: Fit) -> None:
    """``parts`` are trained in even and in odd rounds; one local step each, and everybody takes part."""

    def make() -> LitNet:
        return LitNet(nn.Linear(6, 12, bias=False), lr=LR)

    examples, algorithm = toy_examples(), ls.LoRA(3, aggregation=aggregation)
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(num_clients=3), batch_size=40)
    options: dict[str, Any] = {"algorithm": algorithm, "filters": [ls.Int8()]}
    fitted = fit(seeded(make), data, clients_per_round=3, max_epochs=5, **options)
    adapter: Any = algorithm.new_state(seeded(make), seed=0).adapters[0]
    factors = {name: adapter.get_parameter(name).detach().clone().requires_grad_() for name in "BA"}
    residuals = dict[tuple[int, str], Tensor]()
    for round_idx in range(5):
        trained, mean = [*parts[round_idx % 2]], {name: torch.zeros_like(own) for name, own in factors.items()}
        for client in range(3):
            x, y = (tensor[data.partition[client]] for tensor in examples.tensors)
            weight = adapter.base + algorithm.scale * factors["B"] @ factors["A"]
            loss = nn.functional.cross_entropy(x @ weight.T, y)
            for name, gradient in zip(trained, torch.autograd.grad(loss, [factors[n] for n in trained]), strict=True):
                due = residuals.get((client, name), 0.0) - LR * gradient
                residuals[client, name] = due - (sent := eight_bits(due).nan_to_num())
                mean[name] += sent / 3
        with torch.no_grad():
            for name, own in factors.items():
                own += mean[name]
    expected = adapter.base + algorithm.scale * factors["B"] @ factors["A"]
    torch.testing.assert_close(fitted.state["net.weight"], expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_client_with_a_model_of_its_own_packs_the_shared_one(fit: Fit) -> None:
    data = ls.FederatedDataModule(toy_examples(), ls.IIDPartitioner(num_clients=3), batch_size=40)
    options: dict[str, Any] = {"filters": [ls.TopK(0.1)], "clients_per_round": 2, "max_epochs": 4}
    plain, ditto = (fit(seeded(small), data, algorithm=algorithm, **options) for algorithm in (ls.FedAvg(), ls.Ditto()))
    torch.testing.assert_close(plain.weights, ditto.weights, rtol=1e-5, atol=1e-6)  # one batch, in another order
    assert [row.uplink_bytes for row in plain.ledger.rows] == [row.uplink_bytes for row in ditto.ledger.rows]
    assert (
        ditto.model.own_model(ditto.ledger.rows[0].client_id).keys()
        == dict(ditto.model.module.named_parameters()).keys()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("packing", BOTH, ids=repr)
def test_what_is_sent_and_what_is_kept_are_together_the_change(packing: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (8, 30), "kernel": (4, 3, 3, 3), "vector": (50,), "one": (1,), "none": (0, 4), "scalar": ()}

    def drawn() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    before = drawn()
    feedback, state = ErrorFeedback(packing), dict[str, Tensor]()
    for _ in range(3):
        after, download, earlier = drawn(), Download(WorkUnit(0), 1.0, before), state
        turn = DeviceTurn(nn.Identity(), download, earlier, Parties())
        packed, state = feedback.leave(turn, Upload(download.unit, after))
        received = feedback.unpack(download, packed).tensors
        assert state.keys() == {"matrix", "kernel", "vector"}
        for name in shapes:
            if name not in state:
                assert packed.tensors[name] is after[name]
                continue
            assert name not in packed.tensors
            # in single precision at least; the residual itself is rounded once, and so is what the client owes
            moved = after[name].double() - before[name].double() + earlier.get(name, torch.zeros(())).double()
            kept, got = state[name].double(), received[name].double() - before[name].double()
            error = torch.finfo(received[name].dtype).eps * moved.abs().max()
            assert (got + kept - moved).abs().max() <= 2 * error
            assert kept.abs().max() > 100 * error or packing == ls.Int8()
        before = received if dtype is not torch.bfloat16 else drawn()


def test_ten_largest_of_a_hundred_are_sent_whatever_their_order() -> None:
    parts = ls.TopK(0.1).pack(torch.arange(100.0).roll(37).view(10, 10))
    assert parts["places"].tolist() == [*range(27, 37)]
    assert parts["values"].tolist() == [*range(90, 100)]
    assert (parts["places"].dtype, parts["values"].dtype) == (torch.int32, torch.float32)


def test_eight_bits_do_not_wrap_around_where_a_scale_is_too_coarse() -> None:
    tiny = torch.tensor([179.0, -179.0, 1.0]) * 2.0**-149  # whole numbers of the smallest float: the scale becomes 1
    assert ls.Int8().pack(tiny)["levels"].tolist() == [127, -127, 1]
    assert ls.Int8().pack(torch.zeros(3))["levels"].tolist() == [0, 0, 0]


def pulled_to_examples(size: int) -> LitNet:
    """In the first direction these are far apart, and in the others they agree."""
    net = nn.ParameterDict({"weight": torch.zeros(size)})
    return LitNet(net, lr=0.02, loss=lambda lit, batch: 0.5 * (lit.net["weight"] - batch[0]).square().sum(1).mean())


@pytest.mark.slow
def test_feedback_finds_what_the_largest_changes_alone_never_reach(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.ones(2, 10)
    targets[:, 0] = torch.tensor([10.0, -10.0])  # cancel in the mean, and are the largest for each client
    data = ls.FederatedDataModule(TensorDataset(targets), ls.NaturalPartitioner([0, 1]), batch_size=1)
    options: dict[str, Any] = {"clients_per_round": 2, "max_epochs": 400, "filters": [ls.TopK(0.1)]}
    with_feedback, leave = fit(pulled_to_examples(10), data, **options).state["net.weight"], ErrorFeedback.leave
    monkeypatch.setattr(ErrorFeedback, "leave", lambda *args: (leave(*args)[0], {}))
    without = fit(pulled_to_examples(10), data, **options).state["net.weight"]
    assert without[1:].count_nonzero() == 0
    assert abs(without[0]) < 1e-5
    # what clients owe of an entry while they send others, which the first entry keeps below two of its changes
    assert (with_feedback - targets.mean(0)).abs().max() < 2 * 10 * 0.02


@pytest.mark.sampled(1)
@pytest.mark.parametrize("packing", BOTH, ids=repr)
def test_a_resumed_run_owes_what_the_uninterrupted_one_does(packing: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, toy_data(), tmp_path, filters=[packing], seed=3)


def test_a_resumed_run_owes_factors_too(fit: Fit, tmp_path: Path) -> None:
    algorithm = ls.LoRA(2, **KEPT, train=["net.5"])
    check_resumes(fit, LitMLP, toy_data(), tmp_path, algorithm=algorithm, filters=[ls.TopK(0.1)], seed=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("packing", BOTH, ids=repr)
def test_all_say_the_bytes_that_travel(packing: Any, fit: Fit) -> None:
    travelled: list[int] = []

    def weighed(question: Any, parts: dict[str, bytes]) -> dict[str, bytes]:
        values = parts[Part.VALUES]
        header = 8 + int.from_bytes(values[:8], "little")
        assert header < 8 + 80 * 2 * 6  # at most two parts of each of six tensors
        travelled.append(len(values) - header)
        return parts

    filters = [packing]
    options: dict[str, Any] = {"filters": filters, "max_epochs": 2, "seed": 3}
    ours = fit(seeded(LitMLP), remote(toy_line(LitMLP, spoil=weighed)), **options)
    parameters = [(12 * 6, 12), (12 * 12, 12), (3 * 12, 3)]
    if packing == ls.Int8():  # a scale for each row, and one for each bias
        expected = sum(weight + 4 * bias + bias + 4 for weight, bias in parameters)
    else:
        expected = sum(8 * round(0.1 * size) for size, _ in parameters) + 8 * (1 + 1) + 8
    assert set(travelled) == {expected}
    assert {row.uplink_bytes for row in ours.ledger.rows} == {expected}
    table = ls.cost_table(LitMLP(), ls.FedAvg(), [1], torch.zeros(1, 6), filters=filters)
    assert table.at[1].uplink_bytes == expected
    assert ls.largest_that_fits(LitMLP(), ls.FedAvg(), budget_uplink_bytes=expected, filters=filters) == 1.0
    with pytest.raises(ValueError, match=f"sub-model takes {expected}. Raise .*, or take an algorithm that cuts"):
        ls.largest_that_fits(LitMLP(), ls.FedAvg(), budget_uplink_bytes=expected - 1, filters=filters)
    clock = ls.VirtualClock(DeviceProfile(downlink=math.inf, uplink=1.0, macs_per_second=math.inf), macs={1.0: 0})
    assert fit(seeded(LitMLP), toy_data(), clock=clock, **options).history.rows[-1]["fl/virtual_seconds"] == expected


def test_what_is_averaged_or_frozen_is_not_packed() -> None:
    module = LitMLP(dropout=0.0, norm=True)
    module.net[0].requires_grad_(False)
    module.net[3].requires_grad_(False)
    module.averaged_parameters = ["net.3.*"]  # a teacher, say
    told = instructions(ls.FedAvg().bind(module), [ls.Int8()])
    packed = told.sized(module, Download(WorkUnit(0), 1.0, module.state_dict())).tensors
    owners = {name.partition(":")[0] for name in packed if ":" in name}
    assert owners == {name for name, p in module.named_parameters() if p.requires_grad}
    assert {"net.1.running_mean", "net.1.running_var", "net.3.weight", "net.3.bias"} < packed.keys()
    assert not any(name.startswith("net.0") for name in packed)


def test_a_client_keeps_its_residuals_beside_its_own_head_whatever_the_name(fit: Fit) -> None:
    renamed: Any = type("Renamed", (ls.TopK,), {"name": "mine/too"})
    tops, options = (ls.TopK(0.1), renamed(0.1)), {"seed": 3, "max_epochs": 3}
    one, other = (fit(seeded(LitMLP), toy_data(), filters=[ls.Personal(["net.5.*"]), top], **options) for top in tops)
    client = one.ledger.rows[0].client_id
    assert one.model.own_model(client).keys() == {"net.5.weight", "net.5.bias"}
    kept = {name for name in one.model.client_states.kept(WorkUnit(client)) if name.startswith("TopK")}
    assert kept == {f"TopK/net.{place}.{own}" for place in (0, 2) for own in ("weight", "bias")}
    assert torch.equal(one.weights, other.weights)
    assert instructions(ls.FedAvg().bind(LitMLP()), [ls.Int8()]).own_model({"Int8/net.5.bias": torch.ones(3)}) == {}


@pytest.mark.parametrize("packing", BOTH, ids=repr)
def test_bounds_see_the_update_that_is_summed(packing: Any, fit: Fit) -> None:
    start = nn.utils.parameters_to_vector(seeded(LitMLP).parameters()).detach().clone()

    def moved(bound: float) -> tuple[float, Any]:
        fitted = fit(seeded(LitMLP), toy_data(), filters=[ls.MaxUpdateNorm(bound), packing], clients_per_round=1)
        return float((fitted.weights - start).double().norm()), fitted

    free, fitted = moved(1e6)
    assert fitted.rows[-1]["fl/clients_bounded"] == 0
    short, bounded = moved(free / 10)
    assert bounded.rows[-1]["fl/clients_bounded"] == 1
    assert short == pytest.approx(free / 10, rel=1e-5)


class Norms(ls.RoundCallback):
    """The norms of clients' updates that were measured for a sampler, or that a bound used."""

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        self.found = {outcome.client_id: outcome.update_norm for outcome in summary.measured or summary.clients}


@pytest.mark.parametrize("packing", BOTH, ids=repr)
def test_samplers_measure_the_update_that_bounds_see(packing: Any, fit: Fit) -> None:
    measured, bounded, bound = Norms(), Norms(), ls.MaxUpdateNorm(1e6)
    drawn = {"clients_per_round": None, "participation": ls.UpdateVarianceReduced(active=3, measure=12)}
    fit(seeded(LitMLP), toy_data(), callbacks=[measured], filters=[packing], seed=3, **drawn)
    fit(seeded(LitMLP), toy_data(), callbacks=[bounded], filters=[bound, packing], seed=3, clients_per_round=12)
    assert measured.found == bounded.found
    assert len(measured.found) == 12
    assert min(measured.found.values()) > 0.0


def placed(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: change(t.clone()) if n.endswith(":places") else t for n, t in tensors.items()}


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "beyond the end": (placed(lambda places: places + 10**6), "must ascend, from 0 to at most 71"),
    "before the start": (placed(lambda places: places - 10**6), "net.0.weight cannot be unpacked: its places"),
    "twice": (placed(lambda places: places.fill_(0)), "net.0.weight cannot be unpacked: its places"),
    "in reverse": (placed(lambda places: places.flip(0)), "net.0.weight cannot be unpacked: its places"),
    "places of another type": (placed(lambda places: places.long()), "must be torch.int32"),
    "fewer": (placed(lambda places: places[1:]), "of shape"),
    "whole": (lambda tensors: {"net.0.weight": torch.zeros(12, 6), **tensors}, "net.0.weight, which was not asked for"),
    "NaN": (
        lambda tensors: {n: t.clone().fill_(math.nan) if t.is_floating_point() else t for n, t in tensors.items()},
        "not finite",
    ),
}


def test_devices_that_pack_what_cannot_be_are_left_out(fit: Fit) -> None:
    """Eight of twelve, each in its own way."""
    spoils = [spoil for spoil, _ in HOSTILE.values()]

    def act(question: Any, answer: dict[str, bytes]) -> dict[str, bytes]:
        if (device := question.node - 100) >= len(spoils):
            return answer
        upload = record_of(answer, Upload)
        return record_parts(replace(upload, tensors=spoils[device](dict(upload.tensors))))

    fitted: list[Fitted] = []
    faults = Faults(on_error=LeaveOut(1.0), on_not_finite=LeaveOut(1.0))
    options: dict[str, Any] = {"filters": [ls.TopK(0.1)], "faults": faults}
    data = remote(toy_line(LitMLP, spoil=act), wait_for=12)
    said = said_during(lambda: fitted.append(fit(seeded(LitMLP), data, clients_per_round=12, **options)))
    for name, (_, message) in HOSTILE.items():
        assert any(re.search(message, one) for one in said), (name, said)
    reasons = Counter(row.left_out for row in fitted[0].ledger.rows)
    assert reasons == {"error": len(HOSTILE) - 1, "not_finite": 1, None: 12 - len(HOSTILE)}
    assert torch.isfinite(fitted[0].weights).all()


def wrapped(packing: Any, algorithm: Any) -> ls.FederatedModule:
    return ls.FederatedModule(LitMLP(), algorithm=algorithm, filters=[packing], clients_per_round=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.TopK(0.0), r"`share` must be in \(0, 0.5\], got 0.0; half of the entries"),
        (lambda: ls.TopK(0.6), r"`share` must be in \(0, 0.5\], got 0.6; half of the entries"),
        (
            lambda: wrapped(ls.Int8(), type("Rounded", (ls.FedAvg,), {})()),
            "Int8 needs an algorithm whose clients send back new values of the tensors that were sent, which Rounded "
            r"does not promise: .* let Rounded say so: `promises = Promises\(new_values=True\)`",
        ),
        (lambda: wrapped(ls.Int8(), ls.LoRA(2)), NOT_KEPT),
        (lambda: wrapped(ls.Int8(), ls.LoRA({1: 0.5, 2: 0.5}, **KEPT)), NOT_KEPT),
        (lambda: wrapped(ls.Int8(), ls.LoRA(2, **KEPT, merge_every=3)), NOT_KEPT),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_fit_says_nothing_of_it(fit: Fit) -> None:
    assert said_during(lambda: fit(seeded(LitMLP), toy_data(), filters=[ls.Int8()], max_epochs=2)) == []
