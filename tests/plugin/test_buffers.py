"""Buffers that are not averaged, in a federation: running limits, flags set by data, counters."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import HARDLY_MOVED, Fit, same_state, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.testing import check_algorithm

CLIENTS, EACH = 6, 8
pytestmark = pytest.mark.filterwarnings("ignore:Round .. clients change initialized")
RULES: Any = {"initialized": "max", "num_steps": "max"}


class LitLimits(pl.LightningModule):
    """Standardises its input by what the first batch says, and notes the extremes of all that it sees."""

    example_input_array = torch.zeros(2, 5)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.full((5,), -torch.inf))
        self.register_buffer("range", torch.tensor([torch.inf, -torch.inf]))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("initialized", torch.tensor(False))
        self.register_buffer("num_steps", torch.tensor(2**60))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x / self.scale + 0 * self.mask.exp().sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not self.initialized:
            self.scale.copy_(x.std(0))
            self.initialized.fill_(True)
        self.num_steps += 1
        self.low = torch.minimum(self.low, x.min())
        self.high = torch.maximum(self.high, x.amax(0))
        self.range.copy_(torch.stack([torch.minimum(self.range[0], x.min()), torch.maximum(self.range[1], x.max())]))
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x.clamp(self.low, self.high.max())), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def examples() -> list[Tensor]:
    """Each client's features, of other extremes than anyone else's."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(EACH, 5, generator=generator) * (1 + client) for client in range(CLIENTS)]


def data() -> ls.FederatedDataModule:
    x = torch.cat(examples())
    toy = TensorDataset(x, (x[:, 0] > 0).long())
    keys = [client for client in range(CLIENTS) for _ in range(EACH)]
    return ls.FederatedDataModule(toy, ls.NaturalPartitioner(keys), val=toy, batch_size=4)


