"""Personal parameters, and Ditto, against bare loops and in runs: resumed, evaluated with each client's own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_line import held_out_data
from federation import Fit, check_resumes, same_state, seeded
from other_process import toy_data
from torch import Tensor, nn
from toy_models import LitMLP, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Known
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.protocol.records import WorkUnit

HEAD = ["net.5.*"]
LR, ROUNDS = 0.1, 4


def without_dropout(optimizer: Any) -> LitMLP:
    return variant(LitMLP, configure_optimizers=lambda self: optimizer(self.parameters(), lr=LR))(dropout=0.0)


def with_norm() -> LitMLP:
    return LitMLP(dropout=0.0, norm=True)


def batches_of(data: ls.FederatedDataModule, client: int, round_idx: int, epochs: range, seed: int = 3) -> Any:
    """The batches of a client's local epochs, as the package deals them."""
    from lightning_spectral.protocol.records import Download

    download = Download(WorkUnit(client), 1.0, {}, round_idx=round_idx, seed=seed)
    for epoch in epochs:
        yield from (batch for batch, _ in data.client_data(download).epoch(epoch))


def by_hand(
    data: ls.FederatedDataModule, cohorts: list[list[int]], personal_epochs: int, optimizer: Any
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """FedPer, or FedRep's two phases: one local epoch of all parameters, or some of the head and one of the body.

    Each phase begins with a new optimizer of its own parameters.
    """
    net = seeded(without_dropout, optimizer)
    names = [name for name, _ in net.named_parameters()]
    head = {name for name in names if name.startswith("net.5.")}
    shared = {name: p.detach().clone() for name, p in net.named_parameters()}
    own: dict[int, dict[str, Tensor]] = {}
    for round_idx, cohort in enumerate(cohorts):
        total, mean = 0, {name: torch.zeros_like(shared[name], dtype=torch.float64) for name in names}
        for client in cohort:
            net.load_state_dict({**shared, **own.get(client, {})}, strict=False)
            phases = [(head, range(personal_epochs)), (set(names) - head, range(personal_epochs, personal_epochs + 1))]
            if personal_epochs == 0:
                phases = [(set(names), range(1))]
            for trained, epochs in phases:
                steps = optimizer([p for name, p in net.named_parameters() if name in trained], lr=LR)
                for x, y in batches_of(data, client, round_idx, epochs):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    steps.step()
            size = len(data.partition[client])
            total += size
            for name, p in net.named_parameters():
                mean[name] += size * (p.detach().double() - shared[name])
            own[client] = {name: p.detach().clone() for name, p in net.named_parameters() if name in head}
        for name in set(names) - head:
            shared[name] = (shared[name] + mean[name] / total).float()
    return shared, own


@pytest.mark.sampled(1)
@pytest.mark.parametrize("personal_epochs", [0, 2])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.filterwarnings("ignore:.*rescales gradients")
def test_rounds_are_those_of_a_bare_loop(personal_epochs: int, optimizer: Any, fit: Fit) -> None:
    data, filters = toy_data(), [ls.Personal(HEAD, epochs=personal_epochs)]
    fitted = fit(seeded(without_dropout, optimizer), data, filters=filters, max_epochs=ROUNDS, seed=3)
    cohorts = [[row.client_id for row in fitted.ledger.rows if row.round_idx == i] for i in range(ROUNDS)]
    shared, own = by_hand(data, cohorts, personal_epochs, optimizer)
    torch.testing.assert_close(fitted.state, shared, rtol=1e-5, atol=1e-6)
    assert len(own) > 4  # some took part once, some again
    for client, head in own.items():
        kept = fitted.model.own_model(client)
        torch.testing.assert_close(kept, head, rtol=1e-5, atol=1e-6)
        assert not any(torch.equal(kept[name], fitted.state[name]) for name in head)


def train(net: nn.Module, optimizer: Any, batches: Any, pull: float = 0.0, towards: Any = None) -> None:
    """Steps of a new optimizer on the loss and, for Ditto's second model, on the distance from other weights."""
    steps = optimizer(net.parameters(), lr=LR)
    for x, y in batches:
        loss = nn.functional.cross_entropy(net(x), y)
        if pull:
            loss = loss + pull / 2 * sum((p - towards[name]).square().sum() for name, p in net.named_parameters())
        net.zero_grad()
        loss.backward()
        steps.step()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad])
