"""data/tokenize_text.py: what lands where, however it is made, and that a failure leaves none."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import random
import re
from pathlib import Path
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, launch, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from data import common, tokenize_text, vocab
from data.common import UserError, check_shard
from records.tools.launch import DEMO_TEXT, PIECE
from records.tools.logs import read

def documents(folder, side, name="t"):
    paths = sorted(folder.glob(f"{name}_{side}_*.bin"))
    tokens = np.concatenate([check_shard(path, 257) for path in paths])
    before, *found = np.split(tokens, np.flatnonzero(tokens == 256))
    assert len(before) == 0
    return [bytes(document[1:].astype(np.uint8)) for document in found]

def tokenize(out, *argv):
    tokenize_text.main([f"--out={out}", "--name=t", "--tokenizer=bytes", *map(str, argv)])
    return json.loads((out / "t.json").read_text())

def some_documents(n=300, seed=0):
    """Lengths with a heavy tail, as documents have."""
    rng = random.Random(seed)
    return [f"{i} " + "wörd " * int(rng.lognormvariate(4, 1.2)) for i in range(n)]

def write_jsonl(path, texts, opener=open):
    with opener(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    return path

@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
       fraction=st.floats(0.01, 0.6), shard_size=st.integers(100, 2000))
def test_validation_gets_its_share(tmp_path_factory, lengths, fraction, shard_size):
    folder = tmp_path_factory.mktemp("few")
    texts = [bytes([97 + number]) * length for number, length in enumerate(lengths)]
    write_jsonl(folder / "a.jsonl", [text.decode() for text in texts])
    total = sum(lengths) + len(lengths)
    wanted = round(fraction * total)
    command = folder, folder / "a.jsonl", f"--val_fraction={fraction}", f"--shard_size={shard_size}"
    if not 0 < wanted < total:
        with refused(f"{total} tokens in all, of which validation would ", UserError):
            tokenize(*command)
        return
    sidecar = tokenize(*command)
    for side, first in (("train", 1), ("val", 0)):
        sizes = [len(check_shard(folder / name, 257)) for name in sidecar[side]["shards"]]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= shard_size
        assert sidecar[side] == {"tokens": sum(sizes), "shards": {
            name: common.sha256(folder / name) for name in (
                f"t_{side}_{first + i:06}.bin" for i in range(-(-sum(sizes) // shard_size)))}}
    train, val = (documents(folder, side) for side in ("train", "val"))
    held = sidecar["val"]["tokens"]
    if sidecar["validation"] == "documents by hash":
        assert 0.9 * wanted <= held <= wanted and sorted(train + val) == sorted(texts)
    else:
        assert sidecar["validation"] == "last tokens"
        is_cut = b"".join(train) + b"".join(val) == b"".join(texts) and train + val != texts
        assert held == wanted + is_cut
        assert train + val == texts or is_cut

def test_copies_of_a_document_go_to_one_side_wherever_they_stand(tmp_path, monkeypatch):
    """Whole documents go to validation, which is spread over the corpus. The number of cores
    changes nothing, nor do small buffers, every border of which documents straddle."""
    for module, name, size in ((tokenize_text, "BATCH_BYTES", 5000), (vocab, "PIECE_BYTES", 256),
                               (tokenize_text, "PIECE_TOKENS", 1003),
                               (tokenize_text, "PIECE_BYTES", 256)):
        monkeypatch.setattr(module, name, size)
    texts = some_documents(900)
    texts += texts[:200]
    sides = []
    for number, order in enumerate((texts, sorted(texts))):
        path = write_jsonl(tmp_path / f"{number}.jsonl", order)
        sidecars = []
        for out in (tmp_path / f"out{number}", tmp_path / f"again{number}"):
            monkeypatch.setattr(os, "cpu_count", lambda: 1 + 2 * len(sidecars))
            sidecars.append(tokenize(out, path, "--val_fraction=0.2", "--shard_size=9999"))
        assert sidecars[0] == sidecars[1] and sidecars[0]["validation"] == "documents by hash"
        train, val = (documents(out, side) for side in ("train", "val"))
        assert not set(train) & set(val)
        for side in (train, val):  # in the order of the corpus
            assert side == [t.encode() for t in order if t.encode() in set(side)]
        assert len(train + val) == len(texts)
        places = [order.index(text.decode()) for text in val]
        assert min(places) < 100 and max(places) > 600
        sides.append(sorted(val))
    assert sides[0] == sides[1]

def test_every_way_to_hand_in_the_same_documents_gives_the_same_tokens(tmp_path):
    texts = [text.strip() for text in some_documents(40)]
    (tmp_path / "folder").mkdir()
    for i, text in enumerate(texts):
        suffix, opener = [(".gz", gzip.open), (".xz", lzma.open), ("", open)][i % 3]
        with opener(tmp_path / f"folder/{i:03d}.txt{suffix}", "wb") as f:
            f.write(codecs.BOM_UTF8 * (i % 5 == 0) + text.encode())
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), tmp_path / "p.parquet",
                   row_group_size=7)
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), tmp_path / "q.parquet")
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    lines = plain.read_bytes().splitlines(keepends=True)
    # Two files from a Windows editor, joined; the second begins with a blank line.
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"".join([codecs.BOM_UTF8, *lines[:9], codecs.BOM_UTF8 + b"\r\n",
                                 *(line.replace(b"\n", b"\r\n") for line in lines[9:])]))
    ways = [plain, marked, write_jsonl(tmp_path / "a.jsonl.gz", texts, gzip.open),
            write_jsonl(tmp_path / "a.ndjson.xz", texts, lzma.open),
            write_jsonl(tmp_path / "b.jsonl.bz2", texts, bz2.open),
            write_jsonl(tmp_path / "c4-train.00000-of-01024.json.gz", texts, gzip.open),
            write_jsonl(tmp_path / "unpacked.JSONL.GZ", texts),
            tmp_path / "folder", tmp_path / "p.parquet", tmp_path / "q.parquet"]
    sums = [tokenize(tmp_path / f"out{i}", way, "--val_fraction=0.2")["train"]["shards"]
            for i, way in enumerate(ways)]
    assert sums == [sums[0]] * len(ways)
    assert documents(tmp_path / "out0", "train")[0].decode() in texts

def test_files_are_taken_in_the_order_of_their_paths_and_once(tmp_path, monkeypatch):
    every = "a/tests/u.py a/y.py a.py b/x.py lib/idle/v.py tests/t.py"
    for name in (*every.split(), ".hidden/w.py", "a/n.txt", "a/.s.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    monkeypatch.chdir(tmp_path / "in")
    top = Path.cwd()
    for inputs, globs, exclude, expected in (
            ([top], ["*.py"], [], every), ([top], ["*.py"], ["[al]*", "t*"], "b/x.py"),
            ([top], ["?.txt", "a*"], [], "a/n.txt a.py"), ([top], [], [], "a/n.txt"),
            (["b", ".", "a.py"], ["*.py"], ["tests", "lib"], "b/x.py a/y.py a.py")):
        found = tokenize_text.find_files(inputs, globs, exclude)
        assert [(top / path).relative_to(top).as_posix() for path in found] == expected.split()

def test_no_file_below_a_folder_is_left_out_in_silence(tmp_path, monkeypatch):
    """Links to folders are followed, also in a ring, and what cannot be read is an error."""
    for name in ("in/own.txt", "real/a.txt", "real/run.log", "in/closed/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    top = tmp_path / "in"
    for link, target in (("linked", "real"), ("again", "real"), ("ring", "in")):
        (top / link).symlink_to(tmp_path / target)
    found = [path.relative_to(top).as_posix() for path in tokenize_text.find_files([top], [], [])]
    assert found == ["again/a.txt", "closed/b.txt", "own.txt"]
    assert any("run.log" in line for line in read([top])[1])
    scandir = os.scandir
    def closed(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", closed)
    for reader in (lambda: tokenize_text.find_files([top], [], []), lambda: read([top])):
        with pytest.raises(PermissionError, match="closed"):
            reader()

def test_shuffled_pieces_hold_each_token_once_and_begin_as_documents_do(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", some_documents(200))
    plain, mixed = (tokenize(tmp_path / way, path, *flags, "--shard_size=9999")
                    for way, flags in (("plain", []), ("mixed", ["--shuffle=100"])))
    assert (plain["shuffle"], mixed["shuffle"]) == (None, 100)
    for side in ("train", "val"):
        before, after = (documents(tmp_path / way, side) for way in ("plain", "mixed"))
        places = [next(i for i, text in enumerate(before) if piece in text) for piece in after]
        assert max(map(len, after)) <= 100 and places != sorted(places)
        assert sorted(b"".join(before)) == sorted(b"".join(after))

def test_odd_files_and_lines_do_not_stop_a_run(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "latin1.py").write_bytes("# Größe".encode("latin-1"))
    (folder / "plain.py").write_text("plain\r\n")
    (folder / "long.py").write_bytes(b"\xff" * 600_000)  # several pieces, one document
    (folder / "c.py").symlink_to(tmp_path / "nowhere.py")
    (folder / "z.jsonl").write_bytes(b"\n".join([
        b'{"text": "a\\ud800b"}', b"", b"  \r", b'{"text": ""}', b'{"text": null}',
        b'{"text": "\xff", "text": "\xc3\xa9\\u00e9"}']))
    tokenize(tmp_path / "out", folder, "--glob=*.py", "--glob=*.jsonl", "--val_fraction=0")
    assert documents(tmp_path / "out", "train") == [
        "# Größe".encode("latin-1"), b"\xff" * 600_000, b"plain\r\n", "a\ufffdb".encode(),
        "éé".encode()]
    said = capsys.readouterr().err
    assert "c.py is left out: it is no file, or a link" in said
    assert f"3 document(s) hold invalid UTF-8 or U+FFFD; the first: {folder}/latin1.py" in said

def holding(content: bytes):
    return lambda path: path.write_bytes(content)

def parquet_of_numbers(path):
    pq.write_table(pa.table({"text": [1, 2]}), path)

@pytest.mark.parametrize("name, make, options, expected", [
    ("a.jsonl", holding(b'{"text": ""}\n{'), [], "a.jsonl, line 2: not JSON"),
    ("a.jsonl", holding(b'{"body": "x"}'), [], "line 1: no text in a field 'text' of {'body': "),
    ("a.jsonl", holding('{"text": "a"}\n'.encode("utf-16")), [],
     "a.jsonl: holds zero bytes or is a PDF, so it is no UTF-8 text"),
    ("a.json", holding(b'[{"text": "a"}, {"text": "b"}]'), [], "line 1: not JSON (not an object), "
     "of which each line is to hold one object; of a file with one array, jq -c"),
    ("part-00000.gz", holding(gzip.compress(b'{"text": "a"}\n')), [],
     "part-00000.gz: begins with a JSON object, as JSON Lines does: name it .jsonl, or .txt"),
    ("a.csv", holding(b"id,text\n1,a"), [], "a.csv: a table is no text: make JSON Lines"),
    ("a.txt", holding(b"%PDF-1.7\n"), [], "a.txt: holds zero bytes or is a PDF"),
    ("a.jsonl.zst", holding(b"\x28\xb5\x2f\xfd" + bytes(9)), [], "UTF-8 text; unpack it"),
    ("a.txt", holding(codecs.BOM_UTF8), [], "a.txt: no text"),
    ("a.gz", holding(gzip.compress(os.urandom(5000))[:-2000]), [], "a.gz: damaged or cut off"),
    ("a.parquet", parquet_of_numbers, [],
     "no parquet file with text in 'text' (ArrowNotImplementedError('Unsupp"),
    ("a.parquet", parquet_of_numbers, ["--text_field=body"], "no column 'body' among ['text']"),
    ("A text in place of a file. " * 100, Path, [], ": no such file or folder"),
    ("a", Path.mkdir, [], "a: no file there matches"),
    ("a.txt", holding(b"abc"), [], "hold 4 tokens in all, of which validation would get 0: give a"),
    ("a.txt", holding(b"abc"), [f"--name={'n' * 101}"], "up to 100 letters, digits, and . _ -")])
def test_user_errors(tmp_path, name, make, options, expected):
    make(tmp_path / name)
    out = tmp_path / "out"
    with refused(f"^.{{,400}}{re.escape(expected)}.{{,200}}$", UserError):
        tokenize(out, tmp_path / name, *options)
    assert not out.exists() or not list(out.iterdir())

def test_it_never_overwrites(tmp_path):
    corpus, out = write_jsonl(tmp_path / "corpus.jsonl", some_documents()), tmp_path / "out"
    tokenize(out, corpus)
    before = {p: p.read_bytes() for p in out.iterdir()}
    tokenize(out, corpus, "--name=u", "--val_fraction=0.2")  # another name is welcome
    with refused("t_train_000001.bin: already there, nothing", UserError):
        tokenize(out, corpus)
    assert all(p.read_bytes() == held for p, held in before.items())
    for path in out.glob("t_*.bin"):
        path.unlink()
    with refused("t.json: already there", UserError):
        tokenize(out, corpus)

def test_memory_stays_flat():
    """However large the corpus, a batch is read when the one before is written."""
    taken = []
    batches = ([(bytes([i]), taken.append(i) is None)] for i in range(9))
    for number, tokens in enumerate(tokenize_text.encode_all(batches, vocab.BytesTokenizer())):
        assert tokens.tolist() == [256, number] and len(taken) == number + 1
    assert len(taken) == 9

def test_the_demos_text_and_no_program_needs_the_script_or_torch(tmp_path):
    """As run.sh makes it. A broken tweak of the script breaks no tool."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules |= dict.fromkeys(["train_gpt", "torch"])
from data import fineweb, inspect_shards, tokenize_text
tokenize_text.main(sys.argv[1:])
inspect_shards.main(["data/demo/demo_train_000001.bin"])
"""
    argv = (str(Path(torch.__file__).parent), *DEMO_TEXT.split(), "--out=data/demo",
            "--name=demo", "--tokenizer=python", f"--shuffle={PIECE}")
    done = launch(code, *argv, script="-c", cwd=tmp_path)
    assert " documents; chosen for validation: documents by hash\n" in done.stdout
    assert "tokens (python)" in done.stdout and re.search("it begins: ['\"]", done.stdout)
    train, val = map(int, re.findall(r"(?m)^(?:train|val): (\d+) tokens", done.stdout))
    assert abs(val / (train + val) / 0.05 - 1) < 0.02
