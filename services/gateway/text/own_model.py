"""Compares the gateway's model with the model that the workers serve: tokenizer, configuration, weights and dtype."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1.common_pb2 import ModelInfo
from services.runtime.model.identity import ModelIdentity

_SHOWN_CHARACTERS = 12  # of a hash, in messages


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The gateway's own model. `dtype`: the type that the workers must serve in,
    quantized or not; empty: any."""

    name: str
    vocab_size: int
    dtype: str
    identity: ModelIdentity

    def difference(self, served: ModelInfo) -> str:
        """Why answers would be wrong, in one line that names both models; empty if the models are the same.

        Parts that one side does not have (no tokenizer, dummy weights, a gateway without weights, an older worker) are
        not compared.
        """
        own, theirs = [], []
        for what, mine, other in (
            ("dtype", self.dtype, served.dtype.partition("+")[0]),  # without +int8: any quantization is allowed
            ("vocab_size", str(self.vocab_size or ""), str(served.vocab_size or "")),
            ("tokenizer", self.identity.tokenizer, served.tokenizer_fingerprint),
            ("config", self.identity.config, served.config_fingerprint),
            ("weights", self.identity.weights, served.weights_fingerprint),
        ):
            if mine and other and mine != other:
                own.append(f"{what} {mine[:_SHOWN_CHARACTERS]}")
                theirs.append(f"{what} {other[:_SHOWN_CHARACTERS]}")
        if not own:
            return ""
        return (
            f"this gateway has the model {self.name} ({', '.join(own)}), but the workers serve {served.name} "
            f"({', '.join(theirs)})"
        )
