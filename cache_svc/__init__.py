"""The cache service: keeps the prefix tree and the block tables of every worker, and says which KV is reused."""