@pytest.mark.filterwarnings("ignore:.*rescales gradients")
def test_ditto_trains_two_models_as_two_bare_loops(optimizer: Any, fit: Fit) -> None:
    """Algorithm 1 of Ditto: w_k from w, which is averaged; v_k from where it was, pulled towards w."""
    data, pull = toy_data(), 0.5
    fitted = fit(seeded(without_dropout, optimizer), data, algorithm=ls.Ditto(pull=pull), max_epochs=ROUNDS, seed=3)
    net = seeded(without_dropout, optimizer)
    shared = {name: p.detach().clone() for name, p in net.named_parameters()}
    own: dict[int, dict[str, Tensor]] = {}
    for round_idx in range(ROUNDS):
        cohort = [row.client_id for row in fitted.ledger.rows if row.round_idx == round_idx]
        total, mean = 0, {name: torch.zeros_like(p, dtype=torch.float64) for name, p in shared.items()}
        for client in cohort:
            net.load_state_dict(own.get(client, shared), strict=False)
            train(net, optimizer, batches_of(data, client, round_idx, range(1)), pull, shared)
            own[client] = {name: p.detach().clone() for name, p in net.named_parameters()}
            net.load_state_dict(shared, strict=False)
            train(net, optimizer, batches_of(data, client, round_idx, range(1, 2)))
            size = len(data.partition[client])
            total += size
            for name, p in net.named_parameters():
                mean[name] += size * (p.detach().double() - shared[name])
        shared = {name: (before + mean[name] / total).float() for name, before in shared.items()}
    torch.testing.assert_close(fitted.state, shared, rtol=1e-5, atol=1e-6)
    assert len(own) > 4
    for client, expected_own in own.items():
        for name, tensor in fitted.model.own_model(client).items():
            torch.testing.assert_close(tensor, expected_own[name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(tensor, shared[name])


@pytest.mark.slow
def test_dittos_own_model_has_its_own_running_averages_and_the_shared_one_does_not_see_it(fit: Fit) -> None:
    """Whatever pulls the clients' own models, the shared one is the same: neither weights nor averages leak."""
    weak, strong = (
        fit(seeded(with_norm), toy_data(), algorithm=ls.Ditto(pull=pull), max_epochs=3, seed=3) for pull in (0.0, 5.0)
    )
    assert same_state(weak.state, strong.state)
    client = weak.ledger.rows[0].client_id
    loose, tight = (fitted.model.own_model(client) for fitted in (weak, strong))
    assert loose.keys() == seeded(with_norm).state_dict().keys()
    assert not torch.equal(loose["net.1.running_mean"], weak.state["net.1.running_mean"])

    def distance(own: Any) -> float:
        return sum(float((own[name] - weak.state[name]).square().sum()) for name, _ in weak.module.named_parameters())

    assert distance(tight) < distance(loose)
    plain = fit(seeded(with_norm), toy_data(), max_epochs=3, seed=3).ledger.rows
    assert [(r.downlink_bytes, r.uplink_bytes) for r in weak.ledger.rows] == [
        (r.downlink_bytes, r.uplink_bytes) for r in plain
    ]


def test_spectral_sharding_keeps_the_same_parameters_and_shards_the_others(fit: Fit) -> None:
    algorithm = ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(keep_first_and_last_dense=False))
    lit, filters = seeded(LitMLP), [ls.Personal(HEAD)]
    assert list(algorithm.bind(lit, known=Known(Plan(lit, algorithm, filters).rules())).plan.sharded) == [
        "net.0",
        "net.2",
    ]
    before = seeded(LitMLP).state_dict()
    fitted = fit(lit, toy_data(), algorithm=algorithm, filters=filters, max_epochs=2, seed=3)
    assert torch.equal(fitted.state["net.5.weight"], before["net.5.weight"])
    assert not torch.equal(fitted.state["net.2.weight"], before["net.2.weight"])
    clients = {row.client_id for row in fitted.ledger.rows}
    heads = [fitted.model.own_model(client)["net.5.weight"] for client in clients]
    assert not any(torch.equal(head, before["net.5.weight"]) for head in heads)
    assert fitted.model.own_model(next(iter({*range(12)} - clients))) == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), ls.SpectralSharding(), ls.StaleUpdates(), ls.QFedAvg(), ls.FedDyn(), ls.Ditto()],
    ids=repr,
)
def test_a_resumed_run_has_the_same_own_models(algorithm: Any, fit: Fit, tmp_path: Path) -> None:
    options = {"algorithm": algorithm, "filters": [] if isinstance(algorithm, ls.Ditto) else [ls.Personal(HEAD)]}
    check_resumes(fit, LitMLP, toy_data(), tmp_path, seed=3, **options)
    whole = fit(seeded(LitMLP), toy_data(), max_epochs=4, seed=3, **options)
    whole.trainer.save_checkpoint(tmp_path / "4.ckpt")
    loaded = ls.FederatedModule.load_from_checkpoint(
        tmp_path / "4.ckpt", module=LitMLP(), clients_per_round=4, **options
    )
    clients = {row.client_id for row in whole.ledger.rows}
    assert len(clients) > 4
    for client in clients:
        assert same_state(dict(loaded.own_model(client)), dict(whole.model.own_model(client)))


