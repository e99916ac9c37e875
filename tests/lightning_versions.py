"""What only newer versions of Lightning have."""

import inspect

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

HAS_2_5_3 = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
SAVE_ON_EXCEPTION = {"save_on_exception": True} if HAS_2_5_3 else {}
# Older ones keep converted weights within a `training_step`, so that its second optimizer step sees those of the first
AUTOCAST_CACHES = "cache_enabled=False" not in inspect.getsource(MixedPrecision.autocast_context_manager)
needs_2_5_3 = pytest.mark.skipif(
    not HAS_2_5_3, reason="Lightning 2.5.3 brought `save_on_exception`, and dataloaders in names that are logged"
)
