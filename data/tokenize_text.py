"""Text in, token shards out.

    ./run.sh tokenize corpus.jsonl.xz --out data/mine --name mine --tokenizer gpt2
    ./run.sh tokenize book.txt --out data/book --name book --tokenizer bytes
    ./run.sh tokenize src/ --glob '**/*.py' --out data/code --name code --tokenizer bytes

Inputs are files and folders. A line of .jsonl (.ndjson) and a row of .parquet is a document; any
other text file is one document. Each may be compressed (.gz, .xz, .bz2). Every document begins with
the end-of-text token. Written into --out, when all is complete: NAME_train_000001.bin and on,
NAME_val_000000.bin and on, and NAME.json, which says what they hold; the same whatever --workers.

Validation takes whole documents by a hash of their text: copies of one go to the same side. Of up
to 134 MB of text it gets the wanted number of tokens or up to 10 % fewer; of more, the wanted
fraction on average. Where documents are too few or too long for that (a single file, say), and for
--val_tokens of more than 134 MB, it is the last tokens, exactly so many.
"""

import bz2
import collections
import contextlib
import fnmatch
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, ShardWriter, UserError, publish, require, run, staging
from data.vocab import PIECE_BYTES, TOKENIZERS, is_utf8, load_tokenizer, piece_end, utf8

DECOMPRESS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
FOLDER_GLOBS = [f"*.{kind}{packed}" for kind in ("txt", "md", "jsonl", "ndjson", "parquet")
                for packed in ("", *DECOMPRESS)]
BATCH_BYTES = 1 << 20  # of text, about, to a worker at a time
HEAD_BATCHES = 128  # read before anything is written; a corpus of fewer is split exactly
BUCKETS = 1 << 16  # of documents, by a hash of their text


# ---- Reading -------------------------------------------------------------------------------------

def matches(parts: tuple, pattern: list) -> bool:
    """Whether the parts of a path match those of a pattern, in which ** is any number of parts."""
    if not pattern or not parts:
        return list(parts) == [part for part in pattern if part != "**"]
    if pattern[0] == "**":
        return matches(parts, pattern[1:]) or matches(parts[1:], pattern)
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def matches_any(path: PurePosixPath, patterns) -> bool:
    """As in a .gitignore: a pattern without a slash is for the name alone, else for the path."""
    split = [pattern.strip("/").split("/") for pattern in patterns]
    return any(matches(path.parts[-1:] if len(pattern) == 1 else path.parts, pattern)
               for pattern in split)


def find_files(inputs, globs, exclude, shuffle=False) -> list[Path]:
    """The files to read, each once, those of a folder sorted by path (or by a hash of the path
    below it), whatever order the file system lists them in."""
    files = {}
    exclude = [".*", *exclude]
    for top in map(Path, inputs):
        found = [PurePosixPath()] if top.is_file() else []
        for folder, folders, names in os.walk(top):
            here = PurePosixPath(Path(folder).relative_to(top).as_posix())
            left_out = {name for name in folders + names if matches_any(here / name, exclude)}
            folders[:] = set(folders) - left_out
            paths = (here / name for name in names if name not in left_out)
            for path in paths:
                if not matches_any(path, globs or FOLDER_GLOBS):
                    continue
                if (top / path).is_file():
                    found.append(path)
                else:
                    print(f"note: {top / path} is left out: it is no file, or a link to a file "
                          "that does not exist", file=sys.stderr)
        require(top.exists(), f"{top}: no such file or folder")
        require(found, f"{top}: no file there matches "
                f"{' or '.join(globs) or '.txt .md .jsonl .parquet'}; --glob chooses others")
        found.sort(key=lambda path: path.parts)
        if shuffle:
            found.sort(key=lambda path: hashlib.sha512(os.fsencode(path)).digest())
        for path in found:
            files.setdefault((top / path).resolve(), top / path)
    return list(files.values())


# Readers yield (place, text in UTF-8, whether it begins a document, whether undamaged).

def read_text(path, stream, _):
    rest = stream.read(2 * PIECE_BYTES)
    require(b"\0" not in rest[:8192],
            f"{path}: holds zero bytes, it is no UTF-8 text; leave it out or convert it")
    rest = rest.removeprefix(b"\xef\xbb\xbf")
    begins = True
    while rest or begins:
        end = piece_end(rest)
        yield str(path), rest[:end], begins, is_utf8(rest[:end])
        rest = rest[end:] + stream.read(end)
        begins = False


