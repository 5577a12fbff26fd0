"""Training checkpoints: written whole or not at all, read back before older ones are deleted."""
