"""Forward and backward passes captured once as a graph of kernels, and replayed for all clients. Not run on a GPU yet.

A graph knows memory and nothing of Python. What can be known not to fit is refused before; the rest is found out by
comparing bits: in a client's turn, the passes of each kind first run as always, and a replay must leave the same.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
LAYER_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_FORMS = ("lightning_spectral.nn.", "lightning_spectral.algorithms.")  # owners of hooks that are part of a sub-model
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")
SELDOM = 3  # turns in which passes come up to be captured, unlike odd last ones; in as many, all replays are compared
MOST = 16  # graphs, each with the memory of a pass
PATIENCE = 50  # turns until it is said that no passes come up again
OTHER_VALUES = (
    "replayed, it has other values; perhaps it depends on more than its batch, such as `batch_idx`, the round or an "
    "attribute, or needs Trainer(deterministic=True)"
)

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
    """Forward and backward passes of one kind: when they came up, and where their graph reads and writes.

    Attributes:
        turns, turn: In how many turns, and in which last.
        left: What they leave besides what they write in place: the loss, what is logged, and parameters' gradients.
    """

    turns: int = 0
    turn: int = 0
    replay: Call | None = None
    inputs: list[Tensor] = field(default_factory=list)
    output: Any = None
    left: tuple[Any, Sequence[Any], Sequence[Any]] = None, (), ()

    def run(self, inputs: list[Tensor]) -> None:
        """Replay them for other tensors of a batch."""
        assert self.replay is not None, "they are captured"
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, inputs)
        self.replay()


class CapturedLoop(LocalLoop):
    """Captures passes that come up in several turns, and replays them, with the bits of the passes themselves.

    Passes are of one kind if they have the same memory, modes of layers and shapes of batches. What acts on gradients,
    and the user's optimizer, run in between as always, so any optimizer and schedule will do. If anything forbids it,
    one warning says what, and all steps run as always. So do those of the first rounds, in which hooks watch gradients.
    Not noticed: what a step does elsewhere, as to print, and what first changes its values within a later turn.

    Attributes:
        capture: Records a call, and returns what runs it again in the same memory.
    """

    capture: Callable[[Call], Call] = staticmethod(cuda_graph)

    def __init__(self, module: Any, optimizers: Sequence[Optimizer], settings: LocalSettings) -> None:
        super().__init__(module, optimizers, settings)
        self.num_replayed, self.reason, self._turn = 0, "", 0
        self._passes_of: dict[Any, Passes] = {}
        self._generator, self._stream = torch.default_generator, None
        if (where := self.placement.device).type == "cuda":
            self._generator = torch.cuda.default_generators[where.index or 0]
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]  # graphs need one of their own
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
        self._passes_of.clear()
        warn(f"No local steps of {type(self.module).__name__} are captured, and all run as always: {reason}.", 3)

    def __call__(self, task: LocalTask) -> LocalResult:
        """Train for one client."""
        if not self.reason and task.download.round_idx >= device.WATCHED_ROUNDS:
            self._turn += 1
            if reason := self._reason_against(task):
                self._give_up(reason)
            elif self._turn == PATIENCE and not any(one.replay for one in self._passes_of.values()):
                self._give_up("no passes come up again; memory, modes of layers or shapes of batches always differ")
        if self._stream is None:
            return super().__call__(task)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return super().__call__(task)
        finally:  # also of a client that fails
            current.wait_stream(self._stream)

    def _reason_against(self, task: LocalTask) -> str:
        hooks = [getattr(part, name).values() for part in self.module.modules() for name in LAYER_HOOKS]
        owners = [getattr(getattr(one, "func", one), "__module__", "") for own in hooks for one in own]
        if not all(owner.startswith(OF_FORMS) for owner in owners):
            return "hooks on layers must run in Python each time"
        parameters = self.module.parameters()
        if any(kept_state.hooks_of(parameter, when) for parameter in parameters for when in kept_state.HOOKS):
            return "hooks on gradients must run in Python each time"
        return "the algorithm acts in every forward pass" if task.before_forward or task.after_forward else ""

    def _passes(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        if self.reason or task.download.round_idx < device.WATCHED_ROUNDS:
            return super()._passes(task, batch, batch_idx)
        leaves = tree_leaves(batch)
        dense, where = torch.strided, self.placement.device.type
        inputs = [one for one in leaves if isinstance(one, Tensor) and (one.layout, one.device.type) == (dense, where)]
        others = [leaf for leaf in leaves if type(leaf) in kept_state.PLAIN]
        if len(inputs) + len(others) < len(leaves):
            self._give_up("batches hold more than dense tensors of the device, numbers and texts")
            return super()._passes(task, batch, batch_idx)
        memory = tuple((id(tensor), tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors())
        modes = tuple(part.training for part in self.module.modules())
        shapes = tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in inputs)
        kind = memory, modes, shapes, repr(others), task.recorder.num_examples
        passes = self._passes_of[kind] = self._passes_of.pop(kind, Passes())  # the last to go
        is_first, passes.turn = passes.turn != self._turn, self._turn
        passes.turns += is_first
        if len(self._passes_of) > 9 * MOST:
            del self._passes_of[next(iter(self._passes_of))]
        if passes.turns < SELDOM:
            return super()._passes(task, batch, batch_idx)
        if is_first or passes.turns <= 2 * SELDOM:
            return self._compared(passes, inputs, task, batch, batch_idx)
        passes.run(inputs)
        self.num_replayed += 1
        loss, logged, gradients = passes.left
        for call in logged:
            task.recorder.add(*call)
        new = iter(torch._foreach_mul([own for _, own in gradients if own is not None], 1.0))  # some keep the last ones
        for parameter, gradient in gradients:
            parameter.grad = None if gradient is None else next(new)
        output = tree_map_only(Tensor, torch.clone, passes.output) if self.user.takes_outputs else None
        return output, loss.clone()

    def _compared(
        self, passes: Passes, inputs: list[Tensor], task: LocalTask, batch: Any, batch_idx: int
    ) -> tuple[Any, Tensor | None]:
        """Run passes as always, then replay them, captured before if they are not yet, and compare what both leave."""
        run, recorder, before, versions = super()._passes, task.recorder, self._now(), [one._version for one in inputs]
        kept = kept_state.KeptState(self.module) if passes.turns <= 2 * SELDOM else None
        changed = tuple if kept is None else kept_state.changed_attributes(self.module)
        with noting(recorder, adds=True) as logged, Watch() as watch:
            output, loss = run(task, batch, batch_idx)
        after, gradients, data = self._now(), self._gradients(), [tensor.data for tensor in inputs]

        def take() -> None:
            with noting(recorder, adds=False) as told:
                passes.output, found = tree_map_only(Tensor, Tensor.detach, run(task, batch, batch_idx))
            passes.left = found, told, self._gradients()

        reasons = ["`training_step` returns no loss"] * (loss is None) + watch.reasons
        reasons += [f"it changes {name}" for name in changed()]
        if kept is not None:
            reasons += ["it holds a generator of its own"] * bool(kept.generators)
            reasons += ["it changes what the module holds"] * (not kept.renewed())
        reasons += ["it writes to its batch"] * (versions != [one._version for one in inputs])
        reasons += ["it draws numbers on the CPU"] * (before[2] != after[2])
        try:
            if not reasons:
                said, bits = self._left(output, loss, logged, gradients)
                self._put(before)
                if passes.replay is None:
                    passes.inputs = [tensor.detach().clone() for tensor in inputs]
                    for tensor, standing_in in zip(inputs, passes.inputs, strict=True):
                        tensor.data = standing_in
                    passes.replay = self.capture(take)
                    self._put(before)
                passes.run(data)
                again, replayed = self._left(passes.output, *passes.left)
                reasons += [OTHER_VALUES] * (said != again or not all(map(torch.equal, bits, replayed)))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
        finally:
            for tensor, own_data in zip(inputs, data, strict=True):
                tensor.data = own_data
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if reasons:
            self._put(after)
            self._give_up(reasons[0])
        captured = [kind for kind, one in self._passes_of.items() if one.replay is not None]
        for kind in captured[:-MOST]:
            del self._passes_of[kind]
        return output, loss

    def _tensors(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        return [(parameter, parameter.grad) for parameter in self.module.parameters()]

    def _left(
        self, output: Any, loss: Any, logged: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[Any, list[Tensor]]:
        """All that passes leave behind: what is no tensor, and the bits of all tensors, joined for each device."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        tensors += [loss, *(value for _, value, *_ in logged), *(one for _, one in gradients if one is not None)]
        bits: dict[torch.device, list[Tensor]] = {}
        for tensor in (*tensors, *self._tensors(), self._generator.get_state()):
            bits.setdefault(tensor.device, []).append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        known = [(name, *known) for name, _, *known in logged], tree_map_only(Tensor, type, output), list(bits)
        return known, [torch.cat(parts) for parts in bits.values()]

    def _now(self) -> tuple[list[tuple[Tensor, int, Tensor]], Tensor, bytes]:
        """All that passes can change: parameters and buffers, the device's generator, and other generators."""
        tensors = [(tensor, tensor._version, tensor.detach().clone()) for tensor in self._tensors()]
        others = [torch.default_generator.get_state().tolist()] if self._stream is not None else []
        states = pickle.dumps((random.getstate(), np.random.get_state(), others))
        return tensors, self._generator.get_state(), states

    @torch.no_grad()
    def _put(self, then: tuple[list[tuple[Tensor, int, Tensor]], Tensor, bytes]) -> None:
        """Make the generator and all tensors what they were; what nobody wrote must not look written."""
        for tensor, version, value in then[0]:
            if not isinstance(tensor, nn.Parameter) or tensor._version != version:
                tensor.copy_(value)
        self._generator.set_state(then[1])


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
