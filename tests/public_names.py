"""What users choose from: the names of the top level, and those that stand only in its packages."""

from importlib import import_module
from typing import Any

import lightning_spectral as ls

PLACES = {**ls._PLACE, **ls._NEW_PLACE}  # when old names go, their table moves here
PUBLIC: dict[str, Any] = {
    name: getattr(import_module(f"lightning_spectral.{place}"), name) for name, place in PLACES.items()
}
