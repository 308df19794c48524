"""docs/resuming.md and docs/responses.md show the clients that the tests use."""

from __future__ import annotations

from pathlib import Path

from paceline.request_fields import SAMPLING
from services.gateway.responses_api.schema import IGNORED, REFUSED, ResponsesRequest

ROOT = Path(__file__).parents[3]


def test_the_page_of_responses_shows_the_example_and_the_fields() -> None:
    page = (ROOT / "docs/responses.md").read_text()
    example = (ROOT / "examples/resuming_responses.py").read_text()
    function = example[example.index("def resuming_events") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in page
    assert ", ".join(f"`{name}`" for name in REFUSED) in page
    assert "".join(f"| `{name}` | {why} |\n" for name, why in IGNORED.items()) in page
    assert not [name for name in ResponsesRequest.model_fields if f"`{name}" not in page and name not in SAMPLING]


def test_the_page_shows_the_example() -> None:
    example = (ROOT / "examples/resuming_stream.py").read_text()
    function = example[example.index("def resuming_stream") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in (ROOT / "docs/resuming.md").read_text()
