"""Token ids and block ids as messages carry them: packed little-endian int32, as in the
memory of every machine that Paceline runs on."""

from __future__ import annotations

from array import array

from cache_svc.core.errors import Code, OpError

TOKEN_BYTES = 4


def pack_int32(values: array[int]) -> bytes:
    """Packs token ids or block ids for a message."""
    return values.tobytes()


def unpack_int32(packed: bytes) -> array[int]:
    """The reverse of pack_int32. Raises ValueError if the bytes are not a whole number of int32."""
    return array("i", packed)


def check_token_bytes(token_ids: bytes) -> None:
    """Raises OpError(INVALID_ARGUMENT) if the bytes are not a whole number of int32."""
    if len(token_ids) % TOKEN_BYTES:
        raise OpError(Code.INVALID_ARGUMENT, f"token_ids: {len(token_ids)} bytes is not a whole number of int32")


def common_tokens(one: bytes, other: bytes) -> int:
    """The number of equal tokens at the beginning of two packed runs."""
    size = min(len(one), len(other))
    differ = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    if not differ:
        return size // TOKEN_BYTES
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)
