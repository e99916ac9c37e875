"""All aggregations of adapters."""

from collections.abc import Sequence

import lightning_spectral as ls

AGGREGATIONS: Sequence[ls.algorithms.AdapterAggregation] = [
    ls.PaddedFactors(),
    ls.FrozenA(),
    ls.AlternatingFactors(),
    ls.TruncatedProducts(),
    ls.StackedProducts(),
    ls.SampledTerms(),
]
