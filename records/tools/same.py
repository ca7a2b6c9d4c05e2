"""Does an edit leave the mathematics alone? Then it needs no race, only a look at its speed.

    ./run.sh same my_record.py [--vs=train_gpt.py]
    ./run.sh same my_record.py --map=mlp.fc=mlp.up    # where the copy renames these parameters

Trains both scripts for three steps on a CPU, in float64, with all layers of their preset `speedrun`
at a small width, and with windows and rates that change. Both get equal weights, none of them zero.
All that they show must agree to 1e-9 of its size. Prints how much that is, what cannot be seen
here, and `same mathematics`; or the first difference, with status 3.

Parameters pair by name and shape. --map=OLD=NEW says which word of a name the copy replaces, and
--map=A,B=NEW that one parameter of the copy holds the numbers of both, one after the other. If the
copy splits a parameter, swap the scripts.
"""

import os
import re
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from itertools import accumulate, islice, zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ArgumentParser, require, run

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from data.common import write_shards
from records.tools import honesty
from records.tools.exam import NEEDED, Seen, expect
from records.tools.logs import NO_SETTINGS

BOUND = 1e-9
SIZES = [*honesty.SIZES, "--train_seq_len=1024", "--val_seq_len=1024", "--micro_batches=2",
         "--num_heads=2", "--num_iterations=3", "--window_end=640", "--muon_momentum_steps=1"]
LOADER = ["--vocab_size=50257", "--train_seq_len=256", "--micro_batches=4", "--epochs=3"]
UNSEEN = ("not seen: rounding, since all is float64; FP8, FlexAttention and what else only a GPU "
          "runs; sums over ranks; grouped queries")

def use_float64():
    """In this process, whatever asks for a shorter float gets float64."""
    for name in ("float", "float32", "bfloat16", "half", "float16"):
        setattr(torch, name, torch.float64)
        if hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, torch.Tensor.double)
    torch.set_default_dtype(torch.float64)

class Side:
    """A script, a model of it with the weights that both start from, and where the numbers of the
    baseline's parameters lie in it."""

    def __init__(self, path: str, folder: Path, maps=(), baseline=None):
        self.path = path
        self.folder = folder
        self.script, self.flags, self.hp = honesty.tiny(
            path, ["--preset=speedrun"], folder, SIZES, ["PRESETS", "find_shards", *NEEDED])
        self.masks = [*honesty.masks_seen(self.script)]
        self.script.GPT.LOGITS_TOKENS = 300  # so that the head works in several parts
        self.model = self.script.GPT(self.hp, torch.float64, flex=False)
        self.script.draw_weights(self.model, self.hp.seed)
        self.weights = dict(self.model.named_parameters())
        self.drawn = {name: p.detach().flatten().clone() for name, p in self.weights.items()}
        self.parts = parts_of(baseline or self, self, maps)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.weights.values():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            for old, (new, part) in self.parts.items() if baseline else ():
                self.weights[new].view(-1)[part] = baseline.weights[old].flatten()
                if old != new:  # numbers are drawn by name
                    self.drawn[new][part] = baseline.drawn[old]

    def of_parameters(self, label: str, values: dict):
        """From the last one on, as gradients come."""
        for old, (new, part) in reversed(self.parts.items()):
            if new in values:
                yield f"{label}: {old}", values[new].detach().flatten()[part].clone()

    def of_loader(self):
        """What three passes serve to one rank and to two, with large tokens, from shards that end
        within a step, a little behind one, and with one."""
        tokens = np.random.default_rng(1).integers(30_000, 50_257, 4988).astype("<u2")
        tokens[::100] = 50_256
        for number, part in enumerate(np.split(tokens, [1900, 2940])):
            write_shards([part], self.folder / "served", number, len(part))
        hp, _ = self.script.parse_flags([*self.flags, *LOADER])
        shards = self.script.find_shards(f"{self.folder}/served_*.bin")
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            world = self.script.World(rank, size, torch.device("cpu"))
            for step, batch in enumerate(self.script.train_batches(shards, hp, world, 0)):
                yield from leaves(f"loader, step {step}, rank {rank} of {size}", batch)
            yield from leaves(f"loader, validation, rank {rank} of {size}",
                              self.script.load_validation(shards, hp, world))

    def shown(self, with_masks: bool):
        """Yields labels, which begin with a kind and a step, and tensors."""
        script, hp = self.script, self.hp
        yield from self.of_loader()
        for number, (_, masks) in enumerate(self.masks if with_masks else ()):
            yield from leaves(f"lists of blocks, text {number}", masks)
        yield from self.of_parameters("initial weights", self.drawn)
        world = script.World(0, 1, torch.device("cpu"))
        sequences = script.load_validation(script.find_shards(hp.val_files), hp, world)
        batches = script.train_batches(script.find_shards(hp.train_files), hp, world, 0)
        batches = [*islice(batches, hp.num_iterations)]
        yield from leaves("tokens", [batches, sequences])
        optimizers = script.build_optimizers(self.model, hp, world)
        losses = []
        gradients = {}  # of the micro-batches so far

        def note(name, p):
            gradients[name] = p.grad.clone()

        self.model.register_forward_hook(lambda model, words, loss: losses.append(loss.detach()))
        for name, p in self.weights.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(note, name))
        for step, batch in enumerate(batches):
            losses.clear()
            gradients.clear()
            before = {name: p.detach().clone() for name, p in self.weights.items()}
            mean = script.train_step(self.model, batch, optimizers, step, hp, world)
            yield from leaves(f"losses, step {step}", losses, "micro-batch")
            yield from self.of_parameters(f"gradients, step {step}", gradients)
            yield from leaves(f"losses, step {step}", mean, "mean")
            yield from self.of_parameters(f"updates, step {step}", {
                name: p - before[name] for name, p in self.weights.items()})
        loss = script.evaluate(self.model, sequences, len(batches), hp, world)
        yield from leaves("validation loss, and whether training goes on",
                          [loss, self.model.training])

