"""Every choice that a federation offers can be made in YAML as in Python, and the printed YAML loads again."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from public_names import PUBLIC
from torch import nn

import lightning_spectral as ls
from lightning_spectral.server.optimizers import FedOptimizer
from lightning_spectral.simulation import DeviceProfile

jsonargparse = pytest.importorskip("jsonargparse", reason="comes with the `test` extra")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # `skip_none` has another name since 4.53


@dataclass(frozen=True)
class Cautious(ls.FedAvg):
    caution: float = 0.5


def crowd() -> ls.VirtualClock:
    """A function may take the place of a class: here because YAML cannot map profiles to shares."""
    return ls.VirtualClock({DeviceProfile(1e6, 1e5, 1e9): 0.5, DeviceProfile(1e5, 1e4, 1e8): 0.5})


def sharding(**options: Any) -> Any:
    return ls.SpectralSharding(**options)


def sharded(options: str) -> str:
    return f"{{class_path: SpectralSharding, init_args: {{{options}}}}}"


FAST, SLOW = DeviceProfile(1e6, 1e5, 1e9), DeviceProfile(1e5, 1e4, 1e8)
FAST_YAML = "{downlink: 1.0e+6, uplink: 1.0e+5, macs_per_second: 1.0e+9}"
SLOW_YAML = "{downlink: 1.0e+5, uplink: 1.0e+4, macs_per_second: 1.0e+8}"
SECURE = [("[SecureSums]", [ls.SecureSums()])] if find_spec("cryptography") else []
CHOICES: dict[str, list[tuple[str, object]]] = {
    "algorithm": [
        ("FedAvg", ls.FedAvg()),
        ("Scaffold", ls.Scaffold()),
        ("{class_path: FedDyn, init_args: {alpha: 0.1}}", ls.FedDyn(alpha=0.1)),
        ("{class_path: FedBuff, init_args: {concurrency: 9, durations: [1.0, 2]}}", ls.FedBuff(9, [1.0, 2.0])),
        ("{class_path: Ditto, init_args: {pull: 0.5}}", ls.Ditto(pull=0.5)),
        ("{class_path: QFedAvg, init_args: {q: 2.0}}", ls.QFedAvg(q=2.0)),
        ("{class_path: FIARSE, init_args: {keep_ratio: {0.25: 0.5, 1.0: 0.5}, exclude: [head.*]}}",
         ls.FIARSE({0.25: 0.5, 1.0: 0.5}, exclude=["head.*"])),
        ("{class_path: StaleUpdates, init_args: {beta: 0.5}}", ls.StaleUpdates(beta=0.5)),
        ("{class_path: Zampling, init_args: {degree: 4, exclude: [a], link: Sigmoid, coordinated: true}}",
         ls.Zampling(degree=4, exclude=("a",), link=ls.functional.zampling.Sigmoid(), coordinated=True)),
        ("{class_path: Zampling, init_args: {link: {class_path: Clip, init_args: {absorbing: false}}}}",
         ls.Zampling(link=ls.functional.zampling.Clip(absorbing=False))),
        ("lightning_spectral.Zampling.fed_pm", ls.Zampling.fed_pm()),
        ("{class_path: LoRA, init_args: {rank: {4: 0.5, 8: 0.5}, train: ['*.norm']}}",
         ls.LoRA({4: 0.5, 8: 0.5}, train=["*.norm"])),
        ("{class_path: LoRA, init_args: {alpha: 4.0, merge_every: 5}}", ls.LoRA(alpha=4.0, merge_every=5)),
        ("{class_path: LoRA, init_args: {aggregation: {class_path: SampledTerms, init_args: {strategy: TopN}}}}",
         ls.LoRA(aggregation=ls.SampledTerms(ls.TopN()))),
        *[(f"{{class_path: LoRA, init_args: {{aggregation: {name}}}}}", ls.LoRA(aggregation=getattr(ls, name)()))
          for name in ("AlternatingFactors", "FrozenA", "PaddedFactors", "StackedProducts", "TruncatedProducts")],
        ("{class_path: WidthSharding, init_args: {keep_ratio: {0.5: 0.5, 1.0: 0.5}, scaler: true, exclude: [a]}}",
         ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5}, scaler=True, exclude=["a"])),
        ("{class_path: WidthSharding, init_args: {keep_ratio: 0.5, step_widths: [0.25, 0.5]}}",
         ls.WidthSharding(keep_ratio=0.5, step_widths=(0.25, 0.5))),
        ("{class_path: WidthSharding, init_args: {keep_ratio: 0.5, step_widths: [0.5], averages_per_width: true}}",
         ls.WidthSharding(keep_ratio=0.5, step_widths=(0.5,), averages_per_width=True)),
        ("{class_path: WidthSharding, init_args: {channels: {class_path: RollingChannels, init_args: {step: 2}}}}",
         ls.WidthSharding(ls.RollingChannels(step=2))),
        *[(f"{{class_path: WidthSharding, init_args: {{channels: {name}}}}}", ls.WidthSharding(getattr(ls, name)()))
          for name in ("PrefixChannels", "RandomChannels")],
        ("{class_path: lightning_spectral.SpectralSharding.published, init_args: {keep_ratio: 0.1}}",
         ls.SpectralSharding.published(keep_ratio=0.1)),
        (f"{{class_path: {__name__}.Cautious, init_args: {{caution: 0.1}}}}", Cautious(caution=0.1)),
        ("SpectralSharding", sharding()),
        (sharded("keep_ratio: 0.5"), sharding(keep_ratio=0.5)),
        (sharded("keep_ratio: {0.2: 0.6, 0.4: 0.4}"), sharding(keep_ratio={0.2: 0.6, 0.4: 0.4})),
        (sharded("keep_ratio: [0.2, 0.4, 1.0]"), sharding(keep_ratio=[0.2, 0.4, 1.0])),
        (sharded("strategy: Unbiased, clip_weight_lr: 0.5"), sharding(strategy=ls.Unbiased(), clip_weight_lr=0.5)),
        (sharded("strategy: TopN, clip_tau: .inf"), sharding(strategy=ls.TopN(), clip_tau=float("inf"))),
        (sharded("strategy: {class_path: Collective, init_args: {cohort: joint}}"),
         sharding(strategy=ls.Collective(cohort="joint"))),
        (sharded("strategy: {class_path: PriSM, init_args: {exponent: 1.5}}"), sharding(strategy=ls.PriSM(1.5))),
        (sharded("strategy: {class_path: Scaled, init_args: {strategy: Schatten}}"),
         sharding(strategy=ls.sharding.Scaled(ls.sharding.Schatten()))),
        (sharded("strategy: {class_path: Schedule, init_args: {values: {0: TopN, 5: EffectiveCohort}}}"),
         sharding(strategy=ls.Schedule({0: ls.TopN(), 5: ls.EffectiveCohort()}))),
        (sharded("design: {class_path: Schedule, init_args: {values: {0: null, 5: Brewer}}}"),
         sharding(design=ls.Schedule({0: None, 5: ls.Brewer()}))),
        (sharded("strategy: Collective, design: ConditionalPoisson"),
         sharding(design=ls.ConditionalPoisson())),
        *[(sharded(f"design: {name}"), sharding(design=getattr(ls.designs, name)()))
          for name in ("Coordinated", "MinimumSupport", "RandomSystematic", "SuccessiveSampling", "Systematic")],
        (sharded("exclude: [head]"), sharding(exclude=["head"])),
        (sharded("output_ratio: 0.4"), sharding(output_ratio=0.4)),
        *[(sharded(f"aggregation: {name}"), sharding(aggregation=getattr(ls.algorithms, name)()))
          for name in ("MatrixMeans", "TermMeans")],
        (sharded("layers: {split: {'*.qkv': 3}, term_granularity: 4}"),
         sharding(layers=ls.LayerChoices(split={"*.qkv": 3}, term_granularity=4))),
        (sharded("layers: {convolutions: tucker}"), sharding(layers=ls.LayerChoices(convolutions="tucker"))),
        (sharded("layers: {convolutions: spatial, keep_first_and_last_dense: false}"),
         sharding(layers=ls.LayerChoices(convolutions="spatial", keep_first_and_last_dense=False))),
        (sharded("spectral_start: {tail: 0.2, trained: true}"),
         sharding(spectral_start=ls.SpectralStart(0.2, trained=True))),
        (sharded("spectral_start: null"), sharding(spectral_start=None)),
    ],
    "participation": [
        ("FullParticipation", ls.FullParticipation()),
        ("{class_path: Uniform, init_args: {active: 3.0, design: Brewer}}", ls.Uniform(3.0, ls.Brewer())),
        ("{class_path: RoundRobin, init_args: {active: 3.0}}", ls.RoundRobin(3.0)),
        ("{class_path: LossVarianceReduced, init_args: {active: 2.5, measure: last}}",
         ls.LossVarianceReduced(2.5, measure="last")),
        ("{class_path: UpdateVarianceReduced, init_args: {active: 3.0, measure: 4}}",
         ls.UpdateVarianceReduced(3.0, measure=4)),
        ("{class_path: StaleUpdateVarianceReduced, init_args: {active: 3.0, normalize: true}}",
         ls.StaleUpdateVarianceReduced(3.0, normalize=True)),
    ],
    "server_optimizer": [
        ("FedAdam", ls.FedAdam()),
        ("{class_path: FedAvgM, init_args: {lr: 0.5}}", ls.FedAvgM(lr=0.5)),
        ("{class_path: lightning_spectral.server.BoundedMomentum, init_args: {momentum: 0.5}}",
         ls.BoundedMomentum(momentum=0.5)),
        ("{class_path: lightning_spectral.server.FedYogi, init_args: {betas: [0.8, 0.9]}}",
         ls.FedYogi(betas=(0.8, 0.9))),
        ("{class_path: FedAdagrad, init_args: {tau: 0.1}}", ls.FedAdagrad(tau=0.1)),
    ],
    "local_hooks": [
        ("[{class_path: ProximalTerm, init_args: {mu: 0.1}}, {class_path: GradientClip, init_args: {max_norm: 1.0}}]",
         [ls.ProximalTerm(0.1), ls.GradientClip(1.0)]),
        ("[MaskedLogits]", [ls.MaskedLogits()]),
        ("[{class_path: MaskedLogits, init_args: {layer: net.6, absent: -.inf}}]",
         [ls.MaskedLogits("net.6", -float("inf"))]),
        ("[{class_path: CalibratedLogits, init_args: {rounds: 9}}]", [ls.CalibratedLogits(rounds=9)]),
        ("[{class_path: FixedBatchNorm, init_args: {from_round: 4}}]", [ls.FixedBatchNorm(4)]),
    ],
    "faults": [
        ("{on_error: LeaveOut, on_not_finite: Raise, on_late: {class_path: LeaveOut, init_args: {max_share: 0.2}}}",
         ls.Faults(on_error=ls.LeaveOut(),
                   on_not_finite=ls.server.Raise(), on_late=ls.LeaveOut(0.2))),
    ],
    "filters": [
        ("[UsualUpdateNorm]", [ls.UsualUpdateNorm()]),
        ("[{class_path: MaxUpdateNorm, init_args: {norm: 2.0}}]", [ls.MaxUpdateNorm(2.0)]),
        ("[{class_path: Personal, init_args: {patterns: ['net.0.*'], epochs: 2}}, Int8]",
         [ls.Personal(["net.0.*"], epochs=2), ls.Int8()]),
        ("[{class_path: TopK, init_args: {share: 0.01}}]", [ls.TopK(0.01)]),
        ("[{class_path: LocalNoise, init_args: {clip: 0.5, noise_multiplier: 4.0}}]",
         [ls.LocalNoise(clip=0.5, noise_multiplier=4.0)]),
        ("[{class_path: ExamplePrivacy, init_args: {clip: 0.5, target_epsilon: 8.0, num_epochs: 2, delta: 1.0e-05}}]",
         [ls.ExamplePrivacy(clip=0.5, target_epsilon=8.0, num_epochs=2, delta=1e-5)]),
        ("[{class_path: ClientPrivacy, init_args: {clip: 0.5, noise_multiplier: 1.0, delta: 1.0e-05}}]",
         [ls.ClientPrivacy(clip=0.5, noise_multiplier=1.0, delta=1e-5)]),
        ("[{class_path: Robust, init_args: {rule: Median}}, {class_path: Weights, init_args: {by: uniform}}]",
         [ls.Robust(ls.Median()), ls.Weights("uniform")]),
        ("[FedNova]", [ls.FedNova()]),
        ("[{class_path: Robust, init_args: {rule: {class_path: TrimmedMean, init_args: {share: 0.2}}}}]",
         [ls.Robust(ls.TrimmedMean(0.2))]),
        ("[{class_path: Attack, init_args: {lie: ipm, strength: 2.0, clients: 0.3}}]",
         [ls.Attack("ipm", 2.0, clients=0.3)]),
        ("[{class_path: Attack, init_args: {lie: scale, strength: -1.0, clients: [0, 3]}}]",
         [ls.Attack("scale", -1.0, clients=[0, 3])]),
        *SECURE,
    ],
    "buffers": [("{'*.base': server, low: min}", {"*.base": "server", "low": "min"})],
    "dropout": [
        ("{probability: 0.1}", ls.ClientDropout(0.1)),
        ("{probability: {0.0: 0.5, 0.3: 0.5}}", ls.ClientDropout({0.0: 0.5, 0.3: 0.5})),
    ],
    "clock": [
        (f"{{profiles: {FAST_YAML}, deadline: 3.0, macs: {{0.2: 100.0}}}}",
         ls.VirtualClock(FAST, deadline=3.0, macs={0.2: 100.0})),
        (f"{{profiles: [{FAST_YAML}, {SLOW_YAML}], keep_first: 2}}", ls.VirtualClock([FAST, SLOW], keep_first=2)),
        (f"{__name__}.crowd", crowd()),
    ],
}  # fmt: skip
PARTITIONERS = [
    ("{class_path: IIDPartitioner, init_args: {num_clients: 5}}", ls.IIDPartitioner(5)),
    ("{class_path: DirichletPartitioner, init_args: {num_clients: 5, alpha: 0.3, symmetric: true}}",
     ls.DirichletPartitioner(5, 0.3, symmetric=True)),
    ("{class_path: PachinkoPartitioner, init_args: {num_clients: 5, superclasses: [0, 0, 1], alpha: 0.1, beta: 10.0}}",
     ls.PachinkoPartitioner(5, [0, 0, 1], alpha=0.1, beta=10.0)),
    ("{class_path: NaturalPartitioner, init_args: {keys: [romeo, juliet, romeo]}}",
     ls.NaturalPartitioner(["romeo", "juliet", "romeo"])),
    ("{class_path: ShardPartitioner, init_args: {num_clients: 5, shards_per_client: 3}}", ls.ShardPartitioner(5, 3)),
    ("{class_path: LabelsPerClient, init_args: {num_clients: 5, num_labels: 3}}", ls.LabelsPerClient(5, 3)),
    ("{class_path: IIDPartitioner, init_args: {num_clients: 2, sizes: [3, 1]}}",
     ls.IIDPartitioner(2, sizes=[3.0, 1.0])),
]  # fmt: skip


def parser_of(kind: type, without: str) -> Any:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "it", skip={without}, fail_untyped=False, instantiate=False)
    return parser


@pytest.fixture(scope="module")
def model() -> Any:
    return parser_of(ls.FederatedModule, "module")


@pytest.fixture(scope="module")
def data() -> Any:
    return parser_of(ls.FederatedDataModule, "train")


def built(parser: Any, key: str, yaml: str) -> tuple[Any, Any]:
    """The object from the YAML, and the object from the YAML that is printed for it."""
    config = parser.parse_string(f"it: {{{key}: {yaml}}}")
    again = parser.parse_string(parser.dump(config, skip_none=False))
    return parser.instantiate(config).it[key], parser.instantiate(again).it[key]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("key", "yaml", "expected"), [(key, *case) for key, cases in CHOICES.items() for case in cases]
)
def test_yaml_says_what_python_says(model: Any, key: str, yaml: str, expected: object) -> None:
    for found in built(model, key, yaml):
        assert found == expected or repr(found) == repr(expected)  # some compare as objects, and 32 is 32.0


@pytest.mark.parametrize(("yaml", "expected"), PARTITIONERS)
def test_partitioners_come_from_yaml(data: Any, yaml: str, expected: object) -> None:
    assert [repr(found) for found in built(data, "partitioner", yaml)] == 2 * [repr(expected)]


@pytest.mark.parametrize(
    ("kind", "yaml", "expected"),
    [
        ("model", "clients_per_round: 0.1", 0.1),
        ("model", "local_steps: {5: 0.5, 20: 0.5}", {5: 0.5, 20: 0.5}),
        ("data", f"batch_size: {{4: 0.25, 8: 0.75}}, partitioner: {PARTITIONERS[0][0]}", {4: 0.25, 8: 0.75}),
    ],
)
def test_numbers_of_clients_come_from_yaml(model: Any, data: Any, kind: str, yaml: str, expected: Any) -> None:
    key, _, value = yaml.partition(": ")
    assert [repr(found) for found in built({"model": model, "data": data}[kind], key, value)] == 2 * [repr(expected)]


@pytest.mark.parametrize("name", ["Adam", "torch.optim.Adam"])
def test_an_optimizer_of_torch_can_be_the_servers(model: Any, name: str) -> None:
    for make in built(model, "server_optimizer", f"{{class_path: {name}, init_args: {{lr: 0.25, betas: [0.5, 0.9]}}}}"):
        optimizer = make([nn.Parameter(torch.ones(1))])
        assert type(optimizer) is torch.optim.Adam
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.25, (0.5, 0.9))


@pytest.mark.parametrize(
    ("key", "yaml"),
    [
        ("algorithm", "Collective"),
        ("algorithm", sharded("keep_ratios: 0.2")),
        ("algorithm", sharded("clip_tau: much")),
        ("algorithm", sharded("spectral_start: {tall: 0.2}")),
        ("server_optimizer", "FedAvg"),
        ("faults", "{on_error: {class_path: Raise, init_args: {max_share: 0.5}}}"),
    ],
)
def test_what_is_wrong_in_yaml_is_refused_before_anything_is_built(model: Any, key: str, yaml: str) -> None:
    with pytest.raises(jsonargparse.ArgumentError, match=key):
        model.parse_string(f"it: {{{key}: {yaml}}}")


def test_every_choice_has_a_config_here() -> None:
    known = str([*CHOICES.values(), PARTITIONERS])
    bases = (
        ls.Algorithm,
        ls.algorithms.AdapterAggregation,
        ls.sharding.ShardingStrategy,
        ls.designs.Design,
        ls.participation.Sampler,
        ls.client.LocalHook,
        ls.Filter,
    )
    bases = (*bases, ls.partition.Partitioner, ls.functional.zampling.Link)
    classes = {name: kind for name, kind in PUBLIC.items() if isinstance(kind, type)}
    choices = [name for name, kind in classes.items() if issubclass(kind, (*bases, FedOptimizer))]
    abstract = [
        base.__name__
        for base in (*bases, ls.client.LogitsHook, ls.designs.JointDesign, ls.UpdateBound, ls.filters.Packing)
    ]
    abstract += [] if SECURE else ["SecureSums"]  # which needs the extra
    assert not [name for name in choices if name not in abstract and f"{name}(" not in known]
