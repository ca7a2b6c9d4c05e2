"""Text in, token shards out.

    ./run.sh tokenize corpus.jsonl.xz --out data/mine --name mine --tokenizer gpt2
    ./run.sh tokenize src/ --glob '*.py' --out data/code --name code --tokenizer python

Inputs are files and folders. A line of JSON Lines (.jsonl, .ndjson, .jsonlines, .jl, .json) and a
row of .parquet is a document; any other text file is one document. Each may be compressed, by gzip,
xz or bzip2. Every document begins with the end-of-text token. Written into --out, when all is
complete: NAME_train_000001.bin and on, NAME_val_000000.bin and on, and NAME.json, which says what
they hold.

Validation takes whole documents by a hash of their text, so that copies of one go to the same side;
it gets the wanted number of tokens or up to 10 % fewer. Where documents are too few or too long for
that (a single file, say), it is the last tokens, exactly so many.
"""

import bz2
import contextlib
import fnmatch
import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import (PIECE_TOKENS, ArgumentParser, UserError, between, publish, require, run,
                         staging, walk, write_shards)
from data.vocab import PIECE_BYTES, TOKENIZERS, load_tokenizer, piece_end, utf8

PACKED = (".gz", ".xz", ".bz2")
# A file is what it begins with, whatever its name says: a browser may have unpacked a .gz.
OPENERS = {rb"\x1f\x8b": gzip.open, rb"\xfd7zXZ\0": lzma.open, rb"BZh[1-9]1AY&SY": bz2.open}
FOLDER_GLOBS = [f"*.{kind}{packed}" for kind in ("txt", "md", "jsonl", "ndjson", "parquet")
                for packed in ("", *PACKED)]
BATCH_BYTES = 1_000_000  # of text, about, in memory at a time, and a step of the progress bar

# ---- Reading -------------------------------------------------------------------------------------

def matches(name: str, patterns) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

def find_files(inputs, globs, exclude) -> list[Path]:
    """The files to read, each once, those of a folder sorted by path, whatever order the file
    system lists them in."""
    files = {}
    hidden = [".*", *exclude]
    for top in map(Path, inputs):
        require(os.path.exists(top), f"{str(top)[:200]}: no such file or folder")
        found = [top]
        if not top.is_file():
            walked = walk(top, lambda name: matches(name, hidden))
            found = [folder / name for folder, names in walked for name in names
                     if matches(name, globs or FOLDER_GLOBS) and not matches(name, hidden)]
        require(found, f"{top}: no file there matches "
                f"{' or '.join(globs) or '.txt .md .jsonl .parquet'}; ./run.sh tokenize --glob=... "
                "chooses others")
        for path in sorted(found, key=lambda path: path.parts):
            if path.is_file():
                files.setdefault(path.resolve(), path)
            else:
                print(f"note: {path} is left out: it is no file, or a link to a file that does not "
                      "exist", file=sys.stderr)
    return list(files.values())

# Readers yield (place, text in UTF-8, whether it begins a document).

def without_mark(path, data: bytes) -> bytes:
    """Without the byte order mark that some editors put first. Raises UserError for UTF-16."""
    require(b"\0" not in data[:8192] and not data.startswith(b"%PDF"), f"{path}: holds zero bytes "
            "or is a PDF, so it is no UTF-8 text; unpack it, convert it or leave it out")
    return data.removeprefix("\ufeff".encode())

def read_text(path, stream, _):
    rest = without_mark(path, stream.read(2 * PIECE_BYTES))
    with contextlib.suppress(ValueError, RecursionError):
        require(not isinstance(json.loads(rest.partition(b"\n")[0]), dict)
                or path.suffix.lower() == ".txt", f"{path}: begins with a JSON object, as JSON "
                "Lines does: name it .jsonl, or .txt if it is one text all the same")
    begins = True
    while rest or begins:
        end = piece_end(rest)
        yield str(path), rest[:end], begins
        rest = rest[end:] + stream.read(end)
        begins = False

def read_jsonl(path, stream, text_field):
    for number, line in enumerate(stream, 1):
        place = f"{path}, line {number}"
        line = without_mark(path, line)  # of any line, since files are joined
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode(errors="replace"))
            if not isinstance(record, dict):
                raise ValueError("not an object")
            yield place, utf8(record[text_field] or ""), True
        except (ValueError, RecursionError) as e:
            raise UserError(f"{place}: not JSON ({e}), of which each line is to hold one object; "
                            "of a file with one array, jq -c '.[]' makes such lines") from None
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{place}: no text in a field {text_field!r} of {record!r:.80}; "
                            "--text_field chooses one") from None

