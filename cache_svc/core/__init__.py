"""The cache as a deterministic state machine: no socket, no clock, no loop. See `cache.CacheCore`.

`errors`, `packing`, `retention`, `request_metadata` and `counters` import no room. `invariants` and `messages` may
import every room; `operations`, `cache` and `admin` use all of them.
"""
