"""The KV pool, and the copies of its blocks to and from host memory."""
