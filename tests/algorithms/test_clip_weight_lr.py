"""`clip_weight_lr` and the paper's recipe in a client's turn and in whole fits."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from one_client import Turns
from torch import Tensor, nn
from torch.optim import Optimizer
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.algorithm import SpectralSide
from lightning_spectral.client.device import StepActions
from lightning_spectral.functional.spectra import effective_lr_factors, weight_lr_factors
from lightning_spectral.nn import sharded_layers
from lightning_spectral.nn.optimizer_hooks import TermRates
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, WorkUnit

# a few terms of small random matrices have large multipliers: what is trained matters here, not how well
flat_spectra = pytest.mark.filterwarnings("ignore:Round 0. sub-models of keep ratio:lightning_spectral.SpectralWarning")


def lr_factors(u: Tensor, omega: Tensor, v: Tensor, bound: float) -> Tensor:
    return weight_lr_factors(u.square().sum(0) + v.square().sum(1), omega, bound)


@contextmanager
def sub_model(
    algorithm: Any, server: nn.Module, keep_ratio: float, lr: float, weight_decay: float = 0.0
) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """What one client trains, and what takes its steps."""
    template = torch.optim.SGD(server.parameters(), lr=lr, weight_decay=weight_decay)
    half = algorithm.bind(server)
    download, _ = half.open(Cohort(0, 0, {keep_ratio: (WorkUnit(0),)})).send(WorkUnit(0))
    turns = Turns(half.client_side, server, template)
    with turns.client(download.capacity) as client:
        turns.side.load(client, download)
        yield client, turns.start(client)


class TestAtALearningRateForTheDenseNetwork:
    """Unbiased draws of 7 of 64 terms have multipliers of about 9."""

    LR, STEPS = 0.5, 200

    def losses(self, algorithm: Any, server: nn.Module, keep_ratio: float = 0.1) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        x, teacher, head = (torch.randn(*shape, generator=generator) for shape in ((256, 16), (16, 32), (32, 8)))
        y = torch.tanh(x @ teacher / 4) @ head / 32**0.5
        found: list[float] = []
        with sub_model(algorithm, server, keep_ratio, self.LR) as (client, step):
            while len(found) < self.STEPS and (not found or math.isfinite(found[-1])):
                client.zero_grad()
                loss = (client(x) - y).square().mean()
                loss.backward()
                step()
                found.append(loss.item())
        return found

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("start", [None, ls.SpectralStart()], ids=["random", "spectral"])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_sub_models_explode_without_the_bound_and_learn_with_it(self, seed: int, start: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = [(16, 64), (64, 64), (64, 64), (64, 8)]
            layers = [module for size in sizes for module in (nn.Linear(*size), nn.ReLU())]
        server = nn.Sequential(*layers[:-1])
        if start is not None:
            ls.algorithms.spectral_start(server, 0.1)
        dense = self.losses(ls.FedAvg(), server, 1.0)
        free = self.losses(ls.SpectralSharding.published(ls.Unbiased(), 0.1), server)
        bounded = self.losses(ls.SpectralSharding.published(ls.Unbiased(), 0.1, clip_weight_lr=1.0), server)
        assert max(dense) < 1.1 * dense[0]
        assert dense[-1] < dense[0] / 3
        assert not math.isfinite(free[-1])
        assert max(bounded) < 1.1 * bounded[0]
        assert bounded[-1] < bounded[0] / 3


class TestFrobeniusDecay:
    @pytest.mark.parametrize(("lr", "decay"), [(1.0, 0.1), (0.3, 0.02)])
    def test_a_fast_term_decays_as_a_dense_weight_does_to_first_order(self, lr: float, decay: float) -> None:
        """Both of its vectors decay at half the rate, so the term ends at (1 - lr decay / 2)^2 of itself.

        A dense weight would end at 1 - lr decay. A slow term decays at the rate 2 omega^2 s, which is below 1.
        """
        server = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)).double()
        sizes = torch.tensor([10.0, 3.0, 0.5, 0.4, 0.1, 0.01]).double()
        with torch.no_grad():
            server[1].weight.copy_(torch.diag(sizes))
        algorithm = ls.SpectralSharding(
            ls.TopN(), 1.0, frobenius_decay=0.0, clip_weight_lr=1.0, clip_tau=math.inf, spectral_start=None
        )
        ended = {}
        for bound in (1.0, math.inf):
            bounded = replace(algorithm, clip_weight_lr=bound)
            with sub_model(bounded, server, 1.0, lr, weight_decay=decay) as (client, step):
                for parameter in client.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                step()
                ended[bound] = torch.diagonal(client[1].weight.detach())
        torch.testing.assert_close(ended[1.0], (1 - lr * decay * (2 * sizes).clamp(max=1.0) / 2).square() * sizes)
        dense = (1 - lr * decay) * sizes
        rounding = 1e-12  # float64
        assert bool(((ended[1.0] - dense).abs() <= (lr * decay / 2) ** 2 * sizes + rounding)[:3].all())
        torch.testing.assert_close(ended[math.inf], (1 - lr * decay * sizes).square() * sizes)  # negative control
        assert not torch.allclose(ended[math.inf][:2], dense[:2], rtol=lr * decay)


class MultipliersAlone(SpectralSide):
    """Clips each step with `EffectiveLRClip`, without a bound on the learning rate of the weight."""

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """Hooks of the optimizer, from a client's first step to its last."""
        coefficients, hooked = dict.fromkeys(sharded_layers(client), self.frobenius_decay), set()

        def before_step(optimizer: Optimizer) -> None:
            if optimizer not in hooked:
                ls.nn.FrobeniusDecay(coefficients).register(optimizer, client)
                ls.EffectiveLRClip(self.clip_tau).register(optimizer, client)
                hooked.add(optimizer)

        return StepActions(before_step=before_step)


EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)


@flat_spectra
class TestInAFit:
    OPTIONS: Mapping[str, Any] = {"keep_ratio": {0.3: 0.5, 0.6: 0.5}, "frobenius_decay": 0.01, "layers": EVERY_LAYER}

    @pytest.mark.slow
    @pytest.mark.parametrize("tau", [1.2, 10.0, math.inf])
    def test_without_the_bound_it_is_that_of_effective_rates_bit_for_bit(
        self, tau: float, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        def state(algorithm: ls.SpectralSharding) -> dict[str, Tensor]:
            return fit(seeded(lit_mlp), data, algorithm=algorithm, local_epochs=2, max_epochs=3).state

        options = {**self.OPTIONS, "clip_tau": tau}
        without = state(ls.SpectralSharding.published(ls.Unbiased(), **options))
        bare = variant(ls.SpectralSharding, side=MultipliersAlone)  # without rates of its own for terms
        assert same_state(without, state(bare.published(ls.Unbiased(), **options)))
        bounded = state(ls.SpectralSharding.published(ls.Unbiased(), **options, clip_weight_lr=0.5))
        assert not same_state(without, bounded)  # negative controls
        other = {**options, "clip_tau": math.inf if tau < 2 else 1.2}
        assert not same_state(without, state(ls.SpectralSharding.published(ls.Unbiased(), **other)))

    def test_every_step_has_the_factors_of_the_terms_that_the_client_was_sent(
        self, lit_mlp: Any, data: Any, fit: Fit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: dict[str, Any] = {}
        steps: list[tuple[Any, Tensor, Tensor]] = []  # the client, its factors, and those of its terms at that moment
        load, acting = SpectralSide.load, TermRates.acting

        def spy_load(side: SpectralSide, client: nn.Module, download: Download) -> None:
            load(side, client, download)
            sent.update(client=client, download=download)

        def spy_acting(rates: TermRates, optimizer: Optimizer) -> Callable[[], None]:
            scale = acting(rates, optimizer)

            def spied() -> None:
                layers = sharded_layers(sent["client"])
                before = {name: (layer.u.grad.clone(), layer.v.grad.clone()) for name, layer in layers.items()}  # type: ignore[union-attr]
                scale()
                for name, layer in layers.items():
                    u, omega, v = (sent["download"].tensors[f"{name}.{part}"] for part in ("u", "omega", "v"))
                    factors = torch.minimum(effective_lr_factors(omega, 3.0), lr_factors(u, omega, v, 1.0))
                    assert torch.equal(layer.u.grad, before[name][0] * factors)
                    assert torch.equal(layer.v.grad, before[name][1] * factors[:, None])
                    now = lr_factors(layer.u.detach(), omega, layer.v.detach(), 1.0)
                    steps.append((sent["download"].unit, factors, torch.minimum(effective_lr_factors(omega, 3.0), now)))

            return spied

        monkeypatch.setattr(SpectralSide, "load", spy_load)
        monkeypatch.setattr(TermRates, "acting", spy_acting)
        algorithm = ls.SpectralSharding(ls.Unbiased(), clip_weight_lr=1.0, clip_tau=3.0, **self.OPTIONS)
        fit(seeded(lit_mlp), data, algorithm=algorithm, clients_per_round=6, max_epochs=2)
        assert len({unit for unit, _, _ in steps}) > 6
        assert any(not torch.equal(factors, now) for _, factors, now in steps)  # negative control: terms change
        distinct = {tuple(factors.tolist()) for _, factors, _ in steps}
        assert len(distinct) > 12  # and clients differ
        assert all(min(one) < 1.0 for one in distinct)


class TestPublished:
    def test_it_has_the_settings_of_the_paper(self) -> None:
        """Korzhenkov & Louizos (2024), section 4: conditional Poisson sampling, collective, tau 10, decay 1e-4."""
        paper = ls.SpectralSharding.published()
        assert (paper.strategy, paper.design, paper.clip_tau, paper.frobenius_decay) == (
            ls.Collective(),
            None,
            10.0,
            1e-4,
        )
        assert paper.spectral_start is None
        assert paper.clip_weight_lr == math.inf
        default = ls.SpectralSharding()
        assert replace(default, spectral_start=None, clip_weight_lr=math.inf) == paper
        assert default.spectral_start is not None
        assert default.clip_weight_lr == 1.0

    def test_further_options_are_passed_through(self) -> None:
        options: dict[str, Any] = {
            "design": ls.designs.Coordinated(),
            "clip_tau": 2.0,
            "frobenius_decay": 0.0,
            "exclude": ["head"],
        }
        paper = ls.SpectralSharding.published(ls.Unbiased(), {0.2: 0.6, 0.4: 0.4}, **options)
        expected = ls.SpectralSharding(
            ls.Unbiased(), {0.2: 0.6, 0.4: 0.4}, **options, spectral_start=None, clip_weight_lr=math.inf
        )
        assert paper == expected
        assert paper.layers == ls.LayerChoices(exclude=["head"])
        own = ls.SpectralSharding.published(spectral_start=ls.SpectralStart(), clip_weight_lr=3.0)
        assert (own.spectral_start, own.clip_weight_lr) == (ls.SpectralStart(), 3.0)
        with pytest.raises(TypeError, match="'typo'"):
            ls.SpectralSharding.published(typo=1)
        with pytest.raises(ValueError, match="`clip_weight_lr` must be positive"):
            ls.SpectralSharding.published(clip_weight_lr=0.0)
