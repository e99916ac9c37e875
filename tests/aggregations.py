"""All aggregations of adapters."""

from collections.abc import Sequence

import lightning_spectral as ls

AGGREGATIONS: Sequence[ls.algorithms.AdapterAggregation] = [
    ls.PaddedFactors(),
    ls.FrozenA(),
    ls.algorithms.OrthonormalA(),
    ls.AlternatingFactors(),
    ls.TruncatedProducts(),
    ls.algorithms.RankedProducts(),
    ls.StackedProducts(),
    ls.SampledTerms(),
    ls.algorithms.FoldedTerms(),
    ls.algorithms.ParallelTerms(),
]
