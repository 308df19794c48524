"""A rolling restart of every service, one after the other, under load: no request fails, and each gets its tokens."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx

from services.client import AsyncPacelineClient
from tests.support.stack import Stack
from tests.support.traffic import NextGateway, mixed

VOCAB = 1000
NUM_TOKENS = 100


async def restart(stack: Stack, name: str) -> None:
    """Sends SIGTERM, starts a new process after the old one has ended, and waits until all services are ready."""
    began_s = time.monotonic()
    process = stack.processes[name]
    await asyncio.to_thread(stack.kill, name, signal.SIGTERM)
    assert process.returncode == 0, stack.logs()
    ended_s = time.monotonic()
    await asyncio.to_thread(stack.start, name)
    for http_port, _ in stack.gateway_ports.values():
        await asyncio.to_thread(stack.wait_ready, f"http://127.0.0.1:{http_port}")
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", 2)
    print(f"{name}: ended after {ended_s - began_s:.1f} s, all there {time.monotonic() - ended_s:.1f} s later")


async def test_a_rolling_restart_fails_no_request(stack: Stack) -> None:
    await asyncio.to_thread(stack.up, 2)
    await asyncio.to_thread(stack.start_gateway, "gateway-2")
    urls = [f"http://127.0.0.1:{http_port}" for http_port, _ in stack.gateway_ports.values()]
    targets = "ipv4:" + ",".join(f"127.0.0.1:{grpc_port}" for _, grpc_port in stack.gateway_ports.values())
    http = httpx.AsyncClient(base_url=urls[0], transport=NextGateway(urls), timeout=200)
    async with http, AsyncPacelineClient(targets) as grpc_client:
        traffic = mixed(http, grpc_client, NUM_TOKENS, VOCAB)
        await traffic.learn()
        async with traffic.flowing():
            for name in ("cache", "scheduler", "worker-1", "gateway"):
                await restart(stack, name)
                print(f"    {sum(traffic.done.values())} requests, {len(traffic.wrong)} wrong")
    print(dict(traffic.done))
    assert not traffic.wrong, "\n".join(traffic.wrong[:20]) + stack.logs()
    assert min(traffic.done[kind] for kind in traffic.asks) > 1
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
