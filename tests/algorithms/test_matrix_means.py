"""Averages of whole matrices, FedHM's and those within reach, against a dense matrix for every client, in float64."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from spectral_rounds import cohort, draw, net, run_round, train, unit
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms import term_draws
from lightning_spectral.algorithms.spectral import algorithm as spectral
from lightning_spectral.algorithms.spectral.aggregation import LayerMean, MeanOfTerms, SentTerms, TrainedTerms
from lightning_spectral.algorithms.spectral.algorithm import LayerRound, SpectralHalf
from lightning_spectral.client.forms import Forms
from lightning_spectral.functional.sampling.without_fit import ONE, minimum_support
from lightning_spectral.functional.spectra import factorize, num_terms_for, singular_terms
from lightning_spectral.plugin.callbacks.diagnostics import spectral_figures
from lightning_spectral.protocol.cohort import Cohort, Workers

SHARDED = ("1", "4")  # layers of `net`
MIXED = [0.3, 0.6, 0.3, 1.0]
STRATEGIES = [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective(), ls.sharding.Scaled(ls.TopN())]


def algorithm(strategy: ls.sharding.ShardingStrategy, **options: Any) -> ls.SpectralSharding:
    return ls.SpectralSharding.published(strategy, aggregation=ls.algorithms.MatrixMeans(), **options)


def trained(layer: LayerRound, terms: Tensor, u: Tensor, v: Tensor, multipliers: Tensor) -> TrainedTerms:
    sent = SentTerms(terms, multipliers, terms, multipliers, layer.mean.u[:, terms], layer.mean.v[terms])
    return TrainedTerms(sent, u, v, magnitudes=(1.0, 1.0))


def dense(tensors: Any, name: str, omega: Tensor) -> Tensor:
    return tensors[f"{name}.u"] @ torch.diag(omega) @ tensors[f"{name}.v"]


def means_of_a_round(ours: ls.SpectralSharding, server: nn.Module, ratios: list[float]) -> dict[str, Tensor]:
    """Play a round, and average the clients' matrices as they came back, multiplied out."""
    _, sent = draw(ours, server, ratios)
    uploads = [tensors for _, tensors in run_round(ours, server, ratios)]
    back = [(tensors, download.tensors) for tensors, (download, _) in zip(uploads, sent, strict=True)]
    return {name: mean([dense(own, name, down[f"{name}.omega"]) for own, down in back]) for name in SHARDED}


def mean(matrices: list[Tensor]) -> Tensor:
    """Weighted by the number of examples, which is one more than the client's number."""
    total = sum(range(1, len(matrices) + 1))
    return sum((c + 1) / total * matrix for c, matrix in enumerate(matrices))


def matrix(server: nn.Module, name: str) -> Tensor:
    return server.get_submodule(name).weight.detach().flatten(1)


@pytest.mark.parametrize("ratios", [[0.3, 0.3], MIXED], ids=repr)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_weight_becomes_the_mean_of_the_clients_matrices(strategy: Any, ratios: list[float]) -> None:
    server = net().double()
    for name, expected in means_of_a_round(algorithm(strategy), server, ratios).items():
        torch.testing.assert_close(matrix(server, name), expected, rtol=0, atol=1e-12)


def test_dense_tensors_are_averaged_as_ever() -> None:
    one, two = net(), net()
    run_round(algorithm(ls.TopN()), one, MIXED)
    run_round(ls.SpectralSharding.published(ls.TopN()), two, MIXED)
    same = [name for name in one.state_dict() if name not in {f"{layer}.weight" for layer in SHARDED}]
    assert same_state({n: one.state_dict()[n] for n in same}, {n: two.state_dict()[n] for n in same})
    assert not any(torch.equal(matrix(one, name), matrix(two, name)) for name in SHARDED)


