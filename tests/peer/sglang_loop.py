"""SGLang's Scheduler without its processes, sockets and model: its decisions and their state. See sglang_driver.py."""

from __future__ import annotations

import itertools
import os
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCAB = 2**31 - 1


def match_what_can_be_reused(req: Req, cache: RadixCache, tokens: array[int], **options: Any) -> MatchResult:
    """The match that orders the queue. SGLang's own match subtracts one token from the longest match, and may so end
    within a block. For a fully cached prompt of whole blocks it reports more cached tokens than the request can reuse,
    because only whole blocks are reused."""
    return match_kv_cache(req, cache, tokens, max_prefix_len=len(tokens) - 1, **options)


schedule_policy.match_kv_cache = match_what_can_be_reused


class NoOp:
    """A part of the scheduler that does nothing here: every method accepts any call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


class PassThrough(NoOp):
    """An object that returns a batch unchanged."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda batch=None, *args, **kwargs: batch


class CountingCache(RadixCache):
    """SGLang's cache, which also counts evicted tokens and tokens that were computed twice."""

    evicted_tokens = 0
    deduplicated_tokens = 0

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result

    def _insert_cache(self, req: Req, *args: Any, **kwargs: Any) -> Any:
        result = super()._insert_cache(req, *args, **kwargs)
        self.deduplicated_tokens += max(0, result[2] - req.kv.cache_protected_len)
        return result

    def peek(self, tokens: list[int]) -> tuple[int, int]:
        """How many of these tokens are cached, the last one left out, and how many of those a running request holds.
        Unlike a match, it leaves no trace."""
        if self.disable:
            return 0, 0
        key = RadixKey(array("q", tokens[:-1])).page_aligned(self.page_size)
        node, matched, held = self.root_node, 0, 0
        while len(key) and (child := node.children.get(key.child_key(self.page_size))) is not None:
            common = child.key.match(key, page_size=self.page_size)
            matched += common
            held += common if child.lock_ref else 0
            if common < len(child.key):
                break
            node, key = child, key[common:]
        return matched, held


class Loop(Scheduler):
    """A scheduler that decides and nothing else."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        options = scenario.get("options", {})
        page_size = self.page_size = scenario["block_size"]
        size = scenario["num_blocks"] * page_size
        longest = scenario["max_model_len"] + page_size + 1
        self.req_to_token_pool = ReqToTokenPool(scenario["max_num_seqs"], longest, "cpu", False)
        pool = SimpleNamespace(device="cpu")
        self.token_to_kv_pool_allocator = (
            TokenToKVPoolAllocator(size, torch.float32, "cpu", pool, False)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", pool, False)
        )
        self.tree_cache = CountingCache(
            CacheInitParams(
                disable=not scenario.get("prefix_caching", True),
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=page_size,
            )
        )
        order = "lpm" if scenario["preset"] == "sglang-lpm" else "fcfs"
        self.policy = SchedulePolicy(order, self.tree_cache, False, False, False)
        os.environ["SGLANG_INIT_NEW_TOKEN_RATIO"] = str(options.get("init_new_token_ratio", 0.7))
        os.environ["SGLANG_RETRACT_DECODE_STEPS"] = str(options.get("retract_decode_steps", 20))
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        chunked = options.get("chunked_prefill", True)
        self.chunked_prefill_size = scenario["max_batched_tokens"] if chunked else None
        self.max_prefill_tokens = options.get("max_prefill_tokens", 16384)
        self.prefill_decode_interval = options.get("prefill_decode_interval", 0)
        self.max_running_requests = scenario["max_num_seqs"]
        self.model_config = SimpleNamespace(vocab_size=VOCAB, is_encoder_decoder=False)
        self.max_req_len = scenario["max_model_len"] + 1
        self.max_total_num_tokens = size
        get_parallel().override_permanently(pp_max_micro_batch_size=scenario["max_num_seqs"])
        self.waiting_queue: list[Req] = []
        self._entries = itertools.count()
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self._turn_off_what_is_not_compared()

    def _turn_off_what_is_not_compared(self) -> None:
        self.disaggregation_mode = DisaggregationMode.NULL
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.dp_attn_adapter = self.ngram_embedding_manager = PassThrough()
        self.grammar_manager = self.beam_coordinator = self.load_inquirer = NoOp()
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False))
        self.kv_shard_widening = 1
        self.processed_tokens_counter = self.forward_ct = 0
        self.max_prefill_bs = 0
        self.priority_scheduling_preemption_threshold = 0
        # With 1, the interval only protects decoding requests. With SGLang's default of 0, steps stay empty even if no
        # request decodes.
        self.prefill_decode_interval_min_bs = 1
        self._prefill_decode_interval_remaining = 0
        for name in (
            "scheduler_stage_metrics",
            "_pending_chunked_abort_req",
            "dllm_config",
            "prefill_delayer",
            "min_free_slots_delayer",
            "dynamic_chunk_sizer",
            "decode_offload_manager",
            "truncation_align_size",
            "max_queued_requests",
            "max_new_tokens_limit",
            "sliding_window_size",
            "hisparse_coordinator",
            "lora_drainer",
        ):
            setattr(self, name, None)
        for name in (
            "enable_hierarchical_cache",
            "enable_hicache_storage",
            "enable_unified_cache_external_linker",
            "enable_lmcache",
            "enable_hisparse",
            "enable_lora",
            "enable_lora_overlap_loading",
            "enable_overlap",
            "enable_priority_scheduling",
            "enable_priority_preemption",
            "enable_skip_finishing_decode",
            "abort_on_priority_when_disabled",
            "is_hybrid_swa",
            "is_mixed_chunk",
            "require_mlp_sync",
        ):
            setattr(self, name, False)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        req.entered = next(self._entries)

    def stash_chunked_request(self, req: Req) -> None:
        super().stash_chunked_request(req)
        self.note_state()  # tokens that were computed twice are free from here on

    def note_state(self) -> None:
        """What the step is decided on."""
        available = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        peek = self.tree_cache.peek
        matches = {req.rid: peek([*req.origin_input_ids, *req.output_ids]) for req in self.waiting_queue}
        self.state = {"available_blocks": available // self.page_size, "matches": matches}
