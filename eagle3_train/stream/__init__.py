"""The data plane: schedule, byte budget, capture pipeline, epoch cache, ledger."""