def test_without_training_the_weight_becomes_the_mean_of_its_truncations() -> None:
    """So terms that no client holds are lost, whereas a mean of terms would keep all of them."""
    server = net().double()
    expected = {name: mean([truncated(matrix(server, name), r) for r in (0.3, 0.6, 0.3)]) for name in SHARDED}
    run_round(algorithm(ls.TopN()), server, [0.3, 0.6, 0.3], trained=False)
    for name in SHARDED:
        torch.testing.assert_close(matrix(server, name), expected[name], rtol=0, atol=1e-12)
        rank = num_terms_for(min(expected[name].shape), 0.6)
        assert torch.linalg.matrix_rank(matrix(server, name), rtol=1e-10) == rank


class Shrinking(MeanOfTerms):
    """A mean of the user's, which always loses one everywhere."""

    def truncation(self) -> Tensor:
        return torch.ones(len(self.u), self.v.shape[1], dtype=torch.float64)


class ShrinkingMeans(ls.algorithms.TermMeans):
    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        return Shrinking(u, v, cohort, held_rows)


def test_what_a_mean_of_the_users_truncates_is_taken_from_the_weight() -> None:
    server = net().double()
    before = {name: matrix(server, name).clone() for name in SHARDED}
    run_round(ls.SpectralSharding.published(ls.TopN(), aggregation=ShrinkingMeans()), server, MIXED, trained=False)
    for name in SHARDED:
        torch.testing.assert_close(matrix(server, name), before[name] - 1, rtol=0, atol=1e-12)


def truncated(weight: Tensor, keep_ratio: float) -> Tensor:
    factors = factorize(weight)
    n = num_terms_for(len(factors.s), keep_ratio)
    return factors.U[:, :n] @ torch.diag(factors.s[:n]) @ factors.Vh[:n]


