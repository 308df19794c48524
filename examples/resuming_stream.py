"""A stream that outlives its connection and its gateway. It needs httpx.

python examples/resuming_stream.py http://127.0.0.1:8000 http://127.0.0.1:8010
"""

import itertools
import json
import sys
import time
import uuid

import httpx


def resuming_stream(gateways, path, body, key=None):
    """Each chunk of a streamed answer, once and in order, even if services die.

    Raises httpx.HTTPStatusError for a request that is refused or would fail at any gateway, RuntimeError if it fails in
    the middle of its answer, ConnectionError after 100 attempts.
    """
    body, headers = body | {"stream": True}, {"Idempotency-Key": key or str(uuid.uuid4())}
    for gateway in itertools.islice(itertools.cycle(gateways), 100):
        try:
            with httpx.stream("POST", gateway + path, json=body, headers=headers, timeout=30) as answer:
                is_final = answer.headers.get("x-should-retry") == "false"
                if is_final or answer.status_code not in (429, 502, 503, 504):
                    answer.raise_for_status()
                    event = {}
                    for line in answer.iter_lines():
                        if line:
                            name, _, event[name] = line.partition(": ")
                            continue
                        if event["data"] == "[DONE]":
                            return
                        chunk, last_id, event = json.loads(event["data"]), event.get("id"), {}
                        if "error" in chunk:
                            if chunk["error"]["code"] in (500, 504):
                                raise RuntimeError(chunk["error"]["message"])
                            break
                        headers["Last-Event-ID"] = last_id
                        yield chunk
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise ConnectionError(f"none of {gateways} brings this answer to its end")


if __name__ == "__main__":
    body = {"prompt": "Once there was a fox", "max_tokens": 200}
    for chunk in resuming_stream(sys.argv[1:], "/v1/completions", body):
        print(chunk["choices"][0]["text"], end="", flush=True)
