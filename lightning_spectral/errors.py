"""The package's own warnings and exceptions, so that users can filter them and tests can expect them."""

from typing import Any


class SpectralWarning(UserWarning):
    """The run continues, but something happened that the user should know: a client left out, a setting changed."""


class ClientError(RuntimeError):
    """Something failed while a client trained; the message names the round, the client and the stage."""


class RoundError(RuntimeError):
    """A round cannot be finished: too few clients returned what can be used, or the server's weights are not finite."""


class LostProcessError(RoundError):
    """Another process of the run has ended, or hangs; the message names it, and the client whose turn it was."""


class ReportError(ValueError):
    """A report cannot be made of these runs; the message names the file and what to do."""


def check_is(argument: str, value: object, expected: type) -> None:
    """Raise ``TypeError`` unless ``value`` is an instance of ``expected``, with a hint where there is one.

    A ``bool`` is not an ``int`` here: where a number is asked for, it is a mistake.

    Example:
        >>> check_is("number", int, int)
        Traceback (most recent call last):
        TypeError: `number` must be an instance of int, got the class int; write int(...).
        >>> check_is("number", True, int)
        Traceback (most recent call last):
        TypeError: `number` must be an instance of int, got True; write 1.
    """
    if isinstance(value, expected) and not (expected is int and isinstance(value, bool)):
        return
    if isinstance(value, type):
        raise TypeError(
            f"`{argument}` must be an instance of {expected.__name__}, got the class {value.__name__}; "
            f"write {value.__name__}(...)."
        )
    raise TypeError(f"`{argument}` must be an instance of {expected.__name__}, got {value!r}{_hint(value, expected)}.")


def _hint(value: Any, expected: type) -> str:
    """What to write for a number of another type, such as a string, or one of NumPy."""
    if expected is not int:
        return ""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    return f"; write {int(number)}" if number.is_integer() else "; write a whole number"
