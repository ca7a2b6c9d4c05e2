"""Text in, token shards out.

    python data/tokenize_text.py corpus.jsonl.xz --out data/mine --name mine --tokenizer gpt2
    python data/tokenize_text.py book.txt --out data/book --name book --tokenizer bytes --val_fraction 0.1
    python data/tokenize_text.py src/ --glob '**/*.py' --exclude tests --out data/code --name code --tokenizer bytes

Inputs are files and folders. A line of .jsonl (.ndjson) and a row of .parquet is a document; any other text file is
one document. Each of them, parquet apart, may be compressed (.gz, .xz, .bz2). Every document begins with the
end-of-text token. Written into --out: NAME_train_000001.bin and on, NAME_val_000000.bin and on, and last NAME.json,
which says what they hold.

Validation takes whole documents, chosen by a hash of their text: the same ones in whatever order they come, and copies
of one document all on the same side. Where documents are too few or too long to come within 10 % of the wanted size (a
single file, say) it takes the last tokens of the corpus instead.

The shards depend on the inputs and the options alone, not on the number of workers. They get their names when all of
them are complete: a run that is killed leaves nothing but the folder .NAME.unfinished, which the next one clears. Memory
stays flat; the disk needs 2 bytes per token.
"""

import bz2
import collections
import fnmatch
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, publish, run, staging
from data.vocab import PIECE_BYTES, TOKENIZERS, load_tokenizer, piece_end, utf8
from train_gpt import SHARD_HEADER_INTS, SHARD_MAGIC, SHARD_VERSION, UserError

DECOMPRESS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}  # anything else is text
FOLDER_GLOBS = [f"*{suffix}{packed}" for suffix in (".txt", ".md", *KINDS) for packed in ("", *DECOMPRESS)]
BATCH_BYTES = 1 << 20  # of text, about, to a worker at a time
HASH_BUCKETS = 1 << 16
INDEX_RECORD = np.dtype([("tokens", "<u8"), ("bucket", "<u2")])
SPOOL_TOKENS = 1 << 26  # in a file of the spool
COPY_TOKENS = 1 << 22  # at a time from the spool to the shards


# ----------------------------------------------------------------------------------------------------------------------
# Finding files.

def matches(parts: tuple, pattern: tuple) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def matches_any(path: PurePosixPath, patterns) -> bool:
    """As in a .gitignore: a pattern without a slash is for the name alone, one with a slash for the whole path."""
    return any(matches(path.parts, tuple(p.strip("/").split("/"))) if "/" in p.strip("/") else
               fnmatch.fnmatchcase(path.name, p.strip("/")) for p in patterns)


def find_files(inputs, globs, exclude, shuffle=False) -> list[Path]:
    """The files to read, those of a folder sorted by path (or by a hash of the path below it), whatever order the file
    system lists them in."""
    order = (lambda path: hashlib.sha512(str(path).encode()).digest()) if shuffle else (lambda path: path.parts)
    files = {}
    for top in map(Path, inputs):
        if top.is_file():
            files[top.resolve()] = top
            continue
        if not top.is_dir():
            raise UserError(f"{top}: no such file or folder")
        found = []
        for folder, names_of_folders, names in os.walk(top):
            here = PurePosixPath(Path(folder).relative_to(top).as_posix())
            wanted = lambda name: not name.startswith(".") and not matches_any(here / name, exclude)
            names_of_folders[:] = filter(wanted, names_of_folders)
            found += [here / name for name in names if wanted(name) and matches_any(here / name, globs or FOLDER_GLOBS)]
        if not found:
            raise UserError(f"{top}: no file there matches {' or '.join(globs or ['.txt .md .jsonl .parquet'])}; "
                            "--glob chooses others")
        for path in sorted(found, key=order):
            files.setdefault((top / path).resolve(), top / path)
    return list(files.values())


# ----------------------------------------------------------------------------------------------------------------------
# Reading: the main process cuts the inputs into batches of raw bytes, in order.

@dataclass
class Batch:
    """What a worker tokenizes at a time."""
    kind: str
    pieces: list  # text: pieces of files; jsonl: one block of whole lines; parquet: rows
    where: list   # text: the file of each piece; else the file alone
    first: int = 1  # jsonl, parquet: number of the first line or row
    begins_document: list = field(default_factory=list)  # text: whether each piece begins its file
    disk_bytes: int = 0  # of input, read since the batch before


