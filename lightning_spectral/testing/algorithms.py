"""The contract of an algorithm, as a test."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import promises_of
from lightning_spectral.algorithms.costs import turn_costs
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.arguments import first_match
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import RecordError, RoundError, SpectralWarning, check_is
from lightning_spectral.filters import SecureSums
from lightning_spectral.protocol.buffer_rules import Rules, buffer_rules
from lightning_spectral.protocol.exchange import copy_module, digest
from lightning_spectral.testing.trial import (
    ROUNDS,
    SEED,
    SIZES,
    Case,
    Trial,
    change_norms,
    play_in_two_processes,
    uninterrupted,
    uninterrupted_elsewhere,
    with_statistics,
)

LEAST_SHARE = 0.5  # of a change; divided by all five clients' weights, 0.14. Draws of terms depend on the cohort.
LINEAR = 0.01  # relative, of the length of a step that is rounded to float32
TOLERANCE = 1e-5  # relative; norms are of the same values, in the same type
# Of a tensor's largest value. Devices round sums in another order, by about 1e-7 in each step; a wrong step is of 1e-2.
ROUNDING = 1e-4


def check_algorithm(
    algorithm: Algorithm,
    module: nn.Module,
    batch: Any,
    *,
    local_hooks: Sequence[LocalHook] = (),
    lr: float = 0.05,
    rests: bool = True,
    buffers: Rules | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Check that an algorithm satisfies the contract of :class:`~lightning_spectral.algorithms.Algorithm`.

    Five clients train copies of the module on the batch, one to three steps each, in a few rounds without a Trainer.
    This checks that

    - wrong arguments are refused by name, and modules with nothing to train with a ``ValueError`` if at all;
    - a run that is saved and resumed has the same bits as one that is not interrupted;
    - if nobody trains, the server's weights do not change by one bit;
    - if the server's optimizer does not step, its parameters do not change, however clients train;
    - a client that is lost after its download is as if it had not been asked: the others' average is not divided by
      its weight, and nothing else of it remains;
    - the order of clients, and which of several processes trains which of them, make no difference, bit for bit, and
      all processes log the same;
    - a device elsewhere gives the same bits: its half is pickled, and where the packages of the extra ``network`` are
      installed, half and records are encoded as for a network;
    - no client is sent back what it alone has sent: that could have stayed on its device, by `ClientSide.keep`;
    - a device that is sent the same twice answers the same, and one that has lost what it kept begins anew;
    - another process gives the same bits, in which Python hashes differently, and which has trained another module
      before. It is started once. An algorithm or a module that it cannot import, because a script, a notebook or a
      function defines it, is not tried there;
    - the ledger and the cost of a turn count the bytes that are sent;
    - absolute coefficients, of an unbiased sampler, count as they are, in all sums; tried if the server rests;
    - clients move along their expected updates, and are sent the same, if the algorithm promises so;
    - running statistics of a BatchNorm are averaged, unless the algorithm says that they are frozen;
    - norms of updates, if the algorithm says that it has them, are those of the clients' changes;
    - clients may mask their updates, if the algorithm promises `one_sum`, and cryptography is installed;
    - on another device than the CPU, a run that is resumed after every round ends with the CPU's weights, up to
      rounding. Everything else is checked on the CPU.

    Args:
        algorithm: The algorithm.
        module: A module with a ``training_step``, such as a LightningModule; it is not changed.
        batch: A batch for it, on the CPU.
        local_hooks: What acts in every local step.
        lr: Learning rate of the clients, who use plain SGD.
        rests: Whether the server's weights must stay as they are if nobody trains: false for an algorithm with
            momentum of its own, or that averages what it draws or cuts, such as the bits of Zampling.
        buffers: What becomes of buffers, as for the federation.
        device: The device to compare with the CPU.

    Raises:
        AssertionError: If a rule is broken; it names the rule, the case and the values.
        ClientError: If the algorithm or the module fails, or an update is not finite; it names the round, the client
            and the stage.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import FedAvg
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean()
        >>> check_algorithm(FedAvg(), Line(3, 2), torch.ones(4, 3))
    """
    check_is("algorithm", algorithm, Algorithm)
    check_is("module", module, nn.Module)
    case = Case(algorithm, module, batch, lr, tuple(local_hooks), buffers=buffers or {})
    check_choice(algorithm)
    found = [algorithm.capacities.of_clients(len(SIZES), SEED) for _ in range(4)]
    drawn = {tuple(each.of(client) for client in range(len(SIZES))) for each in found}
    assert len(drawn) == 1, (
        f"{algorithm!r}: `of_clients` gives clients other capacities when asked again; use its seed."
    )
    _check_frozen_module(algorithm, module)
    algorithm.check(Plan(copy_module(module), algorithm))
    expected = check_runs(case, rests)
    if rests:
        _check_steps(case)
        _check_absolute(case)
    _check_downloads(case)
    if promises_of(algorithm).new_values:
        _check_norms(case)
    _check_buffers(case)
    if promises_of(algorithm).one_sum and find_spec("cryptography"):
        _check_secure_sums(case, expected)
    if torch.device(device).type != "cpu":
        _check_device(replace(case, device=torch.device(device)), expected)


