"""The model's files on the gateway's side: tokenizer, detokenizer, chat template.

May import `errors`.
"""
