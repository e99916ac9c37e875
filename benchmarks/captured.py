"""Local steps captured once as a graph of kernels, and replayed for further batches, of all clients: a prototype.

It is tested with a stand-in for CUDA graphs (`captured_steps.py`), and has not been run on a GPU; ``gpu.py --parts
captured`` will tell whether it earns its place in the package. A federation uses it like this::

    class CapturedFederation(ls.FederatedModule):
        def make_executor(self, engine):
            return self.make_local_executor(engine, CapturedLoop)
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_spectral.client import device
from lightning_spectral.client.kept_state import BACK, HOOKS, LARGE, PLAIN, hooks_of, is_users, package_of, parts_of
from lightning_spectral.client.local_loop import LocalLoop, LocalResult, LocalSettings, LocalTask, Recorder, metrics_of
from lightning_spectral.client.user_optimizer import family
from lightning_spectral.errors import warn

IN_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
OWN_WAYS = ("optimizer_zero_grad", "backward", "configure_gradient_clipping")
AROUND_STEP = ("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "on_after_batch_transfer")
# Attributes that a step does not read, or that say nothing of it
IGNORED = {*AROUND_STEP, "transfer_batch_to_device", "log", "log_dict", "optimizers", "lr_schedulers"}
IGNORED |= {*BACK, "manual_backward", "_opt_called", "_warned_capturable_if_run_uncaptured"}
MAY_BE_EMPTY = {*PLAIN, dict, OrderedDict, list, tuple, set}  # most are, and say nothing then
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
TURNS, RECENT = 3, 30  # a step is captured if it comes up in 3 of the last 30 turns; odd last batches seldom do
MOST = 16  # graphs at a time, each with the memory of a step
PATIENCE = 50  # turns until it is said that no step comes up again

Call = Callable[[], object]
State = dict[Any, dict[str, Any]]  # of an optimizer, by parameter
NOTHING: Mapping[int, str] = MappingProxyType({})


def cuda_graph(call: Call, generators: Sequence[torch.Generator]) -> Call:
    """Record the kernels of a call without running them; return what runs them, in the same memory."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
    except Exception:
        with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            warnings.simplefilter("ignore")  # it is empty, and ends what the generators believe to be a capture
        raise
    return graph.replay


class Uncapturable(Exception):
    """A step cannot be captured; the message says why."""


def _refuse(unknown: Any, *args: Any, **options: Any) -> NoReturn:
    name = object.__getattribute__(unknown, "name")
    raise Uncapturable(f"`training_step` uses {name}, which is another in every step")


