"""Pages of docs/ that show code or figures of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.request_fields import METADATA, SAMPLING
from services.gateway.anthropic.schema import MAX_CACHE_MARKS
from services.gateway.batches import files, uploads
from services.gateway.batches import schema as batch_schema
from services.gateway.batches.files import FileLimits
from services.gateway.batches.records import ENDED, TRANSITIONS
from services.gateway.batches.routes import IDLE_S
from services.gateway.batches.service import MAX_RUNS, MAX_UNFINISHED
from services.gateway.engine import idempotency, list_limits, request, sampling
from services.gateway.grammars import structure
from services.gateway.grpc import kserve_tensors
from services.gateway.http import body, connection
from services.gateway.live_view import trace_records, traces
from services.gateway.openai import jobs, middleware
from services.gateway.responses_api import creation
from services.gateway.responses_api.schema import IGNORED, IGNORED_INSIDE, REFUSED, ResponsesRequest
from services.gateway.settings import GatewaySettings
from services.gateway.text import chat_template, chat_values

ROOT = Path(__file__).parents[3]
# The row of docs/limits.md, by its start, and the limits that it names.
LIMITS: dict[str, list[int]] = {
    "headers": [connection._MAX_HEAD_BYTES >> 10, int(GatewaySettings.model_fields["head_timeout_s"].default)],
    "body": [body._BYTES_PER_TOKEN, body._LEAST_BODY_BYTES >> 20, body.MOST_BODY_BYTES >> 20],
    "JSON nesting": [],  # orjson's own
    "`X-Request-ID`": [middleware._REQUEST_ID_CHARS],
    "`tenant`": [METADATA["tenant"].max_chars],
    "`cache_salt`": [METADATA["cache_salt"].max_chars],
    "`user`, `metadata.user_id`": [METADATA["tenant"].max_chars],
    "`chat_template` |": [chat_template._MAX_TEMPLATE_CHARS],
    "the size of `logit_bias`": [request._MAX_COPIED_BYTES >> 20],
    "a line of a file": [],  # a request's body
    "nesting of messages": [chat_values.MAX_DEPTH],
    "`Idempotency-Key`": [idempotency.MAX_KEY_CHARS],
    "`prompt`": [list_limits.MAX_PROMPTS],
    "`messages`": [list_limits.MAX_MESSAGES, list_limits.MAX_PARTS],
    "`tools`": [list_limits.MAX_TOOLS],
    "`input` of": [list_limits.MAX_INPUTS],
    "`cache_control`": [MAX_CACHE_MARKS],
    "`chat_template_kwargs`": [list_limits.MAX_TEMPLATE_VARIABLES],
    "`n`, `best_of`": [request.MAX_SAMPLES],
    "`stop`": [request.MAX_STOP_STRINGS, request.MAX_STOP_STRING_CHARS],
    "`stop_token_ids`": [sampling.MAX_STOP_TOKEN_IDS],
    "`logit_bias`": [sampling.MAX_BIASED_TOKENS, int(sampling.MAX_BIAS)],
    "`bad_words`": [
        sampling.MAX_BAD_WORDS,
        sampling.MAX_BAD_WORD_CHARS,
        sampling.MAX_BAD_WORD_TOKENS,
        sampling.MAX_BAD_WORDS_TOKENS,
    ],
    "`allowed_token_ids`": [sampling.MAX_ALLOWED_TOKENS],
    "`logprobs`": [sampling.MAX_TOP_LOGPROBS],
    "`prompt_logprobs`": [jobs.MAX_PROMPT_LOGPROBS, jobs.MAX_ECHO_CHARS],
    "tokens with `top_logprobs`": [creation.MAX_STORED_LOGPROBS],
    "`cache_retention`": [request.MAX_RETENTION_RANGES],
    "`inputs`, `outputs`": [kserve_tensors.MAX_TENSORS, kserve_tensors.MAX_PARAMETERS],
    "tokens of `/detokenize`": [list_limits.MAX_DETOKENIZED],
    "a [file]": [FileLimits().max_bytes >> 20, files.MAX_LINES],
    "files of one API key": [files.MAX_FILES, FileLimits().max_owner_bytes >> 30],
    "name of a file": [files.MAX_NAME_CHARS],
    "`custom_id`": [batch_schema.MAX_CUSTOM_ID_CHARS],
    "unfinished batches": [MAX_UNFINISHED, MAX_RUNS],
    "uploads at a time": [uploads.MAX_OWNER_UPLOADS, uploads.MAX_UPLOADS, int(uploads.UPLOAD_S), int(IDLE_S)],
    "`metadata`": [batch_schema.MAX_METADATA, batch_schema.MAX_METADATA_KEY_CHARS, batch_schema.MAX_METADATA_CHARS],
    "`expires_after`": [batch_schema.MIN_TTL_S, batch_schema.MAX_TTL_S],
    "a prompt with `truncate": [list_limits.MAX_TRUNCATED],
}


def test_the_page_of_responses_shows_the_example_and_the_fields() -> None:
    page = (ROOT / "docs/responses.md").read_text()
    example = (ROOT / "examples/resuming_responses.py").read_text()
    function = example[example.index("def resuming_events") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in page
    assert ", ".join(f"`{name}`" for name in REFUSED) in page
    assert "".join(f"| `{name}` | {why} |\n" for name, why in (IGNORED | IGNORED_INSIDE).items()) in page
    assert not [name for name in ResponsesRequest.model_fields if f"`{name}" not in page and name not in SAMPLING]


def test_the_page_of_batches_shows_the_example_the_statuses_and_the_settings() -> None:
    page = (ROOT / "docs/batches.md").read_text()
    example = (ROOT / "examples/running_a_batch.py").read_text()
    function = example[example.index("def run_batch") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in page
    for status in {*ENDED, *TRANSITIONS.values(), "validating"}:
        assert f"\n| `{status}` |" in page
    for endpoint in batch_schema.ENDPOINTS:
        assert f"`{endpoint}`" in page
    defaults = GatewaySettings.model_fields
    assert f"| `--batch-lines` | {defaults['batch_lines'].default} |" in page
    assert f"| `--all-batch-lines` | {defaults['all_batch_lines'].default} |" in page
    limits = FileLimits()
    given = [defaults[name].default for name in ("max_file_bytes", "max_files_bytes", "file_ttl_s")]
    assert given == [limits.max_bytes, limits.max_owner_bytes, limits.ttl_s]


def test_the_page_of_openais_api_has_all_reasons_of_errors() -> None:
    gateway = ROOT / "services" / "gateway"
    # Errors in the lines of a batch are in docs/batches.md.
    files = [path for path in gateway.rglob("*.py") if path != gateway / "batches" / "validation.py"]
    texts = [path.read_text() for path in files]
    used = {code for text in texts for code in re.findall(r'\bcode="([a-z_]+)"', text)}
    table = (
        (ROOT / "docs" / "openai-api.md").read_text().partition("| status | type | reasons |")[2].partition("\n\n")[0]
    )
    shown = set(re.findall("`([a-z_]+)`", table))
    assert used <= shown
    literals = {literal for text in texts for literal in re.findall('"([a-z_]+)"', text)}
    assert shown <= literals, "the table has a reason that the gateway never uses"


def test_the_page_on_resuming_shows_the_example() -> None:
    example = (ROOT / "examples/resuming_stream.py").read_text()
    function = example[example.index("def resuming_stream") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in (ROOT / "docs/resuming.md").read_text()


@pytest.mark.parametrize("start", LIMITS)
def test_the_page_on_limits_has_those_of_the_code(start: str) -> None:
    page = (ROOT / "docs/limits.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| {start}")]
    for limit in LIMITS[start]:
        assert re.search(rf"(?<![\d,]){limit:,}(?!,?\d)", row), limit


def test_each_row_of_the_page_on_limits_is_compared_with_the_code() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| what ", "| field "))
    ]
    assert len(rows) > len(LIMITS) - 5
    assert not [row for row in rows if not row.startswith(tuple(f"| {start}" for start in LIMITS))]


def test_the_page_on_limits_has_the_number_of_choices() -> None:
    assert f"`choice` has at most {structure.MAX_CHOICES:,} texts" in (ROOT / "docs/limits.md").read_text()


def test_the_page_on_overload_has_the_limits_of_traces() -> None:
    page = (ROOT / "docs/overload.md").read_text()
    [one, reader] = [line for line in page.splitlines() if "trace" in line and line.startswith("| ")]
    assert f"1, of {traces.MAX_SECONDS:g} s" in one
    assert f"| {traces.MAX_BEHIND_S:g} s |" in reader
    trace_page = (ROOT / "docs/perfetto.md").read_text()
    assert f"at most {trace_records.MAX_ITEMS} items of a kind" in trace_page
    assert f"{traces.MAX_BEHIND_S:g} s after the trace" in trace_page