def test_personal_tensors_travel_once_and_never_back(fit: Fit) -> None:
    plain = fit(seeded(LitMLP), toy_data(), max_epochs=4, seed=3)
    ours = fit(seeded(LitMLP), toy_data(), filters=[ls.Personal(HEAD)], max_epochs=4, seed=3)
    head = 4 * (12 * 3 + 3)
    seen: set[int] = set()
    for row, whole in zip(ours.ledger.rows, plain.ledger.rows, strict=True):
        assert row.uplink_bytes == whole.uplink_bytes - head
        assert row.downlink_bytes == whole.downlink_bytes - (head if row.client_id in seen else 0)
        seen.add(row.client_id)


def test_personal_normalisation_layers_keep_their_averages(fit: Fit) -> None:
    fitted = fit(seeded(with_norm), toy_data(), filters=[ls.Personal(["net.1.*"])], max_epochs=2, seed=3)
    before = seeded(with_norm).state_dict()
    for name in ("net.1.running_mean", "net.1.weight", "net.1.num_batches_tracked"):
        assert torch.equal(fitted.state[name], before[name])
    own = fitted.model.own_model(fitted.ledger.rows[0].client_id)
    assert own["net.1.num_batches_tracked"] > 0
    assert not torch.equal(own["net.1.running_mean"], before["net.1.running_mean"])


def test_it_is_said_once_that_the_servers_own_do_not_learn(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(seeded(with_norm), toy_data(), filters=[ls.Personal(["net.1.*"])], max_epochs=2)
    assert caplog.text.count("Personal: net.1.weight, net.1.bias and 3 more stay with clients") == 1
    assert "`ClientEvaluation` judges each with its own" in caplog.text


@pytest.mark.parametrize("options", [{"filters": [ls.Personal(HEAD)]}, {"algorithm": ls.Ditto()}], ids=repr)
def test_clients_are_evaluated_with_their_own_parameters_beside_the_servers(options: Any, fit: Fit) -> None:
    data = held_out_data()
    evaluation = ls.ClientEvaluation()
    fitted = fit(seeded(LitMLP), data, max_epochs=2, callbacks=[evaluation], seed=3, **options)
    assert evaluation.table is not None
    trained = {row.client_id for row in fitted.ledger.rows}
    for row in evaluation.table.rows:
        examples: Any = [data.client_val_batches(row.client_id)]
        x, y = next(iter(examples[0]))
        for prefix, own in (("", {}), ("own/", fitted.model.own_model(row.client_id))):
            net = seeded(LitMLP).eval()
            net.load_state_dict({**fitted.state, **own})
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(net(x), y))
            assert row.metrics[f"{prefix}val_loss"] == pytest.approx(loss, rel=1e-5)
        assert (row.metrics["own/val_loss"] == row.metrics["val_loss"]) == (row.client_id not in trained)
    assert "fl/clients/own/val_acc/mean" in fitted.trainer.callback_metrics


