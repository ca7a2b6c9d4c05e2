"""data/inspect_shards.py: its numbers, and that a bad shard is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import write_shard

from data import common, inspect_shards
from data.common import UserError, check_shard

def with_sidecar(folder, tokenizer="bytes"):
    (folder / "t.json").write_text(json.dumps({"tokenizer": tokenizer}))

def test_the_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "PIECE_TOKENS", 8)
    with_sidecar(tmp_path)
    lengths = [1, 4, 10, 2, 8]
    tokens = [65, 66] + [t for n in lengths for t in [256] + [70 + n] * (n - 1)]
    path = write_shard(tmp_path / "t_train_000012.bin", tokens)
    inspect_shards.main([str(path)])
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 27 tokens (bytes), ids 65 to 256, 5 documents begin here",
        "  tokens per document: median 4, mean 5, 90 % up to 9, longest 10",
        "  the first 2 tokens continue a document of the shard before",
        "  it begins: ''"]
    path = write_shard(tmp_path / "t_val_000000.bin", list(b"no start"))
    inspect_shards.main([str(path)])
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 8 tokens (bytes), ids 32 to 116, 0 documents begin here",
        "  no end-of-text token (256): made by another tokenizer, or all of it is from within "
        + "one document",
        "  it begins: 'no start'"]

def test_without_a_vocabulary_all_but_the_text_is_told(tmp_path, monkeypatch, capsys):
    def unavailable(*_):
        raise UserError("no vocabulary")
    monkeypatch.setattr(inspect_shards, "load_tokenizer", unavailable)
    inspect_shards.main([str(write_shard(tmp_path / "fineweb_val_000000.bin", [50256, 1, 2]))])
    said = capsys.readouterr().out
    assert "3 tokens (gpt2), ids 1 to 50256, 1 documents" in said
    assert "not decoded: no vocabulary" in said

def test_a_bad_shard_is_named_and_the_others_are_still_reported(tmp_path, capsys):
    with_sidecar(tmp_path)
    good = write_shard(tmp_path / "t_val_000000.bin", [256, 65])
    bad = write_shard(tmp_path / "t_train_000001.bin", [256, 1, 300])
    with pytest.raises(UserError) as expected:
        check_shard(bad, 257)
    assert inspect_shards.main([bad]) == 2
    assert capsys.readouterr() == ("", f"error: {expected.value}\n")
    assert inspect_shards.main([bad, good, str(tmp_path / "none.bin")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"{good}: 2 tokens")
    assert err.splitlines() == [f"error: {expected.value}", f"error: {tmp_path}/none.bin: cannot "
                                "be read (No such file or directory)"]

def test_the_tokenizer_comes_from_the_sidecar_or_the_flag(tmp_path, capsys):
    path = write_shard(tmp_path / "t_train_000001.bin", [256, 65])
    assert inspect_shards.tokenizer_of(Path(path)) == "gpt2"
    with_sidecar(tmp_path)
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.json").read_bytes())
    assert inspect_shards.tokenizer_of(Path(path)) == "bytes"
    for text, words in (('{"tokenizer": "other"}', "unknown tokenizer 'other'"),
                        *((text, "t.json: damaged, names no tokenizer; --tokenizer")
                          for text in ("{", "{}", "[]", "[" * 100_000))):
        (tmp_path / "t.json").write_text(text)
        assert inspect_shards.main([path]) == 2 and words in capsys.readouterr().err
    assert inspect_shards.main([path, "--tokenizer=bytes"]) == 0
    assert "it begins: 'A'" in capsys.readouterr().out

@pytest.mark.parametrize("piece", [8, 50, 10_000])
def test_what_other_shards_hold_too_is_counted(tmp_path, monkeypatch, capsys, piece):
    """Two stretches of the first shard, of 70 and 33 tokens, stand in the others; a stretch of 31
    is too short to count."""
    monkeypatch.setattr(common, "PIECE_TOKENS", piece)
    with_sidecar(tmp_path)
    rng = np.random.default_rng(0)
    tokens, other, third = (rng.integers(0, 256, 400).tolist() for _ in range(3))
    other[100:170] = tokens[50:120]
    other[7:38] = tokens[200:231]
    third[367:] = tokens[300:333]
    val, *trains = (write_shard(tmp_path / f"t_{name}.bin", content) for name, content in (
        ("val_000000", tokens), ("train_000001", other), ("train_000002", third)))
    inspect_shards.main([val, "--seen_in", *trains])
    assert f"  {(39 + 2) / 369:.2%} of its runs of 32 tokens stand in 2 other shard(s) too" in (
        capsys.readouterr().out.splitlines())
