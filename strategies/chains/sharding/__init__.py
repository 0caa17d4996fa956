"""Programs of weights under ``fully_shard`` that change between the passes of training."""