DITTO: dict[str, Any] = {"algorithm": ls.Ditto(), "max_epochs": 2, "seed": 3}


def test_dittos_shared_model_may_be_summed_in_secret(fit: Fit) -> None:
    """Only it leaves the devices, as in federated averaging."""
    plain, secret = (fit(seeded(LitMLP), toy_data(), filters=sums, **DITTO) for sums in ([], [ls.SecureSums(0.6)]))
    assert same_state(plain.state, secret.state)


@pytest.mark.slow
def test_dittos_shared_model_may_be_summed_with_noise(fit: Fit) -> None:
    pytest.importorskip("dp_accounting")
    noise = ls.ClientPrivacy(clip=0.5, noise_multiplier=0.3, delta=1e-3, noise_seed=1)
    sampled = {"clients_per_round": None, "participation": ls.Uniform(active=5)}
    private = fit(seeded(LitMLP), toy_data(), filters=[noise], **DITTO, **sampled)
    assert private.rows[-1]["fl/epsilon"] > 0
    assert any(private.model.own_model(client) for client in range(12))


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding()], ids=["dense", "spectral"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["haed.*"],), r"`Personal` pattern 'haed\.\*' matches no parameter or buffer; known names: net\.0"),
        ((["*"],), "clients would share nothing"),
        ((HEAD, -1), "`epochs` must be at least 0"),
    ],
    ids=["no name", "every name", "no number"],
)
def test_mistakes_are_named_before_a_round(algorithm: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.FederatedModule(LitMLP(), algorithm=algorithm, filters=[ls.Personal(*arguments)], clients_per_round=4)


class WarmsUp(LitMLP):
    """The weight of its loss grows with the steps that an attribute counts; noise comes from generators."""

    def __init__(self) -> None:
        super().__init__(momentum=0.0, dropout=0.0)
        self.steps, self.seen = 0, [0]
        self.generator = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen[0] += 1
        noise = 1 + 0.1 * torch.rand((), generator=self.generator)
        return super().training_step(batch, batch_idx) * noise * min(1.0, (self.steps + self.seen[0]) / 20)


@pytest.mark.filterwarnings("ignore:Round 0. clients change:lightning_spectral.SpectralWarning")
def test_the_shared_model_of_ditto_is_that_of_federated_averaging_whatever_the_first_phase_changes(fit: Fit) -> None:
    """Attributes, containers and generators begin anew; batches hold all of a client's examples, in whatever order."""
    toy = toy_examples()
    clients = ls.FederatedDataModule(toy, ls.IIDPartitioner(4), batch_size=len(toy))
    ours, theirs = (
        fit(seeded(WarmsUp), clients, algorithm=algorithm, max_epochs=3, local_epochs=3).state
        for algorithm in (ls.Ditto(), ls.FedAvg())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_rule_for_all_buffers_does_not_send_personal_ones() -> None:
    """The patterns of `Personal` come before those of the user's rules, which they would contradict."""
    norm = with_norm()
    plan = Plan(norm, ls.FedAvg(), filters=[ls.Personal(["net.1.*"])], buffers={"*running*": "mean"})
    assert not plan.rules().returned
    assert Plan(norm, ls.FedAvg(), buffers={"*running*": "mean"}).rules().returned
