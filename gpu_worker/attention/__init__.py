"""Attention over the paged KV pool: the contract (`base`), with FlashInfer, and with plain torch."""
