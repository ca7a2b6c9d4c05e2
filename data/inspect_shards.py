"""What token shards hold, and whether they are sound.

    python data/inspect_shards.py data/fineweb10B/*.bin

Prints for each file: tokens, range of ids, documents and their lengths, and how the first document begins. The
tokenizer is the one named by NAME.json next to the shards, else GPT-2's. Exits with 2 where a shard is bad, and names
the defect and the byte.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, run
from data.vocab import END_OF_TEXT, TOKENIZERS, load_tokenizer
from train_gpt import SHARD_HEADER_BYTES, UserError, check_shard

PIECE_TOKENS = 1 << 24  # at a time
SHOWN_TOKENS, SHOWN_CHARACTERS = 200, 300


def tokenizer_of(path: Path) -> str:
    """By the sidecar that tokenize_text.py writes; the field's shards have none and are GPT-2's."""
    sidecar = path.parent / (re.sub(r"_(train|val)_\d+$", "", path.stem) + ".json")
    try:
        name = json.loads(sidecar.read_text())["tokenizer"]
    except FileNotFoundError:
        return "gpt2"
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{sidecar}: damaged, names no tokenizer; --tokenizer says which") from None
    if name not in TOKENIZERS:
        raise UserError(f"{sidecar}: unknown tokenizer {name!r}")
    return name


def inspect(path: Path, tokenizer_name: str, vocab_dir=None) -> list[str]:
    """The report on one shard, line by line. Raises UserError where it is bad."""
    vocab_size = TOKENIZERS[tokenizer_name].vocab_size
    num_tokens = check_shard(path, vocab_size)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(num_tokens,))
    low, high, starts = vocab_size, 0, []
    for at in range(0, num_tokens, PIECE_TOKENS):
        piece = tokens[at:at + PIECE_TOKENS]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
        starts.append(at + np.flatnonzero(piece == vocab_size - 1))
    starts = np.concatenate(starts)
    lines = [f"{path}: {num_tokens} tokens ({tokenizer_name}), ids {low} to {high}, {len(starts)} documents begin here"]
    if len(starts):
        lengths = np.diff(starts, append=num_tokens)
        lines.append(f"  tokens per document: median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, "
                     f"90 % up to {np.percentile(lengths, 90):.0f}, longest {lengths.max()}")
        if starts[0]:
            lines.append(f"  the first {starts[0]} tokens continue a document of the shard before")
    begin = int(starts[0]) + 1 if len(starts) else 0
    try:
        text = load_tokenizer(tokenizer_name, vocab_dir).decode(tokens[begin:begin + SHOWN_TOKENS].tolist())
        lines.append(f"  it begins: {text.split(END_OF_TEXT)[0][:SHOWN_CHARACTERS]!r}")
    except UserError as e:
        lines.append(f"  not decoded: {e}")
    return lines


def main(argv=None):
    p = ArgumentParser(description=__doc__)
    p.add_argument("files", nargs="+", type=Path, metavar="FILE", help="token shard")
    p.add_argument("--tokenizer", choices=TOKENIZERS, help="of the shards (see above)")
    p.add_argument("--vocab_dir", metavar="DIR", help="folder with GPT-2's encoder.json and vocab.bpe (downloaded)")
    args = p.parse_args(argv)
    bad = []
    for path in args.files:
        try:
            print("\n".join(inspect(path, args.tokenizer or tokenizer_of(path), args.vocab_dir)))
        except UserError as e:
            bad.append(e)
            if len(args.files) > 1:
                print(f"error: {e}", file=sys.stderr)
    if bad:
        raise bad[0] if len(args.files) == 1 else UserError(f"{len(bad)} of {len(args.files)} shards are bad")


if __name__ == "__main__":
    sys.exit(run(main))
