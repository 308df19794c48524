"""The cache as a deterministic state machine: no socket, no clock, no loop. See `cache.CacheCore`.

`errors`, `packing`, `retention`, `request_metadata` and `counters` import no subpackage. `invariants` and `messages`
may import every subpackage; `operations`, `cache`, `admin` and `live_view` use all of them.
"""