def test_unbiased_sub_models_keep_the_weight_on_average() -> None:
    """Over all draws of a single client, each as likely as a design says: enumerated."""
    server = nn.Sequential(*(seeded(nn.Linear, 4, 4) for _ in range(3))).double()
    ours, weight = algorithm(ls.Unbiased(), keep_ratio=0.5), matrix(server, "1")
    opened, _ = draw(ours, server, [0.5])
    layer = opened.layers["1"]
    plan, expected = layer.draws.groups[0.5], torch.zeros_like(weight)
    for drawn, units in zip(*minimum_support(plan.inclusion_probs), strict=True):
        fresh = ours.aggregation.open(layer.mean.u, layer.mean.v, opened.cohort)
        fresh.add(trained(layer, drawn, layer.mean.u[:, drawn], layer.mean.v[drawn], plan.multipliers[drawn]), 1.0)
        change = fresh.weight_change() - fresh.truncation()
        expected += units.double() / ONE * change
        assert not torch.allclose(change, torch.zeros_like(weight), atol=1e-3)
    torch.testing.assert_close(expected, torch.zeros_like(weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("absolute", [False, True])
def test_the_change_is_weighted_as_the_cohort_says(absolute: bool) -> None:
    server = net().double()
    opened, sent = draw(algorithm(ls.TopN()), server, [0.3, 0.6])
    layer, weight = opened.layers["4"], matrix(server, "4")
    crowd = copy.copy(opened.cohort)
    object.__setattr__(crowd, "absolute", absolute)
    fresh = ls.algorithms.MatrixMeans().open(layer.mean.u, layer.mean.v, crowd)
    matrices = []
    for c, (download, receipt) in enumerate(sent):
        u, v, omega = (download.tensors[f"4.{part}"] for part in ("u", "v", "omega"))
        fresh.add(trained(layer, receipt.drawn["4"], 2 * u, v, omega), c + 1.0)
        matrices.append(2 * u @ torch.diag(omega) @ v)
    scale = 3.0 if absolute else 1.0  # coefficients of 1 and 2 are used as they are
    change = fresh.weight_change() - fresh.truncation()
    torch.testing.assert_close(change, scale * (mean(matrices) - weight), rtol=0, atol=1e-12)


def test_rows_that_nobody_computes_stay() -> None:
    server = net().double()
    before = copy.deepcopy(server)
    expected = means_of_a_round(algorithm(ls.TopN(), output_ratio=0.5), server, MIXED)
    for name, held in {"1": 4, "4": 5}.items():
        torch.testing.assert_close(matrix(server, name)[:held], expected[name], rtol=0, atol=1e-12)
        assert torch.equal(matrix(server, name)[held:], matrix(before, name)[held:])


def test_what_travels_and_what_is_visited_do_not_depend_on_the_aggregation(fit: Fit, data: Any) -> None:
    ratios: Mapping[float, float] = {0.3: 0.5, 0.6: 0.5}
    by_matrix, by_term = (
        fit(seeded(LitMLP), data, algorithm=ls.SpectralSharding(ls.TopN(), ratios, aggregation=aggregation))
        for aggregation in (ls.algorithms.MatrixMeans(), ls.algorithms.TermMeans())
    )
    assert [tuple(row) for row in by_matrix.ledger.rows] == [tuple(row) for row in by_term.ledger.rows]
    for key in ("fl/terms_visited", "fl/loss"):
        assert by_matrix.history.column(key) == by_term.history.column(key)
    assert not torch.equal(by_matrix.weights, by_term.weights)


def test_spatial_matrices_are_averaged_and_put_back_into_kernels() -> None:
    """The whole of FedHM: its selection, its matrices and its average."""
    server = net().double()
    ours = algorithm(ls.TopN(), layers=ls.LayerChoices(convolutions="spatial"))
    expected = means_of_a_round(ours, server, MIXED)
    assert expected["1"].shape == (8 * 3, 6 * 3)
    kernel = server[1].weight.detach()
    torch.testing.assert_close(kernel.permute(0, 2, 1, 3).reshape(24, 18), expected["1"], rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix(server, "4"), expected["4"], rtol=0, atol=1e-12)


def play(
    half: SpectralHalf,
    server: nn.Module,
    ratios: list[float],
    *,
    step: bool = True,
    size: float = 0.1,
    left_out: Sequence[int] = (),
) -> tuple[Any, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Play a round. Return it, how far each client moved each of its own matrices, and these as they were sent."""
    opened, moved, sent = half.open(cohort(ratios)), [], []
    forms = Forms(server, half.client_side.take_form)
    for c in range(len(ratios)):
        download, receipt = opened.send(unit(c))
        with forms.client(download.capacity) as client:
            half.client_side.load(client, download)
            train(client, c, size)
            upload = half.client_side.collect(client, download)
        if c not in left_out:
            opened.add(receipt, upload)
        omega = {name: download.tensors[f"{name}.omega"] for name in SHARDED}
        before, after = (
            {name: dense(part.tensors, name, omega[name]) for name in SHARDED} for part in (download, upload)
        )
        sent.append(before)
        moved.append({name: after[name] - before[name] for name in SHARDED})
    opened.close()
    if step:
        torch.optim.SGD(server.parameters(), lr=1.0).step()
    return opened, moved, sent


def remaining(opened: Any, name: str, ratios: list[float]) -> Tensor:
    """What remains of each term; the weight of a client is one more than its number."""
    plans = [opened.layers[name].draws.groups[ratio] for ratio in ratios]
    if len(set(ratios)) == 1:
        return (plans[0].inclusion_probs > 0).double()
    total = sum(range(1, len(ratios) + 1))
    return sum((c + 1) / total * plan.inclusion_probs * plan.multipliers for c, plan in enumerate(plans))


def shares_of(opened: Any, name: str, ratios: list[float]) -> Tensor:
    """What remains of what is learned of each term: all of those that every client could hold."""
    held = [opened.layers[name].draws.groups[ratio].inclusion_probs > 0 for ratio in ratios]
    return torch.where(sum(own.double() for own in held) == len(held), 1.0, remaining(opened, name, ratios))


def reached(change: Tensor, before: Tensor, shares: Tensor) -> Tensor:
    """A change in all pairs of the weight's left and right vectors, each times the larger share."""
    u, s, vh = torch.linalg.svd(before)
    of_u, of_v = (torch.cat([shares, shares.new_zeros(len(basis) - len(s))]) for basis in (u, vh))
    return u @ (torch.maximum(of_u[:, None], of_v) * (u.mT @ change @ vh.mT)) @ vh


@pytest.mark.parametrize("left_out", [(), (1, 3)], ids=["all report", "the larger ones do not"])
@pytest.mark.parametrize("ratios", [[0.3, 0.3, 0.3, 0.3], [0.3, 0.6, 0.3, 0.6]], ids=repr)
@pytest.mark.parametrize("strategy", [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()], ids=repr)
def test_a_weight_gets_the_mean_change_and_loses_what_is_out_of_reach(
    strategy: Any, ratios: list[float], left_out: Sequence[int]
) -> None:
    server = net().double()
    half = ls.SpectralSharding(strategy, ratios).bind(server)
    half.initialize(Workers())
    before = {name: matrix(server, name).clone() for name in SHARDED}
    opened, moved, sent = play(half, server, ratios, left_out=left_out)
    for name in SHARDED:
        u, s, vh = torch.linalg.svd(before[name], full_matrices=False)
        reach, heard = remaining(opened, name, ratios), [c for c in range(len(moved)) if c not in left_out]
        change = sum((c + 1) * moved[c][name] for c in heard) / sum(c + 1 for c in heard)
        seen, shares = change, shares_of(opened, name, ratios)
        if shrinks := bool(((shares > 1e-9) & (shares < 1 - 1e-9)).any()):
            seen = reached(change, before[name], (shares > 1 - 1e-9).double())
            change = reached(change, before[name], shares)
        assert shrinks == (len(set(ratios)) > 1 and isinstance(strategy, ls.TopN | ls.Collective))
        weight = server.get_submodule(name).weight
        torch.testing.assert_close(-weight.grad.flatten(1), seen, rtol=0, atol=1e-12)
        torch.testing.assert_close(matrix(server, name), u * (reach * s) @ vh + change, rtol=0, atol=1e-12)
        assert shrinks != torch.allclose(seen, change, rtol=0, atol=1e-6)
        if isinstance(strategy, ls.TopN):
            torch.testing.assert_close(u * (reach * s) @ vh, mean([one[name] for one in sent]), rtol=0, atol=1e-12)
            assert 0 < reach.sum() < len(s)
        if isinstance(strategy, ls.Unbiased):  # whose multipliers make up for those who lack a term
            torch.testing.assert_close(reach, torch.ones_like(reach), rtol=0, atol=1e-9)


@pytest.mark.parametrize("output_ratio", [0.25, 0.5])  # fewer rows than larger clients have terms, and more
def test_rows_that_nobody_computes_stay_where_terms_shrink(output_ratio: float) -> None:
    """And a server optimizer is given what all clients hold, among the rows that they compute."""
    server, ratios = net().double(), [0.3, 0.6, 0.3, 0.6]
    half = ls.SpectralSharding(ls.TopN(), ratios, output_ratio=output_ratio).bind(server)
    half.initialize(Workers())
    before = {name: matrix(server, name).clone() for name in SHARDED}
    _, moved, sent = play(half, server, ratios)
    for name in SHARDED:
        held = len(moved[0][name])
        assert torch.equal(matrix(server, name)[held:], before[name][held:])
        u, vh = (torch.linalg.svd(before[name], full_matrices=False)[part] for part in (0, 2))
        common = math.ceil(0.3 * len(vh))
        left, right = torch.linalg.qr(u[:held, :common]).Q, vh[:common].mT
        change = mean([one[name] for one in moved])
        beyond = change - left @ (left.mT @ change)
        beyond -= beyond @ right @ right.mT
        seen = -server.get_submodule(name).weight.grad.flatten(1)[:held]
        torch.testing.assert_close(seen, change - beyond, rtol=0, atol=1e-12)
        rest = matrix(server, name)[:held] - mean([one[name] for one in sent]) - seen
        assert (float(rest.norm()) > 1e-3) == (held > common)


def test_where_all_clients_hold_the_same_terms_it_is_the_mean_of_matrices() -> None:
    ours, fed_hm = net().double(), net().double()
    for server, aggregation in ((ours, None), (fed_hm, ls.algorithms.MatrixMeans())):
        half = ls.SpectralSharding(ls.TopN(), 0.3, aggregation=aggregation).bind(server)
        half.initialize(Workers())
        play(half, server, [0.3, 0.3, 0.3])
    torch.testing.assert_close(ours.state_dict(), fed_hm.state_dict(), rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Smallest(ls.sharding.ShardingStrategy):
    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        held = torch.zeros_like(singular_values).index_fill_(0, singular_values.argsort()[:num_terms], 1.0)
        return held, torch.ones_like(held)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("strategy", "ratios", "suffice"),
    [
        (ls.TopN(), [0.1, 0.1], True),
        (ls.Collective(), [0.1, 0.2, 0.1], True),
        (ls.sharding.Scaled(ls.TopN()), [0.1, 0.1], True),
        (ls.Collective(), [0.1, 0.9], False),
        (ls.Unbiased(), [0.1, 0.1], False),
        (ls.PriSM(), [0.1, 0.1], False),
        (Smallest(), [0.1, 0.1], False),
    ],
    ids=repr,
)
def test_terms_that_nobody_could_hold_are_not_computed(
    strategy: Any, ratios: list[float], suffice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without them a round draws the same terms, logs the same figures, and keeps and drops the same."""
    layers = [seeded(nn.Linear, 40, 40) for _ in range(4)]  # with enough terms that the first of them alone pay
    whole, whole_terms = nn.Sequential(*layers[:2], nn.Tanh(), nn.Identity(), *layers[2:]), []

    def counted(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole_terms.append(weight)
        return singular_terms(weight)

    monkeypatch.setattr(spectral, "singular_terms", counted)
    half = ls.SpectralSharding(strategy, ratios).bind(whole)
    half.initialize(Workers())
    for _ in range(3):  # the first rounds still have all that the start has left
        play(half, whole, ratios, size=0.01)
    first, seen = copy.deepcopy(whole), []
    for server, share in ((whole, 0.0), (first, 1 / 3)):
        monkeypatch.setattr(term_draws, "FIRST_TERMS", share)
        whole_terms.clear()
        half = SpectralHalf(half.choice, server, half.plan, decisions=half.decisions)
        before = {name: matrix(server, name).clone() for name in SHARDED}
        opened, moved, _ = play(half, server, ratios, size=0.01)
        assert len(whole_terms) == (0 if suffice and server is first else len(half.plan.blocks))
        seen.append((opened, opened.observed().figures | spectral_figures(opened.term_draws)))
        for name in opened.term_draws:
            change = sum((c + 1) * one[name] for c, one in enumerate(moved)) / sum(range(len(ratios) + 1))
            u, s, vh = torch.linalg.svd(before[name].double(), full_matrices=False)
            kept = u * (remaining(opened, name, ratios) * s) @ vh
            shares = shares_of(opened, name, ratios)
            if ((shares > 1e-9) & (shares < 1 - 1e-9)).any():
                change = reached(change.double(), before[name].double(), shares)
            torch.testing.assert_close(matrix(server, name).double(), kept + change, rtol=0, atol=1e-6)
    (whole_round, figures), (first_round, others) = seen
    for c in range(len(ratios)):
        assert same_state(whole_round.send(unit(c))[1].drawn, first_round.send(unit(c))[1].drawn)
    assert same_state(whole_round.observed().visited_terms, first_round.observed().visited_terms)
    for figure in ("fl/entropy_rank", "fl/participation_rank"):  # no less than if the unknown terms were equal
        assert others.pop(figure) >= figures.pop(figure) * (1 - 1e-5)
    assert others == pytest.approx(figures, rel=1e-5)


@pytest.mark.parametrize("aggregation", [None, ls.algorithms.MatrixMeans()], ids=repr)
@pytest.mark.parametrize("in_gradient", [False, True])
def test_momentum_does_not_repeat_what_was_dropped(aggregation: Any, in_gradient: bool) -> None:
    """The control puts the dropped terms into the pseudo-gradient: later steps are these terms again.

    What clients train is nearly orthogonal to them: a change of the vectors that clients hold leaves the left or the
    right space of the others alone, so only products of two small changes are not.
    """
    server, dropped, cosines = net().double(), torch.zeros(()), []
    half = ls.SpectralSharding(ls.TopN(), 0.3, aggregation=aggregation).bind(server)
    half.initialize(Workers())
    optimizer = torch.optim.SGD(server.parameters(), lr=1.0, momentum=0.8)
    weight = server.get_submodule("4").weight
    for i in range(4):
        before = weight.detach().clone()
        play(half, server, [0.3, 0.3, 0.3], step=False, size=1e-3)
        lost = before - weight.detach()
        dropped = lost if i == 0 else dropped
        if in_gradient:
            weight.data.add_(lost)
            weight.grad.add_(lost)
        at_close = weight.detach().clone()
        optimizer.step()
        step = weight.detach() - at_close
        cosines.append(abs(float((step * dropped).sum() / (step.norm() * dropped.norm()))))
    assert dropped.norm() > 100 * 1e-3
    assert (min(cosines) > 0.8) if in_gradient else (max(cosines) < 0.02), cosines


def test_what_a_start_leaves_alone_is_averaged_term_by_term() -> None:
    """As in the paper: terms of a trained weight that nobody holds are kept."""
    server = net().double()
    with torch.no_grad():
        server[1].weight *= torch.linspace(3.0, 0.01, 8).double().view(-1, 1, 1, 1)  # looks trained
    by_terms = copy.deepcopy(server)
    half = ls.SpectralSharding(ls.TopN(), 0.3).bind(server)
    half.initialize(Workers())
    assert half.started == {"4"}
    play(half, server, [0.3, 0.3])
    other = ls.SpectralSharding(ls.TopN(), 0.3, aggregation=ls.algorithms.TermMeans()).bind(by_terms)
    other.initialize(Workers())
    play(other, by_terms, [0.3, 0.3])
    assert torch.equal(matrix(server, "1"), matrix(by_terms, "1"))
    assert not torch.allclose(matrix(server, "4"), matrix(by_terms, "4"))


def test_the_published_recipe_averages_terms() -> None:
    server, explicit = net(), net()
    for one, options in ((server, {}), (explicit, {"aggregation": ls.algorithms.TermMeans()})):
        half = ls.SpectralSharding.published(keep_ratio=0.3, **options).bind(one)
        half.initialize(Workers())
        play(half, one, [0.3, 0.3])
    assert same_state(server.state_dict(), explicit.state_dict())


def test_a_resumed_run_remembers_which_matrices_were_changed(fit: Fit, data: Any, tmp_path: Path) -> None:
    algorithm = ls.SpectralSharding(keep_ratio=0.5)
    whole = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=4)
    half, path = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=2), tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["federation_lasting"]["models"][""]
    assert saved["decisions"] == {"started": ["net.2"]}
    assert same_state(fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=4, ckpt_path=path).state, whole.state)
    forgetful = torch.load(path, weights_only=True)
    del forgetful["federation_lasting"]["models"][""]["decisions"]
    torch.save(forgetful, path)
    other = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=4, ckpt_path=path).state
    assert not same_state(other, whole.state)
