"""What only newer versions of Lightning have."""

import inspect

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

HAS_2_5_3 = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
SAVE_ON_EXCEPTION = {"save_on_exception": True} if HAS_2_5_3 else {}
needs_2_5_3 = pytest.mark.skipif(
    not HAS_2_5_3,
    reason="Lightning 2.5.3 brought `save_on_exception`, and dataloaders in names that are logged",
)
