"""What users choose from: the names of the top level, and those that stand only in its packages."""

from importlib import import_module
from typing import Any

import lightning_spectral as ls
from lightning_spectral import old_names

# When the old names go, their table moves here.
PLACES = {**{name: f"lightning_spectral.{place}" for name, place in ls._PLACES.items()}, **old_names.PLACES}
PUBLIC: dict[str, Any] = {name: getattr(import_module(place), name) for name, place in PLACES.items()}
