"""Continue a prompt with the model of a run, finished or not.

    python records/sample.py records/2026-01-31T12-00-00Z_demo.log --prompt "def main("
    python records/sample.py records/*_mine.log --script my_record.py    # the newest run of a copy
    python records/sample.py RUN --tokens 500 --temperature 1 --top_k 0 --seed 7
    python records/sample.py RUN --prompt "464 3290"     # in numbers, without GPT-2's vocabulary

The text goes to stdout as it comes, up to --tokens or the model's end of text. Bytes that are no
UTF-8 show as U+FFFD, control characters in the form \\x1b. The same seed gives the same text on the
same hardware.
"""

import codecs
import hashlib
import importlib.util
import itertools
import shlex
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch import Tensor, nn

from data import common
from data.common import UserError
from data.vocab import TOKENIZERS, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CONTROL = [*range(32), *range(127, 160)]  # what a terminal may take for a command
ESCAPES = {code: f"\\x{code:02x}" for code in CONTROL if chr(code) not in "\n\t"}
NEEDED = ("BLOCK", "GPT", "Hyperparameters", "Rotary", "block_sparse", "checkpoints_in",
          "read_checkpoint", "window_tokens")  # of a training script


class Trained(NamedTuple):
    """A run's model in evaluation mode, for use without a compiler, and the script of its code."""
    model: nn.Module
    hp: object  # the script's Hyperparameters
    script: ModuleType


def note(line: str):
    print(f"note: {line}", file=sys.stderr, flush=True)


def one_line(text) -> str:
    """Text of unknown origin, fit for a message."""
    return " ".join(str(text).split()).translate(ESCAPES)[:500]


def number(kind: type, least: int):
    """An argument's type: a number of that kind from least on."""
    def parse(text: str):
        value = kind(text)
        if not least <= value < 2**63:
            raise ValueError(text)
        return value
    parse.__name__ = f"{'whole number' if kind is int else 'number'} from {least} on"
    return parse


def arguments(description: str) -> common.ArgumentParser:
    """A parser with what every program that uses a trained model takes."""
    parser = common.ArgumentParser(description=description)
    parser.add_argument("run", metavar="RUN", nargs="+",
                        help="a run's log, its folder or a checkpoint; of several the newest")
    parser.add_argument("--script", type=Path, metavar="FILE",
                        help="script that trained the run; default: the repository's train_gpt.py")
    parser.add_argument("--vocab_dir", metavar="DIR", help="folder with GPT-2's encoder.json and "
                        "vocab.bpe; without it tiktoken's copy or a download")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda; default: cuda where there is one, else cpu")
    return parser


def load_script(path: Path) -> ModuleType:
    """A training script as a module of its own, whatever its name. Raises UserError."""
    loader = SourceFileLoader("training_script", str(path))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = script  # dataclasses look for their module there
    try:
        loader.exec_module(script)
    except (Exception, SystemExit) as e:
        raise UserError(f"{path}: cannot be loaded ({type(e).__name__}: {one_line(e)})") from e
    missing = [name for name in NEEDED if not hasattr(script, name)]
    if missing:
        raise UserError(f"{path}: is no training script, it has no {missing[0]}")
    return script


def source_hash(path: Path) -> str | None:
    """The sha256 that a script's runs keep in their checkpoints; None for what is no script."""
    try:
        if path.is_file():
            return hashlib.sha256(path.read_text(encoding="utf-8").encode()).hexdigest()
    except (OSError, ValueError):  # unreadable, or no UTF-8
        pass
    return None


