"""What the package warns about and raises by its own name, so that users can filter it and tests can demand it."""


class SpectralWarning(UserWarning):
    """A run goes on, but something a user would want to know happened: a client left out, a setting moved."""


class ClientError(RuntimeError):
    """Something failed while a client trained; the message names the round, the client and the stage."""


class RoundError(RuntimeError):
    """A round cannot be finished: too many clients returned nothing that can be used."""


def check_is(argument: str, value: object, kind: type) -> None:
    """Raise ``TypeError`` unless ``value`` is an instance of ``kind``; a class in place of its instance is named.

    Example:
        >>> check_is("number", int, int)
        Traceback (most recent call last):
        TypeError: `number` must be an instance of int, got the class int; write int(...).
    """
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        raise TypeError(
            f"`{argument}` must be an instance of {kind.__name__}, got the class {value.__name__}; "
            f"write {value.__name__}(...)."
        )
    raise TypeError(f"`{argument}` must be an instance of {kind.__name__}, got {value!r}.")