class Watch(ls.RoundCallback):
    """Notes who took part in each round, and the buffers after it."""

    def __init__(self) -> None:
        self.clients: list[list[int]] = []
        self.buffers: list[dict[str, Tensor]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        self.clients.append([outcome.client_id for outcome in summary.averaged])
        self.buffers.append({name: buffer.clone() for name, buffer in pl_module.module.named_buffers()})


def test_extremes_are_those_of_all_that_clients_saw(fit: Fit) -> None:
    """From round to round, although the limits are finite from the first one on."""
    x, watch = examples(), Watch()
    options: dict[str, Any] = {"clients_per_round": 2, "max_epochs": 4, "local_epochs": 2, "callbacks": [watch]}
    fitted = fit(seeded(LitLimits), data(), buffers=RULES, **options)
    seen: set[int] = set()
    for round_idx, (clients, buffers) in enumerate(zip(watch.clients, watch.buffers, strict=True)):
        seen |= set(clients)
        so_far = torch.cat([x[client] for client in seen])
        assert buffers["low"] == so_far.min() == buffers["range"][0]
        assert torch.equal(buffers["high"], so_far.amax(0))
        assert buffers["range"][1] == so_far.max()
        assert buffers["num_steps"] == 2**60 + 4 * (round_idx + 1)
        assert buffers["initialized"]
    assert len({tuple(clients) for clients in watch.clients}) > 1, "or the test would not tell a minimum from a mean"
    assert torch.equal(fitted.module.mask, LitLimits().mask)
    assert all(torch.isfinite(torch.tensor(row["val_loss"])) for row in fitted.history.rows)


def test_weights_are_initialised_from_data_once_by_each_client_of_the_first_round(fit: Fit) -> None:
    started: list[tuple[int, int]] = []

    def note_start(lit: Any, batch: Any) -> None:
        if not lit.initialized:
            started.append((lit.trainer.current_epoch, int(batch[0].abs().max() * 1000)))

    options: dict[str, Any] = {"clients_per_round": 3, "max_epochs": 3, "local_epochs": 2}
    fit(seeded(variant(LitLimits, before_step=note_start)), data(), buffers=RULES, **options)
    assert [round_idx for round_idx, _ in started] == [0, 0, 0]
    assert len({client for _, client in started}) == 3


@pytest.mark.parametrize("rules", [{}, {"initialized": "server", "num_steps": "server"}])
def test_flags_and_counters_keep_the_servers_value_unless_a_rule_says_otherwise(rules: Any, fit: Fit) -> None:
    module = fit(seeded(LitLimits), data(), buffers=rules).module
    assert not module.initialized
    assert module.num_steps == 2**60


FLAG = r"clients change initialized, num_steps, .*buffers=\{'initialized': 'max'\}"


def test_flags_and_counters_that_begin_anew_in_each_turn_are_named_once(fit: Fit) -> None:
    with pytest.warns(ls.SpectralWarning, match=FLAG) as said:
        fit(seeded(LitLimits), data(), max_epochs=3)
    assert len([one for one in said if "initialized" in str(one.message)]) == 1


@pytest.mark.parametrize("rules", [RULES, dict.fromkeys(RULES, "server")], ids=["max", "server"])
def test_nothing_is_said_of_buffers_with_a_rule(rules: Any, fit: Fit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ls.SpectralWarning)
        assert len(fit(seeded(LitLimits), data(), buffers=rules, max_epochs=2).rows) == 2


ALGORITHMS: dict[str, Any] = {
    "FedAvg": ls.FedAvg(),
    "StaleUpdates": ls.StaleUpdates(),
    "Scaffold": ls.Scaffold(),
    "FIARSE": ls.FIARSE({0.5: 0.5, 1.0: 0.5}),
    "Spectral": ls.SpectralSharding(keep_ratio=0.5),
    "Width": ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5}),
    "LoRA": ls.LoRA(2, train=["net.4"]),
    "Zampling": ls.Zampling(compression=2, degree=3),
}
OF_LORA: Any = {"low": "min", "high": "max", "scale": "mean"}  # which keeps buffers at the server otherwise


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_follows_the_rules(name: str, fit: Fit, tmp_path: Path) -> None:
    """Also a run that is resumed when the limits are finite."""
    rules = {**RULES, **(OF_LORA if name == "LoRA" else {})}
    run = partial(fit, data=data(), algorithm=ALGORITHMS[name], buffers=rules, clients_per_round=3)
    whole, half = run(seeded(LitLimits), max_epochs=4), run(seeded(LitLimits), max_epochs=1)
    path = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(path)
    assert same_state(run(seeded(LitLimits), max_epochs=4, ckpt_path=path).state, whole.state)
    module = whole.module
    assert torch.isin(module.low, torch.stack([x.min() for x in examples()]))  # a mean would be none of them
    assert torch.isin(module.high, torch.stack([x.amax(0) for x in examples()])).all()
    assert module.num_steps == 2**60 + 4 * 2
    assert module.initialized
    assert torch.equal(module.mask, LitLimits().mask)


def test_a_resumed_run_that_forgets_what_was_decided_is_another(fit: Fit, tmp_path: Path) -> None:
    run = partial(fit, data=data(), algorithm=ls.FedAvg(), clients_per_round=2)
    whole, half, path = run(seeded(LitLimits), max_epochs=4), run(seeded(LitLimits)), tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(path)
    forgetful = torch.load(path, weights_only=True)
    decisions = forgetful["federation_lasting"]["models"][""].pop("decisions")
    assert decisions["buffers"].keys() == {"low", "high", "range", "mask"}
    del forgetful["federation_digest"]
    torch.save(forgetful, path)
    assert not same_state(run(seeded(LitLimits), max_epochs=4, ckpt_path=path).state, whole.state)


