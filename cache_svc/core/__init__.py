"""The cache as a deterministic state machine: no socket, no clock, no loop. See `cache.CacheCore`.

`errors`, `packing`, `retention`, `request_metadata` and `counters` import no subpackage. `invariants` and `messages`
may import every subpackage. Above them come `operations`, then `cache`, then `admin` and `live_view`: each may import
everything below it.
"""
