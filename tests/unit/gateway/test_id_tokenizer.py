"""A model without a tokenizer: numbers in, numbers out, and text refused by name."""

from __future__ import annotations

import pytest

from services.gateway.errors import ApiError
from services.gateway.text.id_tokenizer import IdTokenizer


def test_text_is_refused_and_ids_read_as_numbers() -> None:
    tokenizer = IdTokenizer(100)
    with pytest.raises(ApiError, match="no tokenizer"):
        tokenizer.encode("hello")
    with pytest.raises(ApiError, match="no tokenizer"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    detokenizer = tokenizer.detokenizer([1, 2])
    assert detokenizer.push([3, 40]) + detokenizer.push([5]) + detokenizer.finish() == tokenizer.decode([3, 40, 5])
