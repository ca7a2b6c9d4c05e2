"""What token shards hold, and whether they are sound.

    ./run.sh inspect data/mine/*.bin

Reads every token. Prints for each file: tokens, range of ids, documents and their lengths, and how
the first document begins. The tokenizer is the one named by NAME.json next to the shards, else
GPT-2's. A shard that is bad is one line with the defect and its byte, and the status is 2.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.common import ArgumentParser, UserError, check_shard, run
from data.vocab import END_OF_TEXT, TOKENIZERS, load_tokenizer

def tokenizer_of(path: Path) -> str:
    """By the sidecar that tokenize_text.py writes; the field's shards have none and are GPT-2's."""
    sidecar = path.parent / (re.sub(r"_(train|val)_\d+$", "", path.stem) + ".json")
    if not sidecar.exists():
        return "gpt2"
    try:
        return TOKENIZERS[json.loads(sidecar.read_bytes())["tokenizer"]].name
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"{sidecar}: names no known tokenizer; make the shards again") from None

def report(path: Path, tokens: np.ndarray, tokenizer_name: str, vocab_dir):
    """Prints what a shard holds."""
    end_of_text = TOKENIZERS[tokenizer_name].eot
    starts = np.flatnonzero(tokens == end_of_text)
    print(f"{path}: {len(tokens)} tokens ({tokenizer_name}), ids {tokens.min()} to {tokens.max()}, "
          f"{len(starts)} documents begin here")
    begin = 0
    if len(starts):
        begin = starts[0] + 1
        lengths = np.diff(starts, append=len(tokens))
        print(f"  tokens per document: median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, "
              f"90 % up to {np.percentile(lengths, 90):.0f}, longest {lengths.max()}")
    else:
        print(f"  no end-of-text token ({end_of_text}): made by another tokenizer, or all of it is "
              "from within one document")
    try:
        tokenizer = load_tokenizer(tokenizer_name, vocab_dir)
        text = tokenizer.decode(tokens[begin:begin + 200].tolist()).split(END_OF_TEXT)[0]
        print(f"  it begins: {text[:300]!r}")
    except UserError as e:
        print(f"  not decoded: {e}")

def main(argv=None):
    p = ArgumentParser(description=__doc__, prog="./run.sh inspect")
    add = p.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="token shard")
    add("--vocab_dir", metavar="DIR", help="of GPT-2's encoder.json and vocab.bpe (downloaded)")
    args = p.parse_args(argv)
    status = 0
    for path in args.files:
        try:
            name = tokenizer_of(path)
            report(path, check_shard(path, TOKENIZERS[name].vocab_size), name, args.vocab_dir)
        except (UserError, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            status = 2
    return status

if __name__ == "__main__":
    sys.exit(run(main))
