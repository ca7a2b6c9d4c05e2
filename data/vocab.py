"""Tokenizers: GPT-2's byte-pair encoding and a small one for Python, both by tiktoken, and plain
bytes. Encoding a text adds no end-of-text token, whose number is always vocab_size - 1."""

import base64
import functools
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import UserError, require, sha256

END_OF_TEXT = "<|endoftext|>"

GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

# Text is encoded in pieces: one long run of white space overflows the regex engine's stack, and a
# file need not fit in memory. A piece ends before white space that follows anything else, where
# GPT-2's merges stop anyway, so that the tokens are those of the whole. (The lookbehinds are the
# white space of Unicode in UTF-8.)
PIECE_BYTES = 1 << 18
PIECE_END = re.compile(
    rb"[!-\xff](?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)(?=[\t-\r ])")

def piece_end(data: bytes, start: int = 0) -> int:
    """Where the piece of data that begins at start ends."""
    end = start + PIECE_BYTES
    if len(data) <= end:
        return len(data)
    ends = [match.end() for match in PIECE_END.finditer(data, max(end - 4096, start), end)]
    while not ends and end > start + PIECE_BYTES - 3 and data[end] & 0xC0 == 0x80:
        end -= 1  # not inside a character
    return ends[-1] if ends else end

def utf8(text: str) -> bytes:
    """Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()

class BytesTokenizer:
    """A token is a byte of UTF-8."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def encode_utf8(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decode(self, ids) -> str:
        data = b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in ids)
        return data.decode("utf-8", "replace")

class GPT2Tokenizer:
    """GPT-2's byte-pair encoding. Text that spells the end-of-text token out is text."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self, merge_ranks: dict[bytes, int]):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
        self.encoding = tiktoken.Encoding(
            self.name, pat_str=r50k_pat_str, mergeable_ranks=merge_ranks,
            special_tokens={END_OF_TEXT: self.eot}, explicit_n_vocab=self.vocab_size)

    def encode_utf8(self, data: bytes) -> np.ndarray:
        """Invalid UTF-8 becomes U+FFFD."""
        ids = [np.empty(0, dtype=np.uint32)]
        start = 0
        while start < len(data):
            end = piece_end(data, start)
            text = data[start:end].decode("utf-8", "replace")
            ids.append(self.encoding.encode_to_numpy(text, disallowed_special=()))
            start = end
        return np.concatenate(ids).astype(np.uint16)

    def encode(self, text: str) -> list[int]:
        return self.encode_utf8(utf8(text)).tolist()

    def decode(self, ids) -> str:
        return self.encoding.decode(list(ids), errors="replace")

class PythonTokenizer(GPT2Tokenizer):
    """A byte-pair encoding that records/demo/vocabulary.py learned from the demo's text."""

    name = "python"
    vocab_size = 1025
    eot = 1024

TOKENIZERS = {each.name: each for each in (GPT2Tokenizer, PythonTokenizer, BytesTokenizer)}

def gpt2_merge_ranks(vocab_dir) -> dict[bytes, int]:
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public
    try:
        if vocab_dir is None:
            return openai_public.gpt2()["mergeable_ranks"]
        paths = [str(Path(vocab_dir, name)) for name in GPT2_SHA256]
        for path, digest in zip(paths, GPT2_SHA256.values()):
            require(sha256(path) == digest, f"{path}: its checksum is not that of GPT-2's")
        return data_gym_to_mergeable_bpe_ranks(*paths, *GPT2_SHA256.values())
    except (OSError, ValueError) as e:
        what = "downloaded" if vocab_dir is None else f"read from {vocab_dir}"
        raise UserError(f"GPT-2's vocabulary could not be {what} ({type(e).__name__}: "
                        f"{' '.join(str(e).split())[:200]}); give --vocab_dir a folder with its "
                        "encoder.json and vocab.bpe, or take the bytes tokenizer") from None

@functools.lru_cache
def load_tokenizer(name: str, vocab_dir=None):
    """The tokenizer of that name. Raises UserError where its vocabulary cannot be had."""
    if name == "bytes":
        return BytesTokenizer()
    try:
        if name == "gpt2":
            return GPT2Tokenizer(gpt2_merge_ranks(vocab_dir))
        words = Path(__file__).with_name("python.tiktoken").read_text().split()
        return PythonTokenizer({base64.b64decode(word): rank for rank, word in enumerate(words)})
    except ImportError:
        raise UserError(f"the {name} tokenizer needs tiktoken: pip install tiktoken") from None
