"""`vllm bench serve`, by the module behind it: the command itself imports vLLM's server. Runs in vLLM's environment."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
