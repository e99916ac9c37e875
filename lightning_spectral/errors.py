"""The package's own warnings and exceptions, so that users can filter them and tests can expect them."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import UnionType
from typing import Any

__all__ = ["ClientError", "LostProcessError", "ReportError", "RoundError", "SpectralWarning"]


class SpectralWarning(UserWarning):
    """The run continues, but the user should know of something: a client left out, a setting changed."""


def warn(message: str, level: int = 2) -> None:
    """Give a `SpectralWarning`; ``level`` as ``stacklevel`` of ``warnings.warn``, seen from where this is called."""
    warnings.warn(message, SpectralWarning, stacklevel=level + 1)


class ClientError(RuntimeError):
    """Something failed while a client trained; the message names the round, the client and the stage."""


class RoundError(RuntimeError):
    """A round cannot be finished: too few clients sent a usable update, or the server's weights are not finite."""


class LostProcessError(RoundError):
    """Another process of the run has ended or hangs; the message names it, and the client whose turn it was."""


class RecordError(ValueError):
    """Bytes are not a record, or a record cannot be written as bytes; the message says which part and why."""


class DeviceError(ValueError):
    """A device cannot do what it is asked; the message quotes none of its data, and the server is told."""


class ReportError(ValueError):
    """A report cannot be made of these runs; the message names the file and what to do."""


def check_is(argument: str, value: object, expected: type | UnionType) -> Any:
    """Return ``value``; ``TypeError`` unless it is an instance of ``expected``, with a hint if it is a class or a name.

    Of several classes, as in ``Kind | None``, the message names the first.

    Example:
        >>> check_is("error", ValueError, Exception)
        Traceback (most recent call last):
        TypeError: `error` must be an instance of Exception, got the class ValueError; write ValueError(...).
    """
    if isinstance(value, expected):
        return value
    got = repr(value) if "\n" not in repr(value) else f"a {type(value).__name__}"  # a message is one line
    if isinstance(value, type):
        got = f"the class {value.__name__}; write {value.__name__}(...)"
    elif isinstance(value, str):
        got = f"the string {value!r}; pass an object, not its name"
    kind = expected.__args__[0] if isinstance(expected, UnionType) else expected
    raise TypeError(f"`{argument}` must be an instance of {kind.__name__}, got {got}.")


@contextmanager
def writing(path: object, remedy: str) -> Iterator[None]:
    """Name the file and the remedy if the block cannot write it.

    Example:
        >>> with writing("/proc/run.jsonl", "Choose another folder."):
        ...     open("/proc/run.jsonl", "w").close()
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] /proc/run.jsonl cannot be written: No such file or directory. Choose another ...
    """
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}. {remedy}"
        raise type(error)(error.errno, reason) from error


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Say which extra provides a package that an import inside the block does not find.

    Args:
        extra: Name of the extra in the package's metadata.

    Example:
        >>> with from_extra("examples"):
        ...     import a_package_for_drawing
        Traceback (most recent call last):
        ModuleNotFoundError: this needs a_package_for_drawing; install it: pip install "lightning-spectral[examples]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f'this needs {package}; install it: pip install "lightning-spectral[{extra}]".', name=error.name
        ) from None


def refuse_moved(made: type, options: Mapping[str, Any], moved: Mapping[str, str]) -> None:
    """Raise ``TypeError`` for an argument that a class does not have, with what to write instead.

    Example:
        >>> class Average: ...
        >>> refuse_moved(Average, {"compression": None}, {"compression": "filters=[TopK(0.1)]"})
        Traceback (most recent call last):
        TypeError: Average has no argument `compression`: write filters=[TopK(0.1)].
    """
    own = signature(made.__init__).parameters  # type: ignore[misc]  # not that of `__new__`, which takes anything
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    for name in () if takes_any and "__init__" in vars(made) else options:
        if name in moved and name not in own:
            raise TypeError(f"{made.__name__} has no argument `{name}`: write {moved[name]}.")