def read_parquet(path, stream, text_field):
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
        parquet = pq.ParquetFile(stream)
        names = parquet.schema_arrow.names
        require(text_field in names,
                f"{path}: no column {text_field!r} among {names}; --text_field chooses one")
        row = 0
        for rows in parquet.iter_batches(batch_size=256, columns=[text_field]):
            for data in rows.column(0).cast(pa.large_binary()).to_pylist():
                row += 1
                yield f"{path}, row {row}", data or b"", True
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    except pa.ArrowException as e:
        raise UserError(f"{path}: no parquet file with text in {text_field!r} ({e!r})") from None

READERS = {".parquet": read_parquet, **dict.fromkeys(
    [".jsonl", ".ndjson", ".jsonlines", ".jl", ".json"], read_jsonl)}  # any other: text

def read_files(files, text_field):
    for path in files:
        name = path.with_suffix("") if path.suffix.lower() in PACKED else path
        require(name.suffix.lower() not in (".csv", ".tsv"), f"{path}: a table is no text: make "
                "JSON Lines of its column of texts, or name it .txt to take all of it as one text")
        reader = READERS.get(name.suffix.lower(), read_text)
        try:
            with open(path, "rb") as raw:
                head = raw.peek(10)
                stream = next((opener(raw) for form, opener in OPENERS.items()
                               if re.match(form, head)), raw)
                yield from reader(path, stream, text_field)
        except (EOFError, lzma.LZMAError, zlib.error, ValueError, OSError) as e:
            # An error of the disk has a number, those of the formats have none.
            require(getattr(e, "errno", None), f"{path}: damaged or cut off ({str(e)!r})")
            raise

def read_batches(pieces, buckets: bytearray, damaged: dict):
    """Lists of (text, whether it begins a document) of BATCH_BYTES or a little more. Appends to
    buckets each document's, a hash of its first piece. The keys of `damaged` become the places of
    documents that are not wholly UTF-8."""
    batch = []
    size = 0
    for place, data, begins in pieces:
        if begins and data:
            buckets += hashlib.blake2b(data, digest_size=2).digest()
        if "\ufffd" in data.decode(errors="replace"):
            damaged[place] = True
        batch += [(data, begins)] * bool(data)
        size += len(data)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch

# ---- Tokenizing ----------------------------------------------------------------------------------

