"""Hooks that act while a client trains: in every step, after the backward pass, or around all steps."""

from __future__ import annotations

import difflib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.batches import ClientData
from lightning_spectral.errors import SpectralWarning

BeforeStep = Callable[[], None]
Rows = Mapping[str, Tensor]


class LocalHook(ABC):
    """Base class of local hooks, which are started once per client and called before every step.

    A hook is a frozen dataclass without state, and its ``repr`` is saved in checkpoints. The state of one client
    belongs in the function that `start_client` returns, or in the block of `while_training`. Only `start_client` must
    be implemented.
    """

    @abstractmethod
    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep | None:
        """Prepare for a client, and return the function to call before each of its steps; ``None`` for nothing.

        The function is called without arguments after ``on_before_optimizer_step`` of the user's module, once gradients
        are computed and unscaled; Frobenius decay and `EffectiveLRClip` act afterwards. It must not read the value of a
        tensor, because that would wait for the device.

        Args:
            module: The sub-model, loaded with what the client was sent.
            optimizer: The optimizer of its parameters; if a module has several, the hook is started for each of them.
        """

    def while_training(self, module: nn.Module, data: ClientData) -> AbstractContextManager[None]:
        """Return a context manager that is entered once around all local steps of a client; does nothing by default.

        The next client trains the same sub-model, so the block must undo whatever it changes, even after an error.

        Args:
            module: The sub-model, as for `start_client`, which is called earlier.
            data: The client's data.
        """
        return nullcontext()

    def untrained_rows(self, module: nn.Module, data: ClientData) -> Rows:
        """Return the rows of parameters that this client's loss does not reach; by default none.

        Called after the client has trained. An algorithm that averages each entry over the clients that trained it
        leaves these rows out of the average.

        Args:
            module: The sub-model.
            data: The client's data.

        Returns:
            For each parameter, by name, indices along its first dimension.
        """
        return {}

    def check(self, module: nn.Module, labels: Callable[[], Tensor]) -> None:
        """Raise ``ValueError`` if the hook cannot act on a user's module, before training; by default never.

        Args:
            module: The server's module.
            labels: Returns the class of each training example; it raises ``ValueError`` if they have none.
        """
        return None


@dataclass(frozen=True)
class ProximalTerm(LocalHook):
    r"""FedProx: pulls a client's parameters towards the values that the client was sent.

    Adds the gradient :math:`\mu (w - w_0)` of :math:`\frac{\mu}{2}\|w - w_0\|^2` to that of the loss. Here w are the
    parameters that the client's optimizer updates. For a sharded layer these are the factors u and v, each pulled
    towards its own starting value: this limits the change of the factors, not of the weight that they form.
    A parameter without a gradient in a step is skipped in that step, as it is by the optimizer.

    Args:
        mu: Strength, in units of loss per squared parameter, at least 0.

    Reference:
        Li et al. (2020), Federated optimization in heterogeneous networks, equation (2).

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> before_step = ProximalTerm(mu=0.5).start_client(model, optimizer)
        >>> model.weight.grad = torch.zeros(1, 1)
        >>> _ = model.weight.data.add_(2.0)  # as a step would
        >>> before_step()
        >>> model.weight.grad
        tensor([[1.]])
    """

    mu: float

    def __post_init__(self) -> None:
        check_fields(self, mu=Number(at_least=0))

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep:
        """Copy the parameters that the client starts from."""
        # an optimizer that maximises reverses the sign of gradients
        signs = [-self.mu if group.get("maximize") else self.mu for group in optimizer.param_groups]
        groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        starts = [[p.detach().clone() for p in group] for group in groups]

        @torch.no_grad()
        def pull() -> None:
            for mu, parameters, start in zip(signs, groups, starts, strict=True):
                moved = [(p, p.grad, before) for p, before in zip(parameters, start, strict=True) if p.grad is not None]
                if moved:
                    now, gradients, before = (list(column) for column in zip(*moved, strict=True))
                    torch._foreach_add_(gradients, torch._foreach_sub(now, before), alpha=mu)

        return pull


