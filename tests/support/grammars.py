"""Grammars for structured outputs, and a logits processor with which transformers follows a grammar."""

from __future__ import annotations

import json

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from transformers import LogitsProcessor

from demo import CHECKPOINT
from tests.support import reference

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
GRAMMARS = {
    "json": JSON,
    "regex": grammar_from("regex", "[0-9]{3}-[a-f]{40}"),
    "choice": grammar_from("choice", json.dumps(["seven", "eight", "once upon a time there was a fox"])),
    "lark": grammar_from("grammar", 'start: word (" " word){9}\nword: /[a-z]+/'),
}


class Follows(LogitsProcessor):
    """Lets the demo model generate only texts of the grammar. For each token, a new matcher reads the whole output and
    returns the allowed tokens."""

    def __init__(self, grammar: str, num_prompt: int) -> None:
        ends = reference.load(str(CHECKPOINT)).generation_config.eos_token_id
        self.tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=ends)
        self.grammar, self.num_prompt = grammar, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = LLMatcher(self.tokenizer, self.grammar)
        for token in input_ids[0, self.num_prompt :].tolist():
            if not matcher.is_stopped():
                assert matcher.consume_token(token)
        bias = torch.tensor(list(matcher.compute_logit_bias()))[: scores.shape[-1]]
        return scores.masked_fill(bias == 0, -torch.inf)