# Stands for a value that differs from step to step: it can be passed on, and all else is an error.
USES = {"__getattribute__", "__bool__", "__call__", *dir(int), *dir(list)}
USES -= {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__"}
Unknown: Any = type("Unknown", (), {name: _refuse for name in USES if name.startswith("__")})


def unknown(name: str) -> Any:
    """Make one, which is called so in the error."""
    made = Unknown.__new__(Unknown)
    object.__setattr__(made, "name", name)
    return made


class Watch(TorchDispatchMode):
    """Notes where the host would wait for the device in a step, which a graph cannot."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reasons: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        by_mask = name in ("index", "index_put", "index_put_") and any(t.dtype == torch.bool for t in tensors[1:])
        if name in READS or by_mask:
            self.reasons.append(f"it reads values of tensors, as `.item()` does ({name})")
        elif len(devices := sorted({t.device.type for t in tensors})) > 1:
            self.reasons.append(f"it uses tensors on {' and '.join(devices)} together ({name})")
        return result


class Look:
    """What a step can reach from some objects: plain values and identities, by path, and tensors.

    Args:
        roots: The objects, by name.
        package: The package of the user's module.
        seen: Paths of objects that are known, by identity.
        deep: Whether to look into functions and the package's own objects, which are others for every client.
    """

    def __init__(self, roots: Mapping[str, Any], package: str, seen: Mapping[int, str] = NOTHING, deep: bool = False):
        self.found: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.generators: list[torch.Generator] = []
        self.hooks: list[str] = []  # of the user's, on layers
        self.held: list[Any] = []  # so that no other object gets its identity
        self.seen = dict(seen)
        rest = deque(roots.items())
        while rest:
            path, value = rest.popleft()  # the shortest paths first
            if type(value) in PLAIN:
                self.found[path] = str(value) if isinstance(value, slice) else value
            elif id(value) in self.seen:
                self.found[path] = self.seen[id(value)]
            elif path != "optimizer.state":
                self.seen[id(value)] = path
                self.held.append(value)
                parts = self._parts(path, value, package, deep)
                parts = ((name, part) for name, part in parts if type(part) not in MAY_BE_EMPTY or part)
                rest += [(name, part) for name, part in parts if name.rpartition(".")[2] not in IGNORED]

    def _parts(self, path: str, value: Any, package: str, deep: bool) -> Iterable[tuple[str, Any]]:
        is_open = isinstance(value, nn.Module | Optimizer) or is_users(value, package)
        if isinstance(value, Tensor) and value.layout == torch.strided:
            self.tensors[path] = value
            return ()
        if deep and isinstance(value, FunctionType):
            cells = (cell.cell_contents for cell in value.__closure__ or ())
            held = dict(zip(value.__code__.co_freevars, cells, strict=True))
            return parts_of([value.__code__, held, value.__defaults__, value.__kwdefaults__], path)
        if deep and isinstance(value, partial):
            return parts_of((value.func, value.args, value.keywords), path)
        if deep and isinstance(value, MethodType):
            return parts_of((value.__func__, value.__self__), path)
        if isinstance(value, dict | list | tuple | set | frozenset) and len(value) <= LARGE:
            if path.endswith("_hooks") and isinstance(value, dict):
                owners = [getattr(getattr(one, "func", one), "__module__", None) or "" for one in value.values()]
                self.hooks += [path for owner in owners if not owner.startswith(("lightning_spectral.", "torch."))]
            if isinstance(value, set | frozenset):
                value = sorted(value, key=repr)
            elif isinstance(value, dict) and not all(type(key) in PLAIN for key in value):
                value = list(value.items())
            return parts_of(value, path)
        if is_open or (deep and type(value).__module__.startswith(("lightning_spectral.", "torch.autograd."))):
            self.found[path] = type(value)
            return parts_of(value, path)
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        self.found[path] = id(value)
        return ()

    def known(self, by_place: bool) -> frozenset[Any]:
        """All that was found, and tensors by their memory, or else as they are apart from memory and values."""
        places = ((path, id(t), t.data_ptr(), t.requires_grad) for path, t in self.tensors.items())
        kinds = ((path, t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for path, t in self.tensors.items())
        return frozenset(self.found.items()) | frozenset(places if by_place else kinds)


def _same_bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    as_bytes = ([t.detach().contiguous().view(-1).view(torch.uint8) for t in pair] for pair in pairs)
    return all(torch.equal(*pair) for pair in as_bytes)


@dataclass(eq=False)
class Captured:
    """A captured step: what it reads, computes and sets, in the memory in which `replay` takes it again."""

    replay: Call
    inputs: list[Tensor]  # of the client, and of the batch
    output: Any
    loss: Tensor
    logged: list[tuple[Any, ...]]
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    state: State  # afterwards
    held: Any  # so that the identities in its key keep their meaning
    own: Any = None  # the look from which the inputs of the client are
    turn: int = 0  # the last in which it was taken


class CapturedLoop(LocalLoop):
    """Captures local steps that come up in several turns, and replays them, with the bits of the steps themselves.

    Steps are the same if they have the same form, optimizer settings and kind of batch. What clients have of their own,
    such as factors of gradients, is copied into the memory of the first. Before a step is captured, it is taken as
    always but watched, and once more without the values that differ from step to step; afterwards its bits are
    compared. If anything forbids it, one warning says what, and steps are taken as always. So are those of the first
    rounds, in which hooks watch gradients. Not noticed: what a step does elsewhere, as to print, or to set a global
    variable.

    Args:
        module, optimizers, settings: As for `LocalLoop`.
        capture: Records a call, and returns what runs it again in the same memory; given what the call draws from,
            besides the global generators.
    """

    def __init__(
        self,
        module: Any,
        optimizers: Sequence[Optimizer],
        settings: LocalSettings,
        capture: Callable[[Call, Sequence[torch.Generator]], Call] = cuda_graph,
    ) -> None:
        super().__init__(module, optimizers, settings)
        self.capture, self.num_replayed, self.reason = capture, 0, ""
        self._optimizer, self._package, where = optimizers[0], package_of(module), self.placement.device
        self._global, self._stream = torch.default_generator, None
        if where.type == "cuda":
            self._global = torch.cuda.default_generators[where.index or 0]
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]  # graphs need one of their own
        self._captured: dict[Any, Captured] = {}
        self._turns: dict[Any, set[int]] = {}  # in which each step came up
        self._memory: dict[Any, dict[str, Tensor]] = {}  # of the optimizer's state
        self._turn, self._around, self._last_around = 0, frozenset[Any](), frozenset[Any]()
        self._stays = not any(settings.defines(module, name) for name in AROUND_STEP)
        own = [name for name in IN_STEP if settings.defines(module, name)]
        own += [name for name in OWN_WAYS if getattr(self.user, name) is not None]
        if reason := self._reason_against(own):
            self._give_up(reason)

    def _reason_against(self, hooks: Sequence[str]) -> str:
        optimizer = self._optimizer
        kind = type(optimizer).__name__
        if self.is_manual or not self._eager or len(list(family(optimizer))) > 1:
            return f"the user's code, or {kind}, evaluates the loss or takes steps itself"
        if hooks:
            return f"{', '.join(hooks)} must run in Python each time"
        if self.placement.scaler is not None:
            return "precision '16-mixed' scales by what gradients are; use 'bf16-mixed' or 32"
        if metrics_of(self.module):
            return "metrics of torchmetrics count in Python; log values in `training_step`"
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            return f"{kind} counts its steps on the CPU; write {kind}(..., capturable=True)"
        return ""

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._captured.clear()
        kind = type(self.module).__name__
        warn(f"No local steps of {kind} are captured, and all run as always: {reason}.", 3)

    def __call__(self, task: LocalTask) -> LocalResult:
        """Train for one client."""
        if self._stream is None:
            return super().__call__(task)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = super().__call__(task)
        current.wait_stream(self._stream)
        return result

    def _epoch(self, task: LocalTask, local_epoch: int) -> Iterator[tuple[Any, int]]:
        self._is_eager = bool(self.reason) or task.download.round_idx < device.WATCHED_ROUNDS
        if not self._is_eager:
            self._turn += task.epochs is None or local_epoch == task.epochs.start
            try:
                self._look_around(task)
            except Exception as error:  # some objects cannot be looked into
                self._give_up(f"{type(error).__name__}: {error}")
            if self._turn == PATIENCE and not self._captured:
                differ = sorted(str(entry[0]) for entry in self._around ^ self._last_around) or ["their batches"]
                self._give_up(f"no step came up again, as clients differ in {differ[0]}")
        return super()._epoch(task, local_epoch)

    def _look_around(self, task: LocalTask) -> None:
        """Look at what steps can reach besides their batches."""
        acts = {"before_forward": task.before_forward, "after_forward": task.after_forward}
        self._inside = inside = Look({"module": self.module, "optimizer": self._optimizer}, self._package)
        self._own = own = Look({**acts, "before_step": task.before_step[0]}, self._package, inside.seen, deep=True)
        self._last_around, self._around = self._around, inside.known(by_place=True) | own.known(by_place=False)
        if inside.hooks or any(hooks_of(p, when) for p in self.module.parameters() for when in HOOKS):
            self._give_up(f"hooks must run in Python each time ({(*inside.hooks, 'on gradients')[0]})")
        elif own.generators:
            self._give_up("the algorithm draws on the CPU in every step")

    def _step(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        if not (self._is_eager or self.reason or self._stays):
            self._look_around(task)
        if self._is_eager or self.reason:
            return super()._step(task, batch, batch_idx)
        of_batch = Look({"batch": batch}, self._package)
        inputs = [*self._own.tensors.values(), *of_batch.tensors.values()]
        state = tuple(
            (id(parameter), name, (value.shape, value.dtype) if isinstance(value, Tensor) else value)
            for parameter, own in self._optimizer.state.items()
            for name, value in own.items()
            if isinstance(value, Tensor) or type(value) in PLAIN
        )
        key = self._around, of_batch.known(by_place=False), task.recorder.num_examples, state
        if (captured := self._captured.get(key)) is None:
            if len(self._turns) > 9 * MOST:
                self._turns.clear()
            turns = self._turns.setdefault(key, set())
            turns.add(self._turn)
            has_room = len(self._captured) < MOST or not self._is_recent(next(iter(self._captured.values())).turn)
            if not has_room or sum(map(self._is_recent, turns)) < TURNS:
                return super()._step(task, batch, batch_idx)
            return self._first(key, inputs, task, batch, batch_idx)
        self._settle()
        self._captured[key] = self._captured.pop(key)  # the last to go
        known = len(self._own.tensors) if captured.own is self._own else 0  # these have been copied
        with torch.no_grad():
            for memory, value in zip(captured.inputs[known:], inputs[known:], strict=True):
                memory.copy_(value)
        captured.own, captured.turn = self._own, self._turn
        captured.replay()
        self.num_replayed += 1
        self._optimizer.state.update(self._state(captured.state))
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        for call in captured.logged:
            task.recorder.add(*call)
        task.recorder.num_steps += 1
        output = tree_map_only(Tensor, torch.clone, captured.output) if self.user.takes_outputs else None
        return output, captured.loss.clone()

    def _first(
        self, key: Any, inputs: list[Tensor], task: LocalTask, batch: Any, batch_idx: int
    ) -> tuple[Any, Tensor | None]:
        """Take a step as always, and capture it if it can be."""
        step, recorder, watch = super()._step, task.recorder, Watch()
        self._settle()
        inside, own, before = self._inside, self._own, self._now()
        with noting(recorder, adds=True) as logged, watch:
            output, loss = step(task, batch, batch_idx)
        self._settle()
        num_steps, after, data = recorder.num_steps, self._now(), [tensor.data for tensor in inputs]
        parts: list[Any] = [part for part in self.module.modules() if "_trainer" in vars(part)]
        trainers = [part._trainer for part in parts]
        taken: list[Captured] = []

        def take() -> None:
            with noting(recorder, adds=False) as told:
                result, found = step(task, batch, unknown("`batch_idx`"))
            self._settle()
            gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
            known = tree_map_only(Tensor, Tensor.detach, result), cast(Tensor, found).detach(), told, gradients
            taken[:] = [Captured(take, list(map(Tensor.detach, inputs)), *known, self._state(), (inside, own))]

        def compare(reason: str) -> None:
            values = [(one[1], other[1]) for one, other in zip(logged, taken[0].logged, strict=True)]
            values += [(cast(Tensor, loss), taken[0].loss), *after[1], *((g.get_state(), now) for g, now in after[2])]
            if not _same_bits(values):
                raise Uncapturable(reason)

        try:
            self._look_around(task)
            reasons = ["`training_step` returns no loss"] * (loss is None) + watch.reasons
            if reasons := [*reasons, *self._changes(inside, own, before, after)]:
                raise Uncapturable(reasons[0])
            for part in parts:
                vars(part)["_trainer"] = unknown("`self.trainer`, or what it tells")
            self._put(before)
            take()
            compare("it has other values when it is taken again; try Trainer(deterministic=True)")
            for tensor in inputs:
                tensor.data = tensor.detach().clone()
            self._put(before)
            replay = self.capture(take, [g for g in inside.generators if g.device == self._global.device])
            self._put(before)
            replay()
            compare("replayed, it has other values")
            self._optimizer.state.update(self._state(after[0]))
            if len(self._captured) == MOST:
                del self._captured[next(iter(self._captured))]
            self._captured[key] = replace(taken[0], replay=replay, turn=self._turn)
        except Exception as error:
            self._put(after)
            self._give_up(str(error) if isinstance(error, Uncapturable) else f"{type(error).__name__}: {error}")
        finally:
            for tensor, own_data in zip(inputs, data, strict=True):
                tensor.data = own_data
            for part, trainer in zip(parts, trainers, strict=True):
                vars(part)["_trainer"] = trainer
            recorder.num_steps = num_steps
        return output, loss

    def _is_recent(self, turn: int) -> bool:
        return self._turn - turn < RECENT

    def _changes(self, inside: Look, own: Look, before: Any, after: Any) -> Iterator[str]:
        """What a step has done that a graph would not repeat."""
        changed = inside.known(by_place=True) ^ self._inside.known(by_place=True)
        changed |= own.known(by_place=False) - self._own.known(by_place=False)
        yield from (f"it changes {entry[0]}" for entry in sorted(changed, key=str))
        for parameter, state in after[0].items():
            was = before[0].get(parameter, state)
            if not all(isinstance(v, Tensor) or (type(v) in PLAIN and was.get(n) == v) for n, v in state.items()):
                yield "the optimizer counts in Python, or keeps more than tensors and numbers"
        if before[3] != after[3]:
            yield "it draws numbers on the CPU"
        ours = slice(len(inside.tensors), len(inside.tensors) + len(own.tensors))
        pairs = ((one[1], other[1]) for one, other in zip(before[1][ours], after[1][ours], strict=True))
        if len(self._own.tensors) > len(own.tensors) or not _same_bits(pairs):
            yield "a hook makes or changes tensors of its own"

    @torch.no_grad()
    def _settle(self) -> None:
        """Move the optimizer's state to memory that stays."""
        for parameter, own in self._optimizer.state.items():
            memory = self._memory.setdefault(parameter, {})
            for name, value in own.items():
                if isinstance(value, Tensor) and memory.get(name) is not value:
                    if name not in memory or memory[name].shape != value.shape or memory[name].dtype != value.dtype:
                        memory[name] = value.detach().clone()
                    own[name] = memory[name].copy_(value)

    def _state(self, of: State | None = None) -> State:
        """The optimizer's state, or another one, in dictionaries of its own."""
        return {parameter: dict(own) for parameter, own in (self._optimizer.state if of is None else of).items()}

    def _now(self) -> tuple[State, list[tuple[Tensor, Tensor]], list[tuple[Any, Tensor]], bytes]:
        """All that a step can change: the optimizer's state, tensors, and generators, on the device and elsewhere."""
        state = self._state()
        tensors = [*self._inside.tensors.values(), *self._own.tensors.values()]
        tensors += [value for own in state.values() for value in own.values() if isinstance(value, Tensor)]
        known = dict.fromkeys([torch.default_generator, self._global, *self._inside.generators])
        drawing = [(g, g.get_state()) for g in known if g.device == self._global.device]
        elsewhere = [g.get_state().tolist() for g in known if g.device != self._global.device]
        others = pickle.dumps((random.getstate(), np.random.get_state(), elsewhere))
        return state, [(t, t.detach().clone()) for t in tensors], drawing, others

    @torch.no_grad()
    def _put(self, then: tuple[Any, ...]) -> None:
        """Make all of it as it was then."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state(then[0]))
        for tensor, value in then[1]:
            if not _same_bits([(tensor, value)]):
                tensor.detach().copy_(value)
        for generator, state in then[2]:
            generator.set_state(state)


@contextmanager
def noting(recorder: Recorder, adds: bool) -> Iterator[list[tuple[Any, ...]]]:
    """Note the values that are logged within the block; ``adds`` says whether they are also recorded."""
    noted: list[tuple[Any, ...]] = []

    def note(name: str, value: Tensor, *known: Any) -> None:
        noted.append((name, value.clone(), *known))
        if adds:
            Recorder.add(recorder, name, value, *known)

    vars(recorder)["add"] = note
    try:
        yield noted
    finally:
        del vars(recorder)["add"]