def read_batches(files, args):
    """The files in batches of about BATCH_BYTES: small text files share one."""
    small = Batch("text", [], [])
    for batch in (batch for path in files for batch in read_file(path, args)):
        if batch.kind == "text":
            small.pieces += batch.pieces
            small.where += batch.where
            small.begins_document += batch.begins_document
            small.disk_bytes += batch.disk_bytes
        if small.pieces and (batch.kind != "text" or sum(map(len, small.pieces)) >= BATCH_BYTES):
            yield small
            small = Batch("text", [], [])
        if batch.kind != "text":
            yield batch
    if small.pieces:
        yield small


def read_file(path, args):
    packed = path.suffix if path.suffix in DECOMPRESS else ""
    kind = args.format or KINDS.get(Path(path.name.removesuffix(packed)).suffix, "text")
    if kind == "parquet":
        yield from read_parquet(path, args.text_field)
        return
    try:
        with open(path, "rb") as raw:
            stream = DECOMPRESS[packed](raw) if packed else raw
            told = 0
            for batch in read_lines(path, stream) if kind == "jsonl" else read_text(path, stream):
                batch.disk_bytes, told = raw.tell() - told, raw.tell()
                yield batch
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as e:
        if isinstance(e, OSError) and e.errno:  # the disk's; those of gzip and bz2 have no number
            raise
        raise UserError(f"{path}: damaged or cut off ({e})") from None


def read_text(path, stream):
    rest, begins = b"", True
    while True:
        block = stream.read(PIECE_BYTES)
        rest += block
        while len(rest) > PIECE_BYTES or not block:
            end = piece_end(rest)
            piece, rest = rest[:end], rest[end:]
            if begins:
                if b"\0" in piece[:8192]:
                    raise UserError(f"{path}: holds zero bytes, it is no UTF-8 text; leave it out or convert it")
                piece = piece.removeprefix(b"\xef\xbb\xbf")
            yield Batch("text", [piece], [path], begins_document=[begins])
            begins = False
            if not rest and not block:
                return


def read_lines(path, stream):
    parts, line = [], 1
    while block := stream.read(BATCH_BYTES):
        cut = block.rfind(b"\n") + 1
        parts.append(block[:cut] if cut else block)
        if cut:
            lines = b"".join(parts)
            yield Batch("jsonl", [lines], [path], first=line)
            line += lines.count(b"\n")
            parts = [block[cut:]]
    if any(parts):
        yield Batch("jsonl", [b"".join(parts)], [path], first=line)


def read_parquet(path, text_field):
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pq.ParquetFile(path) as parquet:
            columns = parquet.schema_arrow
            if text_field not in columns.names:
                raise UserError(f"{path}: no column {text_field!r} among {', '.join(columns.names)}; "
                                "--text_field chooses one")
            kind = columns.field(text_field).type
            if not any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                               pa.types.is_large_binary)):
                raise UserError(f"{path}: column {text_field!r} holds {kind}, not text")
            row, size = 1, path.stat().st_size
            for rows in parquet.iter_batches(batch_size=256, columns=[text_field]):
                yield Batch("parquet", rows.column(0).to_pylist(), [path], first=row,
                            disk_bytes=size * len(rows) // parquet.metadata.num_rows)
                row += len(rows)
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, pa.ArrowException) or e.errno is None:  # Arrow's own errors can be OSErrors
            raise UserError(f"{path}: no parquet file, or damaged ({str(e).splitlines()[0]})") from None
        raise


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizing, in the workers.

@dataclass
class Encoded:
    """A batch in tokens. lengths and buckets have one entry per document; where begins_document is False the first
    entry continues the document before."""
    tokens: np.ndarray
    lengths: list
    buckets: list
    begins_document: bool
    disk_bytes: int
    empty: list    # where documents without text stood
    invalid: list  # where invalid UTF-8 stood
    error: str = ""