def check_script(checkpoint: Path, payload: dict, path: Path, asked: bool):
    """Raises UserError where path is not the script of the run, unless it was asked for by name."""
    trained_by = payload.get("script")
    if source_hash(path) == trained_by:
        return
    name = str(payload.get("script_path"))
    message = f"{checkpoint}: trained by {one_line(name)}, which is not {path} as it is now"
    if asked:
        note(message)
        return
    candidates = [Path(name), *sorted(Path().glob("*.py")), *sorted(ROOT.glob("*.py"))]
    for candidate in candidates:
        if source_hash(candidate) == trained_by:
            raise UserError(f"{message}; add --script {one_line(shlex.quote(str(candidate)))}")
    raise UserError(f"{message}; add --script FILE (the run's log holds its text), or "
                    f"--script {shlex.quote(str(path))} to try this one all the same")


def folder_of(run: Path) -> Path:
    """The folder of a run that is named by its log, its folder or a checkpoint."""
    if run.suffix == ".pt":
        return run.parent
    if run.suffix == ".log" and not run.is_dir():
        return run.with_suffix("")
    return run


def find_checkpoint(run: Path, script: ModuleType) -> Path:
    folder = folder_of(run)
    if run.suffix == ".pt" and run.is_file():
        return run
    if run.suffix == ".pt" or not (folder.is_dir() or run.is_file()):
        raise UserError(f"{run}: there is no such run; name its log, its folder or a checkpoint")
    checkpoints = script.checkpoints_in(folder)
    if not checkpoints:
        raise UserError(f"{folder}: holds no checkpoint; the run has not saved one yet, or was "
                        "told to save none (--save_every=0)")
    return checkpoints[0]


def load_model(run, device="cpu", script_path: Path | None = None) -> Trained:
    """The newest model of a run that is named by its log, its folder or a checkpoint.

    script_path: the script that trained it, where that is not the repository's train_gpt.py.
    Raises UserError where there is no model, where it is another script's, or does not fit."""
    path = script_path or ROOT / "train_gpt.py"
    script = load_script(path)
    checkpoint = find_checkpoint(Path(run), script)
    try:
        payload = script.read_checkpoint(checkpoint)
    except script.UserError as e:
        raise UserError(one_line(e)) from None
    if not isinstance(payload, dict):
        raise UserError(f"{checkpoint}: is no checkpoint of a run")
    check_script(checkpoint, payload, path, asked=script_path is not None)
    try:
        hp = script.Hyperparameters(**payload["hyperparameters"])
        weights = payload["model"]
        model = script.GPT(hp, script.block_sparse, weights["embed.weight"].dtype)
        model.load_state_dict(weights)
    except Exception as e:
        reason = f"{type(e).__name__}: {one_line(e)}"
        raise UserError(f"{checkpoint}: does not fit {path} ({reason})") from e
    return Trained(model.to(device).eval(), hp, script)


def load_run(args) -> Trained:
    """The model that the arguments name. Raises UserError."""
    try:
        if torch.device(args.device).type not in ("cpu", "cuda"):
            raise RuntimeError("neither cpu nor cuda")
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device={args.device} cannot be used ({one_line(e)})") from None
    runs = [Path(run) for run in args.run]
    newest = max(runs, key=lambda run: (folder_of(run).absolute().name, run.name))
    if len(runs) > 1:
        note(f"the newest of {len(runs)}: {newest}")
    return load_model(newest, args.device, args.script)


def tokenizer_of(hp, vocab_dir):
    """The tokenizer of a run's vocabulary. Raises UserError where it cannot be had."""
    names = {tokenizer.vocab_size: name for name, tokenizer in TOKENIZERS.items()}
    if hp.vocab_size not in names:
        raise UserError(f"no tokenizer is known for a vocabulary of {hp.vocab_size} tokens")
    return load_tokenizer(names[hp.vocab_size], vocab_dir)