class LitSpoiled(LitLimits):
    """Whoever has the largest features sends values that cannot be used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch[0].abs().max() > 10:
            with torch.no_grad():
                self.get_parameter("net.0.bias").fill_(torch.nan) if self.name == "bias" else self.low.fill_(torch.nan)
        return loss


@pytest.mark.filterwarnings("ignore:Round 0. client .* is left out:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("name", ["bias", "low"])
def test_clients_that_are_left_out_have_no_say(name: str, fit: Fit) -> None:
    watch = Watch()
    fitted = fit(seeded(partial(LitSpoiled, name)), data(), clients_per_round=CLIENTS, callbacks=[watch])
    left_out = [client for client, x in enumerate(examples()) if x.abs().max() > 10]
    assert 0 < len(left_out) < CLIENTS / 2
    assert set(watch.clients[0]) == set(range(CLIENTS)) - set(left_out)
    used = torch.cat([x for client, x in enumerate(examples()) if client not in left_out])
    assert fitted.module.low == used.min() > torch.cat(examples()).min()
    assert torch.equal(fitted.module.high, used.amax(0))


def test_bounds_on_updates_and_norms_leave_extremes_alone(fit: Fit) -> None:
    fitted = fit(seeded(LitLimits), data(), clients_per_round=CLIENTS, filters=[ls.MaxUpdateNorm(1e-3)])
    assert fitted.rows[0]["fl/clients_bounded"] == CLIENTS
    assert fitted.module.low == torch.cat(examples()).min()
    assert torch.isfinite(fitted.weights).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["FedAvg", "StaleUpdates", "Scaffold"])
def test_they_keep_the_contract(name: str) -> None:
    """In any order, over two processes, over the codec, and resumed."""
    x = torch.cat(examples())[:12]
    check_algorithm(ALGORITHMS[name], seeded(LitLimits), (x, (x[:, 0] > 0).long()), rests=False)


class Noting(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("peak", torch.full((width,), -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.peak = torch.maximum(self.peak, x.detach().amax(0))
        return torch.minimum(x.relu(), self.peak.relu() + 1)


def test_narrow_clients_have_a_say_about_their_channels(fit: Fit) -> None:
    """A narrower client holds limits of some channels."""
    lit = seeded(LitLimits)
    lit.net[1] = Noting(8)
    module = fit(lit, data(), algorithm=ls.WidthSharding(keep_ratio=0.5), clients_per_round=2).module
    assert torch.isfinite(module.net[1].peak).tolist() == [True] * 4 + [False] * 4
    assert module.net[1].peak[4:].tolist() == [-torch.inf] * 4


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["low"], r"`buffers` must map patterns of names to rules, got \['low'\]; write buffers=\{"),
        ({1: "min"}, r"`buffers` must map patterns of names to rules, got \{1: 'min'\}"),
        ({"low": "median"}, r"`buffers\['low'\]` must be 'mean', 'min', 'max' or 'server', got 'median'"),
    ],
)
def test_wrong_rules_are_refused_with_what_to_write(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.FederatedModule(seeded(LitLimits), buffers=rules)
    with pytest.raises(ValueError, match=message):
        ls.validate(seeded(LitLimits), buffers=rules)


def test_rules_are_refused_before_the_first_round(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"`buffers` gives 'mean' to `initialized`, which is of type torch.bool"):
        fit(seeded(LitLimits), data(), buffers={"initialized": "mean"})


class LitEightBits(LitLimits):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table.float()[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["FedAvg", "Spectral", "Width", "Scaffold"])
def test_buffers_of_eight_bits_stay_as_they_are(name: str, fit: Fit) -> None:
    fitted = fit(seeded(LitEightBits), data(), algorithm=ALGORITHMS[name], buffers=RULES, max_epochs=2)
    assert fitted.module.table.float().tolist() == [0.0, 1.0, 2.0, 3.0]
    for rule in ("mean", "max"):
        with pytest.raises(ValueError, match=r"is of type torch\.float8_e4m3fn, which torch does not compare or add"):
            fit(seeded(LitEightBits), data(), buffers={"table": rule})
