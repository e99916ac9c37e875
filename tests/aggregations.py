"""All aggregations of adapters."""

import inspect
from dataclasses import is_dataclass
from typing import Any

import lightning_spectral as ls

PUBLIC: list[Any] = [getattr(ls.algorithms, name) for name in ls.algorithms.__all__]
KINDS = [kind for kind in PUBLIC if inspect.isclass(kind) and issubclass(kind, ls.algorithms.AdapterAggregation)]
AGGREGATIONS = [kind() for kind in KINDS if is_dataclass(kind)]  # which the base is not