@dataclass(frozen=True)
class GradientClip(LocalHook):
    """Scales a client's gradients so that their joint Euclidean norm is at most ``max_norm``.

    The norm is taken over all parameters that the client's optimizer updates: the factors of sharded layers and the
    dense parameters. Weight decay is not part of it, as in a plain ``Trainer(gradient_clip_val=max_norm)``.

    Args:
        max_norm: Largest norm, positive.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> before_step = GradientClip(1.0).start_client(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> before_step()
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_fields(self, max_norm=Number(above=0, finite=False, hint="leave the hook out to clip nothing"))

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep:
        """Collect the parameters to clip; nothing is copied."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip() -> None:
            nn.utils.clip_grad_norm_(parameters, self.max_norm)

        return clip


ABSENT = Number(
    below=math.inf, finite=False, hint="0 as in HeteroFL, or -inf for a loss over the present classes alone"
)


@dataclass(frozen=True)
class MaskedLogits(LocalHook):
    r"""Replaces the logits of classes missing from a client's data with a constant while the client trains.

    Masked logits have no gradient, so a client does not unlearn the classes that only other clients have. The constant
    0 is that of HeteroFL; an absent class then still adds :math:`e^0 = 1` to the sum of the softmax. With minus
    infinity the loss is that of the present classes alone. ``training_step`` needs no change: its loss and metrics see
    the masked logits. Evaluation is not masked, and a client that has all classes trains as it would without the hook.

    A client's classes are the ``FederatedDataModule.labels`` of the examples it trains on, after the data set's
    ``target_transform`` if the labels are read from it. They are indices into the logits, counted from 0; negative
    labels, which losses ignore, are not classes. Class names are numbered in sorted order. If your logits are in
    another order, the wrong ones are masked without a warning; give numbers in that case.

    `WidthSharding` averages the layer's rows of absent classes over the clients that have the class, as it averages
    every entry over the clients that hold it. Other algorithms include the unchanged rows in the average.

    Args:
        layer: Dotted name of the layer whose output is the logits, as in ``named_modules()``; ``""`` for the module
            itself, if ``training_step`` calls ``self(x)``. Classes are along the last dimension of a linear layer,
            and along dimension 1 otherwise, as in `torch.nn.functional.cross_entropy`.
        absent: The constant, less than infinity. With minus infinity a loss must not use absent logits in any other
            way, as label smoothing does, and a client with a single class learns nothing, because its loss is 0.

    Raises:
        ValueError: If the constant is infinity or NaN; or, when training starts, if the module has no such layer, the
            examples have no labels, or the layer has fewer outputs than there are classes.

    Reference:
        Diao et al. (2021), HeteroFL, section 3: the masked cross-entropy. Its constant is that of the published code.

    Example:
        >>> from lightning_spectral.client.batches import BatchSource
        >>> head, labels = nn.Linear(2, 4), torch.tensor([3, 0, 3])
        >>> source = BatchSource(torch.utils.data.TensorDataset(torch.ones(3, 2), labels))
        >>> data = ClientData(source, torch.arange(3), 3, seed=0, ids=(), labels=lambda: labels)
        >>> with MaskedLogits(layer="").while_training(head, data):
        ...     print(head(torch.ones(1, 2))[:, 1:3])
        tensor([[0., 0.]], grad_fn=<SliceBackward0>)
    """

    layer: str = "head"
    absent: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str):
            raise TypeError(f"`layer` must be the dotted name of a layer, got {self.layer!r}; write layer='head'.")
        check_fields(self, absent=ABSENT)

    def check(self, module: nn.Module, labels: Callable[[], Tensor]) -> None:
        """Check that the layer exists, can be masked, and has an output for each class."""
        layer = _found(module, self.layer)
        try:
            num_classes = 1 + int(labels().max())
        except ValueError as error:
            raise ValueError(
                "MaskedLogits needs the class of every training example, FederatedDataModule(..., labels=...). "
                f"{error} Leave the hook out where an example has several classes, or none."
            ) from error
        num_outputs = next(
            (getattr(layer, name) for name in ("out_features", "out_channels") if hasattr(layer, name)), None
        )
        if num_outputs is not None and num_outputs < num_classes:
            raise ValueError(_too_few(self.layer, num_outputs, num_classes - 1))

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Nothing to do in each step."""

    @contextmanager
    def while_training(self, module: nn.Module, data: ClientData) -> Iterator[None]:
        """Mask the output of the layer within the block."""
        classes, absent = data.classes(), list[Tensor]()  # the absent ones are known from the first pass on

        def mask(layer: nn.Module, inputs: Any, output: Any) -> Tensor | None:
            dim = -1 if hasattr(layer, "out_features") else 1
            if not absent:
                absent.append(self._absent_from(output, dim, classes))
            if not len(absent[0]):
                return None
            constant, largest = self.absent, torch.finfo(output.dtype).max
            if not math.isinf(constant):
                constant = max(-largest, min(constant, largest))  # half precision has no -1e9
            masked: Tensor = output.index_fill(dim, absent[0], constant)
            return masked

        handle = module.get_submodule(self.layer).register_forward_hook(mask)
        try:
            yield
        finally:
            handle.remove()
        if not absent:  # there was no forward pass
            warnings.warn(
                f"MaskedLogits has masked nothing: the layer {self.layer!r} was not called while a client trained. "
                "Name the one that `training_step` calls.",
                SpectralWarning,
                stacklevel=2,
            )

    def _absent_from(self, output: Any, dim: int, classes: Tensor) -> Tensor:
        """The classes among the logits that are not a client's, on the device of the output."""
        if not isinstance(output, Tensor) or output.ndim < 2:
            got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"MaskedLogits masks a tensor of logits, one for each class, and the output of {self.layer!r} is "
                f"{got}; name the layer that makes the logits."
            )
        largest = int(classes.max()) if len(classes) else -1
        if largest >= output.shape[dim]:
            raise ValueError(_too_few(self.layer, output.shape[dim], largest))
        return _absent(classes, output.shape[dim]).to(output.device)

    def untrained_rows(self, module: nn.Module, data: ClientData) -> Mapping[str, Tensor]:
        """The rows of absent classes in the parameters of a linear layer or convolution that no other layer shares."""
        layer = module.get_submodule(self.layer)
        if not isinstance(layer, nn.Linear | _ConvNd) or isinstance(layer, _ConvTransposeNd) or not self.layer:
            return {}
        rows = _absent(data.classes(), len(layer.weight))
        owners = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
        own = {f"{self.layer}.{name}": id(getattr(layer, name)) for name in ("weight", "bias")}
        return {name: rows for name, owner in own.items() if len(rows) and owners.count(owner) == 1}


