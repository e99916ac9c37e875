"""Hooks that act while a client trains: in every step, after the backward pass, or around all steps."""

from __future__ import annotations

import difflib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

from lightning_spectral.arguments import Number, Whole, check_fields
from lightning_spectral.client.batches import ClientData
from lightning_spectral.errors import warn

BeforeStep = Callable[[], None]
Change = Callable[[Tensor], Tensor]  # of logits


class LocalHook:
    """Base class of local hooks, which act before every step of a client, or around all of them; by default not at all.

    A hook is a frozen dataclass without state, and its ``repr`` is saved in checkpoints. The state of one client
    belongs in the function that `start_client` returns, or in the block of `while_training`.
    """

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep | None:
        """Prepare for a client, and return the function to call before each of its steps; ``None`` for nothing.

        The function is called without arguments after ``on_before_optimizer_step`` of the user's module, once gradients
        are computed and unscaled; Frobenius decay and `EffectiveLRClip` act afterwards. It must not read the value of a
        tensor, because that would wait for the device.

        Args:
            module: The sub-model, loaded with what the client was sent.
            optimizer: The optimizer of its parameters; if a module has several, the hook is started for each of them.
        """
        return None

    def while_training(self, module: nn.Module, data: ClientData) -> AbstractContextManager[None]:
        """Return a context manager that is entered once around all local steps of a client; does nothing by default.

        The next client trains the same sub-model, so the block must undo whatever it changes, even after an error.

        Args:
            module: The sub-model, as for `start_client`, which is called earlier.
            data: The client's data.
        """
        return nullcontext()

    def untrained_rows(self, module: nn.Module, data: ClientData) -> Mapping[str, Tensor]:
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
            labels: Returns the class of each training example, or nothing if only devices know them; it raises
                ``ValueError`` if there are none.
        """


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
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip() -> None:
            nn.utils.clip_grad_norm_(parameters, self.max_norm)

        return clip


@dataclass(frozen=True)
class LogitsHook(LocalHook, ABC):
    """Base class of hooks that change a layer's logits while a client trains, by the classes of its data.

    ``training_step`` needs no change: its loss and metrics see the logits as they are changed. Evaluation does not.

    A client's classes are the ``FederatedDataModule.labels`` of the examples it trains on, after the data set's
    ``target_transform`` if the labels are read from it. They are indices into the logits, counted from 0; negative
    labels, which losses ignore, are not classes. Class names are numbered in sorted order. If your logits are in
    another order, the wrong ones are changed without a warning; give numbers in that case.

    Args:
        layer: Dotted name of the layer whose output is the logits, as in ``named_modules()``; ``""`` for the module
            itself, if ``training_step`` calls ``self(x)``. Classes are along the last dimension of a linear layer,
            and along dimension 1 otherwise, as in `torch.nn.functional.cross_entropy`.

    Raises:
        ValueError: When training starts, if the module has no such layer, the examples have no labels, or the layer has
            fewer outputs than there are classes.
    """

    layer: str = "head"

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str):
            raise TypeError(f"`layer` must be the dotted name of a layer, got {self.layer!r}; write layer='head'.")

    @abstractmethod
    def changing(self, data: ClientData, logits: Tensor, dim: int) -> Change | None:
        """Return the function that changes a client's logits; ``None`` to leave them as they are.

        Args:
            data: The client's data.
            logits: Its first logits, whose shape, type and device are known.
            dim: Their dimension of classes.
        """

    def check(self, module: nn.Module, labels: Callable[[], Tensor]) -> None:
        hook, layers = type(self).__name__, dict(module.named_modules(remove_duplicate=False))
        if self.layer not in layers:
            close = difflib.get_close_matches(self.layer, list(layers), cutoff=0.5) or list(layers)[1:][-3:]
            raise ValueError(
                f"{hook}: {type(module).__name__} has no layer {self.layer!r}; it has {', '.join(map(repr, close))}."
            )
        paths = ["", *itertools.accumulate(self.layer.split("."), "{}.{}".format)]
        if compiled := [path for path in paths[:-1] if hasattr(layers[path], "_orig_mod")]:
            raise ValueError(  # it does not notice hooks being added
                f"{hook} cannot change {self.layer!r} inside of {compiled[0]!r}, which is compiled for all clients at "
                "once; compile the layers below the logits alone."
            )
        try:
            classes = labels()
        except ValueError as error:
            raise ValueError(
                f"{hook} needs the class of every training example, FederatedDataModule(..., labels=...). {error} "
                "Leave the hook out where an example has several classes, or none."
            ) from error
        layer = layers[self.layer]
        num_outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if num_outputs is not None:
            self._check_outputs(num_outputs, classes)

    @contextmanager
    def while_training(self, module: nn.Module, data: ClientData) -> Iterator[None]:
        hook, changes = type(self).__name__, list[Change | None]()  # known from the first pass on

        def act(layer: nn.Module, inputs: Any, output: Any) -> Tensor | None:
            if not changes:
                is_tensor = isinstance(output, Tensor)
                if not is_tensor or output.ndim < 2:
                    got = f"a tensor of shape {tuple(output.shape)}" if is_tensor else type(output).__name__
                    raise ValueError(
                        f"{hook} changes a tensor of logits, one for each class, and the output of {self.layer!r} is "
                        f"{got}; name the layer that makes the logits."
                    )
                dim = -1 if hasattr(layer, "out_features") else 1
                self._check_outputs(output.shape[dim], data.classes())
                changes.append(self.changing(data, output, dim))
            return None if changes[0] is None else changes[0](output)

        with module.get_submodule(self.layer).register_forward_hook(act):
            yield
        if not changes:  # there was no forward pass
            warn(
                f"{hook} has changed nothing: the layer {self.layer!r} was not called while a client "
                "trained. Name the one that `training_step` calls."
            )

    def _check_outputs(self, num_outputs: int, classes: Tensor) -> None:
        if len(classes) == 0 or (largest := int(classes.max())) < num_outputs:
            return
        start = f"{type(self).__name__}: the layer {self.layer!r} has"
        if num_outputs == 1:
            raise ValueError(
                f"{start} one output, and there are examples of class {largest}; a single logit cannot be changed by "
                "class: leave the hook out, or train one output per class with cross-entropy."
            )
        raise ValueError(
            f"{start} {num_outputs} outputs, and there are examples of class {largest}; name the layer that makes the "
            "logits, or number classes from 0: FederatedDataModule(..., labels=...)."
        )


@dataclass(frozen=True)
class MaskedLogits(LogitsHook):
    r"""Replaces the logits of classes missing from a client's data with a constant while the client trains.

    Masked logits have no gradient, so a client does not unlearn the classes that only other clients have. The constant
    0 is that of HeteroFL; an absent class then still adds :math:`e^0 = 1` to the sum of the softmax. With minus
    infinity the loss is that of the present classes alone. A client that has all classes trains as it would without the
    hook. `LogitsHook` says which classes a client has.

    `WidthSharding` averages the layer's rows of absent classes over the clients that have the class, as it averages
    every entry over the clients that hold it. Other algorithms include the unchanged rows in the average.

    Args:
        layer: The layer that makes the logits, as in `LogitsHook`.
        absent: The constant, less than infinity. With minus infinity a loss must not use absent logits in any other
            way, as label smoothing does, and a client with a single class learns nothing, because its loss is 0.

    Raises:
        ValueError: If the constant is infinity or NaN, and as for `LogitsHook`.

    Reference:
        Diao et al. (2021), HeteroFL, section 3: the masked cross-entropy. Its constant is that of the published code.

    Example:
        >>> from lightning_spectral.client.batches import BatchSource
        >>> head, labels = nn.Linear(2, 4), torch.tensor([3, 0, 3])
        >>> data = ClientData(BatchSource([]), torch.arange(3), 3, seed=0, ids=(), labels=lambda: labels)
        >>> with MaskedLogits(layer="").while_training(head, data):
        ...     print(head(torch.ones(1, 2))[:, 1:3])
        tensor([[0., 0.]], grad_fn=<SliceBackward0>)
    """

    absent: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "0 as in HeteroFL, or -inf for a loss over the present classes alone"
        check_fields(self, absent=Number(below=math.inf, finite=False, hint=hint))

    def changing(self, data: ClientData, logits: Tensor, dim: int) -> Change | None:
        absent = _absent(data.classes(), logits.shape[dim]).to(logits.device)

        def mask(logits: Tensor) -> Tensor:
            constant, largest = self.absent, torch.finfo(logits.dtype).max
            if not math.isinf(constant):
                constant = max(-largest, min(constant, largest))  # half precision has no -1e9
            return logits.index_fill(dim, absent, constant)

        return mask if len(absent) else None

    def untrained_rows(self, module: nn.Module, data: ClientData) -> Mapping[str, Tensor]:
        """The rows of absent classes in the parameters of a linear layer or convolution that no other layer shares."""
        layer = module.get_submodule(self.layer)
        if not isinstance(layer, nn.Linear | _ConvNd) or isinstance(layer, _ConvTransposeNd) or not self.layer:
            return {}
        rows = _absent(data.classes(), len(layer.weight))
        owners = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
        own = {f"{self.layer}.{name}": id(getattr(layer, name)) for name in ("weight", "bias")}
        return {name: rows for name, owner in own.items() if len(rows) and owners.count(owner) == 1}


@dataclass(frozen=True)
class CalibratedLogits(LogitsHook):
    r"""Adds the logarithms of a client's label shares to its logits while it trains, less and less over the rounds.

    Where clients have few labels each, a local step mostly learns which labels a client has. With these shares in the
    logits, the loss does not ask for that. For class c of K, and a client with :math:`n_c` of n examples, in round t:

    .. math::
        z_c + \tau_t \log\frac{n_c + 0.1}{n + 0.1 K} , \qquad
        \tau_t = \tfrac12 \big(1 + \cos(\pi \min(1, t / \text{rounds}))\big)

    Use it with `GradientClip`. On networks with BatchNorm, `FixedBatchNorm` helps as well.

    Args:
        layer: The layer that makes the logits, as in `LogitsHook`.
        rounds: Rounds after which logits are as they are, most often all rounds of the fit: shares that stay do harm.

    Raises:
        ValueError: If an argument is out of range, and as for `LogitsHook`.

    Reference:
        Zhang et al. (2022), FedLC, whose margins differ; Menon et al. (2021), logit adjustment. The schedule is ours.

    Example:
        >>> from lightning_spectral.client.batches import BatchSource
        >>> head, labels = nn.Linear(2, 2), torch.tensor([1, 1, 1])
        >>> data = ClientData(BatchSource([]), torch.arange(3), 3, seed=0, ids=(50, 0), labels=lambda: labels)
        >>> with CalibratedLogits(layer="", rounds=100).while_training(head, data):
        ...     calibrated = head(torch.zeros(1, 2))
        >>> calibrated - head.bias  # half of log(0.1 / 3.2), log(3.1 / 3.2)
        tensor([[-1.7329, -0.0159]], grad_fn=<SubBackward0>)
    """

    rounds: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, rounds=Whole(at_least=1))

    def changing(self, data: ClientData, logits: Tensor, dim: int) -> Change | None:
        weight = (1 + math.cos(math.pi * min(1.0, data.round_idx / self.rounds))) / 2
        classes, counts = data.class_counts
        shares = torch.zeros(logits.shape[dim], dtype=torch.float64)
        shares[classes[classes >= 0]] = counts[classes >= 0].double()
        shift = weight * ((shares + 0.1) / (shares + 0.1).sum()).log()
        shift = shift.to(logits).view(-1, *[1] * (logits.ndim - 2 if dim == 1 else 0))
        return None if weight == 0.0 else lambda logits: logits + shift


@dataclass(frozen=True)
class FixedBatchNorm(LocalHook):
    """Lets clients normalise by the server's running averages, from a round on, instead of by their own batches.

    A batch of a client with few labels is normalised by statistics that no other client has. BatchNorm layers are in
    eval mode while a client trains: their averages stay as they are, and weights and biases still learn. Without
    `GradientClip` such training may diverge.

    Args:
        from_round: The first round, about half of all rounds: before it, averages have to be learned.

    Raises:
        ValueError: When training starts, if no BatchNorm layer has running averages.

    Reference:
        Zhong et al. (2023), FixBN.

    Example:
        >>> from lightning_spectral.client.batches import BatchSource
        >>> norm = nn.BatchNorm1d(2)
        >>> for round_idx in (49, 50):
        ...     data = ClientData(BatchSource([]), torch.arange(3), 3, seed=0, ids=(round_idx, 0))
        ...     with FixedBatchNorm(50).while_training(norm, data):
        ...         print(norm.training)
        True
        False
    """

    from_round: int

    def __post_init__(self) -> None:
        check_fields(self, from_round=Whole(at_least=0))

    def check(self, module: nn.Module, labels: Callable[[], Tensor]) -> None:
        if not batch_norms(module):
            raise ValueError(
                f"FixedBatchNorm finds no BatchNorm layer with running averages in {type(module).__name__}; leave it "
                "out, or build the layers with `track_running_stats=True`."
            )

    @contextmanager
    def while_training(self, module: nn.Module, data: ClientData) -> Iterator[None]:
        layers = [one for one in batch_norms(module) if one.training and data.round_idx >= self.from_round]
        for layer in layers:
            layer.eval()
        try:
            yield
        finally:
            for layer in layers:
                layer.train()


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers with running averages."""
    return [one for one in module.modules() if isinstance(one, _BatchNorm) and one.running_mean is not None]


def _absent(classes: Tensor, num_classes: int) -> Tensor:
    """All classes from 0 to ``num_classes - 1`` that are not in ``classes``."""
    return torch.ones(num_classes, dtype=torch.bool).index_fill_(0, classes[classes >= 0], False).nonzero().squeeze(1)