def features(trained: Trained, tokens: list[int]) -> Tensor:
    """x_TD for the head, of tokens and what fills their last block, with the last step's windows.

    Attention sees only distances, and none beyond its window, so a sequence may be longer than any
    in training: it only needs angles for its positions."""
    model, hp, script = trained
    device = model.embed.weight.device
    padded = tokens + [hp.vocab_size - 1] * (-len(tokens) % script.BLOCK)
    if len(padded) > len(model.rotary.cos):
        model.rotary = script.Rotary(hp.head_dim, len(padded), hp.rope_base).to(device)
    window = script.window_tokens(hp.num_iterations, hp)
    return model.features(torch.tensor(padded, dtype=torch.int32, device=device),
                          torch.tensor(window, dtype=torch.int32, device=device))


@torch.no_grad()
def generate(trained: Trained, tokens: list[int], temperature: float = 0.8, top_k: int = 50,
             generator: torch.Generator | None = None):
    """Yields the tokens that continue tokens, the last one an end of text; each by a forward over
    all before it. top_k: choose from so many likeliest ones, 0 from all."""
    vocab_size = trained.hp.vocab_size
    tokens = list(tokens)
    while True:
        x_D = features(trained, tokens)[len(tokens) - 1]  # the padding after it changes nothing
        logits_V = trained.model.logits(x_D)[:vocab_size].cpu() / max(temperature, 1e-6)
        values, ids = logits_V.topk(min(top_k or vocab_size, vocab_size))
        chosen = torch.multinomial(values.softmax(-1), 1, generator=generator)
        tokens.append(int(ids[chosen]))
        yield tokens[-1]
        if tokens[-1] == vocab_size - 1:
            return


def start(main) -> int:
    def within_memory():
        try:
            main()
        except torch.OutOfMemoryError:
            raise UserError("out of GPU memory; ask for less, or take --device=cpu") from None
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
    raise UserError("--prompt: without its vocabulary it has to be token numbers from 0 to "
                    f"{vocab_size - 1}, such as '464 32'")


def token_bytes(token: int, tokenizer) -> bytes:
    """A token as UTF-8, perhaps a part of a character; without a tokenizer its number."""
    if not tokenizer:
        return f"{token} ".encode()
    if tokenizer.name == "bytes":
        return bytes([token])
    return tokenizer.encoding.decode_single_token_bytes(token)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--prompt", default="", metavar="TEXT",
                        help="text to continue; default: none, a new document")
    parser.add_argument("--tokens", type=number(int, 1), default=200, metavar="N",
                        help="tokens to add at most; default 200")
    parser.add_argument("--temperature", type=number(float, 0), default=0.8, metavar="F",
                        help="0 takes the likeliest token, 1 the model's own odds; default 0.8")
    parser.add_argument("--top_k", type=number(int, 0), default=50, metavar="K",
                        help="choose from the K likeliest tokens, 0 from all; default 50")
    parser.add_argument("--seed", type=number(int, 0), default=0, metavar="S",
                        help="seed of the choices; default 0")
    args = parser.parse_args()
    trained = load_run(args)
    model, hp, script = trained
    if model.embed.weight.device.type == "cpu":  # few of which are fast in bfloat16
        model.float()
    try:
        tokenizer = tokenizer_of(hp, args.vocab_dir)
    except UserError as e:
        if args.vocab_dir:
            raise
        tokenizer = None
        note(f"token numbers, for want of a vocabulary: {e}")
    prompt = encode_prompt(args.prompt, tokenizer, hp.vocab_size)
    eot = hp.vocab_size - 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(text: bytes, final: bool = False):
        print(decoder.decode(text, final).translate(ESCAPES), end="", flush=True)

    show(b"".join(token_bytes(token, tokenizer) for token in prompt))
    generator = torch.Generator().manual_seed(args.seed)
    endless = generate(trained, [eot, *prompt], args.temperature, args.top_k, generator)
    shown = 0
    try:
        for token in itertools.islice(endless, args.tokens):
            if token == eot:
                break
            show(token_bytes(token, tokenizer))
            shown += 1
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        show(b"\n", final=True)
    if token == eot:
        note(f"end of text after {shown} tokens")


if __name__ == "__main__":
    sys.exit(start(main))