def documents_of(batch: Batch, text_field: str):
    """(where, text in UTF-8, whether it begins a document, whether it was damaged) of each. Raises UserError."""
    if batch.kind == "text":
        for where, data, begins in zip(batch.where, batch.pieces, batch.begins_document):
            yield where, data, begins, not is_utf8(data)
    elif batch.kind == "parquet":
        for row, text in enumerate(batch.pieces, batch.first):
            data = text.encode() if isinstance(text, str) else text or b""
            yield f"{batch.where[0]}, row {row}", data, True, not is_utf8(data)
    else:
        for number, line in enumerate(batch.pieces[0].split(b"\n"), batch.first):
            if line and not line.isspace():
                where = f"{batch.where[0]}, line {number}"
                yield where, *text_of_line(where, line, text_field)


def text_of_line(where: str, line: bytes, text_field: str):
    decoded = line.decode("utf-8", "replace")
    damaged = "\ufffd" in decoded and not is_utf8(line)
    try:
        record = json.loads(decoded)
    except ValueError as e:
        raise UserError(f"{where}: not JSON ({e})") from None
    except RecursionError:
        raise UserError(f"{where}: JSON nested too deeply") from None
    if not isinstance(record, dict) or text_field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where}: no field {text_field!r} (it holds {fields[:80]}); --text_field chooses one")
    text = record[text_field]
    if not isinstance(text, str | None):
        raise UserError(f"{where}: field {text_field!r} holds a {type(text).__name__}, not text")
    data = utf8(text or "")
    return data, True, damaged or not is_utf8(text or "")


def is_utf8(text) -> bool:
    try:
        text.decode() if isinstance(text, bytes) else text.encode()
        return True
    except UnicodeError:
        return False


def encode_documents(batch: Batch, tokenizer_name: str, vocab_dir, text_field: str) -> Encoded:
    tokenizer = load_tokenizer(tokenizer_name, vocab_dir)
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    pieces, out = [], Encoded(np.empty(0, np.uint16), [], [], True, batch.disk_bytes, [], [])
    try:
        for where, data, begins, damaged in documents_of(batch, text_field):
            if not data:
                out.empty.append(str(where))
                continue
            if damaged:
                out.invalid.append(str(where))
            ids = tokenizer.encode_utf8(data)
            if begins or not out.lengths:
                out.lengths.append(0)
                # A document longer than a piece goes by the hash of its first piece.
                out.buckets.append(int.from_bytes(hashlib.blake2b(data, digest_size=2).digest(), "little"))
                if not begins:
                    out.begins_document = False
            if begins:
                pieces.append(eot)
            pieces.append(ids)
            out.lengths[-1] += len(ids) + begins
    except UserError as e:
        out.error = str(e)
    if pieces:
        out.tokens = np.concatenate(pieces)
    return out


