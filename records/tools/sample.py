"""Continue a prompt with the model of a run, finished or not.

    ./run.sh sample records/2026-01-31T12-00-00Z_demo.log --prompt "def main("
    ./run.sh sample records/*_mine.log --script my_record.py    # the newest run of a copy

The text goes to stdout token by token, until there are --tokens of them or the model ends its text.
Characters that do not print are shown in the form \\x1b. One seed gives one text on the same
hardware, which is a GPU where there is one, unless CUDA_VISIBLE_DEVICES= hides it.
"""

import contextlib
import hashlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs
from records.tools.load import (ROOT, ArgumentParser, UserError, between, load_script, require,
                                run)

import torch
from torch import Tensor, nn

from data.vocab import TOKENIZERS, load_tokenizer

LONGEST = 1 << 17  # tokens of a text; the angles of their positions take memory

class Trained(NamedTuple):
    """A run's model, for use without a compiler, and the script that trained it. It is in float32:
    what bfloat16 rounds after a rotation depends on a token's place."""
    model: nn.Module
    hp: object  # the script's Hyperparameters
    script: ModuleType

def note(line: str):
    print(f"note: {line}", file=sys.stderr, flush=True)

def checked_script(path: Path, *names: str) -> ModuleType:
    """A training script as a module. Raises UserError where there is none, or it lacks a name."""
    script = load_script(path)
    missing = [name for name in ("GPT", *names) if not hasattr(script, name)]
    require(not missing,
            f"{path}: is no copy of train_gpt.py, because it has no {', '.join(missing)}")
    return script

def source_hash(path: Path) -> str:
    """The sha256 that a script's runs keep in their checkpoints."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return hashlib.sha256(text.encode()).hexdigest()

def folder_of(run: Path) -> Path:
    """The folder of the run that this log, folder or checkpoint belongs to."""
    if run.suffix == ".pt":
        return run.parent
    return run.with_suffix("") if run.suffix == ".log" else run

def age(run: Path) -> tuple[str, str]:
    """Sorts runs by the time in their names. Those that were renamed without it come first."""
    name = folder_of(run).name
    found = re.search(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", name)
    return found[0] if found else "", name

def content_of(checkpoint: Path) -> dict:
    """What a checkpoint holds; nothing if it is none."""
    with contextlib.suppress(Exception):  # a damaged file leads to many kinds
        return dict(torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True))
    return {}

def find_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run; in a folder of logs, of the newest run that has one."""
    if run.suffix == ".pt" and run.is_file():
        return run
    if run.is_dir():
        for log in sorted(run.glob("*.log"), key=age, reverse=True):
            with contextlib.suppress(UserError):
                return find_checkpoint(log)
    folder = folder_of(run)
    require(run.suffix != ".pt" and (folder.is_dir() or run.is_file()),
            f"{run}: there is no such run; name its log, its folder or a checkpoint")
    found = sorted(folder.glob(f"step{8 * '[0-9]'}.pt"))
    require(found, f"{folder}: has no checkpoint; the run has not saved one yet, was told to save "
            "none (--save_every=0), or its folder was removed, or renamed without its log")
    return found[-1]

def load_model(run, device="cpu", script_path: Path | None = None) -> Trained:
    """The newest model of the run that this log, folder or checkpoint belongs to. script_path names
    the script that trained it, if that is not the repository's train_gpt.py. Raises UserError."""
    path = script_path or ROOT / "train_gpt.py"
    script = checked_script(path)
    try:
        checkpoint = find_checkpoint(Path(run))
        saved = script.read_checkpoint(checkpoint)
    except script.UserError as e:
        raise UserError(str(e).removeprefix("--resume=")) from None
    if source_hash(path) != saved.get("script"):
        message = f"{checkpoint}: was trained by another script than {path} as it is now"
        require(script_path, f"{message}; add --script FILE, with that one (the run's log contains "
                "its text), or with this one to try it all the same")
        note(message)
    try:
        hp = script.Hyperparameters(**saved["settings"])
        hp = replace(hp, val_seq_len=max(hp.val_seq_len, LONGEST))
        model = script.GPT(hp, torch.float32, flex=False)
        model.load_state_dict(saved["state"]["model"])
    except Exception as e:
        reason = logs.short(" ".join(str(e).split()), 500)
        raise UserError(f"{checkpoint}: does not fit {path} ({type(e).__name__}: {reason})")
    return Trained(model.to(device).eval(), hp, script)

