"""Runs many requests as one batch: python examples/running_a_batch.py http://127.0.0.1:8000."""

from __future__ import annotations

import json
import sys
import time

from openai import OpenAI


def run_batch(client, requests, endpoint="/v1/chat/completions"):
    """The result of each request, by its name. `requests`: the bodies by name.

    Raises RuntimeError for a batch that fails, with the lines that are wrong.
    """
    lines = [{"custom_id": name, "method": "POST", "url": endpoint, "body": body} for name, body in requests.items()]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    if batch.errors is not None:
        raise RuntimeError([(error.line, error.message) for error in batch.errors.data])
    files = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    results = [json.loads(line) for file_id in files for line in client.files.content(file_id).text.splitlines()]
    return {result["custom_id"]: result["response"] or result["error"] for result in results}


if __name__ == "__main__":
    questions = ("a fox", "a hen", "a wolf")
    asked = {name: {"messages": [{"role": "user", "content": f"Tell me of {name}."}]} for name in questions}
    for name, result in run_batch(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), asked).items():
        print(name, result)