def leaves(label: str, values, what: str = "tensor"):
    for number, x in enumerate(tree_leaves(values), 1):
        yield f"{label}: {what} {number}", torch.as_tensor(x)

def parts_of(baseline: Side, copy: Side, maps) -> dict[str, tuple[str, slice]]:
    """{parameter of the baseline: (that of the copy which holds it, in this part)}"""
    ours, theirs = baseline.weights, copy.weights
    groups = {}
    for old in ours:
        new, place = old, 0
        for words, _, other in (text.partition("=") for text in maps):
            for number, word in enumerate(words.split(",")):
                if word and word in new:
                    new, place = new.replace(word, other), number
                    break
        groups.setdefault(new, []).append((place, old))
    parts = {}
    for new, olds in groups.items():
        sizes = [ours[old].numel() for _, old in sorted(olds)]
        fits = new in theirs and sum(sizes) == theirs[new].numel()
        if fits and (olds != [(0, new)] or ours[new].shape == theirs[new].shape):
            parts |= {old: (new, slice(end - size, end)) for (_, old), size, end in
                      zip(sorted(olds), sizes, accumulate(sizes))}
    olds = [name for name in ours if name not in parts]
    news = theirs.keys() - {new for new, _ in parts.values()}
    old, new = (", ".join(names[:2]) or "none" for names in (olds, sorted(news)))
    require(not olds and not news, f"by name and shape, {old} of {baseline.path} and {new} of "
            f"{copy.path} pair with none: add --map=OLD=NEW or --map=A,B=NEW if they are the same")
    return {old: parts[old] for old in ours}

def compare_settings(ours, theirs):
    """Of the presets, except those that only name, save or show."""
    for name in ours.PRESETS.keys() & theirs.PRESETS.keys():
        here, there = (asdict(script.PRESETS[name]) for script in (ours, theirs))
        for key in (here.keys() & there.keys()) - NO_SETTINGS - {"seed", "val_loss_every"}:
            expect(here[key] == there[key], f"settings: {key} of the preset {name} is "
                   f"{there[key]!r}, not {here[key]!r}")

def check(copy: str, vs: str, maps=()):
    """Yields a line for each kind of thing. Raises Seen with a difference, or UserError."""
    torch.set_num_threads(1)
    gaps = {}
    with tempfile.TemporaryDirectory() as folder:
        ours = Side(vs, Path(folder))
        theirs = Side(copy, Path(folder), maps, ours)
        compare_settings(ours.script, theirs.script)
        with_masks = bool(ours.masks and theirs.masks)
        shown = [one.shown(with_masks) for one in (ours, theirs)]
        for (label, a), (other, b) in zip_longest(*shown, fillvalue=("the end", torch.empty(0))):
            expect(label == other, f"{vs} shows {label}, where {copy} shows {other}")
            expect(a.shape == b.shape, f"{label} has the shape {[*b.shape]}, not {[*a.shape]}")
            gap, size = (float(x.double().abs().max()) for x in (a.double() - b.double(), a))
            gap = gap and gap / max(size, 1e-300)
            expect(gap <= BOUND, f"{label} differs by {gap:.1e} of its size")
            gaps.setdefault(re.match(r"[\w ]+", label)[0], []).append(gap)
    for kind, found in gaps.items():
        yield f"{kind}: {len(found)} tensors, the largest difference is {max(found):.0e}"
    yield UNSEEN + "; the lists of blocks" * (not with_masks)

def main():
    parser = ArgumentParser(description=__doc__, prog="./run.sh same")
    parser.add_argument("script", help="the copy")
    parser.add_argument("--vs", default="train_gpt.py", help="the baseline")
    parser.add_argument("--map", action="append", default=[], metavar="OLD=NEW",
                        help="a parameter with another name")
    args = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", TORCH_COMPILE_DISABLE="1")
    use_float64()
    return honesty.say(check(args.script, args.vs, args.map), "same mathematics")

if __name__ == "__main__":
    sys.exit(run(main))
