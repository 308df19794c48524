"""From logits to tokens: logits processors, grammars, filters, the random draw, and scores of prompts."""
