"""The model's files in the gateway: tokenizer, detokenizer, chat template, identity.

May import `errors`.
"""
