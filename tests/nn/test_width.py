"""Which channels belong together, against slices by hand, and against what a permutation of channels shows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_third_party_models import gpt2, vit
from torch import Tensor, nn
from toy_models import Net

import lightning_spectral as ls
from lightning_spectral.models import CCT, FEMNISTCNN, ResNet18
from lightning_spectral.nn.trace import run_example
from lightning_spectral.nn.width import planner
from lightning_spectral.nn.width.plan import ChannelGroup, WidthPlan, cut_module, take
from lightning_spectral.nn.width.planner import Problem, check_cut, problem_of, width_plan, wrong_among
from lightning_spectral.protocol.exchange import copy_module, travelling_tensors

IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class UNet(nn.Module):
    """Skips are concatenated; a depthwise, a grouped and a transposed convolution, three kinds of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 1)
        )
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.scale = nn.Parameter(torch.ones(1, 16, 1, 1))
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        deep = self.deep(first)
        deep = deep + self.depthwise(deep) * self.scale
        return self.out(torch.cat([first, self.up(deep)], dim=1))


class PackedAttention(nn.Module):
    """Packed queries, keys and values, split in three ways; a gated MLP; tied embeddings."""

    def __init__(self, split: str) -> None:
        super().__init__()
        self.split = split
        self.embed, self.place = nn.Embedding(11, 16), nn.Parameter(torch.randn(1, 5, 16))
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.gated, self.back = nn.Linear(16, 24), nn.Linear(12, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x) + self.place
        packed, size = self.qkv(self.norm(tokens)), tokens.shape[:2]
        if self.split == "reshape":
            q, k, v = packed.reshape(*size, 3, 4, -1).permute(2, 0, 3, 1, 4)
        elif self.split == "chunk":
            q, k, v = (part.view(*size, 4, -1).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        else:
            q, k, v = (part.view(*size, -1, 4).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*size, -1)
        tokens = tokens + self.proj(attended)
        value, gate = self.gated(tokens).chunk(2, dim=-1)
        return self.head(tokens + self.back(value * gate.sigmoid()))


class Standard(nn.Module):
    """Torch's own attention, flattened images, and a squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.excite = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 4), nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.flat = nn.Linear(8 * 16, 10)
        self.prelu = nn.PReLU(10)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        return self.head(self.prelu(self.flat(tokens.transpose(1, 2).flatten(1))))


TOKENS = torch.arange(10).reshape(2, 5)
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int]]] = {
    "ResNet-18": (lambda: ResNet18(10), IMAGE[..., :8, :8], {"conv": 32, "blocks.0.conv1": 32, "blocks.6.conv2": 256}),
    "CCT": (
        lambda: CCT(10, image_size=16, width=32, num_layers=2),
        IMAGE,
        {"": 32, "conv1": 64, "blocks.1.attention.query": 8, "blocks.1.expand": 64},
    ),
    "FEMNIST": (FEMNISTCNN, FEMNISTCNN().example_input(), {"conv1": 32, "conv2": 64, "hidden": 2048}),
    "U-Net": (UNet, IMAGE, {"": 16, "down.0": 4, "deep.0": 2, "up": 8, "out.0": 8}),
    **{
        f"packed, {split}": (partial(PackedAttention, split), TOKENS, {"": 16, "qkv": 4, "gated": 12})
        for split in ("reshape", "chunk", "heads")
    },
    "standard": (Standard, IMAGE, {"conv": 4, "squeeze": 4, "flat": 10}),
}


def randomised(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in evaluation mode none of whose parameters and averages has a special value."""
    net, generator = make().eval(), torch.Generator().manual_seed(1)
    for name, tensor in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.data.copy_(noise + 0.5 if "var" in name else tensor + 0.3 * (noise - 0.5))
    return net


def output_of(net: nn.Module, example: Any) -> Tensor:
    out = run_example(net, example)
    return getattr(out, "logits", out)


def permuted(plan: WidthPlan, net: nn.Module, group: Any) -> nn.Module:
    """The module with the units of one group in another order, in all tensors that have them."""
    order = np.arange(plan.num_labels)
    own = slice(group.first_label, group.first_label + group.num_units)
    order[own] = np.random.default_rng(0).permutation(order[own])
    there = copy_module(net)
    whole = travelling_tensors(there)
    for name, dims in plan.labels.items():
        tensor = whole[name]
        for dim, labels in enumerate(dims):
            places = np.empty(len(labels), dtype=np.int64)
            places[labels.argsort(kind="stable")] = order[labels].argsort(kind="stable")
            tensor = tensor.index_select(dim, torch.from_numpy(places))
        whole[name].copy_(tensor)
    return there


def check_plan(net: nn.Module, example: Any, plan: WidthPlan) -> None:
    """No order of a group's units is any other, and a module without some of them has every entry where it was."""
    expected = output_of(net, example)
    for group in plan.groups:
        assert torch.allclose(output_of(permuted(plan, net, group), example), expected, rtol=1e-3, atol=1e-4), group
    kept = {
        g.name: torch.randperm(g.num_units, generator=torch.Generator().manual_seed(2))[: -(-g.num_units // 3)]
        for g in plan.groups
    }
    indices, positions = plan.indices(kept), plan.positions(kept)
    small = copy_module(net)
    cut_module(small, indices)
    output_of(small, example)
    own = travelling_tensors(small)
    for name, tensor in travelling_tensors(net).items():
        assert torch.equal(own[name], take(tensor, indices.get(name, ())))
        assert torch.equal(own[name], tensor.reshape(-1)[positions[name]] if name in positions else tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_channels_of_a_group_are_interchangeable(name: str) -> None:
    make, example, sizes = NETS[name]
    net = randomised(make)
    plan = width_plan(net, example)
    assert {g.name: g.num_units for g in plan.groups}.items() >= sizes.items(), str(plan)
    check_plan(net, example, plan)
    assert not plan.notes


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("make", "example", "cut"),
    [
        (vit, torch.randn(2, 3, 8, 8), {"embeddings", "attention", "mlp"}),
        (gpt2, torch.arange(16).reshape(2, 8), {"wte", "mlp"}),
    ],
)
def test_transformers_are_cut(make: Any, example: Tensor, cut: set[str]) -> None:
    net = randomised(make)
    plan = width_plan(net, example)
    assert {part for part in ("embeddings", "attention", "mlp", "wte", "attn") if part in str(plan.groups)} >= cut
    check_plan(net, example, plan)


def test_a_slice_by_hand() -> None:
    """Each kind of layer without its outer channels."""
    net = randomised(UNet)
    plan = width_plan(net, IMAGE)
    names = {group.name: group for group in plan.groups}
    kept = {name: torch.arange(group.num_units // 2) for name, group in names.items()}
    small: Any = copy_module(net)
    cut_module(small, plan.indices(kept))
    whole: Any = net
    halves = torch.tensor([0, 1, 4, 5])  # of the two groups of a convolution each loses the same
    assert torch.equal(small.down[0].weight, whole.down[0].weight[halves])
    assert torch.equal(small.down[1].running_var, whole.down[1].running_var[halves])
    assert torch.equal(small.deep[0].weight, whole.deep[0].weight[:, :2][plan.indices(kept)["deep.0.weight"][0]])
    assert small.deep[0].groups == 2
    assert small.depthwise.groups == len(small.depthwise.weight) == len(small.scale[0])
    rows, columns = plan.indices(kept)["deep.3.weight"][:2]
    assert torch.equal(small.deep[3].weight, whole.deep[3].weight[rows][:, columns])
    assert torch.equal(small.up.weight, whole.up.weight[plan.indices(kept)["scale"][1]][:, :4])
    inner = torch.cat([halves, torch.arange(8, 12)])  # the concatenated channels
    assert torch.equal(small.out[0].weight, whole.out[0].weight[:4][:, inner])
    assert torch.equal(small.out[2].weight, whole.out[2].weight[:, :4])
    assert torch.equal(small.out[2].bias, whole.out[2].bias)


class Graph(nn.Module):
    """A random graph of convolutions, sums, concatenations and norms, on the outputs of earlier ones."""

    def __init__(self, steps: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.steps, self.layers, widths = steps, nn.ModuleList(), [3]
        for kind, one, two, width in steps:
            one, two = one % len(widths), two % len(widths)
            layers = nn.ModuleList()
            if kind == "conv":
                layers.append(nn.Conv2d(widths[one], width, 1))
            elif kind == "norm":
                layers.append(nn.BatchNorm2d(widths[one]))
            elif kind == "sum":
                layers.extend([nn.Conv2d(widths[one], width, 1), nn.Conv2d(widths[two], width, 1)])
            widths.append({"norm": widths[one], "cat": widths[one] + widths[two]}.get(kind, width))
            self.layers.append(layers)
        self.head = nn.Linear(widths[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for (kind, one, two, _), layers in zip(self.steps, self.layers, strict=True):
            first, second = made[one % len(made)], made[two % len(made)]
            if kind == "cat":
                made.append(torch.cat([first, second], dim=1))
            elif kind == "sum":
                made.append(layers[0](first) + layers[1](second).tanh())
            else:
                made.append(layers[0](first).sigmoid())
        return self.head(made[-1].mean((2, 3)))


STEP = st.tuples(
    st.sampled_from(["conv", "conv", "norm", "sum", "cat"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([2, 4, 6]),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=7))
def test_random_graphs_are_cut_where_channels_are_interchangeable(steps: list[tuple[str, int, int, int]]) -> None:
    net = randomised(lambda: Graph(steps))
    plan = width_plan(net, torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(3)))
    assert not plan.notes
    check_plan(net, torch.rand(2, 3, 2, 2), plan)


def test_a_layer_without_a_rule_keeps_its_channels_whole() -> None:
    layers = {"one": nn.Linear(4, 6), "two": nn.Linear(6, 6), "three": nn.Linear(6, 2)}
    net = Net(lambda net, x: net.three(net.two(net.one(x).sort(dim=1).values).relu()), **layers)
    plan = width_plan(net, torch.randn(2, 4))
    assert [group.name for group in plan.groups] == ["two"]
    assert "channels that go through sort are held whole: no rule" in str(plan)


def test_the_plan_leaves_module_and_random_state_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2))
    before, state = {n: t.clone() for n, t in net.state_dict().items()}, torch.get_rng_state()
    ls.nn.width_plan(net, torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(("num_groups", "channels"), [(1, 4), (2, 8), (4, 12), (4, 16), (8, 8)])
def test_a_group_norm_is_cut_as_in_the_whole_module_however_little_is_left(num_groups: int, channels: int) -> None:
    norm = nn.GroupNorm(num_groups, channels)
    module = nn.Sequential(nn.Conv2d(3, channels, 3), norm, nn.ReLU(), nn.Conv2d(channels, 5, 3))
    module.example_input_array = IMAGE
    plan = width_plan(module, IMAGE)
    (group,) = plan.groups
    for kept in range(1, group.num_units + 1):
        check_cut(module, plan, kept / group.num_units)


def test_what_a_module_caches_in_one_pass_is_not_there_in_the_next() -> None:
    """Here a table is kept that the first pass in evaluation mode computes, from weights that may be cut."""

    def plan(caches: bool) -> Any:
        def forward(net: Any, x: Tensor) -> Tensor:
            if net.kept is None or net.training or not caches:
                net.kept = net.table(torch.ones(1, 3))
            return net.out(net.into(x) * net.kept)

        net = Net(forward, into=nn.Linear(4, 8), table=nn.Linear(3, 8), out=nn.Linear(8, 2))
        net.kept = None
        return width_plan(net, torch.zeros(2, 4))

    caching, plain = plan(caches=True), plan(caches=False)
    assert str(caching) == str(plain)
    assert [group.num_units for group in caching.groups] == [8]


class Branches(nn.Module):
    """Sixteen independent branches; the channels of some are counted, perhaps without a message."""

    def __init__(self, counted: tuple[int, ...], speaks: bool = True) -> None:
        super().__init__()
        self.counted, self.speaks = counted, speaks
        self.into = nn.ModuleList(nn.Linear(4, 8) for _ in range(16))
        self.out = nn.ModuleList(nn.Linear(8, 2) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 2)
        for i, (into, out) in enumerate(zip(self.into, self.out, strict=True)):
            hidden = into(x).relu()
            if i in self.counted and hidden.shape[1] != 8:
                raise AssertionError(*([f"branch {i}"] if self.speaks else []))
            total = total + out(hidden)
        return total


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("counted", "most"), [((), 1), ((5,), 6), ((0, 15), 8), (tuple(range(16)), 17)])
def test_groups_that_cannot_be_cut_are_found_in_few_trials(
    counted: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = []

    def counting(*arguments: Any) -> Problem | None:
        trials.append(arguments)
        return problem_of(*arguments)

    monkeypatch.setattr(planner, "problem_of", counting)
    plan = width_plan(Branches(counted), torch.zeros(2, 4))
    assert [group.name for group in plan.groups] == [f"into.{i}" for i in range(16) if i not in counted]
    assert all(f"AssertionError: branch {i}" in str(plan) for i in counted)
    assert len(trials) <= most + 1  # the last tests the plan without them


def test_a_failed_assertion_that_says_nothing_keeps_the_channels_whole() -> None:
    plan = width_plan(Branches((3,), speaks=False), torch.zeros(2, 4))
    assert len(plan.groups) == 15
    assert "into.3: 8 channels are held whole: the module does not run without some channels: Assert" in str(plan)


GROUPS = tuple(
    ChannelGroup(f"blocks.{i}.{name}", 3, 1 + 6 * i + 3 * j, {}) for i in range(8) for j, name in enumerate("ab")
)
PLACES = {group.name: place for place, group in enumerate(GROUPS)}
Fails = Callable[[set[str]], str | None]  # the name of the group at fault if some are cut


class Trials:
    """Trials that fail for a group, and name it or another one."""

    def __init__(self, fails: Fails, blamed: Callable[[int], int] = lambda place: place) -> None:
        self.fails, self.blamed, self.count = fails, blamed, 0

    def __call__(self, groups: Sequence[ChannelGroup]) -> Problem | None:
        self.count += 1
        guilty = self.fails({group.name for group in groups})
        if guilty is None:
            return None
        named = GROUPS[self.blamed(PLACES[guilty]) % len(GROUPS)]
        return Problem(guilty, PLACES[guilty], [np.array([0, named.first_label])])


def failing(guilty: set[str]) -> Fails:
    """A trial fails for the first of some groups that it cuts."""
    return lambda cut: min(cut & guilty, key=PLACES.__getitem__, default=None)


def names(found: Sequence[tuple[ChannelGroup, str]]) -> list[str]:
    return [group.name for group, _ in found]


@given(st.sets(st.sampled_from(sorted(PLACES))), st.integers(0, 15), st.integers(0, 3))
def test_exactly_the_groups_at_fault_are_found_whichever_a_problem_names(guilty: set[str], add: int, by: int) -> None:
    found = wrong_among(GROUPS, Trials(failing(guilty), lambda place: by * place + add))
    assert names(found) == sorted(guilty, key=PLACES.__getitem__)
    assert all(reason == group.name for group, reason in found)


@pytest.mark.parametrize(
    ("guilty", "most"),
    [
        (set(), 1),
        ({"blocks.5.b"}, 8),  # the same place of other blocks is suspected, too, and cleared by one trial
        ({f"blocks.{i}.b" for i in range(8)}, 11),
        (set(PLACES), 18),
    ],
)
def test_problems_that_name_the_group_at_fault_save_trials(guilty: set[str], most: int) -> None:
    trials = Trials(failing(guilty))
    assert set(names(wrong_among(GROUPS, trials))) == guilty
    assert trials.count <= most


def test_of_groups_that_fail_only_together_the_later_one_is_held_whole() -> None:
    both = {"blocks.1.a", "blocks.6.b"}
    for named in both:
        trials = Trials(lambda cut, named=named: named if both <= cut else None)
        assert names(wrong_among(GROUPS, trials)) == ["blocks.6.b"]


def test_a_group_that_can_only_be_cut_with_a_later_one_is_held_whole() -> None:
    first, last = "blocks.0.a", "blocks.7.a"

    def fails(cut: set[str]) -> str | None:
        return "blocks.3.b" if "blocks.3.b" in cut else first if first in cut and last not in cut else None

    assert names(wrong_among(GROUPS, Trials(fails))) == [first, "blocks.3.b"]