def check_runs(case: Case, rests: bool = True) -> list[dict[str, Tensor]]:
    """Check that whatever must make no difference makes none, bit for bit; return the server's tensors by round."""
    expected = uninterrupted(case)
    assert differing(expected[0], expected[-1]), (
        f"{case}: after {ROUNDS} rounds nothing has changed, so nothing was checked; give it a module and a batch that "
        "train."
    )
    if rests:
        _check_rest(case)
    _check_lost(case)
    for check in (_check_resume, _check_order, _check_grouping, _check_elsewhere, _check_other_process):
        check(case, expected)
    return expected


class _WrongValue:
    def __repr__(self) -> str:
        return "<an object of no use>"


def check_choice(algorithm: Any) -> None:
    """Check that a choice equals its copies, and that wrong values of its fields are refused by their names."""
    assert copy.deepcopy(algorithm) == algorithm, (
        f"{algorithm!r}: a copy is not equal to it, so a resumed run could not tell that it is the same; make it a "
        "frozen dataclass."
    )
    for name in (field.name for field in dataclasses.fields(algorithm) if field.init):
        for value in (_WrongValue(), math.nan) if type(getattr(algorithm, name)) is float else (_WrongValue(),):
            where = f"{algorithm!r} with {name}={value!r}"
            error = _error_of(partial(dataclasses.replace, algorithm, **{name: value}))
            assert error is not None, (
                f"{where}: it was not refused; call `lightning_spectral.arguments.check_fields` in `__post_init__`."
            )
            assert isinstance(error, TypeError | ValueError), (
                f"{where}: raised {error!r}, not a TypeError or ValueError."
            )
            assert name in str(error), f"{where}: the message does not name the argument: {error}"


def _check_frozen_module(algorithm: Algorithm, module: nn.Module) -> None:
    """Check that a module with nothing to train is either accepted, or refused with a ``ValueError`` that names it."""
    frozen: nn.Module = copy_module(module).requires_grad_(False)
    where = f"{algorithm!r} with a module in which every parameter is frozen"
    if (error := _error_of(lambda: algorithm.check(Plan(frozen, algorithm)))) is None:
        return
    assert isinstance(error, ValueError), f"{where}: `check` raised {error!r}, not a ValueError."
    names = {type(frozen).__name__, type(algorithm).__name__, *dict(frozen.named_modules())} - {""}
    assert any(name in str(error) for name in names), (
        f"{where}: the message names neither the module, nor a layer, nor the algorithm: {error}"
    )


def _error_of(do: Callable[[], object]) -> Exception | None:
    try:
        do()
    except Exception as error:
        return error
    return None


