"""A pretended accelerator in plain Python: tensors that say they live on ``pretend:0``, and are computed on the CPU.

What a GPU would refuse is refused: an operation on tensors of both devices, and ``numpy()`` of a tensor that was not
moved. `WAITS` counts where the host would wait for the device, as ``torch.cuda.set_sync_debug_mode`` would report it:
where a value is read, where a shape depends on values, and in copies from and to the CPU that are not ``non_blocking``.
So a machine without a GPU shows most mistakes of placement, and how often a round waits.

`install` changes the whole process, and nothing can undo it: torch has room for one such backend, and some functions of
torch are `REPLACED`, as is ``Tensor.data``. So the tests in ``devices/`` run in a process of their own.

Not shown: kernels, memory, streams, float16, autocast, and fused recurrent cells: an LSTM fails here and works on a
GPU. It needs torch 2.9 or later, and an interface that torch calls experimental.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
WAITS: Counter[str] = Counter()  # how often the host would have waited so far, by operation

# Functions of torch that ask a device, in C++, for memory of a size that is not known yet; and whether a GPU waits.
REPLACED = {"tensor": True, "as_tensor": True, "sparse_csr_tensor": True, "arange": False, "eye": False}

aten = torch.ops.aten
_COPIES = {aten.copy_.default: (0, 1), aten._copy_from.default: (1, 0)}  # operation: places of the target, the source
_WITH_CPU_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}  # CUDA moves these
_READS = {
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "item",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "nonzero",
    aten._unique2.default: "unique",
    aten._linalg_svd.default: "linalg",  # whether the solver converged
    aten._linalg_eigh.default: "linalg",
}


class PretendTensor(torch.Tensor):
    """A tensor that is ``raw``, on the CPU, and says that it is elsewhere."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> PretendTensor:
        """Wrap a tensor of the CPU."""
        is_dense = raw.layout == torch.strided  # a sparse matrix says that it is dense, and multiplies as one
        memory = {"strides": raw.stride(), "storage_offset": raw.storage_offset()} if is_dense else {}
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=f"{NAME}:0", dtype=raw.dtype, **memory)
        tensor.raw = raw.detach()
        return tensor

    def tolist(self) -> Any:
        """All values, for which the host waits."""
        WAITS["item"] += 1
        return self.raw.tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        """Refuse, as a tensor on a GPU does."""
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        """A new tensor with the given values, by default of this one's type, on its device."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def untyped_storage(self) -> torch.UntypedStorage:
        """Its memory, which tells views of the same values."""
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What a file holds: a tensor of the CPU, as ``torch.load(map_location="cpu")`` would read it."""
        return self.raw.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"PretendTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


class PretendAccelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class _Backend(getattr(backend_registration, "_DummyBackendModule", object)):  # type: ignore[misc]
    """What ``torch.pretend`` answers; older versions of torch have no such base."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, *device: Any) -> None: ...

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def is_supported() -> bool:
    """Whether this version of torch lets a device be written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install() -> None:
    """Make the device known to torch, for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")  # for what creates tensors
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # which casts nothing
    install.library = library  # type: ignore[attr-defined]  # it ends with the object
    for name, waits in REPLACED.items():
        setattr(torch, name, _by_way_of_the_cpu(getattr(torch, name), waits))
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)  # type: ignore[assignment,method-assign]
    torch.distributed.Backend.backend_capability["gloo"].append(NAME)  # as for a GPU: it accepts a group's device


def trainer_options() -> dict[str, Any]:
    """Arguments of a Trainer that runs on the pretended device; tensors of a subclass know no inference mode."""
    strategy = SingleDeviceStrategy(device=torch.device(NAME, 0), accelerator=PretendAccelerator())
    return {"strategy": strategy, "inference_mode": False}


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, unless a GPU would refuse it, and wrap what a GPU would have computed."""
    here = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    _refuse_two_devices(op, args, kwargs, here)
    if wait := _wait(op, args, kwargs, here):
        WAITS[wait] += 1
    result = op(*tree_map(_raw, args), **_options(kwargs))
    if resized := [tensor for tensor in here if tensor.raw.shape != tensor.shape]:
        raise NotImplementedError(f"{op} resized {resized}, which a pretended tensor cannot follow")
    if op is aten._local_scalar_dense.default:
        return result
    if op in _COPIES:
        return args[_COPIES[op][0]]
    wanted = kwargs.get("device")
    on_device = bool(here) if wanted is None else _is_pretended(wanted)
    known = {id(tensor.raw): tensor for tensor in here}  # an operation in place returns its argument

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf) if on_device else leaf

    return tree_map(wrap, result)


def _refuse_two_devices(op: Any, args: Any, kwargs: Any, here: list[Any]) -> None:
    if not here or op in _COPIES or op in _WITH_CPU_INDICES or op is aten._to_copy.default:
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    elsewhere = [t for t in tensors if not isinstance(t, PretendTensor) and t.dim() > 0]  # numbers may be anywhere
    if elsewhere:
        shapes = [tuple(tensor.shape) for tensor in elsewhere]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {op} got tensors on {NAME}:0 and on cpu, of {shapes}"
        )


def _wait(op: Any, args: Any, kwargs: dict[str, Any], here: list[Any]) -> str | None:
    """Why the host would wait in this operation; ``None`` if it would not."""
    if op in _COPIES:
        target, source = (isinstance(args[place], PretendTensor) for place in _COPIES[op])
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return ("to device" if target else "to host") if target != source and blocks else None
    if op is aten._to_copy.default:
        target, source = _is_pretended(kwargs.get("device", args[0].device)), bool(here)
        blocks = not kwargs.get("non_blocking", False)
        return ("to device" if target else "to host") if target != source and blocks else None
    if here and op in _WITH_CPU_INDICES and any(i is not None and i.dtype == torch.bool for i in args[1]):
        return "nonzero"
    return _READS.get(op) if here else None


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of an operation, on the CPU."""
    options = {name: _raw(value) for name, value in kwargs.items() if name != "pin_memory"}
    if _is_pretended(options.get("device")):
        options["device"] = "cpu"
    return tree_map(_raw, options)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, PretendTensor) else leaf


def _is_pretended(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """What ``tensor.data = data`` does: other memory, perhaps on the other device."""
    if isinstance(tensor, PretendTensor) and isinstance(data, PretendTensor):
        torch._C.TensorBase.data.__set__(tensor, data)
        tensor.raw = data.raw
    elif isinstance(tensor, PretendTensor) or isinstance(data, PretendTensor):
        _become(tensor, nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data.detach())
    else:
        torch._C.TensorBase.data.__set__(tensor, data)


def _become(tensor: Any, other: Any) -> None:
    """What ``torch.utils.swap_tensors`` does; unlike that, also if a graph refers to one of them."""
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)


def _by_way_of_the_cpu(make: Callable[..., Tensor], waits: bool) -> Callable[..., Tensor]:
    """The same function, but for the pretended device it creates the tensor on the CPU and moves it."""

    def made(*args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if not _is_pretended(device):
            return make(*args, **options)
        return make(*args, **{**options, "device": None}).to(device, non_blocking=not waits)

    return made
