"""The request of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from services.gateway.engine.truncation import Truncation, make_truncation
from services.gateway.fields.numbers import Flag, Integer
from services.gateway.openai.schema import SharedFields
from services.gateway.openai.values import Prompt

# vLLM's fields that would change the vectors, as REFUSED of fields/other_servers.py.
REFUSED: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (),
    "use_activation": (),
}


class EmbeddingRequest(SharedFields):
    """POST /v1/embeddings."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    renamed: ClassVar[Mapping[str, str]] = {}

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    # The first elements of each vector; only Matryoshka models.
    dimensions: Annotated[Integer, Field(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: Flag | None = None

    def truncation(self, max_model_len: int) -> Truncation | None:
        """How an input may be cut. A text keeps the tokens that the tokenizer adds at both ends: `last` pooling needs
        the end of sequence. Raises ApiError 400."""
        return make_truncation(
            self.truncate_prompt_tokens, self.truncation_side, max_model_len, num_output=0, keeps_added=True
        )
