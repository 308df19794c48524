"""docs/resuming.md shows the client that the tests use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_example() -> None:
    example = (ROOT / "examples/resuming_stream.py").read_text()
    function = example[example.index("def resuming_stream") : example.index('\n\nif __name__ == "__main__"')]
    assert f"```python\n{function}```" in (ROOT / "docs/resuming.md").read_text()
