"""Packages that come with an extra: imported where they are used, with an error that says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["from_extra"]


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
