"""Choices that mean nothing are refused where they are made, by rule, value and remedy; see also `test_arguments`."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral.functional.sampling.cohorts import effective_cohort_size
from lightning_spectral.functional.sampling.inclusion import schatten_inclusion_probs
from lightning_spectral.nn.zampling import Compression
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.simulation import Conditions, SimulatedTask

DEVICE = ls.simulation.DeviceProfile(downlink=1.0, uplink=1.0, macs_per_second=1.0)
TASK = SimulatedTask(0.5, num_examples=10, local_epochs=2, num_parameters=100, downlink_bytes=400, uplink_bytes=300)
CUT_AT_4 = ls.LayerChoices(output_ratio=0.4)
Rows = list[tuple[dict[str, Any], str]]


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


federated = partial(ls.FederatedModule, LitNet(nn.Linear(3, 1)), clients_per_round=1)
clock = partial(ls.VirtualClock, DEVICE)
compression = partial(Compression, factor=2)
dense = partial(ls.SpectralShardedLinear, 5, 3)
effective = partial(effective_cohort_size, torch.ones(4), 2, 3.0)
pachinko = partial(ls.PachinkoPartitioner, 2, alpha=1.0, beta=10.0)
replaced = partial(ls.replace_layers, net())
schatten = partial(schatten_inclusion_probs, torch.ones(3).double(), 1)
step_widths = partial(ls.WidthSharding, step_widths=[0.5])


def small_cohort(**options: Any) -> None:
    Conditions(None, clock(**options)).check(9, 2)


def timed(**options: Any) -> None:
    clock(**options).seconds(DEVICE, TASK)


POSITIVE, RATIO = "must be positive and finite, got", r"must be in \(0, 1\], got"
PATTERNS = "must be a sequence of patterns"
OF_ANOTHER_TYPE = re.compile(
    "an instance|True or False|must be a (whole )?number|a tensor|whole numbers, |by round|of keep ratios"
)
REFUSED: dict[Callable[..., Any], Rows] = {
    # systems
    ls.SpectralSharding: [
        ({"keep_ratio": 0.0}, f"`keep_ratio` {RATIO} 0.0"),
        ({"keep_ratio": {0.2: 0.6, 1.4: 0.4}}, "got 1.4"),
        ({"keep_ratio": [0.2, -1.0]}, "got -1.0"),
        ({"keep_ratio": "0.2"}, "`keep_ratio` must be a number, got '0.2'; write 0.2"),
        ({"keep_ratio": [0.2, None]}, "`keep_ratio` must be a number, got None; it is the share"),
        ({"keep_ratio": ls.Schedule({0: 0.2})}, "keep_ratio"),
        ({"clip_tau": 0.5}, "`clip_tau` must be at least 1, got 0.5"),
        ({"clip_weight_lr": 0.0}, r"`clip_weight_lr` must be positive, got .*use float\('inf'\) for no bound"),
        ({"frobenius_decay": -1e-4}, "`frobenius_decay` must be at least 0 and finite, got -0.0001"),
        ({"output_ratio": 0.0}, f"`output_ratio` {RATIO} 0.0"),
        ({"output_ratio": 1.5}, f"`output_ratio` {RATIO} 1.5"),
        ({"output_ratio": 0.5, "layers": CUT_AT_4}, "`layers` has 0.4; set it once"),
        ({"output_ratio": 0.5, "layers": ls.nn.plan_layers(net())}, "`layers` has 1; set it once"),
        ({"aggregation": ls.StackedProducts()}, "`aggregation` must be an instance of TermAggregation"),
        *(({"spectral_start": start}, "spectral_start") for start in (True, 0.1, "default", ls.SpectralStart)),
        ({"strategy": ls.Schedule({0: ls.TopN(), 2: "collective"})}, "`strategy` .*ShardingStrategy.*'collective'"),
        ({"strategy": ls.Schedule({0: None})}, "`strategy` .*ShardingStrategy.*None"),
        ({"strategy": ls.Schedule({0: ls.Schedule({0: ls.TopN()})})}, "`strategy` .*ShardingStrategy.*Schedule"),
        ({"strategy": {0: ls.TopN()}}, r"`strategy` by round must be a Schedule.*write Schedule\(\{0: TopN\(\)\}\)"),
        ({"design": ls.Schedule({0: None, 1: ls.TopN()})}, r"`design` .*Design.*TopN\(\)"),
        ({"design": {0: ls.Systematic()}}, "`design` by round must be a Schedule"),
        ({"spectral_start": ls.Schedule({0: None})}, "`spectral_start` .*SpectralStart"),
    ],
    ls.LoRA: [
        ({"rank": 0}, "`rank` must be at least 1, got 0"),
        ({"rank": {4: 0.5, 8: 0.6}}, "Shares of `rank` must sum to 1"),
        ({"aggregation": ls.Collective()}, "`aggregation` must be an instance of AdapterAggregation"),
        ({"layers": "net"}, f"`layers` {PATTERNS}"),
    ],
    ls.WidthSharding: [
        ({"keep_ratio": 0.0}, f"`keep_ratio` {RATIO} 0.0; it is the share of .* channels"),
        ({"keep_ratio": {0.5: 0.5, 1.0: 0.6}}, "Shares of `keep_ratio` must sum to 1"),
        ({"channels": ls.Collective()}, "`channels` must be an instance of ChannelChoice"),
        ({"exclude": "net"}, f"`exclude` {PATTERNS}"),
    ],
    step_widths: [
        ({"step_widths": 0.5}, r"`step_widths` is a sequence of keep ratios, such as \(0.5, 1.0\), got 0.5"),
        ({"step_widths": [0.0, 0.5]}, f"`step_widths` {RATIO} 0.0"),
        ({"step_widths": [1.0]}, r"keep ratios of all clients, got \(1.0,\): \[0.5\] is missing"),
        ({"channels": ls.RandomChannels()}, r"channels=PrefixChannels\(\), not RandomChannels\(\)"),
        ({"scaler": True}, "`step_widths` and `scaler` exclude each other"),
    ],
    ls.StaleUpdates: [
        ({"beta": 1.5}, r"`beta` must be in \[0, 1\], got 1.5"),
        ({"coefficients": "all"}, "`coefficients` must be 'sampled' or 'data', got 'all'"),
        ({"unseen": "first"}, "`unseen` must be 'zero' or 'mean', got 'first'"),
        ({"num_terms": 0}, "`num_terms` must be at least 1, or None, got 0"),
    ],
    compression: [
        *(({"factor": f}, r"`compression` must be at least 1 and finite, got .*; it is the n") for f in (0.5, -1.0)),
        *(({"factor": f}, "`compression` must be at least 1 and finite, got") for f in (0.0, math.inf, math.nan)),
        ({"degree": None}, r"With `degree=None` each weight has a probability of its own, .* give a"),
        ({"exclude": "2.*"}, rf"`exclude` {PATTERNS}, got '2\.\*'; write exclude="),
        ({"degree": 0}, "`degree` must be at least 1, or None, got 0"),
        ({"gain": 0}, f"`gain` {POSITIVE} 0"),
        *(({name: "other"}, f"`{name}` must be '.*' or '.*', got 'other'") for name in ("init", "values")),
    ],
    ls.Schedule: [
        ({"values": {}}, r"needs a value for round 0, got rounds \[\]"),
        ({"values": {5: "b", 1: "a"}}, r"needs a value for round 0, got rounds \[1, 5\]"),
        ({"values": {0: "a", -1: "b"}}, "`values` must be at least 0, got -1; the keys of a schedule are rounds"),
        ({"values": {False: "a"}}, "`values` must be a whole number, got False"),
        ({"values": {0: "a", True: "b"}}, "`values` must be a whole number, got True"),
        ({"values": {0: "a", "1": "b"}}, "`values` must be a whole number, got '1'"),
        ({"values": {0: "a", 1.0: "b"}}, "`values` must be a whole number, got 1.0"),
        ({"values": "a"}, r"maps rounds to values, got 'a'; write Schedule\(\{0: ...\}\)"),
        ({"values": [(0, "a")]}, "maps rounds to values, got"),
        ({"values": None}, "maps rounds to values, got None"),
    ],
    # layers, strategies, draws
    ls.LayerChoices: [
        ({"exclude": "4"}, rf"`exclude` {PATTERNS}, got '4'; write exclude=\('4',\)"),
        ({"exclude": [4]}, rf"`exclude` {PATTERNS}, got \[4\]; write strings"),
        ({"exclude": 4}, f"`exclude` {PATTERNS}, got 4; write strings"),
        ({"split": {"4": 1}}, "must be at least 2, got 1; leave the pattern out"),
        ({"split": {"4": 2.0}}, "must be a whole number, got 2.0; write 2"),
        ({"split": ["4"]}, r"`split` is a mapping from patterns to numbers of parts, got \['4'\]; write split="),
        ({"split": {4: 2}}, r"`split` is a mapping from patterns to numbers of parts, got \{4: 2\}"),
        ({"term_granularity": 0}, "`term_granularity` must be at least 1, got 0"),
        ({"ratio_factors": ["4"]}, r"`ratio_factors` is a mapping from patterns to factors, got \['4'\]; write ratio_"),
        ({"ratio_factors": {"4": 0}}, rf"`ratio_factors\['4'\]` {POSITIVE} 0; name the layers in"),
        ({"ratio_factors": {"4": "5"}}, r"`ratio_factors\['4'\]` must be a number, got '5'"),
        ({"keep_first_and_last_dense": "no"}, "`keep_first_and_last_dense` must be True or False, got 'no'"),
    ],
    replaced: [({"keep_ratio": ratio}, f"`keep_ratio` {RATIO}") for ratio in (0.0, -0.1, 1.5, math.nan)],
    dense: [({"num_terms": number}, rf"`num_terms` must be in \[1, 3\], got {number}") for number in (0, 4)],
    ls.EffectiveLRClip: [({"tau": tau}, "`tau` must be at least 1") for tau in (0.5, math.nan, -1.0)],
    ls.Collective: [({"cohort": "all"}, "`cohort` must be 'group', 'joint' or 'best', got 'all'")],
    ls.PriSM: [
        ({"compensation": "fisher"}, "`compensation` must be None or 'wallenius', got 'fisher'"),
        ({"marginals": "rough"}, "`marginals` must be 'exact' or 'manly', got 'rough'"),
    ],
    **{
        made: [
            ({"slack": slack}, f"`slack` must be (at least 0|a number), got {slack!r}")
            for slack in (-0.1, math.nan, -math.inf, "0.05")
        ]
        for made in (ls.EffectiveCohort, effective)
    },
    schatten: [({"p": p}, "`p` must be at least 2 and finite") for p in (1.0, math.nan, math.inf)],
    # clients
    ls.DirichletPartitioner: [
        ({"num_clients": 2, "alpha": alpha}, f"`alpha` {POSITIVE[:-5]}") for alpha in (0.0, math.inf)
    ],
    pachinko: [
        ({"superclasses": []}, "`superclasses` must hold a whole number for each class, got none"),
        ({"superclasses": "01"}, "`superclasses` must be a sequence of whole numbers, one for each class, got '01'"),
        ({"superclasses": {0: 1}}, "`superclasses` must be a sequence of whole numbers"),
        ({"superclasses": [0, 1.5]}, r"`superclasses\[1\]` must be a whole number, got 1.5"),
    ],
    ls.Uniform: [
        ({"active": 0}, "`active` must be at least 1 and finite, got 0"),
        ({"active": 0.2}, r"got 0\.2; it is a number of clients, not a share"),
        ({"active": 2.5, "design": ls.Systematic()}, "must be whole with a design, got 2.5; round it or"),
        ({"active": 2, "design": ls.Systematic}, "got the class Systematic; write Systematic"),
        ({"active": 2, "normalize": "yes"}, "`normalize` must be True or False, got 'yes'"),
    ],
    ls.FullParticipation: [({"normalize": 1}, "`normalize` must be True or False, got 1")],
    ls.LossVarianceReduced: [
        ({"active": 2, "measure": 0}, 'at least 1, got 0; it is "all", "last" or a number'),
        ({"active": 2, "measure": "some"}, 'got \'some\'; it is "all", "last" or a number'),
    ],
    UniformParticipation: [
        ({"clients_per_round": size}, r"`clients_per_round` must be in \[1, 1048576\], got") for size in (0, -1)
    ],
    ls.GradientClip: [({"max_norm": 0.0}, r"`max_norm` must be positive, got 0\.0")],
    ls.MaskedLogits: [
        ({"absent": math.inf}, "`absent` must be below inf, got inf; 0 as in HeteroFL, or -inf"),
        ({"absent": math.nan}, "`absent` must be below inf, got nan"),
    ],
    ls.simulation.DeviceProfile: [
        ({"downlink": 0.0, "uplink": 1.0, "macs_per_second": 1.0}, "`downlink` must be positive, got 0.0")
    ],
    clock: [
        ({"deadline": 0.0}, "`deadline` must be positive, got 0.0; it is in seconds"),
        ({"keep_first": 0}, "`keep_first` must be at least 1, or None, got 0"),
    ],
    ls.VirtualClock: [({"profiles": [3.0]}, "`profiles` must be an instance of DeviceProfile, got 3.0")],
    small_cohort: [({"keep_first": 3}, "`keep_first=3` is more than clients_per_round=2; lower it, or ask more")],
    timed: [({"macs": {1.0: 3.0}}, "no entry for keep ratio 0.5")],
    ls.ClientDropout: [
        ({"probability": 1.1}, r"`probability` must be in \[0, 1\], got 1.1"),
        ({"probability": [0.1, -1.0]}, r"`probability` must be in \[0, 1\], got -1.0"),
        ({"probability": {0.1: 0.5, 2.0: 0.5}}, r"`probability` must be in \[0, 1\], got 2.0"),
        ({"probability": "often"}, "`probability` must be a number, got 'often'"),
    ],
    # the server
    ls.LeaveOut: [({"max_share": 1.5}, r"`max_share` must be in \[0, 1\], got 1\.5")],
    ls.Faults: [({"on_error": "leave out"}, "`on_error` must be an instance of LeaveOut")],
    federated: [
        ({"dropout": 0.1}, "`dropout` must be an instance"),
        ({"clock": DEVICE}, "`clock` must be an instance of"),
    ],
    ls.FedAvgM: [({"lr": 0.0}, f"`lr` {POSITIVE} 0.0"), ({"momentum": 1.0}, "`momentum` must be in")],
    ls.BoundedMomentum: [({"momentum": 1.0}, "`momentum` must be in")],
    ls.FedAdagrad: [({"tau": 0.0}, f"`tau` {POSITIVE} 0.0")],
    ls.FedAdam: [({"betas": (-0.1, 0.9)}, "`betas` must be in .*, got -0.1")],
    ls.FedYogi: [({"betas": (0.9,)}, "`betas` must be two numbers")],
    ls.Robust: [({"rule": rule}, "`rule` must be an instance of RobustRule") for rule in (ls.Median, "median", 3)],
    ls.MaxUpdateNorm: [({"norm": 0.0}, "`norm` must be")],
    ls.SecureSums: [
        ({"threshold": share}, r"`threshold` must be in \(0.5, 1\], got .*; above half, or two groups could")
        for share in (0.5, 1.01, 0.0)
    ],
    ls.functional.standardize_images: [
        ({"images": [[0.0]]}, "`images` must be a tensor, got a list"),
        ({"images": torch.zeros(4, 4)}, r"got torch.float32 of shape \(4, 4\); grey images without a channel"),
        ({"images": torch.zeros(2, 3, 0, 4)}, "with at least one pixel"),
        ({"images": torch.zeros(1, 2, 2, dtype=torch.complex64)}, "must be real"),
    ],
}
CASES = [
    pytest.param(made, *row, id=f"{getattr(made, '__name__', None) or made.func.__name__}-{list(row[0])[-1]}")  # type: ignore[attr-defined]
    for made, rows in REFUSED.items()
    for row in rows
]


@pytest.mark.parametrize(("made", "options", "message"), CASES)
def test_what_means_nothing_is_refused(made: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as refused:
        made(**options)
    assert refused.type is (TypeError if OF_ANOTHER_TYPE.search(str(refused.value)) else ValueError)
