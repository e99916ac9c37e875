"""Forward and backward passes captured once as a graph of kernels, and replayed for all clients: a prototype.

It is tested with a stand-in for CUDA graphs (`tests/test_captured_steps.py`), and has not been run on a GPU; ``gpu.py
--parts captured`` will tell whether it earns its place in the package. A federation uses it like this::

    class CapturedFederation(ls.FederatedModule):
        def make_executor(self, engine):
            return self.make_local_executor(engine, CapturedLoop)
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_spectral.client import device, kept_state
from lightning_spectral.client.local_loop import LocalLoop, LocalResult, LocalSettings, LocalTask, Recorder, metrics_of
from lightning_spectral.errors import warn

IN_PYTHON = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
AROUND_STEP = ("on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "on_after_batch_transfer")
LAYER_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_FORMS = ("lightning_spectral.nn.", "lightning_spectral.algorithms.")  # owners of hooks that are part of a sub-model
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
TURNS = 3  # in which passes must come up to be captured; odd last batches seldom do
MOST = 16  # graphs, each with the memory of a pass
PATIENCE = 50  # turns until it is said that no passes come up again

Call = Callable[[], object]


def cuda_graph(call: Call) -> Call:
    """Record the kernels of a call without running them; return what runs them, in the same memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
    except Exception:
        with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            warnings.simplefilter("ignore")  # it is empty, and ends what the generators believe to be a capture
        raise
    return graph.replay


class Uncapturable(Exception):
    """Passes cannot be captured; the message says why."""


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
    """Notes where the host would wait for the device, which a graph cannot."""

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


@dataclass(eq=False)
class Passes:
    """What a forward and a backward pass compute, in memory into which a replay writes it again."""

    output: Any
    loss: Tensor
    logged: list[tuple[Any, ...]]
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    inputs: list[Tensor]  # of the batch
    held: dict[str, Any]  # attributes, which its key may know by identity
    replay: Call = tuple


