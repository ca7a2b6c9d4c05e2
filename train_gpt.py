"""Train a GPT ... (written below)"""

import os
from pathlib import Path

import numpy as np


class UserError(Exception):
    """What a user can cause: the message is one line that says what is wrong and what to do."""


# ----------------------------------------------------------------------------------------------------------------------
# Shards: 256 int32 of header (magic, version, token count, zeros), then uint16 tokens. A document begins with the
# end-of-text token, which is vocab_size - 1.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS


def read_shard_header(path) -> int:
    """The number of tokens in a shard, once its header and its size on disk agree. Raises UserError naming the defect
    and its byte offset."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            header = np.frombuffer(f.read(SHARD_HEADER_BYTES), dtype="<i4", count=-1)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None
    if size < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, shorter than the {SHARD_HEADER_BYTES}-byte header; make the shard again")
    if header[0] != SHARD_MAGIC:
        raise UserError(f"{path}: magic number {header[0]} at byte 0, expected {SHARD_MAGIC}; not a token shard")
    if header[1] != SHARD_VERSION:
        raise UserError(f"{path}: version {header[1]} at byte 4, expected {SHARD_VERSION}; make the shard again")
    num_tokens, held = int(header[2]), (size - SHARD_HEADER_BYTES) / 2
    if num_tokens <= 0:
        raise UserError(f"{path}: token count {num_tokens} at byte 8; the shard is empty, make it again")
    if held != num_tokens:
        raise UserError(f"{path}: header promises {num_tokens} tokens at byte 8, the file holds {held:g}; "
                        "it is damaged or was cut off, fetch or make it again")
    return num_tokens


def check_shard(path, vocab_size: int) -> int:
    """read_shard_header, and every token below vocab_size. Reads the whole file (about 1 GB/s)."""
    num_tokens = read_shard_header(path)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(num_tokens,))
    for start in range(0, num_tokens, 1 << 24):
        piece = tokens[start:start + (1 << 24)]
        if piece.max() >= vocab_size:
            at = start + int(np.argmax(piece >= vocab_size))
            raise UserError(f"{path}: token {tokens[at]} at byte {SHARD_HEADER_BYTES + 2 * at} is not below the "
                            f"vocabulary size {vocab_size}; wrong tokenizer or damaged file")
    return num_tokens
