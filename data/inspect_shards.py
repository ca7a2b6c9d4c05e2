"""What token shards hold, and whether they are sound.

    ./run.sh inspect data/fineweb10B/*.bin
    ./run.sh inspect data/mine/*.bin --tokenizer bytes
    ./run.sh inspect data/mine/mine_val_*.bin --seen_in data/mine/mine_train_*.bin

Reads every token. Prints for each file: tokens, range of ids, documents and their lengths, and how
the first document begins. The tokenizer is the one named by NAME.json next to the shards, else
GPT-2's. With --seen_in it also prints what share of all runs of 32 tokens stands in those shards
too: where it is large, validation tests what was learned by heart. A shard that is bad is one line
with the defect and its byte, and the status is 2.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import (SHARD_HEADER_BYTES, ArgumentParser, UserError, check_shard, require, run,
                         token_pieces)
from data.vocab import END_OF_TEXT, TOKENIZERS, load_tokenizer

RUN = 32  # tokens

def tokenizer_of(path: Path) -> str:
    """By the sidecar that tokenize_text.py writes; the field's shards have none and are GPT-2's."""
    sidecar = path.parent / (re.sub(r"_(train|val)_\d+$", "", path.stem) + ".json")
    try:
        name = json.loads(sidecar.read_bytes())["tokenizer"]
    except FileNotFoundError:
        return "gpt2"
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{sidecar}: damaged, names no tokenizer; --tokenizer says which") from None
    require(name in list(TOKENIZERS), f"{sidecar}: unknown tokenizer {name!r}")
    return name

def inspect(path: Path, tokenizer_name: str, vocab_dir=None) -> list[str]:
    """The report on one shard, line by line. Raises UserError where it is bad."""
    vocab_size = TOKENIZERS[tokenizer_name].vocab_size
    num_tokens = check_shard(path, vocab_size)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES)
    starts = np.flatnonzero(tokens == vocab_size - 1)
    lines = [f"{path}: {num_tokens} tokens ({tokenizer_name}), ids {tokens.min()} to "
             f"{tokens.max()}, {len(starts)} documents begin here"]
    if len(starts):
        lengths = np.diff(starts, append=num_tokens)
        lines.append(f"  tokens per document: median {np.median(lengths):.0f}, mean "
                     f"{lengths.mean():.0f}, 90 % up to {np.percentile(lengths, 90):.0f}, longest "
                     f"{lengths.max()}")
        if starts[0]:
            lines.append(f"  the first {starts[0]} tokens continue a document of the shard before")
    else:
        lines.append(f"  no end-of-text token ({vocab_size - 1}): made by another tokenizer, or "
                     "all of it is from within one document")
    begin = starts[0] + 1 if len(starts) else 0
    try:
        tokenizer = load_tokenizer(tokenizer_name, vocab_dir)
        text = tokenizer.decode(tokens[begin:begin + 200].tolist()).split(END_OF_TEXT)[0]
        lines.append(f"  it begins: {text[:300]!r}")
    except UserError as e:
        lines.append(f"  not decoded: {e}")
    return lines

def run_hashes(tokens: np.ndarray) -> np.ndarray:
    """A hash of each RUN consecutive tokens of [n]: [n - RUN + 1], of uint64."""
    hashes = np.zeros(max(0, len(tokens) - RUN + 1), dtype=np.uint64)
    for at in range(RUN if len(hashes) else 0):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[at:at + len(hashes)]
    return hashes

def share_seen(path: Path, others: list[Path]) -> float:
    """The share of a shard's runs of RUN tokens that stand in the other shards too."""
    runs = run_hashes(np.concatenate(list(token_pieces(path))))
    known = np.unique(runs)
    seen = np.zeros(len(known), dtype=bool)
    for other in others:
        before = np.empty(0, dtype=np.uint16)
        for piece in token_pieces(other):
            piece = np.concatenate((before, piece))
            seen |= np.isin(known, run_hashes(piece))
            before = piece[1 - RUN:]
    return float(seen[np.searchsorted(known, runs)].mean()) if len(runs) else 0.0

def main(argv=None):
    p = ArgumentParser(description=__doc__, prog="./run.sh inspect")
    add = p.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="token shard")
    add("--tokenizer", choices=TOKENIZERS, help="of the shards (see above)")
    add("--vocab_dir", metavar="DIR", help="of GPT-2's encoder.json and vocab.bpe (downloaded)")
    add("--seen_in", nargs="+", type=Path, default=[], metavar="FILE", help="shards to look in")
    args = p.parse_args(argv)
    status = 0
    for path in args.files:
        try:
            tokenizer_name = args.tokenizer or tokenizer_of(path)
            lines = inspect(path, tokenizer_name, args.vocab_dir)
            for other in args.seen_in:
                check_shard(other, TOKENIZERS[tokenizer_name].vocab_size)
            if args.seen_in:
                lines.append(f"  {share_seen(path, args.seen_in):.2%} of its runs of {RUN} tokens "
                             f"stand in {len(args.seen_in)} other shard(s) too")
            print("\n".join(lines))
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            status = 2
    return status

if __name__ == "__main__":
    sys.exit(run(main))
