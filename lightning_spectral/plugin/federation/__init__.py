"""A federation of one model or several as plain objects, which two LightningModules own and a test can drive."""
