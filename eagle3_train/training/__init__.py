"""One optimiser step: step, optimiser, sharding, checkpoint."""
