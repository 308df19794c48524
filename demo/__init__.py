"""The built-in demo model: its synthetic corpus, its training script, its score and its committed checkpoint."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