def _absent(classes: Tensor, num_classes: int) -> Tensor:
    """All classes from 0 to ``num_classes - 1`` that are not in ``classes``."""
    return torch.ones(num_classes, dtype=torch.bool).index_fill_(0, classes[classes >= 0], False).nonzero().squeeze(1)


def _too_few(layer: str, num_outputs: int, largest: int) -> str:
    if num_outputs == 1:
        return (
            f"MaskedLogits: the layer {layer!r} has one output, and there are examples of class {largest}; a single "
            "logit cannot be masked by class: leave the hook out, or train one output per class with cross-entropy."
        )
    return (
        f"MaskedLogits: the layer {layer!r} has {num_outputs} outputs, and there are examples of class {largest}; "
        "name the layer that makes the logits, or number classes from 0: FederatedDataModule(..., labels=...)."
    )


def _found(module: nn.Module, name: str) -> nn.Module:
    """The layer with a given name.

    Raises:
        ValueError: If there is none, or it is inside a compiled module, which does not notice hooks being added.
    """
    layers: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if name not in layers:
        close = difflib.get_close_matches(name, list(layers), cutoff=0.5) or list(layers)[1:][-3:]
        raise ValueError(
            f"MaskedLogits: {type(module).__name__} has no layer {name!r}; it has {', '.join(map(repr, close))}."
        )
    *above, _ = ["", *(name[:i] for i, letter in enumerate(name) if letter == "."), name] if name else [""]
    compiled = [path for path in above if hasattr(layers[path], "_orig_mod")]
    if compiled:
        raise ValueError(
            f"MaskedLogits cannot mask {name!r} inside of {compiled[0]!r}, which is compiled for all clients at once; "
            "compile the layers below the logits alone."
        )
    return layers[name]
