#!/usr/bin/env python3
"""HellaSwag (arXiv:1905.07830) accuracy of a run's model: which of four endings continues a context?

    python records/hellaswag.py records/2026-01-31T12-00-00Z_speedrun              # all 10,042 items, fetched once
    python records/hellaswag.py RUN --data my_items.jsonl --limit 1000

The answer is the ending with the lowest mean loss per token of the ending, given the context (acc_norm), and for
comparison the one with the lowest summed loss (acc). The context is the field `ctx` as it stands and an ending's tokens
are those of a space and the ending. Harnesses that clean the text or divide by characters get other figures.

A line of the file is a JSON object with a `ctx`, four `endings` and the `label` 0 to 3 of the right one; other fields
are ignored. Nothing is written to the run's log: this is outside the clock and the record.
"""

import json
import math
import sys
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from data.common import publish, staging
from records.sample import arguments, load_run, note, reach, start, tokenizer_of, whole
from train_gpt import BLOCK, UserError, window_tokens

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
ITEMS = 10042  # in the published file
FOLDER = Path(__file__).resolve().parent.parent / "data" / "hellaswag"


@dataclass
class Item:
    context: list[int]  # begins with the end-of-text token
    endings: list[list[int]]
    label: int


def download(folder: Path) -> Path:
    """The published file, fetched where it is not there yet."""
    path = folder / "hellaswag_val.jsonl"
    if path.exists():
        return path
    note(f"fetching {URL} into {folder}")
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            content = response.read()
    except (OSError, HTTPException) as e:
        raise UserError(f"{path.name}: could not be fetched from {URL} ({e}); give a copy of it by --data") from None
    lines = content.count(b"\n")
    if lines != ITEMS:
        raise UserError(f"{path.name}: {URL} gave {lines} lines instead of {ITEMS}; give a copy of it by --data")
    with staging(folder / ".hellaswag.unfinished") as unfinished:
        (unfinished / path.name).write_bytes(content)
        publish([unfinished / path.name], folder)
    return path


def read_item(line: bytes, tokenizer) -> Item:
    """Raises ValueError that says what is wrong with the line."""
    try:
        fields = json.loads(line)
    except ValueError as e:  # JSON or UTF-8
        raise ValueError(f"no JSON ({e})") from None
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    context, endings, label = (fields.get(name) for name in ("ctx", "endings", "label"))
    if not (isinstance(context, str) and context):
        raise ValueError("ctx is no text")
    if not (isinstance(endings, list) and len(endings) == 4 and all(isinstance(e, str) and e for e in endings)):
        raise ValueError("endings are not four texts")
    if str(label) not in ("0", "1", "2", "3"):  # some copies have it as text
        raise ValueError("label is not 0, 1, 2 or 3")
    return Item([tokenizer.eot, *tokenizer.encode(context)], [tokenizer.encode(" " + e) for e in endings], int(label))


def read_items(path: Path, tokenizer, limit: int | None) -> list[Item]:
    items = []
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if len(items) == limit:
                    break
                if line.strip():
                    items.append(read_item(line, tokenizer))
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from None
    except ValueError as e:
        raise UserError(f"{path}: line {number}: {e}") from None
    if not items:
        raise UserError(f"{path}: holds no item")
    return items


@torch.no_grad()
def ending_losses(model, items: list[Item], window: int) -> tuple[Tensor, Tensor]:
    """(summed loss in nats of each ending, its tokens), both [item, ending], by one forward over all of them.

    Each context and ending is a document of one long sequence. Attention windows count in blocks of 128 tokens, so each
    document begins with a block: then it sees exactly what it would see alone."""
    device, eot = model.embed.weight.device, model.hp.vocab_size - 1
    tokens, positions, targets, lengths = [], [], [], []
    for item in items:
        for ending in item.endings:
            first = len(tokens) + len(item.context) - 1  # predicts the ending's first token
            positions += range(first, first + len(ending))
            targets += ending
            lengths.append(len(ending))
            tokens += item.context + ending
            tokens += [eot] * (-len(tokens) % BLOCK)
    reach(model, len(tokens))
    x_TD = model.features(torch.tensor(tokens, dtype=torch.int32, device=device),
                          torch.tensor(window, dtype=torch.int32, device=device))
    logits = model.logits(x_TD[torch.tensor(positions, device=device)])
    losses = F.cross_entropy(logits, torch.tensor(targets, device=device), reduction="none").double().cpu()
    summed = torch.stack([part.sum() for part in losses.split(lengths)])
    return summed.view(len(items), -1), torch.tensor(lengths).view(len(items), -1)


def accuracy(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """(share of items whose lowest score is the right ending's, its standard error)"""
    share = float((scores.argmin(1) == labels).double().mean())
    return share, math.sqrt(share * (1 - share) / len(labels))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="items in the format of hellaswag_val.jsonl; default: that "
                        "file, fetched into data/hellaswag")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="only the first N items")
    parser.add_argument("--batch_size", type=whole(1), default=8, metavar="N",
                        help="items in one forward, of four sequences each; changes the speed alone; default 8")
    args = parser.parse_args()
    model, hp = load_run(args.run, args.device)
    model.float()  # bfloat16 rounds the rotary angles by position, which a document's place in the batch decides
    tokenizer = tokenizer_of(hp, args.vocab_dir)
    items = read_items(args.data or download(FOLDER), tokenizer, args.limit)
    window, batches = window_tokens(hp.num_iterations, hp), []
    with tqdm(total=len(items), unit="item", disable=None) as bar:
        for at in range(0, len(items), args.batch_size):
            batches.append(ending_losses(model, items[at:at + args.batch_size], window))
            bar.update(len(batches[-1][0]))
    summed, lengths = (torch.cat(parts) for parts in zip(*batches))
    labels = torch.tensor([item.label for item in items])
    for name, scores in (("acc_norm", summed / lengths), ("acc", summed)):
        print("hellaswag_{}:{:.4f} standard_error:{:.4f} n:{}".format(name, *accuracy(scores, labels), len(items)))


if __name__ == "__main__":
    sys.exit(start(main))
