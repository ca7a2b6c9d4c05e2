#!/usr/bin/env python3
"""Continue a prompt with the model of a run, or with the newest checkpoint of one that is not finished.

    python records/sample.py records/2026-01-31T12-00-00Z_demo --prompt "def main("
    python records/sample.py records/2026-01-31T12-00-00Z_demo.log --tokens 500 --temperature 1 --top_k 0 --seed 7
    python records/sample.py RUN --prompt "464 3290"     # GPT-2's vocabulary not at hand: token numbers

The run is named by its folder, its log, or the model.pt or checkpoint to take. The text goes to stdout as it comes, up to --tokens or the
model's end of text; bytes that are no UTF-8 show as U+FFFD. The same seed gives the same text on the same hardware.
"""

import codecs
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from data import common
from data.vocab import TOKENIZERS, load_tokenizer
from train_gpt import (BLOCK, GPT, Hyperparameters, Rotary, UserError, block_sparse, checkpoints_in, fast_bf16, generate, read_checkpoint,
                       require, window_tokens)


def note(line: str):
    print(f"note: {line}", file=sys.stderr, flush=True)


def whole(least: int):
    """An argument's type: a whole number from least on."""
    def number(text: str) -> int:
        if not least <= int(text) < 2**63:
            raise ValueError(text)
        return int(text)
    number.__name__ = f"whole number from {least} on"
    return number


def from_zero(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise ValueError(text)
    return float(text)


from_zero.__name__ = "number from 0 on"


def arguments(description: str) -> common.ArgumentParser:
    """A parser with what every program that uses a saved model takes."""
    parser = common.ArgumentParser(description=description)
    parser.add_argument("run", metavar="RUN", help="the run's folder, its log, or the model.pt or checkpoint in it")
    parser.add_argument("--vocab_dir", metavar="DIR", help="folder with GPT-2's encoder.json and vocab.bpe; without it "
                        "tiktoken's copy or a download")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda; default: cuda where there is one, else cpu")
    return parser


def load_model(path, device="cpu") -> tuple[GPT, Hyperparameters]:
    """The model of a checkpoint, or of a run's folder records/<name of the log>/: the trained one, else its newest checkpoint's; in
    evaluation mode, for use without a compiler."""
    folder, path = path, Path(path)
    if path.suffix != ".pt":
        path = next((p for p in (path / "model.pt", *checkpoints_in(path)) if p.exists()), None)
    require(path, f"{folder}: holds no model.pt and no checkpoint; name a run's folder, records/<name of the log>")
    payload = read_checkpoint(path)
    try:
        hp = Hyperparameters(**payload["hyperparameters"])
        model = GPT(hp, block_sparse, payload["model"]["embed.weight"].dtype).to(device).eval()
        model.load_state_dict(payload["model"])
    except Exception as e:  # of another version of the script
        raise UserError(f"{path}: does not fit this version of the script ({type(e).__name__})") from None
    return model, hp


def load_run(run: str, device: str):
    """The model of a run named by its folder, its log or a file of its, and its hyperparameters."""
    path = Path(run)
    if path.suffix == ".log" and not path.is_dir():
        path = path.with_suffix("")
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("neither cpu nor cuda")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device={device} cannot be used ({str(e).splitlines()[0]})") from None
    return load_model(path, device)


def tokenizer_of(hp, vocab_dir):
    """The tokenizer of a run's vocabulary. Raises UserError where it cannot be had."""
    names = {tokenizer.vocab_size: name for name, tokenizer in TOKENIZERS.items()}
    if hp.vocab_size not in names:
        raise UserError(f"no tokenizer is known for a vocabulary of {hp.vocab_size} tokens")
    return load_tokenizer(names[hp.vocab_size], vocab_dir)


def reach(model, num_tokens: int):
    """Rotary angles for a sequence of so many tokens. Attention sees only distances, and none beyond its window, so a
    sequence may be longer than any in training."""
    if num_tokens > len(model.rotary.cos):
        rotary = Rotary(model.hp.head_dim, -(-num_tokens // BLOCK) * BLOCK, model.hp.rope_base)
        model.rotary = rotary.to(model.embed.weight.device)


def start(main) -> int:
    def within_memory():
        try:
            main()
        except torch.OutOfMemoryError:
            raise UserError("out of GPU memory; ask for less at once, or take --device=cpu") from None
    return common.run(within_memory)


def encode_prompt(prompt: str, tokenizer, vocab_size: int) -> list[int]:
    if tokenizer:
        return tokenizer.encode(prompt)
    try:
        tokens = [int(number) for number in prompt.replace(",", " ").split()]
        if all(0 <= token < vocab_size for token in tokens):
            return tokens
    except ValueError:
        pass
    raise UserError(f"--prompt: without its vocabulary it has to be token numbers from 0 to {vocab_size - 1}, such as '464 32'")


def token_bytes(token: int, tokenizer) -> bytes:
    """A token as UTF-8, of which it may hold a part of a character; as a number without a tokenizer."""
    if not tokenizer:
        return f"{token} ".encode()
    return bytes([token]) if tokenizer.name == "bytes" else tokenizer.encoding.decode_single_token_bytes(token)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue; default: none, a new document")
    parser.add_argument("--tokens", type=whole(1), default=200, metavar="N", help="tokens to add at most; default 200")
    parser.add_argument("--temperature", type=from_zero, default=0.8, metavar="F",
                        help="0 takes the likeliest token, 1 the model's own odds; default 0.8")
    parser.add_argument("--top_k", type=whole(0), default=50, metavar="K",
                        help="choose from the K likeliest tokens, 0 from all; default 50")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S", help="seed of the choices; default 0")
    args = parser.parse_args()
    model, hp = load_run(args.run, args.device)
    if not fast_bf16(model.embed.weight.device):
        model.float()
    try:
        tokenizer = tokenizer_of(hp, args.vocab_dir)
    except UserError as e:
        if args.vocab_dir:
            raise
        tokenizer = None
        note(f"token numbers, for want of a vocabulary: {e}")
    prompt = encode_prompt(args.prompt, tokenizer, hp.vocab_size)
    eot, window = hp.vocab_size - 1, window_tokens(hp.num_iterations, hp)
    generator = torch.Generator().manual_seed(args.seed)
    reach(model, 1 + len(prompt) + args.tokens)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know fewer characters than the model
    text = codecs.getincrementaldecoder("utf-8")("replace")
    print(text.decode(b"".join(token_bytes(token, tokenizer) for token in prompt)), end="", flush=True)
    tokens = [eot, *prompt]  # a document begins with the end-of-text token
    try:
        while len(tokens) - 1 - len(prompt) < args.tokens:
            tokens = generate(model, tokens, 1, window, args.temperature, args.top_k, generator)
            if tokens[-1] == eot:
                break
            print(text.decode(token_bytes(tokens[-1], tokenizer)), end="", flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        print(text.decode(b"", final=True))
    if tokens[-1] == eot:
        note(f"end of text after {len(tokens) - 2 - len(prompt)} tokens")


if __name__ == "__main__":
    sys.exit(start(main))
