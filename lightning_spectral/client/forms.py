"""The forms of a module and of its user's optimizers: they are the server's, except while they are a client's."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself searches an enum for every handler
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.client.kept_state import KeptState
from lightning_spectral.protocol.exchange import buffer_shapes, named_state


@dataclass(frozen=True, eq=False)
class Entries:
    """What differs in a dictionary, such as a layer's attributes or hooks: entries that are new, others, or gone."""

    mapping: dict[Any, Any]
    first: Mapping[Any, Any]  # new ones before all others
    others: Mapping[Any, Any]  # changed ones, which stay where they are, and new ones at the end
    gone: Collection[Any]

    def apply(self) -> None:
        kept = {key: entry for key, entry in self.mapping.items() if key not in self.gone}
        content = {**self.first, **kept, **self.others}
        self.mapping.clear()
        self.mapping.update(content)


@dataclass(frozen=True, eq=False)
class Form:
    """What makes a module a client of one capacity, as differences from the server.

    What is not among them is the server's, and is shared: its attributes, and hooks that are added later.

    Attributes:
        classes: The parts of another class, with it.
        entries: The dictionaries that differ, also of attributes.
        gradients: The server's tensors that need a gradient only here, or only there.
        server: The server's parameters, by name.
        replaced: The server's parameters that a client does not have, by name.
        buffers: Shapes of a client's buffers, by name.
        kept: The state of what only a client has, its tensors' flags among it.
    """

    classes: Sequence[tuple[Any, type]]
    entries: Sequence[Entries]
    gradients: Sequence[tuple[Tensor, bool]]
    server: Mapping[str, Tensor]
    replaced: Mapping[str, Tensor]
    buffers: Mapping[str, tuple[int, ...]]
    kept: KeptState

    def apply(self) -> None:
        """Turn the server into the client, except for the values of tensors."""
        for part, kind in self.classes:
            part.__class__ = kind
        for entries in self.entries:
            entries.apply()
        for tensor, needs_gradient in self.gradients:
            tensor.requires_grad_(needs_gradient)


