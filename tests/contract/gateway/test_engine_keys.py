"""API keys at the contracts of other systems: every method, tenants, quotas, aborts, and KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool

from paceline.third_party import kserve_inference_pb2 as kserve
from paceline.third_party import sglang_scheduler_pb2 as sglang
from paceline.third_party import smg_common_pb2 as smg
from paceline.third_party import vllm_engine_pb2 as vllm
from paceline.third_party.kserve_inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.third_party.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from paceline.third_party.vllm_engine_pb2_grpc import VllmEngineStub
from services.runtime.keys import admin_gate
from tests.contract.cache.test_keys import cache
from tests.contract.gateway.conftest import Running, Start, eventually, until
from tests.contract.gateway.test_engines import answers, refusal, sglang_request, stub, vllm_request
from tests.contract.gateway.test_keys import Keys, bearer, keys, launch
from tests.contract.gateway.test_kserve import TEXT, parameters, request
from tests.support.certificates import make_certificates
from tests.support.untyped_grpc import untyped

__all__ = ["keys"]  # the fixture

SERVICES = ("vllm.grpc.engine.VllmEngine", "sglang.grpc.scheduler.SglangScheduler", "inference.GRPCInferenceService")
KV_STUBS = (VllmEngineStub, SglangSchedulerStub)
UNKNOWN, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
SUBSCRIBE = smg.SubscribeKvEventsRequest()


def generate(contract: str, running: Running, secret: str, num_tokens: int = 4) -> Any:
    """A request that is not streamed."""
    metadata = list(bearer(secret).items())
    match contract:
        case "vllm":
            return stub(VllmEngineStub, running).Generate(vllm_request(max_tokens=num_tokens), metadata=metadata)
        case "sglang":
            asked = sglang_request(params={"max_new_tokens": num_tokens, "ignore_eos": True})
            return stub(SglangSchedulerStub, running).Generate(asked, metadata=metadata)
    whole = request(TEXT, parameters(max_tokens=num_tokens))
    return stub(GRPCInferenceServiceStub, running).ModelInfer(whole, metadata=metadata)


async def outcome(call: Any) -> grpc.aio.AioRpcError | None:
    """The error of a call; None if it is served."""
    try:
        if hasattr(call, "__aiter__"):
            await answers(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def code(call: Any) -> grpc.StatusCode:
    error = await outcome(call)
    return grpc.StatusCode.OK if error is None else error.code()


async def test_every_method_wants_a_key(start: Start, keys: Keys) -> None:
    keys.add("a")
    running = await launch(start, keys)
    num_methods = 0
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        for service in SERVICES:
            for method in descriptor_pool.Default().FindServiceByName(service).methods:
                for metadata in ((), (("x-api-key", "wrong"),)):
                    call = untyped(channel).stream_stream(f"/{service}/{method.name}")(metadata=metadata)
                    async with asyncio.timeout(20):
                        assert await call.code() is UNKNOWN, method.full_name
                num_methods += 1
    assert num_methods > 25
    assert not running.scheduler.submissions


@pytest.mark.parametrize("contract", ["vllm", "sglang", "kserve"])
async def test_the_key_decides_the_tenant_and_the_quotas(start: Start, keys: Keys, contract: str) -> None:
    secret, other = keys.add("a", tenant="acme", max_requests=1), keys.add("b", max_requests=1)
    running = await launch(start, keys)
    assert await code(generate(contract, running, secret)) is grpc.StatusCode.OK
    assert [submission.tenant for submission in running.scheduler.submissions] == ["acme"]
    running.scheduler.paused = True
    first = asyncio.create_task(code(generate(contract, running, secret)))
    await until(lambda: running.scheduler.num_running == 1)
    error = await outcome(generate(contract, running, secret))
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the key 'a' is at its limit of 1 requests at a time (max_requests)"
    assert dict(untyped(error).trailing_metadata())["retry-after-s"] == "1"
    second = asyncio.create_task(code(generate(contract, running, other)))
    await until(lambda: running.scheduler.num_running == 2)
    running.scheduler.paused = False
    assert [await first, await second] == [grpc.StatusCode.OK] * 2
    small = keys.add("s", max_tokens_in_flight=8)

    async def known() -> bool:
        return await code(generate(contract, running, small, 40)) is not UNKNOWN

    await eventually(known)
    error = await outcome(generate(contract, running, small, 40))
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens_in_flight" in (error.details() or "")


async def test_kserve_names_no_other_tenant_and_no_higher_priority(start: Start, keys: Keys) -> None:
    secret, router = keys.add("a", tenant="acme", max_priority=1.0), keys.add("r", any_tenant=True)
    running = await launch(start, keys)

    async def asked(key: str, **fields: Any) -> grpc.StatusCode:
        call = stub(GRPCInferenceServiceStub, running).ModelInfer(
            request(TEXT, parameters(max_tokens=4, **fields)), metadata=list(bearer(key).items())
        )
        return await code(call)

    assert await asked(secret, tenant="other") is DENIED
    assert await asked(secret, priority=2) is DENIED
    assert await asked(secret, priority=1, user="customer 7") is grpc.StatusCode.OK
    assert await asked(router, tenant="other") is grpc.StatusCode.OK
    assert [submission.tenant for submission in running.scheduler.submissions] == ["acme", "other"]


async def test_an_abort_reaches_only_ones_own_requests(start: Start, keys: Keys) -> None:
    mine, theirs = keys.add("a", tenant="t"), keys.add("b", tenant="t")
    running = await launch(start, keys, step_s=0.01)
    engine, scheduler = stub(VllmEngineStub, running), stub(SglangSchedulerStub, running)
    own, foreign = list(bearer(mine).items()), list(bearer(theirs).items())
    call = engine.Generate(vllm_request(stream=True, max_tokens=1500, ignore_eos=True), metadata=own)
    chunks = aiter(call)
    await anext(chunks)
    await engine.Abort(vllm.AbortRequest(request_ids=["r"]), metadata=foreign)
    assert not (await scheduler.Abort(sglang.AbortRequest(request_id="r"), metadata=foreign)).success
    await anext(chunks)
    assert running.scheduler.num_running == 1
    assert (await scheduler.Abort(sglang.AbortRequest(request_id="r"), metadata=own)).success
    assert (await answers(call))[-1].complete.finish_reason == "abort"


async def test_a_revoked_key_ends_no_kserve_stream_and_starts_no_request_on_it(start: Start, keys: Keys) -> None:
    secret = keys.add("a")
    running = await launch(start, keys)
    go = asyncio.Event()

    async def asked() -> AsyncIterator[kserve.ModelInferRequest]:
        yield request(TEXT, parameters(max_tokens=4))
        await go.wait()
        yield request(TEXT, parameters(max_tokens=4), id="late")

    call = stub(GRPCInferenceServiceStub, running).ModelStreamInfer(asked(), metadata=list(bearer(secret).items()))
    parts = aiter(call)
    assert not (await anext(parts)).error_message
    keys.remove("a")

    async def revoked() -> bool:
        return await code(generate("kserve", running, secret)) is UNKNOWN

    await eventually(revoked)
    go.set()
    last = await anext(parts)
    assert (last.error_message, last.infer_response.id) == ("the API key is not known here", "late")


# ── KV events ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KV_STUBS)
async def test_kv_events_need_an_admin_key(start: Start, keys: Keys, kind: Any) -> None:
    user, admin = keys.add("u"), keys.add("a", admin=True)
    async with cache(keys_file=str(keys.path), event_tokens=True) as port:
        running = await launch(start, keys, {"cache": f"127.0.0.1:{port}"})
        subscribe = stub(kind, running).SubscribeKvEvents
        assert await code(subscribe(SUBSCRIBE)) is UNKNOWN
        error = await refusal(subscribe(SUBSCRIBE, metadata=list(bearer(user).items())))
        assert (error.code(), error.details()) == (DENIED, "the key 'u' may not use admin calls (admin = true)")
        call = subscribe(SUBSCRIBE, metadata=[("x-api-key", admin)])
        assert (await call.read()).events[0].WhichOneof("data") == "cleared"  # the begin of a snapshot
        call.cancel()


async def test_the_cache_decides_about_the_key_too(start: Start, keys: Keys, tmp_path: Path) -> None:
    admin = keys.add("a", admin=True)
    others = Keys(tmp_path / "others.toml")
    others.add("x", admin=True)
    async with cache(keys_file=str(others.path), event_tokens=True) as port:
        running = await launch(start, keys, {"cache": f"127.0.0.1:{port}"})
        call = stub(VllmEngineStub, running).SubscribeKvEvents(SUBSCRIBE, metadata=[("x-api-key", admin)])
        error = await refusal(call)
    assert (error.code(), error.details()) == (UNKNOWN, "the cache: the API key is not known here")


@pytest.mark.parametrize("kind", KV_STUBS)
async def test_without_keys_kv_events_are_for_this_machine(
    start: Start, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache(event_tokens=True) as port:
        running = await start(settings={"cache": f"127.0.0.1:{port}", "insecure": True})
        call = stub(kind, running).SubscribeKvEvents(SUBSCRIBE)
        assert (await call.read()).events
        call.cancel()
        monkeypatch.setattr(admin_gate, "is_local_peer", lambda peer: False)
        error = await refusal(stub(kind, running).SubscribeKvEvents(SUBSCRIBE))
        assert (error.code(), "this machine only" in (error.details() or "")) == (DENIED, True)


@pytest.mark.parametrize("kind", KV_STUBS)
async def test_a_cache_that_sends_no_tokens_is_named(start: Start, kind: Any) -> None:
    async with cache() as port:
        running = await start(settings={"cache": f"127.0.0.1:{port}"})
        error = await refusal(stub(kind, running).SubscribeKvEvents(SUBSCRIBE))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "start the cache with --event-tokens" in (error.details() or "")


async def test_the_gateway_dials_the_cache_with_its_certificates(start: Start, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "tls")
    async with cache(tls_dir=folder, event_tokens=True) as port:
        settings = {"cache": f"127.0.0.1:{port}", "tls_dir": folder, "http_tls": False}
        running = await start(settings=settings, scheduler_up=False)
        call = stub(VllmEngineStub, running).SubscribeKvEvents(SUBSCRIBE)
        assert (await call.read()).events
        call.cancel()
        plain = await start(settings={"cache": f"127.0.0.1:{port}"}, scheduler_up=False)
        error = await refusal(stub(VllmEngineStub, plain).SubscribeKvEvents(SUBSCRIBE))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
