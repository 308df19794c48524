"""A stream of a response's events that outlives its gateway. It needs the openai package.

python examples/resuming_responses.py http://127.0.0.1:8000/v1 http://127.0.0.1:8010/v1
"""

import itertools
import sys
import time
import uuid

import openai


def resuming_events(clients, **request):
    """Each event of a streamed response, once and in order, even if gateways die.

    `clients`: one openai.OpenAI for each gateway. Raises openai.APIStatusError for a request that is refused,
    ConnectionError after 100 attempts.
    """
    # The same key gives the same response. So a response is not lost even if no event of it has arrived.
    request["extra_headers"] = {"Idempotency-Key": str(uuid.uuid4())}
    response_id = seen = None
    for client in itertools.islice(itertools.cycle(clients), 100):
        try:
            if response_id is None:
                stream = client.responses.create(stream=True, **request)
            else:
                stream = client.responses.retrieve(response_id, stream=True, starting_after=seen)
            for event in stream:
                if event.type == "error":  # this gateway cannot go on
                    break
                seen = event.sequence_number
                if event.type == "response.created":
                    response_id = event.response.id
                yield event
                if event.type in ("response.completed", "response.incomplete", "response.failed"):
                    return
        except openai.APIStatusError as error:
            if error.status_code not in (429, 502, 503, 504):
                raise
        except openai.APIConnectionError:
            pass
        time.sleep(0.2)
    raise ConnectionError("no gateway brings this response to its end")


if __name__ == "__main__":
    gateways = [openai.OpenAI(base_url=url, api_key="none", max_retries=0) for url in sys.argv[1:]]
    model = gateways[0].models.list().data[0].id
    for event in resuming_events(gateways, model=model, input="Tell me of a fox."):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print()
