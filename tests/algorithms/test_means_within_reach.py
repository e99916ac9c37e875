"""The default average of matrices that a spectral start has changed, against a slow one: dense matrices in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from spectral_rounds import cohort, net, train, unit
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.algorithm import SpectralHalf
from lightning_spectral.client.forms import Forms
from lightning_spectral.protocol.cohort import Workers

SHARDED = ("1", "4")  # layers of `net`
STRATEGIES = [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()]


def dense(tensors: Any, name: str, omega: Tensor) -> Tensor:
    return tensors[f"{name}.u"] @ torch.diag(omega) @ tensors[f"{name}.v"]


def matrix(server: nn.Module, name: str) -> Tensor:
    return server.get_submodule(name).weight.detach().flatten(1)


def play(
    half: SpectralHalf, server: nn.Module, ratios: list[float], *, step: bool = True, size: float = 0.1
) -> tuple[Any, list[dict[str, Tensor]]]:
    """Play a round. Return it, and how far each client moved each of its own matrices."""
    opened, moved = half.open(cohort(ratios)), []
    forms = Forms(server, half.device_half.take_form)
    for c in range(len(ratios)):
        download, receipt = opened.send(unit(c))
        with forms.client(download.capacity) as client:
            half.device_half.load(client, download)
            train(client, c, size)
            upload = half.device_half.collect(client, download)
        opened.add(receipt, upload)
        omega = {name: download.tensors[f"{name}.omega"] for name in SHARDED}
        both = {name: [dense(part.tensors, name, omega[name]) for part in (upload, download)] for name in SHARDED}
        moved.append({name: after - before for name, (after, before) in both.items()})
    opened.close()
    if step:
        torch.optim.SGD(server.parameters(), lr=1.0).step()
    return opened, moved


@pytest.mark.parametrize("ratios", [[0.3, 0.3, 0.3], [0.3, 0.6, 0.3, 0.6]], ids=repr)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_weight_gets_the_mean_change_and_loses_what_is_out_of_reach(strategy: Any, ratios: list[float]) -> None:
    server = net().double()
    half = ls.SpectralSharding(strategy, ratios).bind(server)
    half.initialize(Workers())
    before = {name: matrix(server, name).clone() for name in SHARDED}
    opened, moved = play(half, server, ratios)
    for name in SHARDED:
        probs = [plan.inclusion_probs for plan in opened.layers[name].draws.groups.values()]
        u, s, vh = torch.linalg.svd(before[name], full_matrices=False)
        reach = torch.tensor([any(group[i] > 0 for group in probs) for i in range(len(s))])
        change = sum((c + 1) * one[name] for c, one in enumerate(moved)) / sum(c + 1 for c in range(len(moved)))
        expected = u[:, reach] * s[reach] @ vh[reach] + change
        torch.testing.assert_close(matrix(server, name), expected, rtol=0, atol=1e-12)
        if isinstance(strategy, ls.TopN):
            assert 0 < reach.sum() < len(s)
        if isinstance(strategy, ls.Unbiased):
            assert reach.all()


def test_where_all_clients_hold_the_same_terms_it_is_the_mean_of_matrices() -> None:
    ours, fed_hm = net().double(), net().double()
    for server, aggregation in ((ours, None), (fed_hm, ls.algorithms.MatrixMeans())):
        half = ls.SpectralSharding(ls.TopN(), 0.3, aggregation=aggregation).bind(server)
        half.initialize(Workers())
        play(half, server, [0.3, 0.3, 0.3])
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, fed_hm.state_dict()[name], rtol=0, atol=1e-12)


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
    assert torch.load(path, weights_only=True)["federation_decisions"] == {"": {"started": ["net.2"]}}
    assert same_state(fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=4, ckpt_path=path).state, whole.state)
    forgetful = torch.load(path, weights_only=True)
    forgetful["federation_decisions"] = {}
    torch.save(forgetful, path)
    other = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=4, ckpt_path=path).state
    assert not same_state(other, whole.state)
