"""The placement algebra: shard and split tensors, combine local tensors, enumerate and cover combinations."""
