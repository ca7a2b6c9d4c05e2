"""data/vocab.py: the tokenizers, and that text cut into pieces gives the tokens of the whole."""

import itertools
import json
import random
import sys
import numpy as np
import pytest
from conftest import refused, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from data import inspect_shards, tokenize_text, vocab
from data.common import UserError, check_shard, sha256
from data.vocab import GPT2Tokenizer, gpt2_merge_ranks, load_tokenizer, piece_end

# Letters, digits, contractions, punctuation, and white space of one to three bytes, some of it odd.
LETTERS = "abst'lve01_-. \n\t\r\x1céЖ的\u0661\u2167\u0301\xa0\x85\u1680\u2003\u2028\u3000\U0001f600"
TEXT = st.text(st.sampled_from(LETTERS), max_size=80)

@pytest.fixture(scope="module")
def vocab_dir(tmp_path_factory):
    """A folder for --vocab_dir, taken for GPT-2's while this module's tests run. Its merges are
    pairs of bytes in a random order, so that a cut in the wrong place shows."""
    folder = tmp_path_factory.mktemp("vocab")
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    order = printable + [b for b in range(256) if b not in printable]
    letters = {b: chr(b) if b in printable else chr(256 + i - len(printable))
               for i, b in enumerate(order)}
    common = b"abst'lve01_-. \n"
    pairs = [(a, b) for a in range(256) for b in range(256)]
    random.Random(0).shuffle(pairs)
    pairs.sort(key=lambda pair: not set(pair) <= set(common))
    merges = [(letters[a], letters[b]) for a, b in pairs[:50_000]]
    ids = {token: i for i, token in enumerate([*map(letters.get, order), *map("".join, merges)])}
    (folder / "encoder.json").write_text(json.dumps({**ids, "<|endoftext|>": 50256}))
    lines = ["#version: 0.2", *map(" ".join, merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        patch.setattr(vocab, "GPT2_SHA256",
                      {name: sha256(folder / name) for name in ("vocab.bpe", "encoder.json")})
        yield folder

@pytest.fixture(scope="module")
def gpt2(vocab_dir):
    return GPT2Tokenizer(gpt2_merge_ranks(vocab_dir))

@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=8), size=st.integers(4, 40))
def test_pieces_are_whole_characters_and_lose_nothing(gpt2, texts, size):
    data, pieces, start = "".join(texts).encode(), [], 0
    whole = gpt2.encode(data.decode())
    assert gpt2.decode(whole) == data.decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "PIECE_BYTES", size)
        while start < len(data):
            end = piece_end(data, start)
            assert start < end <= start + size
            pieces.append(data[start:end].decode())
            start = end
        ids = gpt2.encode(data.decode())
    assert "".join(pieces).encode() == data
    # Wherever a piece ends at its proper place the tokens are those of the whole text.
    if all(right[0] in " \t\n\r" and not left[-1].isspace()
           for left, right in itertools.pairwise(pieces)):
        assert ids == whole

@pytest.mark.parametrize("unit", [" ", "a"])
def test_a_run_that_overflows_the_regex_engine_does_not_reach_it(gpt2, unit):
    text = unit * 1_200_000 + "x"
    assert gpt2.decode(gpt2.encode(text)) == text

@pytest.mark.parametrize("name", ["bytes", "python", "gpt2"])
def test_what_all_promise(name, gpt2):
    tokenizer = gpt2 if name == "gpt2" else load_tokenizer(name)
    assert tokenizer.eot == tokenizer.vocab_size - 1 and tokenizer.name == name
    text = "naïve <|endoftext|> 的\n"
    ids = tokenizer.encode(text)
    assert type(ids) is list and tokenizer.eot not in ids and tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot] + tokenizer.encode("a")) == "<|endoftext|>a"
    assert tokenizer.encode("") == [] and tokenizer.encode_utf8(b"").dtype == np.uint16
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode_utf8(b"a\xffb").tolist()) == "a\ufffdb"

def test_where_the_vocabulary_cannot_be_had(vocab_dir, tmp_path, monkeypatch, capsys):
    from tiktoken_ext import openai_public
    def no_network():
        raise ConnectionError("no network")
    monkeypatch.setattr(openai_public, "gpt2", no_network)
    with refused("could not be downloaded .ConnectionError: no network.; give --vocab", UserError):
        load_tokenizer("gpt2")
    inspect_shards.main([write_shard(tmp_path / "fineweb_val_000000.bin", [50256, 1, 2])])
    said = capsys.readouterr().out
    assert "3 tokens (gpt2), ids 1 to 50256, 1 documents" in said and "not decoded: GPT-2" in said
    with refused("could not be read from .*No such file.*vocab.bpe", UserError):
        load_tokenizer("gpt2", str(tmp_path))
    for damaged in (b"", (vocab_dir / "vocab.bpe").read_bytes() + b"\n"):
        (tmp_path / "vocab.bpe").write_bytes(damaged)
        with refused("vocab.bpe: its checksum is not that of GPT-2's", UserError):
            load_tokenizer("gpt2", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    load_tokenizer.cache_clear()
    for name in ("gpt2", "python"):
        with refused(f"the {name} tokenizer needs tiktoken: pip install tiktoken", UserError):
            load_tokenizer(name, "elsewhere")

def test_shards_of_gpt2_tokens(vocab_dir, gpt2, tmp_path, capsys):
    load_tokenizer.cache_clear()
    texts = [f"document {i} says naïve things" * (i % 7 + 1) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenize_text.main([str(tmp_path / "a.jsonl"), f"--out={tmp_path}", "--name=t",
                        "--tokenizer=gpt2", f"--vocab_dir={vocab_dir}"])
    decoded = []
    for path in (tmp_path / "t_train_000001.bin", tmp_path / "t_val_000000.bin"):
        decoded += gpt2.decode(check_shard(path, 50257).tolist()).split("<|endoftext|>")[1:]
    assert sorted(decoded) == sorted(texts)
    capsys.readouterr()
    inspect_shards.main([str(tmp_path / "t_train_000001.bin"), f"--vocab_dir={vocab_dir}"])
    assert "(gpt2)" in (said := capsys.readouterr().out) and "it begins: 'document" in said
    load_tokenizer.cache_clear()