def start_worker(tokenizer_name, vocab_dir):
    """The main process decides when to stop, and a worker outlives it in no case."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    load_tokenizer(tokenizer_name, vocab_dir)


def encode_all(batches, args):
    """Encoded batches in the order of the batches, from as many processes as workers. Few are under way at a time, so
    that memory stays flat."""
    how = (args.tokenizer, args.vocab_dir, args.text_field)
    if args.workers == 1:
        for batch in batches:
            yield encode_documents(batch, *how)
        return
    # Forked workers share the tokenizer that is already loaded; elsewhere each loads its own.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(args.workers, context, start_worker, how[:2])
    try:
        pending = collections.deque()
        for batch in batches:
            pending.append(pool.submit(encode_documents, batch, *how))
            if len(pending) > 2 * args.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process died, most likely for lack of memory; try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------
# The spool: all tokens in reading order, and an index of documents. Only when all is known can validation be chosen.

class Spool:
    def __init__(self, folder: Path):
        self.folder, self.files, self.tokens, self.documents = folder, 0, 0, 0
        self.out, self.room = None, 0
        self.index = open(folder / "index", "wb")
        self.open_document = None  # (tokens, bucket): it may go on in the next batch
        self.bucket_tokens = np.zeros(HASH_BUCKETS, dtype=np.uint64)

    def append(self, encoded: Encoded):
        documents = np.array(list(zip(encoded.lengths, encoded.buckets)), dtype=INDEX_RECORD)
        if len(documents) and not encoded.begins_document:
            documents["bucket"][0] = self.open_document["bucket"][0]
            documents["tokens"][0] += self.open_document["tokens"][0]
        elif len(documents):
            self.flush_document()
        self.add_to_index(documents[:-1])
        self.open_document = documents[-1:] if len(documents) else self.open_document

        tokens = encoded.tokens
        self.tokens += len(tokens)
        while len(tokens):
            if not self.room:
                self.close_file()
                self.out, self.room = open(self.folder / f"spool_{self.files:06d}", "wb"), SPOOL_TOKENS
                self.files += 1
            self.out.write(tokens[:self.room].astype("<u2").data)
            tokens, self.room = tokens[self.room:], max(self.room - len(tokens), 0)

    def add_to_index(self, documents):
        self.documents += len(documents)
        np.add.at(self.bucket_tokens, documents["bucket"], documents["tokens"])
        self.index.write(documents.tobytes())

    def flush_document(self):
        if self.open_document is not None:
            self.add_to_index(self.open_document)
            self.open_document = None

    def close_file(self):
        if self.out:
            self.out.close()

    def finish(self):
        self.flush_document()
        self.index.close()
        self.close_file()

    def runs_by_document(self, taken):
        """(whether for validation, number of tokens) of each run of documents that go to the same side."""
        with open(self.folder / "index", "rb") as index:
            while len(documents := np.frombuffer(index.read(INDEX_RECORD.itemsize << 16), dtype=INDEX_RECORD)):
                side = taken[documents["bucket"]]
                starts = np.flatnonzero(np.diff(side, prepend=not side[0]))
                yield from zip(side[starts].tolist(), np.add.reduceat(documents["tokens"], starts).tolist())

    def read(self):
        """A function that returns the next n tokens or fewer; files are deleted as they are read, so that the disk
        holds little more than one copy of the tokens."""
        def pieces():
            for number in range(self.files):
                path = self.folder / f"spool_{number:06d}"
                with open(path, "rb") as f:
                    while piece := f.read(2 * COPY_TOKENS):
                        yield np.frombuffer(piece, dtype="<u2")
                path.unlink()

        unread, rest = pieces(), np.empty(0, dtype="<u2")

        def take(n):
            nonlocal rest
            if not len(rest):
                rest = next(unread)
            out, rest = rest[:n], rest[n:]
            return out
        return take


# ----------------------------------------------------------------------------------------------------------------------
# Shards.

class ShardWriter:
    """Writes one side's shards, and counts what they hold."""

    def __init__(self, folder: Path, stem: str, first_number: int, num_tokens: int, shard_size: int, tokenizer):
        self.folder, self.stem, self.number, self.remaining = folder, stem, first_number, num_tokens
        self.shard_size, self.tokenizer = shard_size, tokenizer
        self.shards, self.documents, self.tokens, self.bytes = [], 0, 0, 0
        self.out, self.room = None, 0

    def write(self, tokens):
        while len(tokens):
            if not self.room:
                self.open_shard()
            piece, tokens = tokens[:self.room], tokens[self.room:]
            data = piece.astype("<u2").tobytes()
            self.out.write(data)
            self.digest.update(data)
            self.room -= len(piece)
            self.remaining -= len(piece)
            self.tokens += len(piece)
            self.documents += int((piece == self.tokenizer.eot).sum())
            self.bytes += int(self.tokenizer.token_bytes[piece].sum())
            if not self.room:
                self.out.close()
                self.shards[-1]["sha256"] = self.digest.hexdigest()

    def open_shard(self):
        self.room = min(self.shard_size, self.remaining)
        header = np.zeros(SHARD_HEADER_INTS, dtype="<i4")
        header[:3] = SHARD_MAGIC, SHARD_VERSION, self.room
        self.shards.append({"file": f"{self.stem}_{self.number:06d}.bin", "tokens": self.room})
        self.out = open(self.folder / self.shards[-1]["file"], "wb")
        self.digest = hashlib.sha256(header.tobytes())
        self.out.write(header.tobytes())
        self.number += 1

    def summary(self) -> dict:
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes,
                "bytes_per_token": self.bytes / self.tokens if self.tokens else None, "shards": self.shards}


def choose_buckets(bucket_tokens, wanted: int):
    """Which hash buckets are for validation: in order, each that still fits into the wanted number of tokens. None
    where that falls short by more than 10 %."""
    taken, room = np.zeros(HASH_BUCKETS, dtype=bool), wanted
    for bucket in np.flatnonzero(bucket_tokens):
        if bucket_tokens[bucket] <= room:
            taken[bucket] = True
            room -= int(bucket_tokens[bucket])
    return taken if room <= wanted / 10 else None


