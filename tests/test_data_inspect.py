"""The inspector: its numbers, and that a bad shard is named in the words training uses."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data import inspect_shards
from data.common import run
from conftest import write_shard
from train_gpt import UserError, check_shard


def with_sidecar(folder, tokenizer="bytes"):
    (folder / "t.json").write_text(json.dumps({"tokenizer": tokenizer}))


def test_the_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspect_shards, "PIECE_TOKENS", 7)
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
    assert capsys.readouterr().out.splitlines() == [f"{path}: 8 tokens (bytes), ids 32 to 116, 0 documents begin here",
                                                    "  it begins: 'no start'"]


def test_without_a_vocabulary_all_but_the_text_is_told(tmp_path, monkeypatch, capsys):
    def unavailable(*_):
        raise UserError("no vocabulary")
    monkeypatch.setattr(inspect_shards, "load_tokenizer", unavailable)
    inspect_shards.main([str(write_shard(tmp_path / "fineweb_val_000000.bin", [50256, 1, 2]))])
    said = capsys.readouterr().out
    assert "3 tokens (gpt2), ids 1 to 50256, 1 documents" in said and "not decoded: no vocabulary" in said


@pytest.mark.parametrize("change, where", [
    ({"magic": 1}, "magic number 1 at byte 0"), ({"version": 2}, "version 2 at byte 4"), ({"count": 9}, "at byte 8"),
    ({"tokens": [256, 1, 300]}, "token 300 at byte 1028"), ({"tokens": []}, "token count 0 at byte 8")])
def test_a_bad_shard_is_named_in_the_words_of_training(tmp_path, capsys, change, where):
    with_sidecar(tmp_path)
    good = write_shard(tmp_path / "t_val_000000.bin", [256, 65])
    bad = write_shard(tmp_path / "t_train_000001.bin", **{"tokens": [256, 65], **change})
    with pytest.raises(UserError) as training:
        check_shard(bad, 257)
    assert where in str(training.value)
    assert run(lambda: inspect_shards.main([str(bad)])) == 2
    assert capsys.readouterr() == ("", f"error: {training.value}\n")
    assert run(lambda: inspect_shards.main([str(bad), str(good)])) == 2
    captured = capsys.readouterr()
    assert f"{good}: 2 tokens" in captured.out  # the others are still reported
    assert captured.err.splitlines() == [f"error: {training.value}", "error: 1 of 2 shards are bad"]


def test_the_tokenizer_comes_from_the_sidecar_or_the_flag(tmp_path, capsys):
    path = write_shard(tmp_path / "t_train_000001.bin", [256, 65])
    assert inspect_shards.tokenizer_of(Path(path)) == "gpt2"
    with_sidecar(tmp_path)
    assert inspect_shards.tokenizer_of(Path(path)) == "bytes"
    with_sidecar(tmp_path, "other")
    assert run(lambda: inspect_shards.main([str(path)])) == 2 and "unknown tokenizer 'other'" in capsys.readouterr().err
    (tmp_path / "t.json").write_text("{")
    assert run(lambda: inspect_shards.main([str(path)])) == 2 and "t.json: damaged" in capsys.readouterr().err
    inspect_shards.main([str(path), "--tokenizer=bytes"])
    assert "it begins: 'A'" in capsys.readouterr().out
    assert run(lambda: inspect_shards.main([str(tmp_path / "none.bin")])) == 2
    assert "cannot be read" in capsys.readouterr().err