class CapturedLoop(LocalLoop):
    """Captures passes that come up in several turns, and replays them, with the bits of the passes themselves.

    Passes are the same if they have the same form, attributes and kind of batch. What acts on gradients, and the user's
    optimizer, run in between as always, so any optimizer and schedule will do. Before passes are captured, they run as
    always but watched, and once more without the values that differ from step to step; afterwards their bits are
    compared. If anything forbids it, one warning says what, and all steps run as always. So do those of the first
    rounds, in which hooks watch gradients. Not noticed: what a step does elsewhere, as to print, or to change objects
    of libraries.

    Args:
        module, optimizers, settings: As for `LocalLoop`.
        capture: Records a call, and returns what runs it again in the same memory.
    """

    def __init__(
        self,
        module: Any,
        optimizers: Sequence[Optimizer],
        settings: LocalSettings,
        capture: Callable[[Call], Call] = cuda_graph,
    ) -> None:
        super().__init__(module, optimizers, settings)
        self.capture, self.num_replayed, self.reason, self._package = capture, 0, "", kept_state.package_of(module)
        self._generator, self._stream = torch.default_generator, None
        if (where := self.placement.device).type == "cuda":
            self._generator = torch.cuda.default_generators[where.index or 0]
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]  # graphs need one of their own
        self._captured: dict[Any, Passes] = {}
        self._turns: dict[Any, set[int]] = {}  # in which each kind of passes came up
        self._turn, self._around, self._is_eager = 0, self._look_around(), True
        self._stays = not any(settings.defines(module, name) for name in AROUND_STEP)
        in_python = [name for name in IN_PYTHON if settings.defines(module, name)]
        in_python += [name for name in ("optimizer_zero_grad", "backward") if getattr(self.user, name) is not None]
        if self.is_manual or not self._eager:
            self._give_up(f"the user's code, or {type(optimizers[0]).__name__}, evaluates the loss or steps itself")
        elif in_python:
            self._give_up(f"{', '.join(in_python)} must run in Python each time")
        elif self.placement.scaler is not None:
            self._give_up("precision '16-mixed' scales by what gradients are; use 'bf16-mixed' or 32")
        elif metrics_of(module):
            self._give_up("metrics of torchmetrics count in Python; log values in `training_step`")

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
            last, self._around = self._around, self._look_around()
            if reason := self._reason_against(task):
                self._give_up(reason)
            elif self._turn == PATIENCE and not self._captured:
                differ = sorted({str(name) for name, *_ in last ^ self._around}) or ["their batches"]
                self._give_up(f"no passes come up again, as clients differ in {differ[0]}")
        return super()._epoch(task, local_epoch)

    def _look_around(self) -> frozenset[Any]:
        """What passes depend on besides the batch and the values of parameters and buffers."""
        module, found = self.module, set[Any]()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found.add((name, tensor.data_ptr(), tensor.requires_grad))
        found |= {(f"{path}.training", part.training) for path, part in module.named_modules()}
        for name, value in kept_state.own_attributes(module):
            if isinstance(value, Tensor):
                found.add((name, id(value)))
            else:
                found.add((name, repr(kept_state.comparable(value, 6, self._package))))
        return frozenset(found)

    def _reason_against(self, task: LocalTask) -> str:
        hooks = [getattr(part, name).values() for part in self.module.modules() for name in LAYER_HOOKS]
        owners = [getattr(getattr(one, "func", one), "__module__", "") for own in hooks for one in own]
        if not all(owner.startswith(OF_FORMS) for owner in owners):
            return "hooks on layers must run in Python each time"
        if any(
            kept_state.hooks_of(parameter, when) for parameter in self.module.parameters() for when in kept_state.HOOKS
        ):
            return "hooks on gradients must run in Python each time"
        return "the algorithm acts in every forward pass" if task.before_forward or task.after_forward else ""

    def _passes(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        if not (self._is_eager or self.reason or self._stays):
            self._around = self._look_around()
        if self._is_eager or self.reason:
            return super()._passes(task, batch, batch_idx)
        leaves = tree_leaves(batch)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        others = [leaf for leaf in leaves if type(leaf) in kept_state.PLAIN]
        if len(inputs) + len(others) < len(leaves):
            self._give_up("batches hold more than dense tensors, numbers and texts")
            return super()._passes(task, batch, batch_idx)
        kind = repr(([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in inputs], others))
        key = self._around, kind, task.recorder.num_examples
        if (passes := self._captured.pop(key, None)) is None:
            if len(self._turns) > 9 * MOST:
                self._turns.clear()
            turns = self._turns.setdefault(key, set())
            turns.add(self._turn)
            if len(turns) < TURNS:
                return super()._passes(task, batch, batch_idx)
            del self._turns[key]  # in case it must go
            return self._first(key, inputs, task, batch, batch_idx)
        self._captured[key] = passes  # the last to go
        with torch.no_grad():
            torch._foreach_copy_(passes.inputs, inputs)
        passes.replay()
        self.num_replayed += 1
        for call in passes.logged:
            task.recorder.add(*call)
        for parameter, gradient in passes.gradients:
            parameter.grad = gradient
        output = tree_map_only(Tensor, torch.clone, passes.output) if self.user.takes_outputs else None
        return output, passes.loss.clone()

    def _first(
        self, key: Any, inputs: list[Tensor], task: LocalTask, batch: Any, batch_idx: int
    ) -> tuple[Any, Tensor | None]:
        """Run passes as always, and capture them if they can be."""
        run, recorder, watch = super()._passes, task.recorder, Watch()
        parts: list[Any] = [part for part in self.module.modules() if "_trainer" in vars(part)]
        trainers, data = [part._trainer for part in parts], [tensor.data for tensor in inputs]
        changed, attributes, before = (
            kept_state.changed_attributes(self.module),
            dict(kept_state.own_attributes(self.module)),
            self._now(),
        )
        with noting(recorder, adds=True) as logged, watch:
            output, loss = run(task, batch, batch_idx)
        after, gradients = self._now(), self._gradients()
        first = [tensor.detach().clone() for tensor in self._left(loss, logged)]
        taken: list[Passes] = []

        def take() -> None:
            with noting(recorder, adds=False) as told:
                again, found = run(task, batch, unknown("`batch_idx`"))
            known = tree_map_only(Tensor, Tensor.detach, again), cast(Tensor, found).detach(), told, self._gradients()
            taken[:] = [Passes(*known, [tensor.detach() for tensor in inputs], attributes)]

        def compare(reason: str) -> None:
            if not _same_bits(first, self._left(taken[0].loss, taken[0].logged)):
                raise Uncapturable(reason)

        try:
            now = dict(kept_state.own_attributes(self.module))
            set_anew = {name for name, value in now.items() if attributes.get(name) is not value}
            reasons = ["`training_step` returns no loss"] * (loss is None) + watch.reasons
            reasons += [f"it changes {name}" for name in sorted({*changed(), *set_anew})]
            if reasons := reasons + ["it draws numbers on the CPU"] * (before[2] != after[2]):
                raise Uncapturable(reasons[0])
            for part in parts:
                vars(part)["_trainer"] = unknown("`self.trainer`, or what it tells")
            self._put(before)
            take()
            compare("it has other values when it is taken again; try Trainer(deterministic=True)")
            for tensor in inputs:
                tensor.data = tensor.detach().clone()
            self._put(before)
            replay = self.capture(take)
            self._put(before)
            replay()
            compare("replayed, it has other values")
            if len(self._captured) == MOST:
                del self._captured[next(iter(self._captured))]
            self._captured[key] = replace(taken[0], replay=replay)
        except Exception as error:
            self._put(after)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._give_up(str(error) if isinstance(error, Uncapturable) else f"{type(error).__name__}: {error}")
        finally:
            for tensor, own_data in zip(inputs, data, strict=True):
                tensor.data = own_data
            for part, trainer in zip(parts, trainers, strict=True):
                vars(part)["_trainer"] = trainer
        return output, loss

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        return [(parameter, parameter.grad) for parameter in self.module.parameters()]

    def _left(self, loss: Tensor | None, logged: Sequence[Sequence[Any]]) -> list[Tensor]:
        """All that passes leave behind."""
        tensors = [loss, *(gradient for _, gradient in self._gradients()), *self.module.parameters()]
        tensors += [*self.module.buffers(), self._generator.get_state(), *(value for _, value, *_ in logged)]
        return [tensor for tensor in tensors if tensor is not None]

    def _now(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor, bytes]:
        """All that passes can change: parameters and buffers, the device's generator, and other generators."""
        tensors = [(t, t.detach().clone()) for t in (*self.module.parameters(), *self.module.buffers())]
        own = [value for _, value in kept_state.own_attributes(self.module) if isinstance(value, torch.Generator)]
        others = [g.get_state().tolist() for g in (torch.default_generator, *own) if g is not self._generator]
        return tensors, self._generator.get_state(), pickle.dumps((random.getstate(), np.random.get_state(), others))

    @torch.no_grad()
    def _put(self, then: tuple[list[tuple[Tensor, Tensor]], Tensor, bytes]) -> None:
        """Make all of it as it was then."""
        for tensor, value in then[0]:
            if not _same_bits([tensor], [value]):
                tensor.detach().copy_(value)
        self._generator.set_state(then[1])


def _same_bits(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    as_bytes = [[t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors] for tensors in (some, others)]
    return len(some) == len(others) and all(map(torch.equal, *as_bytes))


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
