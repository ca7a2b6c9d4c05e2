"""HellaSwag (arXiv:1905.07830) accuracy of a run's model: which of four endings comes next?

    ./run.sh hellaswag records/2026-01-31T12-00-00Z_speedrun.log  # 10,042 items, fetched
    ./run.sh hellaswag RUN --data my_items.jsonl

The answer is the ending with the lowest mean loss per token of the ending, given the context
(acc_norm), and for comparison the one with the lowest summed loss (acc). Harnesses that clean the
text or divide by characters get other figures. A line of the file is a JSON object with a `ctx`,
four `endings`, which follow a space, and the `label` 0 to 3 of the right one.
"""

import json
import math
import sys
from collections import namedtuple
from http.client import HTTPException
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ROOT, UserError, require, run

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from records.tools.sample import Trained, arguments, features, load_run, note, tokenizer_of

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # of 10,042 items
BATCH = 8  # items in one forward, of four sequences each
FOLDER = ROOT / "data" / "hellaswag"

Item = namedtuple("Item", "context endings label")

def download(folder: Path) -> Path:
    """The published file, fetched where it is not there yet."""
    path = folder / "hellaswag_val.jsonl"
    if not path.exists():
        note(f"fetching {URL} into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(URL, str(path), SHA256, progress=False)
        except (OSError, HTTPException, RuntimeError) as e:
            raise UserError(f"{path.name}: could not be fetched from {URL} ({e}); "
                            "give a copy of it by --data") from None
    return path

def read_items(path: Path, tokenizer) -> list[Item]:
    """In tokens. The context begins with the end-of-text token."""
    items = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            label = ["0", "1", "2", "3"].index(str(fields["label"]))  # some have a text
            context = [tokenizer.eot, *tokenizer.encode(fields["ctx"])]
            endings = [tokenizer.encode(" " + text)
                       for text, _ in zip(fields["endings"], range(4), strict=True)]
            items.append(Item(context, endings, label))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise UserError(f"{path}: line {number}: expected a JSON object with ctx, four endings "
                            f"and a label from 0 to 3 ({type(e).__name__}: {e})") from None
    require(items, f"{path}: holds no item")
    return items

@torch.no_grad()
def ending_losses(trained: Trained, items: list[Item]) -> tuple[Tensor, Tensor]:
    """(summed loss in nats of each ending, its tokens), both [item, ending], by one forward.

    Each context and ending is a document of one long sequence. Attention windows count in blocks,
    so each document begins with a block: then it sees exactly what it would see alone."""
    device = trained.model.embed.weight.device
    eot = trained.hp.vocab_size - 1
    tokens = []
    positions = []  # whose logits predict the endings' tokens
    targets = []
    lengths = []
    for item in items:
        for ending in item.endings:
            first = len(tokens) + len(item.context) - 1
            positions += range(first, first + len(ending))
            targets += ending
            lengths.append(len(ending))
            tokens += item.context + ending
            tokens += [eot] * (-len(tokens) % trained.script.BLOCK)
    x_TD = features(trained, tokens)[torch.tensor(positions, device=device)]
    targets = torch.tensor(targets, device=device)
    losses = F.cross_entropy(trained.model.logits(x_TD), targets, reduction="none").double().cpu()
    summed = torch.stack([ending.sum() for ending in losses.split(lengths)])
    return summed.view(len(items), -1), torch.tensor(lengths).view(len(items), -1)

def main():
    parser = arguments("hellaswag", __doc__)
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="items (hellaswag_val.jsonl, fetched)")
    args = parser.parse_args()
    trained = load_run(args)
    tokenizer = tokenizer_of(trained.hp, args.vocab_dir)
    items = read_items(args.data or download(FOLDER), tokenizer)
    batches = []
    for at in tqdm(range(0, len(items), BATCH), unit="batch", disable=None):
        batches.append(ending_losses(trained, items[at:at + BATCH]))
    summed, lengths = map(torch.cat, zip(*batches))
    labels = torch.tensor([item.label for item in items])
    for name, scores in (("acc_norm", summed / lengths), ("acc", summed)):
        share = float((scores.argmin(1) == labels).double().mean())
        error = math.sqrt(share * (1 - share) / len(labels))
        print(f"hellaswag_{name}:{share:.4f} standard_error:{error:.4f} n:{len(items)}")

if __name__ == "__main__":
    sys.exit(run(main, errors=(torch.OutOfMemoryError,)))
