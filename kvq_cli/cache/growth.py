"""How the room for packed tokens grows."""

#: Tokens that a store grows by, at least and at most; in between, by an eighth. At 131,072, 3 % or less are unused.
MIN_GROWTH, MAX_GROWTH = 32, 4096


def grown(need: int, capacity: int, room: int, block_tokens: int) -> int:
    """Tokens by which a store of `capacity` tokens grows for `need` more, in whole blocks. room: the known final
    tokens, or 0."""
    tokens = max(need, MIN_GROWTH, min(capacity // 8, MAX_GROWTH), room - capacity)
    return -(-tokens // block_tokens) * block_tokens
