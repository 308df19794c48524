"""The prefix cache beside those of vLLM and SGLang, and hit rates on traces."""