def wanted_val_tokens(total: int, args) -> int:
    wanted = round(args.val_fraction * total) if args.val_tokens is None else args.val_tokens
    if wanted >= total:
        raise UserError(f"the inputs hold {total} tokens in all; --val_tokens {wanted} leaves none to train on")
    if not wanted and (args.val_fraction if args.val_tokens is None else 0):
        raise UserError(f"the inputs hold {total} tokens in all, too few for a validation part of {args.val_fraction}; "
                        "raise --val_fraction, or set it to 0 for none")
    return wanted


def write_shards(spool: Spool, folder: Path, args, tokenizer):
    """The spool into shards of train and validation; (writers, how validation was chosen)."""
    wanted = wanted_val_tokens(spool.tokens, args)
    taken = choose_buckets(spool.bucket_tokens, wanted)
    if taken is None:
        chosen = "last tokens"
        runs, val_tokens = [(False, spool.tokens - wanted), (True, wanted)], wanted
    else:
        chosen = "documents by hash"
        runs, val_tokens = spool.runs_by_document(taken), int(spool.bucket_tokens[taken].sum())
    take = spool.read()
    writers = {}

    def writer(val: bool, first_token: int):
        # Cut within a document, validation gets an end-of-text token of its own to begin with.
        lead = int(val and first_token != tokenizer.eot)
        num_tokens = val_tokens + lead if val else spool.tokens - val_tokens
        writers[val] = ShardWriter(folder, f"{args.name}_{'val' if val else 'train'}", int(not val), num_tokens,
                                   args.shard_size, tokenizer)
        writers[val].write(np.array([tokenizer.eot] * lead, dtype=np.uint16))

    for val, left in runs:
        while left:
            tokens = take(left)
            if val not in writers:
                writer(val, int(tokens[0]))
            writers[val].write(tokens)
            left -= len(tokens)
    if True not in writers:
        writers[True] = ShardWriter(folder, "", 0, 0, 0, tokenizer)
    return writers[False].summary(), writers[True].summary(), chosen


# ----------------------------------------------------------------------------------------------------------------------

def parse(argv):
    p = ArgumentParser(description=__doc__)
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="file or folder")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    p.add_argument("--name", required=True, help="what the shards' names begin with")
    p.add_argument("--tokenizer", choices=TOKENIZERS, required=True)
    p.add_argument("--vocab_dir", metavar="DIR", help="folder with GPT-2's encoder.json and vocab.bpe (downloaded)")
    p.add_argument("--glob", action="append", default=[], metavar="PATTERN",
                   help="files to take from folders, as '*.py' or '**/src/*.py' (repeatable; .txt .md .jsonl .parquet)")
    p.add_argument("--exclude", action="append", default=[], metavar="PATTERN",
                   help="files or folders to leave out, as 'tests' or 'idlelib/idle_test' (repeatable)")
    p.add_argument("--shuffle", action="store_true", help="take a folder's files in an order that their names do not tell")
    p.add_argument("--format", choices=("text", "jsonl", "parquet"), help="of all inputs (by the file's name)")
    p.add_argument("--text_field", default="text", metavar="NAME", help="field of jsonl, column of parquet (text)")
    p.add_argument("--shard_size", type=int, default=100_000_000, metavar="TOKENS", help="(100000000)")
    p.add_argument("--val_fraction", type=float, default=0.05, metavar="F", help="of the tokens; 0 for none (0.05)")
    p.add_argument("--val_tokens", type=int, metavar="N", help="in place of a fraction")
    p.add_argument("--strict", action="store_true", help="stop at invalid UTF-8")
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) if sys.platform == "linux" else
                   os.cpu_count(), metavar="N", help="processes (one per core)")
    args = p.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", args.name):
        raise UserError(f"--name {args.name!r}: letters, digits, and . _ - only")
    for name, low in (("shard_size", 1), ("workers", 1), ("val_tokens", 0)):
        if getattr(args, name) is not None and getattr(args, name) < low:
            raise UserError(f"--{name} {getattr(args, name)}: must be {low} or more")
    if args.shard_size >= 1 << 31:
        raise UserError(f"--shard_size {args.shard_size}: a shard's header counts up to {(1 << 31) - 1} tokens")
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction}: must be 0 or more and below 1")
    return args