def _check_resume(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that a run that is resumed after every round is the uninterrupted one."""
    trial = Trial(case)
    trial.play()
    for round_idx in range(1, ROUNDS):
        trial = Trial(case, saved=trial.save())
        trial.play()
        where = f"{case}, resumed after {round_idx} of {ROUNDS} rounds: not the uninterrupted run"
        rule = "what lasts belongs in `new_state`, of a client in `cohort.store` or `ClientSide.keep`"
        if case.filters:
            rule = "what lasts belongs in the `state_dict` of the server's end, of a client in what `leave` returns"
        assert_same_bits(trial.everything(), expected[round_idx + 1], f"{where}; {rule}")


def _check_rest(case: Case) -> None:
    """Check that the server's weights stay as they are if nobody trains."""
    trained = Trial(case)
    trained.play()
    starts = {"the start": None, "a round of training": trained.save()}
    if promises_of(case.algorithm).steps_without_clients:  # what it has stored moves the server
        del starts["a round of training"]
    for start, saved in starts.items():
        trial = Trial(case, saved, local_epochs=0)
        before = trial.weights()
        for _ in range(2):
            trial.play()
            where = f"{case}, after {start}: nobody trained, but the server's weights changed"
            assert_same_bits(trial.weights(), before, where)


def _check_steps(case: Case) -> None:
    trial = Trial(case, server_lr=0.0)
    try:
        case.algorithm.check(Plan(trial.server, case.algorithm, server_optimizer=trial.optimizer))
    except ValueError:  # it says that the server's step is its own
        return
    for _ in range(ROUNDS):
        before = trial.parameters()
        trial.play()
        where = f"{case}: the server's optimizer did not step, but the parameters changed"
        assert_same_bits(trial.parameters(), before, f"{where}; give them a gradient in `Round.close`")


def _check_lost(case: Case) -> None:
    """One of five clients returns, and with the same weights as if it alone had been asked, it counts alone."""
    where = f"{case}, four of five clients lost after their downloads"
    moved = []
    for asked in (5, 1):
        trial = Trial(case, lost=range(1, asked))
        before = trial.parameters()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore" if case.filters else "default", category=SpectralWarning)
                trial.play(trial.units[:asked])
        except RoundError:
            if not case.filters:
                raise
            return  # a filter needs more clients
        except Exception as error:
            raise AssertionError(f"{where}: the round failed: {type(error).__name__}: {error}") from error
        changes = [after - before[name] for name, after in trial.parameters().items()]
        moved.append(math.sqrt(sum(float(change.double().square().sum()) for change in changes)))
    assert moved[1] == 0.0 or moved[0] > LEAST_SHARE * moved[1], (
        f"{where}: the server moved by {moved[0]:.3g}, and by {moved[1]:.3g} where the fifth alone was asked; divide "
        "by the weights of the clients that reported, as `MeanChange` does."
    )


def _check_order(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that the order in which clients train makes no difference."""
    trial = Trial(case)
    for round_idx in range(ROUNDS):
        trial.play(trial.units[::-1])
        where = f"{case}, round {round_idx}, clients in reverse"
        assert_same_bits(trial.everything(), expected[round_idx + 1], f"{where}: their order made a difference")


def _check_grouping(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that it makes no difference which of two processes trains which clients."""
    trials = Trial(case), Trial(case)
    if not trials[0].can_share():
        return
    units = trials[0].units
    for round_idx in range(ROUNDS):
        groups = units[round_idx + 1 :: 2], [*units[: round_idx + 1], *units[round_idx + 2 :: 2]]
        summaries = play_in_two_processes(trials, groups)
        for rank, trial in enumerate(trials):
            where = f"{case}, round {round_idx}, process {rank} of 2"
            assert_same_bits(trial.everything(), expected[round_idx + 1], f"{where}: grouping made a difference")
        told = [summary.diagnostics for summary in summaries]
        assert told[0] == told[1], (
            f"{case}, round {round_idx}: one of two processes logs {told[0]}, the other {told[1]}; let `observed` read "
            "what both know, such as the cohort and `Round.sums`."
        )


def _check_elsewhere(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Check bits and bytes if a device shares nothing with the server."""
    where = f"{case}, with a device elsewhere"
    try:
        trial = Trial(case, elsewhere=True)
    except Exception as error:
        raise AssertionError(f"{where}: its half cannot be sent there: {type(error).__name__}: {error}") from error
    for round_idx in range(ROUNDS):
        capacities = [trial.engine.clients.capacity_of(unit.client_id) for unit in trial.units]
        given: dict[str, Any] = {"round_idx": round_idx, "filters": case.filters}
        costs = [turn_costs(trial.half, [each], **given)[each] for each in capacities]
        try:
            summary = trial.play()
        except RecordError as error:
            raise AssertionError(f"{where}: a record cannot be sent: {error}") from error
        assert_same_bits(
            trial.everything(), expected[round_idx + 1], f"{where}, round {round_idx}: not as in one process"
        )
        for outcome, cost in zip(summary.clients, costs, strict=True):
            travelled = trial.executor.travelled[outcome.client_id]
            counted = outcome.downlink_bytes, outcome.uplink_bytes
            what = f"{case}, round {round_idx}, client {outcome.client_id}: "
            assert counted == travelled, (
                f"{what}{travelled} bytes travelled down and up, but the ledger counts {counted}."
            )
            moving, said = (counted[0] - outcome.frozen_bytes, counted[1]), (cost.downlink_bytes, cost.uplink_bytes)
            assert moving == said, (
                f"{what}{moving} bytes travelled down and up, without frozen tensors, but `turn_costs` says {said}."
            )


def _check_downloads(case: Case) -> None:
    """Check what clients are sent in a second round, and that a device does the same with it whenever it comes."""
    trial = Trial(case)
    device, opened = trial.device(), trial.engine.open_round(trial.round_idx, trial.units)
    said = {unit: _digests(device.run(opened.send(unit)[0]).tensors) for unit in trial.units}
    trial.engine.abandon_round()
    trial.play()
    opened = trial.engine.open_round(trial.round_idx, trial.units)
    downloads = {unit: opened.send(unit)[0] for unit in trial.units}
    sent = {unit: _digests(download.tensors) for unit, download in downloads.items()}
    for unit, download in downloads.items():
        where = f"{case}: client {unit.client_id}"
        others = {value for other in trial.units if other != unit for value in sent[other].values()}
        own = {value for value in said[unit].values() if value not in others}
        back = [name for name, value in sent[unit].items() if value in own]
        assert not back, (
            f"{where} is sent back {', '.join(back)} as it has sent it, and nobody else is; let it stay on the device, "
            "with `ClientSide.keep`."
        )
        alike = [each for each in trial.units if downloads[each].capacity == download.capacity]
        assert not promises_of(case.algorithm).noise_hides or all(sent[each] == sent[unit] for each in alike), (
            f"{where} is sent other tensors than the rest, perhaps of its last update; do not promise `noise_hides`."
        )
        first, again = (device.run(download).tensors for _ in range(2))
        rule = "leave `download.client_state` as it is, and let nothing else last on a device"
        assert_same_bits(again, first, f"{where}, sent the same twice: its uploads differ; {rule}")
        lost = device.run(replace(download, client_state={})).failure
        assert lost is None, f"{where} has lost what its device kept, and cannot train: {lost}; let it begin anew."
        expected = opened.algorithm_round.expected_update(unit)
        along = sum(float(((first[n] - download.tensors[n]) * change).sum()) for n, change in expected.items())
        assert along >= 0.0, f"{where} moves against its expected update, which must be a change, and no gradient."
    trial.engine.abandon_round()


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of those tensors that are not one value throughout."""
    return {name: digest(tensor) for name, tensor in tensors.items() if (tensor != tensor.flatten()[:1]).any()}


def _check_other_process(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that another process, in which Python hashes differently, gives the same bits."""
    found = uninterrupted_elsewhere(case)
    if found is None:
        return
    where = f"{case}, in a process with another PYTHONHASHSEED"
    assert not isinstance(found, str), f"{where}: {found}"
    for round_idx, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=-1):
        what = "before the first round" if round_idx < 0 else f"round {round_idx}"
        rule = "draw from `protocol.rng.derived_generator`, and not by `hash()` or in the order of a set"
        assert_same_bits(ours, theirs, f"{where}, {what}: not as in this process; {rule}")


def _check_absolute(case: Case) -> None:
    """As weights of an unbiased sampler, coefficients of twice the size make the step twice as long, if they count."""

    def changes(absolute: float, sizes: Sequence[int] = SIZES) -> dict[str, Tensor]:
        trial = Trial(case, absolute=absolute, sizes=sizes)
        before = trial.parameters()
        trial.play()
        return {name: after.double() - before[name] for name, after in trial.parameters().items()}

    once, twice = changes(0.02), changes(0.04)
    counts = differing(once, changes(0.02, SIZES[::-1]))
    for name in counts:
        longer = float(twice[name].norm() / once[name].norm())
        assert math.isclose(longer, 2.0, rel_tol=LINEAR), (
            f"{case}: with absolute coefficients, of an unbiased sampler, of twice the size, {name!r} changes "
            f"{longer:.3g} times as far; use them as they are in every sum if `Cohort.absolute` is true, as "
            "`MeanChange` does."
        )


def _check_buffers(case: Case) -> None:
    module, name = with_statistics(case.module), "trial_statistics.running_mean"
    if _error_of(lambda: case.algorithm.check(Plan(copy_module(module), case.algorithm))) is not None:
        return
    trial = Trial(replace(case, module=module))
    if first_match(name, case.buffers) is not None or name in trial.half.frozen_tensors():
        return  # it says that this is not averaged, or the user does
    num_steps = max(client.num_steps for client in trial.play().clients)
    mean = float(trial.server.get_buffer(name))
    most = 1 - 0.9**num_steps
    assert 0.1 - ROUNDING <= mean <= most + ROUNDING, (
        f"{case}: the running means of a BatchNorm were from 0.1 to {most:.3g} at the clients, and "
        f"the server's became {mean:.3g}; average buffers too, as `DenseRound` does."
    )


def _check_norms(case: Case) -> None:
    rule = (
        "but samplers take the norm of what is uploaded minus what was sent for that of a client's change; do not "
        "promise `new_values`"
    )
    where = f"{case}"
    for outcome in Trial(case, local_epochs=0).play().clients:
        assert outcome.update_norm == 0, (
            f"{where}: client {outcome.client_id} did not train, and the norm of its update is {outcome.update_norm}, "
            f"{rule}."
        )
    trial = Trial(case)
    norms = change_norms(trial)
    for outcome in trial.play().clients:
        found, expected = outcome.update_norm, norms.get(outcome.client_id, outcome.update_norm)
        assert math.isclose(found, expected, rel_tol=TOLERANCE), (
            f"{where}: client {outcome.client_id} moved by {expected}, and the norm of its update is {found}, {rule}."
        )


def _check_secure_sums(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    if buffer_rules(case.module).limits:  # which secure sums refuse
        return
    trial = Trial(replace(case, filters=(SecureSums(),)))
    for round_idx in range(ROUNDS):
        trial.play()
        where = f"{case}, whose clients mask their updates: not the same run; do not promise `one_sum`"
        found = {name: tensor for name, tensor in trial.everything().items() if not name.startswith("filter ")}
        assert_same_bits(found, expected[round_idx + 1], where)


def _check_device(case: Case, expected: Sequence[Mapping[str, Tensor]]) -> None:
    trial = Trial(case)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for round_idx in range(ROUNDS):
            trial = Trial(case, saved=trial.save()) if round_idx else trial
            trial.play()
            for name, tensor in trial.weights().items():
                if tensor.numel() == 0:
                    continue
                on_cpu = expected[round_idx + 1][name].double()
                largest = on_cpu.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
                difference = float((tensor.cpu().double() - on_cpu).abs().max() / largest)
                assert difference <= ROUNDING, (  # not-a-number is not
                    f"{case}, round {round_idx} on {case.device}: {name!r} differs from the CPU's by "
                    f"{difference:.0e} of its largest value."
                )


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise ``AssertionError``, which begins with ``where``, unless names, types, shapes and bits are the same."""
    assert found.keys() == expected.keys(), (
        f"{where}: only one of both has the tensors {', '.join(sorted(found.keys() ^ expected.keys()))}."
    )
    names = differing(found, expected)
    assert not names, (
        f"{where}: {len(names)} of {len(found)} tensors, first {names[0]!r}, "
        f"{_difference(found[names[0]], expected[names[0]])}."
    )


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose bits differ."""
    return [name for name, tensor in found.items() if digest(tensor) != digest(expected[name])]


def _difference(found: Tensor, expected: Tensor) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of shape {tuple(expected.shape)}"
    place = int((found.double() - expected.double()).abs().nan_to_num(float("inf")).argmax())
    values = found.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return "most at index {}: {!r}, not {!r}".format(place, *values)