def load_run(args) -> Trained:
    """The model of the run that the arguments name. Raises UserError."""
    runs = [Path(run) for run in args.run]
    for run in runs if len(runs) > 1 else ():
        require(run.exists(), f"{run}: there is no such run (--prompt gives a text to continue)")
    newest = max(runs, key=lambda run: (age(run), run.name))
    if len(runs) > 1:
        note(f"the newest of {len(runs)} runs: {newest}")
    return load_model(newest, "cuda" if torch.cuda.is_available() else "cpu", args.script)

def features(trained: Trained, tokens: list[int]) -> Tensor:
    """What the model hands to its head, x_TD, for tokens whose last block is filled up, with the
    windows of the last step. A sequence may be longer than those in training: attention depends on
    distances alone, and on none beyond its window."""
    model, hp, script = trained
    device = model.embed.weight.device
    padded = tokens + [hp.vocab_size - 1] * (-len(tokens) % script.BLOCK)
    return model.features(torch.tensor(padded, dtype=torch.int32, device=device),
                          script.window_tensor(hp.num_iterations, hp, device))

@torch.no_grad()
def generate(trained: Trained, tokens: list[int], temperature: float = 0.8, top_k: int = 50,
             generator: torch.Generator | None = None):
    """Yields the tokens that continue `tokens`, without end. Each takes a forward pass over all
    tokens before it, and is drawn from the top_k likeliest ones, or from all if top_k is 0."""
    vocab_size = trained.hp.vocab_size
    tokens = list(tokens)
    while True:
        x_D = features(trained, tokens)[len(tokens) - 1]  # on which the padding has no influence
        logits_V = trained.model.logits(x_D)[:vocab_size].cpu() / max(temperature, 1e-6)
        values, ids = logits_V.topk(min(top_k or vocab_size, vocab_size))
        chosen = torch.multinomial(values.softmax(-1), 1, generator=generator)
        tokens.append(int(ids[chosen]))
        yield tokens[-1]

def main():
    parser = ArgumentParser(description=__doc__, prog="./run.sh sample")
    add = parser.add_argument
    add("run", metavar="RUN", nargs="+", help="a log, folder or checkpoint; of several, the newest")
    add("--script", type=Path, metavar="FILE", help="that trained the run (train_gpt.py)")
    add("--vocab_dir", metavar="DIR", help="of GPT-2's encoder.json and vocab.bpe (downloaded)")
    add("--prompt", default="", metavar="TEXT", help="text to continue (a new document begins)")
    add("--tokens", type=between(1), default=200, metavar="N", help="at most so many (200)")
    add("--temperature", type=between(0, kind=float), default=0.8, metavar="F",
        help="0 takes the likeliest token, 1 draws by the model's own probabilities (0.8)")
    add("--top_k", type=between(0), default=50, metavar="K",
        help="draw from the K likeliest tokens, or from all with 0 (50)")
    add("--seed", type=between(0, 2**63 - 1), default=0, metavar="S",
        help="of the random choices (0)")
    args = parser.parse_args()
    if "OMP_NUM_THREADS" not in os.environ:  # where others use the cores, threads are far slower
        torch.set_num_threads(1)
    trained = load_run(args)
    size = trained.hp.vocab_size
    eot = size - 1
    names = {tokenizer.vocab_size: name for name, tokenizer in TOKENIZERS.items()}
    require(size in names, f"no tokenizer is known for a vocabulary of {size} tokens")
    tokenizer = load_tokenizer(names[size], args.vocab_dir)
    tokens = tokenizer.encode(args.prompt)
    generator = torch.Generator().manual_seed(args.seed)
    endless = generate(trained, [eot, *tokens], args.temperature, args.top_k, generator)
    last = len(tokens) + args.tokens
    shown = 0  # characters
    try:
        while True:
            text = tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):  # which may be a part of a character
                print(logs.printable(text[shown:]), end="", flush=True)
                shown = len(text)
            token = next(endless) if len(tokens) < last else eot
            if token == eot:
                break
            tokens.append(token)
    finally:
        print(logs.printable(text[shown:]))
    if len(tokens) < last:
        note(f"end of text after {args.tokens - last + len(tokens)} tokens")

if __name__ == "__main__":
    sys.exit(run(main, errors=(torch.OutOfMemoryError,)))