def encode_all(batches, tokenizer):
    """The batches encoded, one after the other, so that memory stays flat. Threads share the texts
    of a batch, since tiktoken leaves Python's lock to others."""
    end_of_text = np.array([tokenizer.eot], dtype="<u2")

    def encode(piece) -> np.ndarray:
        data, begins = piece
        return np.concatenate([end_of_text[:begins], tokenizer.encode_utf8(data)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches:
            yield np.concatenate([*pool.map(encode, batch)])

# ---- Splitting -----------------------------------------------------------------------------------

def split(stream: np.ndarray, buckets, args, end_of_text: int) -> tuple[list, list, str]:
    """(stretches of the tokens to train on, those to validate on, how they were chosen)"""
    total = len(stream)
    wanted = round(args.val_fraction * total)
    require(0 < wanted < total or not args.val_fraction, f"the inputs hold {total} tokens in all, "
            f"of which validation would get {wanted}: give a longer text, or change "
            "--val_fraction of ./run.sh tokenize (0 for none)")
    starts = np.concatenate([at + np.flatnonzero(stream[at:at + PIECE_TOKENS] == end_of_text)
                             for at in range(0, total, PIECE_TOKENS)])
    buckets = np.frombuffer(buckets, dtype="<u2")
    bucket_tokens = np.bincount(buckets, np.diff(starts, append=total))
    taken = np.zeros(len(bucket_tokens), dtype=bool)
    room = wanted
    for bucket in np.flatnonzero(bucket_tokens):
        if bucket_tokens[bucket] <= room:
            taken[bucket] = True
            room -= bucket_tokens[bucket]
    if room > wanted / 10:
        cut = total - wanted
        begin = np.full(int(stream[cut] != end_of_text), end_of_text, dtype=np.uint16)
        return [stream[:cut]], [begin, stream[cut:]], "last tokens"
    is_val = taken[buckets]
    begins = 1 + np.flatnonzero(np.diff(is_val))  # the documents with which the side changes
    stretches = np.split(stream, starts[begins])
    first = int(is_val[0])
    return stretches[first::2], stretches[1 - first::2], "documents by hash"

def shuffled(stretches, length: int, end_of_text: int) -> list[np.ndarray]:
    """Pieces of `length` tokens in one random order. Each begins as a document does."""
    pieces = [text[at:at + length] for text in stretches for at in range(0, len(text), length)]
    begin = np.array([end_of_text], dtype="<u2")
    return [part for i in np.random.RandomState(0).permutation(len(pieces))
            for part in (begin[:int(pieces[i][0] != end_of_text)], pieces[i])]

def parse(argv):
    p = ArgumentParser(description=__doc__, prog="./run.sh tokenize")
    add = p.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file or folder")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    add("--name", required=True, help="what the shards' names begin with")
    add("--tokenizer", choices=TOKENIZERS, required=True)
    add("--vocab_dir", metavar="DIR", help="of GPT-2's encoder.json and vocab.bpe (downloaded)")
    patterns = dict(action="append", default=[], metavar="PATTERN")  # each may be repeated
    add("--glob", **patterns, help="files of folders, as '*.py' (.txt .md .jsonl .parquet)")
    add("--exclude", **patterns, help="files and folders to leave out, as 'tests'")
    add("--shuffle", type=between(1), metavar="N", help="cut into pieces of N tokens, and shuffle")
    add("--text_field", default="text", metavar="NAME", help="of jsonl and parquet (text)")
    add("--shard_size", type=between(1, 2**31 - 1), default=100_000_000, metavar="N",
        help="at most (100000000)")
    add("--val_fraction", type=between(0, 0.99, float), default=0.05, metavar="F",
        help="of tokens; 0: none (0.05)")
    args = p.parse_args(argv)
    require(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", args.name),
            f"--name {args.name!r}: up to 100 letters, digits, and . _ - only")
    return args

def main(argv=None):
    args = parse(argv)
    tokenizer = load_tokenizer(args.tokenizer, args.vocab_dir)
    require("/" not in "".join(args.glob + args.exclude), "--glob and --exclude take names")
    files = find_files(args.inputs, args.glob, args.exclude)
    damaged = {}
    buckets = bytearray()  # two bytes a document
    batches = read_batches(read_files(files, args.text_field), buckets, damaged)
    batches = encode_all(batches, tokenizer)
    with staging(args.out / f".{args.name}.unfinished") as folder, contextlib.closing(batches):
        for there in (path for end in ("_train_*.bin", "_val_*.bin", ".json")
                      for path in sorted(args.out.glob(args.name + end))):
            raise UserError(f"{there}: already there, nothing was changed; choose another --name "
                            "or --out, or remove the files of that name")
        with open(folder / "tokens", "wb") as f:
            for tokens in tqdm(batches, unit=" MB", disable=None):
                f.write(tokens)
        require(buckets, f"{args.inputs[0]}: no text in the {len(files)} input files")
        stream = np.memmap(f.name, dtype="<u2", mode="r")
        *sides, chosen = split(stream, buckets, args, tokenizer.eot)
        if args.shuffle:
            sides = [shuffled(stretches, args.shuffle, tokenizer.eot) for stretches in sides]
        sides = {side: write_shards(stretches, folder / f"{args.name}_{side}", first,
                                    args.shard_size)
                 for side, stretches, first in zip(("train", "val"), sides, (1, 0))}
        sidecar = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
                   "validation": chosen, "shuffle": args.shuffle, **sides}
        path = folder / f"{args.name}.json"
        path.write_text(json.dumps(sidecar, indent=1) + "\n")
        shards = [folder / name for side in sides.values() for name in side["shards"]]
        publish([*shards, path], args.out)
    if damaged:
        print(f"{len(damaged)} document(s) hold invalid UTF-8 or U+FFFD; the first: "
              f"{next(iter(damaged))}", file=sys.stderr)
    for side, held in sides.items():
        print(f"{side}: {held['tokens']} tokens, {len(held['shards'])} shard(s)")
    print(f"{len(buckets) // 2} documents; chosen for validation: {chosen}")

if __name__ == "__main__":
    sys.exit(run(main))