def read_jsonl(path, stream, text_field):
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8", "surrogateescape"))
            text = record[text_field] or ""
            data = utf8(text)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{place}: not JSON ({e})") from None
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{place}: no text in a field {text_field!r} of {record!r:.80}; "
                            "--text_field chooses one") from None
        yield place, data, True, data == text.encode("utf-8", "surrogatepass")


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
                yield f"{path}, row {row}", data or b"", True, is_utf8(data or b"")
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    except pa.ArrowException as e:
        raise UserError(f"{path}: no parquet file with text in {text_field!r} ({e!r})") from None


READERS = {"text": read_text, "jsonl": read_jsonl, "ndjson": read_jsonl, "parquet": read_parquet}


def read_files(files, args):
    """What the files hold, with a progress bar of the bytes read from the disk."""
    before = 0
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for path in files:
            packed = path.suffix if path.suffix in DECOMPRESS else ""
            kind = args.format or Path(path.name.removesuffix(packed)).suffix[1:]
            try:
                with open(path, "rb") as raw:
                    stream = DECOMPRESS[packed](raw) if packed else raw
                    for piece in READERS.get(kind, read_text)(path, stream, args.text_field):
                        yield piece
                        bar.update(before + raw.tell() - bar.n)
            except (EOFError, lzma.LZMAError, zlib.error, OSError) as e:
                if isinstance(e, OSError) and e.errno:  # the disk's; the formats' have no number
                    e.filename = path
                    raise
                raise UserError(f"{path}: damaged or cut off ({str(e)!r})") from None
            before += path.stat().st_size


def read_batches(files, args, notes: dict[str, list]):
    """Lists of (text, whether it begins a document, the document's hash bucket) of BATCH_BYTES or a
    little more. A document that comes in pieces goes by the hash of the first. Counts in notes the
    documents that something is wrong with: {what: [how many, the first one's place, the last's]}"""
    done = "kept as it is" if args.tokenizer == "bytes" else "its place taken by U+FFFD"
    batch = []
    size = 0
    for place, data, begins, valid in read_files(files, args):
        require(valid or not args.strict, f"{place}: not valid UTF-8")
        if not data or not valid:
            what = f"invalid UTF-8, {done}" if data else "no text, left out"
            noted = notes.setdefault(what, [0, place, None])
            noted[0] += place != noted[2]  # once for a long document in pieces
            noted[2] = place
        if not data:
            continue
        if begins:
            bucket = int.from_bytes(hashlib.blake2b(data, digest_size=2).digest(), "little")
        batch.append((data, begins, bucket))
        size += len(data)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


# ---- Tokenizing ----------------------------------------------------------------------------------

def encode(batch, tokenizer_name: str, vocab_dir):
    """(tokens, how many each text of the batch became, its document's bucket)"""
    tokenizer = load_tokenizer(tokenizer_name, vocab_dir)
    end_of_text = np.array([tokenizer.eot], dtype=np.uint16)
    parts = [np.concatenate([end_of_text[:begins], tokenizer.encode_utf8(data)])
             for data, begins, _ in batch]
    return np.concatenate(parts), list(map(len, parts)), [bucket for _, _, bucket in batch]


def encode_all(batches, args):
    """The batches encoded, in their order, by threads, for tiktoken leaves Python's lock to others.
    Few batches are under way at a time: memory stays flat."""
    pending = collections.deque()
    with ThreadPoolExecutor(args.workers) as pool:
        for batch in batches:
            pending.append(pool.submit(encode, batch, args.tokenizer, args.vocab_dir))
            if len(pending) > 2 * args.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ---- Splitting -----------------------------------------------------------------------------------

def wanted_val_tokens(total: int, args) -> int:
    wanted = round(args.val_fraction * total) if args.val_tokens is None else args.val_tokens
    require(0 < wanted < total, f"the inputs hold {total} tokens in all, of which validation would "
            f"get {wanted}; change --val_fraction or --val_tokens (0 for no validation)")
    return wanted


def choose_buckets(head, args):
    """Which hash buckets validate, told by the first encoded batches: in order, each that still
    fits into the wanted number of tokens; of a larger corpus the wanted fraction of all buckets;
    none where validation has to be the last tokens."""
    taken = np.zeros(BUCKETS, dtype=bool)
    is_all = len(head) < HEAD_BATCHES
    if not head or args.val_tokens is not None and not is_all:
        return taken
    _, lengths, buckets = zip(*head)
    bucket_tokens = np.bincount(np.concatenate(buckets), np.concatenate(lengths), BUCKETS)
    wanted = wanted_val_tokens(int(bucket_tokens.sum()), args)
    room = wanted
    for bucket in np.flatnonzero(bucket_tokens):
        if bucket_tokens[bucket] <= room:
            taken[bucket] = True
            room -= bucket_tokens[bucket]
    if room > wanted / 10:
        return np.zeros_like(taken)
    return taken if is_all else np.arange(BUCKETS) < round(args.val_fraction * BUCKETS)