def refuse_to_overwrite(args):
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"{args.out}: exists and is not a folder")
    there = [*args.out.glob(f"{args.name}_train_*.bin"), *args.out.glob(f"{args.name}_val_*.bin"),
             *args.out.glob(f"{args.name}.json")]
    if there:
        raise UserError(f"{min(there)}: already there, nothing was changed; choose another --name or --out, or remove "
                        f"the {len(there)} files of that name")


class Tally:
    """How many documents had something about them, and where the first one stands."""
    number, first, last = 0, None, None

    def add(self, places):
        for where in places:
            self.number += where != self.last  # a long document comes in several pieces
            self.first, self.last = self.first or where, where


def fill_spool(spool: Spool, files, args) -> tuple[Tally, Tally]:
    """Tokenizes the files into the spool. Returns the tallies of documents without text and with invalid UTF-8."""
    empty, invalid = Tally(), Tally()
    started = time.monotonic()
    encoded_batches = encode_all(read_batches(files, args), args)
    try:
        with tqdm(total=sum(path.stat().st_size for path in files), unit="B", unit_scale=True, disable=None) as bar:
            for encoded in encoded_batches:
                empty.add(encoded.empty)
                invalid.add(encoded.invalid)
                if args.strict and encoded.invalid:
                    raise UserError(f"{encoded.invalid[0]}: not valid UTF-8")
                if encoded.error:
                    raise UserError(encoded.error)
                spool.append(encoded)
                rate = spool.tokens / (time.monotonic() - started) / 1e6
                bar.set_postfix_str(f"{spool.tokens / 1e6:.1f}M tokens, {rate:.2f}M tokens/s", refresh=False)
                bar.update(encoded.disk_bytes)
    finally:
        encoded_batches.close()  # stops the workers
    spool.finish()
    return empty, invalid


def main(argv=None):
    args = parse(argv)
    tokenizer = load_tokenizer(args.tokenizer, args.vocab_dir)
    files = find_files(args.inputs, args.glob, args.exclude, args.shuffle)
    refuse_to_overwrite(args)
    started = time.monotonic()
    with staging(args.out / f".{args.name}.unfinished") as folder:
        spool = Spool(folder)
        empty, invalid = fill_spool(spool, files, args)
        if not spool.tokens:
            raise UserError(f"{args.inputs[0]}: no text in the {len(files)} input files")
        train, val, chosen = write_shards(spool, folder, args, tokenizer)
        shards = train["shards"] + val["shards"]
        checksum = hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()
        # Without the workers, so that the same shards have the same sidecar.
        arguments = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "workers"}
        sidecar = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "validation": chosen,
                   "train": train, "val": val, "sha256": checksum, "arguments": arguments}
        (folder / f"{args.name}.json").write_text(json.dumps(sidecar, indent=1) + "\n")
        refuse_to_overwrite(args)
        publish([folder / shard["file"] for shard in shards] + [folder / f"{args.name}.json"], args.out)
    report(args, empty, invalid, sidecar, time.monotonic() - started)


def report(args, empty, invalid, sidecar, seconds):
    if empty.number:
        print(f"skipped {empty.number} empty document(s), the first: {empty.first}", file=sys.stderr)
    if invalid.number:
        done = "kept as it is" if args.tokenizer == "bytes" else "its place taken by U+FFFD"
        print(f"{invalid.number} document(s) with invalid UTF-8, {done}; the first: {invalid.first}", file=sys.stderr)
    for side in ("train", "val"):
        held = sidecar[side]
        if held["tokens"]:
            print(f"{side}: {held['documents']} documents, {held['tokens']} tokens, {held['bytes_per_token']:.3f} "
                  f"bytes per token, {len(held['shards'])} shard(s) from {args.out / held['shards'][0]['file']}")
    size = sidecar["train"]["bytes"] + sidecar["val"]["bytes"]
    print(f"validation by {sidecar['validation']}; checksum {sidecar['sha256']}")
    rate = size / seconds / 1e6
    print(f"{size / 1e6:.1f} MB of text in {seconds:.1f} s, {rate:.1f} MB/s with {args.workers} worker(s)")


if __name__ == "__main__":
    sys.exit(run(main))
