"""Programs that make token shards, each also an importable module."""