def split(encoded, train: ShardWriter, val: ShardWriter, args, end_of_text: int) -> str:
    """Writes the encoded batches into the shards of both sides; how validation was chosen."""
    asked = args.val_fraction if args.val_tokens is None else args.val_tokens
    head = list(itertools.islice(encoded, HEAD_BATCHES)) if asked else []
    taken = choose_buckets(head, args)
    for tokens, lengths, buckets in itertools.chain(head, encoded):
        is_val = np.repeat(taken[buckets], lengths)
        train.write(tokens[~is_val])
        val.write(tokens[is_val])
    if val.tokens or not head:
        return "documents by hash" if val.tokens else "nothing"
    train.move_end(val, wanted_val_tokens(train.tokens, args), end_of_text)
    return "last tokens"


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
    add("--exclude", **patterns, help="files or folders to leave out, as 'tests' or 'src/**/old'")
    add("--shuffle", action="store_true", help="order a folder's files by a hash of their paths")
    add("--format", choices=READERS, help="of all inputs (by the file's name)")
    add("--text_field", default="text", metavar="NAME", help="of jsonl and parquet (text)")
    add("--shard_size", type=int, default=100_000_000, metavar="TOKENS", help="(100000000)")
    add("--val_fraction", type=float, default=0.05, metavar="F", help="of tokens; 0: none (0.05)")
    add("--val_tokens", type=int, metavar="N", help="in place of a fraction")
    add("--strict", action="store_true", help="stop at invalid UTF-8")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    add("--workers", type=int, default=cores, metavar="N", help="threads (one per core)")
    args = p.parse_args(argv)
    require(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", args.name),
            f"--name {args.name!r}: letters, digits, and . _ - only")
    for name, low, high in (("shard_size", 1, (1 << 31) - 1), ("workers", 1, 1000),
                            ("val_tokens", 0, 1 << 62), ("val_fraction", 0, 0.99)):
        value = getattr(args, name)
        require(value is None or low <= value <= high, f"--{name} {value}: must be {low} to {high}")
    return args


def refuse_to_overwrite(args):
    names = f"{args.name}_train_*.bin", f"{args.name}_val_*.bin", f"{args.name}.json"
    there = [path for name in names for path in args.out.glob(name)]
    require(not there, f"{min(there, default='')}: already there, nothing was changed; choose "
            f"another --name or --out, or remove the {len(there)} files of that name")


def main(argv=None):
    args = parse(argv)
    tokenizer = load_tokenizer(args.tokenizer, args.vocab_dir)
    files = find_files(args.inputs, args.glob, args.exclude, args.shuffle)
    notes = {}
    batches = encode_all(read_batches(files, args, notes), args)
    with staging(args.out / f".{args.name}.unfinished") as folder, contextlib.closing(batches):
        refuse_to_overwrite(args)
        train = ShardWriter(folder, f"{args.name}_train", 1, args.shard_size)
        val = ShardWriter(folder, f"{args.name}_val", 0, args.shard_size)
        chosen = split(batches, train, val, args, tokenizer.eot)
        require(train.tokens, f"{args.inputs[0]}: no text in the {len(files)} input files")
        sides = {"train": train.finish(tokenizer), "val": val.finish(tokenizer)}
        sums = [shard["sha256"] for side in sides.values() for shard in side["shards"]]
        checksum = hashlib.sha256("".join(sums).encode()).hexdigest()
        # Without the workers, so that the same shards have the same sidecar.
        arguments = {name: value for name, value in vars(args).items() if name != "workers"}
        sidecar = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
                   "validation": chosen, **sides, "sha256": checksum, "arguments": arguments}
        path = folder / f"{args.name}.json"
        path.write_text(json.dumps(sidecar, indent=1, default=str) + "\n")
        publish([*train.paths, *val.paths, path], args.out)
    for what, (number, first, _) in notes.items():
        print(f"{number} document(s) with {what}; the first: {first}", file=sys.stderr)
    for side, held in sides.items():
        print(f"{side}: {held['documents']} documents, {held['bytes']} bytes of text, "
              f"{held['tokens']} tokens, {len(held['shards'])} shard(s)")
    print(f"chosen for validation: {chosen}; checksum {checksum}")


if __name__ == "__main__":
    sys.exit(run(main))
