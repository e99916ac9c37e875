"""Scripts, and configs with the data that they name."""
