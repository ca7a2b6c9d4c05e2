"""data/inspect_shards.py: its numbers, and that a bad shard is named."""

import json
from pathlib import Path
import pytest
from conftest import write_shard
from data import inspect_shards
from data.common import UserError, check_shard

def with_sidecar(folder, tokenizer="bytes"):
    (folder / "t.json").write_text(json.dumps({"tokenizer": tokenizer}))

def inspected(capsys, *arguments):
    return inspect_shards.main(list(map(str, arguments))), *capsys.readouterr()

def test_the_numbers(tmp_path, capsys):
    with_sidecar(tmp_path)
    lengths = [1, 4, 10, 2, 8]
    tokens = [65, 66] + [t for n in lengths for t in [256] + [70 + n] * (n - 1)]
    path = write_shard(tmp_path / "t_train_000012.bin", tokens)
    assert inspected(capsys, path)[1].splitlines() == [
        f"{path}: 27 tokens (bytes), ids 65 to 256, 5 documents begin here",
        "  tokens per document: median 4, mean 5, 90 % up to 9, longest 10", "  it begins: ''"]
    path = write_shard(tmp_path / "t_val_000000.bin", list(b"no start"))
    assert inspected(capsys, path)[1].splitlines() == [
        f"{path}: 8 tokens (bytes), ids 32 to 116, 0 documents begin here",
        "  no end-of-text token (256): made by another tokenizer, or all of it is from within "
        + "one document", "  it begins: 'no start'"]

def test_a_bad_shard_is_named_and_the_others_are_still_reported(tmp_path, capsys):
    with_sidecar(tmp_path)
    good = write_shard(tmp_path / "t_val_000000.bin", [256, 65])
    bad = write_shard(tmp_path / "t_train_000001.bin", [256, 1, 300])
    with pytest.raises(UserError) as expected:
        check_shard(bad, 257)
    assert inspected(capsys, bad) == (2, "", f"error: {expected.value}\n")
    status, out, err = inspected(capsys, bad, good, tmp_path / "none.bin")
    assert status == 2 and out.startswith(f"{good}: 2 tokens")
    assert err.splitlines() == [f"error: {expected.value}", "error: [Errno 2] No such file or "
                                f"directory: '{tmp_path}/none.bin'"]

def test_the_tokenizer_comes_from_the_sidecar_or_the_flag(tmp_path, capsys):
    path = write_shard(tmp_path / "t_train_000001.bin", [256, 65])
    assert inspect_shards.tokenizer_of(Path(path)) == "gpt2"
    with_sidecar(tmp_path)
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.json").read_bytes())
    assert "it begins: 'A'" in inspected(capsys, path)[1]
    for text in ('{"tokenizer": "other"}', '{"tokenizer": []}', "{", "{}", "[]", "[" * 100_000):
        (tmp_path / "t.json").write_text(text)
        status, _, err = inspected(capsys, path)
        assert status == 2 and "t.json: names no known tokenizer; make the sh" in err
