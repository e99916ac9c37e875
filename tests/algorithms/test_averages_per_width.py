"""BatchNorm's running averages for each width of ordered dropout: against clients that train physically cut copies."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor, nn
from toy_models import LitSmall
from width_norms import AVERAGES, MIXED, WIDTHS, LitNorms, cut, ours, randomised

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Setting
from lightning_spectral.algorithms.width import STEP_COUNTS, WidthAverages, arrange
from lightning_spectral.client.forms import Forms
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator

LR, MOMENTUM, SEED = 0.1, 0.9, 4


class Round:
    """One round without Lightning, whose clients are played one by one."""

    def __init__(self, server: Any, capacities: list[float], algorithm: Any = None) -> None:
        self.server = server
        algorithm = algorithm or ours()
        self.state: Any = algorithm.new_state(server, SEED)
        self.half = algorithm.bind(server, self.state)
        self.half.settle()
        for number, tensor in enumerate(self.state.buffers()):
            if tensor.is_floating_point():
                tensor.add_(number + 1.0)
        self.before = {width: {n: t.clone() for n, t in own.items()} for width, own in self.state.widths.items()}
        self.units = [WorkUnit(c, coefficient=c + 1.0) for c in range(len(capacities))]
        groups = {r: tuple(u for u, own in zip(self.units, capacities, strict=True) if own == r) for r in capacities}
        self.opened = self.half.open(Cohort(SEED, 2, groups))
        self.sent = [self.opened.send(unit) for unit in self.units]

    def close(self) -> None:
        self.opened.close()


def batches_of(client: int, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(client)
    return [torch.randn(5, 6, generator=generator) for _ in range(num_steps)]


def played(round: Round, client: int, num_steps: int) -> Upload:
    """Train a client as a device does."""
    download = replace(round.sent[client][0], round_idx=2, seed=SEED)
    side = round.half.client_side
    with Forms(round.server, side.take_form).client(download.capacity) as module:
        side.load(module, download)
        actions = side.start(module, download)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        for x in batches_of(client, num_steps):
            actions.before_forward()
            loss = module(x).square().mean()
            actions.after_forward()
            optimizer.zero_grad()
            loss.backward()
            actions.before_step(optimizer)
            optimizer.step()
        return side.collect(module, download)


class SlowClient:
    """A client that trains a physically cut copy in each step, and copies weights and averages over by hand."""

    def __init__(self, round: Round, client: int, capacity: float, num_steps: int) -> None:
        plan = round.half.plan
        widths = [width for width in WIDTHS if width <= capacity]
        self.module = cut(round.server, plan, capacity)
        self.averages = {
            width: round.before[width] if width < 1.0 else dict(round.server.named_buffers()) for width in widths
        }
        self.averages = {w: {n: own[n].clone() for n in AVERAGES} for w, own in self.averages.items()}
        self.counters = {w: {n: torch.tensor(0) for n in ("net.1", "before", "norm")} for w in widths}
        self.counts: Counter[float] = Counter()
        momenta = {name: torch.zeros_like(p) for name, p in self.module.named_parameters()}
        generator = derived_generator(SEED, "step widths", 2, client)
        for step, x in enumerate(batches_of(client, num_steps)):
            width = widths[int(torch.randint(len(widths), (), generator=generator))]
            self.counts[width] += 1
            gradients = self.gradients(round.server, plan, capacity, width, x)
            for name, parameter in self.module.named_parameters():
                momenta[name] = gradients[name] if step == 0 else MOMENTUM * momenta[name] + gradients[name]
                parameter.data.sub_(momenta[name], alpha=LR)

    def gradients(
        self, server: Any, plan: ls.nn.WidthPlan, capacity: float, width: float, x: Tensor
    ) -> dict[str, Tensor]:
        small = cut(server, plan, width)
        own, left = plan.indices(plan.first(capacity)), plan.indices(plan.first(width))
        where = {n: tuple(torch.searchsorted(a, b) for a, b in zip(own[n], left[n], strict=True)) for n in own}
        for name, parameter in small.named_parameters():
            values = self.module.get_parameter(name).data
            parameter.data.copy_(values[torch.meshgrid(*where[name], indexing="ij")] if name in where else values)
        for name, average in self.averages[width].items():
            small.get_buffer(name).copy_(average)
        for layer, counter in self.counters[width].items():
            small.get_submodule(layer).num_batches_tracked.copy_(counter)
        small(x).square().mean().backward()
        self.averages[width] = {name: small.get_buffer(name).clone() for name in AVERAGES}
        self.counters[width] = {n: small.get_submodule(n).num_batches_tracked.clone() for n in self.counters[width]}
        gradients = {}
        for name, parameter in small.named_parameters():
            whole = torch.zeros_like(self.module.get_parameter(name))
            whole[torch.meshgrid(*where[name], indexing="ij") if name in where else ...] = parameter.grad
            gradients[name] = whole
        return gradients


CAPACITIES, STEPS = [0.25, 1.0, 0.75, 1.0, 0.5, 0.75], [3, 12, 9, 1, 2, 1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("client", range(len(CAPACITIES)))
def test_a_client_trains_as_one_that_cuts_copies_by_hand(client: int) -> None:
    """Bit for bit: weights, the averages of each width, and the number of steps at each."""
    capacity, num_steps = CAPACITIES[client], STEPS[client]
    opened = Round(randomised(LitNorms(), 0), CAPACITIES)
    upload = played(opened, client, num_steps)
    slow = SlowClient(opened, client, capacity, num_steps)
    for name, parameter in slow.module.named_parameters():
        assert torch.equal(upload.tensors[name], parameter)
    for width, averages in slow.averages.items():
        for name, average in averages.items():
            assert torch.equal(upload.tensors[name if width == capacity else f"{name}@{width}"], average)
    narrower = [width for width in WIDTHS if width < capacity]
    assert upload.tensors.keys() == {
        *dict(slow.module.named_parameters()),
        *AVERAGES,
        *(f"{name}@{width}" for width in narrower for name in AVERAGES),
        *([STEP_COUNTS] if narrower else []),
    }
    if narrower:
        assert upload.tensors[STEP_COUNTS].tolist() == [slow.counts[width] for width in (*narrower, capacity)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backwards", [False, True])
def test_each_width_averages_over_the_clients_that_took_steps_at_it(backwards: bool) -> None:
    """Weighted by examples, in float64; averages of a width that no client drew are unchanged, bit for bit."""
    server = randomised(LitNorms(), 0)
    opened = Round(server, CAPACITIES, ours(keep_ratio=[*CAPACITIES]))
    whole = {name: buffer.clone() for name, buffer in server.named_buffers()}
    uploads = [played(opened, client, STEPS[client]) for client in range(len(CAPACITIES))]
    for client in reversed(range(len(uploads))) if backwards else range(len(uploads)):
        opened.opened.add(opened.sent[client][1], uploads[client])
    slow = [SlowClient(opened, client, *each) for client, each in enumerate(zip(CAPACITIES, STEPS, strict=True))]
    opened.close()
    holders = {width: [c for c, one in enumerate(slow) if one.counts[width]] for width in WIDTHS}
    assert 1 < len(holders[0.25]) < sum(capacity >= 0.25 for capacity in CAPACITIES)
    for width, found in {**opened.state.widths, 1.0: dict(server.named_buffers())}.items():
        for name in AVERAGES:
            start = whole[name] if width == 1.0 else opened.before[width][name]
            total = sum(c + 1 for c in holders[width])
            moved = {c: slow[c].averages[width][name] - start for c in holders[width]}
            change = sum((c + 1) / total * moved[c].double() for c in holders[width])
            error = (found[name].double() - (start.double() + change)).abs()  # the change and the sum are rounded
            assert bool((error <= 2**-24 * (2 * change.abs() + start.abs())).all())
            if not holders[width]:
                assert torch.equal(found[name], start)
    nobody = Round(randomised(LitNorms(), 0), [1.0])
    upload = played(nobody, 0, 1)
    nobody.opened.add(nobody.sent[0][1], upload)
    nobody.close()
    drawn = [w for w, count in zip(WIDTHS, upload.tensors[STEP_COUNTS].tolist(), strict=True) if count]
    for width, own in nobody.state.widths.items():
        assert same_state(own, nobody.before[width]) == (width not in drawn)


def test_averages_that_a_client_lacks_are_where_its_others_are() -> None:
    """The server sums on its own device, which refuses even empty tensors of another; a meta device shows it."""
    own = {name: torch.zeros(2, device="meta") for name in ("norm.running_mean", "norm.running_mean@0.25")}
    upload = Upload(WorkUnit(0), {**own, STEP_COUNTS: torch.tensor([0, 3])})
    vars(upload)["largest"] = dict.fromkeys(upload.tensors, 0.0)
    tensors, positions, _ = arrange(upload, {}, ["norm.running_mean"], 0.5, [0.25, 0.5])
    lacking = [name for name, where in positions.items() if not len(where)]
    assert lacking == ["norm.running_mean@0.25", "norm.running_mean"]
    assert {tensors[name].device.type for name in lacking} == {"meta"}


def test_without_training_nothing_changes(data: Any, fit: Fit) -> None:
    lit = randomised(LitNorms(), 0)
    before = copy.deepcopy(lit)
    fitted = fit(lit, data, algorithm=ours(), local_epochs=0, clients_per_round=6, max_epochs=2)
    assert same_state(fitted.state, before.state_dict())
    plan = ls.nn.width_plan(before)
    assert [*fitted.model.state.widths] == [0.25, 0.5, 0.75]
    for width, own in fitted.model.state.widths.items():
        small = cut(before, plan, width)
        assert all(torch.equal(tensor, small.get_buffer(name)) for name, tensor in own.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("keep_ratio", "widths"), [(0.5, [0.5]), (1.0, [1.0]), (0.5, [0.5, 0.75])])
def test_clients_whose_only_width_is_their_own_train_as_without(
    keep_ratio: float, widths: Any, data: Any, fit: Fit
) -> None:
    on, off = (
        fit(seeded(LitNorms), data, algorithm=ours(keep_ratio, widths, averages_per_width=flag), max_epochs=2)
        for flag in (True, False)
    )
    assert same_state(on.tensors, off.tensors)
    assert on.ledger.rows == off.ledger.rows
    assert on.rows == off.rows


def test_weights_are_those_of_shared_averages(data: Any, fit: Fit) -> None:
    """A training step reads no average, so only these differ."""
    on, off = (
        fit(seeded(LitNorms), data, algorithm=ours(averages_per_width=flag), clients_per_round=6, max_epochs=2)
        for flag in (True, False)
    )
    for name, parameter in on.module.named_parameters():
        assert torch.equal(parameter, off.state[name])
    assert not any(torch.equal(on.state[name], off.state[name]) for name in AVERAGES)


@pytest.mark.slow
def test_bytes_are_those_of_the_cost_table(data: Any, fit: Fit) -> None:
    """By hand: the averages of each narrower width, and eight bytes for each count of steps."""
    table, without = (
        ls.cost_table(seeded(LitNorms), ours(averages_per_width=flag), MIXED, torch.zeros(2, 6))
        for flag in (True, False)
    )
    rows = fit(seeded(LitNorms), data, algorithm=ours(), clients_per_round=12, max_epochs=2).ledger.rows
    assert {row.keep_ratio for row in rows} == {*MIXED}
    for row in rows:
        cost = table.at[row.keep_ratio]
        assert (row.downlink_bytes, row.uplink_bytes) == (cost.downlink_bytes, cost.uplink_bytes)
    values = {0.25: 2 * (3 + 6 + 2), 0.5: 2 * (6 + 6 + 4), 0.75: 2 * (9 + 6 + 6)}
    for capacity, cost in table.at.items():
        narrower = [width for width in values if width < capacity]
        extra = 4 * sum(values[width] for width in narrower)
        assert cost.downlink_bytes - without.at[capacity].downlink_bytes == extra
        assert cost.uplink_bytes - without.at[capacity].uplink_bytes == extra + 8 * (len(narrower) + 1) * bool(narrower)


@pytest.mark.slow
def test_a_cost_table_goes_beyond_the_widest_client() -> None:
    table = ls.cost_table(seeded(LitNorms), ours(0.5, [0.25, 0.5]), [0.4, 0.5, 0.8], torch.zeros(2, 6))
    assert table.at[0.4].uplink_bytes < table.at[0.5].uplink_bytes < table.at[0.8].uplink_bytes


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="`averages_per_width` needs widths: give `step_widths`"):
        ls.WidthSharding(averages_per_width=True)
    with pytest.raises(ValueError, match=r"but net.1.running_mean are not averaged"):
        ours().check(Setting(seeded(LitNorms), buffers={"net.1.running_mean": "server"}))
    lit = seeded(LitSmall)
    lit.net[1] = nn.LayerNorm(12)
    with pytest.warns(ls.SpectralWarning, match="finds no BatchNorm with running averages in LitSmall"):
        ours().check(Setting(lit))


def test_state_is_moved_and_cast_with_the_module() -> None:
    state = ours().new_state(seeded(LitNorms), 0)
    assert isinstance(state, WidthAverages)
    assert {t.dtype for own in copy.deepcopy(state).half().widths.values() for t in own.values()} == {torch.float16}


@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_of_the_other_averages_says_what_to_pass(own: bool, data: Any, fit: Fit, tmp_path: Path) -> None:
    fitted = fit(seeded(LitNorms), data, algorithm=ours(averages_per_width=own), max_epochs=1)
    fitted.trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = {"module": LitNorms(), "algorithm": ours(averages_per_width=not own), "clients_per_round": 1}
    with pytest.raises(
        RuntimeError, match=r"state of another algorithm, .*algorithm=\.\.\.\), or load your own module"
    ):
        ls.FederatedModule.load_from_checkpoint(tmp_path / "last.ckpt", **other, weights_only=True)