@dataclass(eq=False)
class Forms:
    """The forms of one module, in which it is the clients of each capacity in turn.

    A form is built once, in place. Taking and leaving it takes a constant time per part. In between the module is the
    client: its tensors are in the clients' memory, of which there is one copy, and one more of each tensor that only a
    capacity has. Otherwise it is the server, bit for bit.

    Args:
        module: The module.
        take_form: Turns it into a client of a capacity, in place.
        others: What else belongs to a client while it trains, such as the user's optimizers.
        owned: Whether the module is not the server's, so that its tensors are the clients' memory, and those that a
            client does not have need none.

    Example:
        >>> line = nn.Linear(2, 1, bias=False)
        >>> forms = Forms(line, lambda module, capacity: None)
        >>> with forms.client(1.0):
        ...     line.weight.data.fill_(1.0)
        ...     line.steps = 1
        tensor([[1., 1.]])
        >>> bool((line.weight == 1).any()), hasattr(line, "steps")
        (False, False)
    """

    module: nn.Module
    take_form: Callable[[nn.Module, float], object]
    others: Sequence[Any] = ()
    owned: bool = False
    kept: KeptState | None = field(default=None, init=False)
    _parts: list[int] = field(default_factory=list, init=False)
    _shared: dict[float, dict[str, Tensor]] = field(default_factory=dict, init=False)  # by capacity
    _form: Form | None = field(default=None, init=False)
    _last: KeptState | None = field(default=None, init=False)
    _forms: dict[float, Form] = field(default_factory=dict, init=False)
    _memory: dict[Tensor, Tensor] = field(default_factory=dict, init=False)
    _server: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)

    @contextmanager
    def client(self, capacity: float, sent: Collection[str] = ()) -> Iterator[nn.Module]:
        """The module as a client within the block; see `take`."""
        assert self.kept is None, "a module is one client at a time"
        try:
            try:
                self.take(capacity, sent)
                yield self.module
            finally:
                self.give_back()
        finally:
            self.give_back()  # Ctrl-C may have kept the first from beginning

    def take(self, capacity: float, sent: Collection[str] = ()) -> Form:
        """Turn the module into a client; `give_back` must follow, whatever happens.

        Args:
            capacity: What the client can hold.
            sent: Names of the tensors that are about to be loaded; others begin with the server's values.
        """
        with postponing_interrupts():
            assert self.kept is None, "a module is one client at a time"
            if self._last is None or not self._last.renewed():
                self._last = KeptState(self.module, *self.others)
                self._forget_what_is_gone(self._last)
            self.kept = self._last
            if capacity in self._forms:
                form = self._forms[capacity]
                form.apply()
            else:
                form = self._forms[capacity] = self._built(self.kept, capacity)
            self._form = form
            self._point_to_memory(capacity, sent)
            return form

    def give_back(self) -> None:
        """Turn the module into the server again, if it is not."""
        if self.kept is None:
            return
        with postponing_interrupts(math.inf):
            for tensor, data in self._server:
                tensor.data = data
            self._server.clear()
            if self._form is not None:
                self._form.kept.restore()
            self.kept.restore()
            self.kept = self._form = None

    def _forget_what_is_gone(self, kept: KeptState) -> None:
        """Forget memory of tensors that the server no longer has, and all forms if its parts have changed."""
        parts = [*map(id, self.module.modules()), *map(id, self.module.parameters())]
        if parts != self._parts:
            self._parts = parts
            self._forms.clear()
        self._memory = {tensor: self._memory[tensor] for tensor in kept.tensors if tensor in self._memory}
        self._shared.clear()

    def _built(self, kept: KeptState, capacity: float) -> Form:
        server = dict(self.module.named_parameters())
        self.take_form(self.module, capacity)
        left = set(map(id, named_state(self.module).values()))
        classes = [(part, type(part)) for part, kind in kept.classes if type(part) is not kind]
        entries = [own for mapping, before in kept.mappings() if (own := _entry_change(mapping, before)) is not None]
        flags = [(t, t.requires_grad) for t, needed in kept.needed_gradients if t.requires_grad != needed]
        new = [value for own in entries for found in (own.first, own.others) for value in found.values()]
        form = Form(
            classes,
            entries,
            flags,
            server,
            {name: tensor for name, tensor in server.items() if id(tensor) not in left},
            buffer_shapes(self.module),
            KeptState(self.module, *new, without=kept),
        )
        if self.owned:
            for tensor in form.replaced.values():
                tensor.data = tensor.new_empty(()).expand(tensor.shape)
        return form

    def _point_to_memory(self, capacity: float, sent: Collection[str]) -> None:
        if self.owned:
            return
        assert self.kept is not None, "it is kept before it changes"
        if capacity not in self._shared:
            whose, mine = set(self.kept.tensors), named_state(self.module).items()
            self._shared[capacity] = {name: tensor for name, tensor in mine if tensor in whose}
        shared = self._shared[capacity]
        fitting = (
            (memory := self._memory.get(t)) is not None
            and (memory.shape, memory.dtype, memory.device) == (t.shape, t.dtype, t.device)
            for t in shared.values()
        )
        if not all(fitting):
            self._allocate(shared.values())
        for name, tensor in shared.items():
            data, memory = tensor.data, self._memory[tensor]
            if name not in sent:
                memory.copy_(data)
            self._server.append((tensor, data))
            tensor.data = memory

    def _allocate(self, tensors: Collection[Tensor]) -> None:
        """Give tensors memory; those that share some, such as an LSTM's on a GPU, share it there as well."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            place = tensor.data.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
            by_storage.setdefault(place, []).append(tensor)
        for group in by_storage.values():
            storage = group[0].data.untyped_storage().clone() if len(group) > 1 else None  # type: ignore[no-untyped-call]
            for tensor in group:
                data = self._memory[tensor] = tensor.data.clone()
                if storage is not None:
                    data.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _entry_change(mapping: dict[Any, Any], before: dict[Any, Any]) -> Entries | None:
    gone = {key for key in before if key not in mapping}
    new = {key: entry for key, entry in mapping.items() if key not in before or before[key] is not entry}
    first = {key: new.pop(key) for key in takewhile(lambda key: key not in before, mapping)}
    return Entries(mapping, first, new, gone) if gone or first or new else None


@contextmanager
def postponing_interrupts(how_many: float = 1) -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block, unless it is pressed more than ``how_many`` times."""
    own = signal.getsignal(signal.SIGINT)
    if not callable(own) or threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[FrameType | None] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(frame)
        if len(noted) > how_many:
            own(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
    if noted:
        own(signal.SIGINT, noted[0])
