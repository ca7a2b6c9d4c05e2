"""Examines a run for a race, which believes nothing that a script says of itself:

    python records/tools/exam.py SCRIPT LOG [--text=SHARD --place=N --tokens=N]

It has as many processes as the run had, after the run has ended. The model comes from the run's
final checkpoint and is asked for `logits(features(tokens, window))`; it never sees a target.
Tokens, softmax and sums are this program's own. What it finds out:

- The loss on a text that the run was not given, from the place N on. It is what a verdict judges.
- The loss on the run's own validation text, which must be that of the log.
- Whether features or logits change with later tokens. Other processes, which never see the text as
  it is, compute both with other tokens from a drawn place on, at eight places of the text that is
  judged. What they say before the place must be what the loss was computed from.
- Whether the first three steps, from the initial weights, and eight steps from the checkpoint that
  the run saved on its way give the training losses of the log when they are trained again, on
  tokens that are read here at the places that `step_starts` names.

Prints one line of JSON: the losses text (null without --text), own and logged; replayed (the
largest differences of training losses, in the first steps and the later ones); future (the largest
changes with later tokens, if documents stay and if they change too); seconds; and problem (what was
seen that must not be, or nothing).
"""

import json
import os
import socket
import sys
import time
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from random import SystemRandom

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs
from records.tools.leash import STARTER, end_with_starter
from records.tools.load import ArgumentParser, between, require, run

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.attention.flex_attention  # here, so that forked processes share it
from torch._C._nn import cross_entropy_loss  # as it is before a script can replace it
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from data.common import check_shard
from records.tools.sample import checked_script

PLACES = 8  # at which later tokens are changed
FIRST, LATER = 3, 8  # steps that are trained again
CHUNK = 4096  # tokens whose logits are held at a time
# What may differ. On a CPU, which repeats its bits: what a log rounds away, other orders of sums.
# On a GPU, a loss by 4 SD of a mean over 1,000 tokens (calculated; SD 0.005, measured between
# programs of one model that round elsewhere), and a step's by what such programs differed by with
# 512 tokens a step (measured: 0.004; on an H200, at the speedrun's size: 0.0004). Later tokens
# change no bit (calculated: no kernel has atomics or is chosen by timing). If documents change, 4
# roundings to bfloat16 of a feature, which is below 32, are allowed (calculated; 1 was measured).
LOSS_BOUND = {"cpu": 2e-4, "cuda": 1e-3}
STEP_BOUND = {"cpu": 6e-5, "cuda": 5e-3}
FUTURE_BOUND = {"cpu": (0.0, 1e-4), "cuda": (0.0, 0.5)}  # if documents stay, if they change too
NEEDED = ["World", "world_of_this_process", "draw_weights", "build_optimizers", "train_batches",
          "step_starts", "tokens_seen", "window_tensor", "train_step", "evaluate",
          "load_validation", "gather_training_state", "load_training_state"]

class Seen(Exception):
    """What must not be, in one line."""

expect = partial(require, error=Seen)

class SeenBy:
    """A model that notes which tokens it reads."""

    def __init__(self, model):
        self.model = model
        self.read = []

    def __call__(self, tokens, targets, *others, **named):
        self.read.append((tokens, targets, *others, *named.values()))
        return self.model(tokens, targets, *others, **named)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def has_read(self, streams: list) -> bool:
        """Whether these were all sequences of the streams, in any order, with no target other than
        the next token. A step may leave targets out, and may read its sequences again."""
        def as_bytes(x):
            return x.cpu().int().numpy().tobytes()
        length = len(self.read[0][0])
        next_tokens = {as_bytes(x): y for stream in streams
                       for x, y in zip(stream[:-1].split(length), stream[1:].split(length))}
        read = [(as_bytes(x), y) for x, y, *_ in self.read]
        return next_tokens.keys() == {x for x, _ in read} and all(
            bool(((y < 0) | (y == next_tokens[x])).all()) for x, y in read)

def fork(target, *args):
    """Calls this in a process that ends with the present one, and need not import torch again."""
    starter = str(os.getpid())
    if os.fork():
        return
    try:
        os.environ[STARTER] = starter
        end_with_starter()
        target(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)

class Exam:
    def __init__(self, path: Path, log: Path):
        self.began = time.monotonic()
        self.path = path
        self.run = logs.read_run(log, log.stem)
        found = {self.read(path)["step"]: path for path in log.with_suffix("").glob("*.pt")}
        self.final = found.pop(self.run.steps, None)
        self.middle = max(found, default=0), found.get(max(found, default=0))
        require(self.final, f"there is no checkpoint of step {self.run.steps}, the last one")
        self.found = {"text": None, "own": None, "logged": self.run.loss,
                      "replayed": [None, None], "future": [0.0, 0.0]}
        self.future_seen = ""
        self.other, pipe = Pipe()
        fork(self.answer, pipe)  # before there are threads, or a GPU is used
        pipe.close()
        self.build()
        if self.world.size > 1:
            cuda = self.kind == "cuda"
            dist.init_process_group("nccl" if cuda else "gloo",
                                    device_id=self.world.device if cuda else None)
        self.optimizers = self.script.build_optimizers(self.model, self.hp, self.world)

    def build(self):
        """Makes the model of the run, with its initial weights."""
        self.script = checked_script(self.path, *NEEDED)
        self.hp = self.script.Hyperparameters(**self.read(self.final)["settings"])
        self.world = self.script.world_of_this_process()  # which chooses the GPU
        torch.set_num_threads(int((self.run.environment.get("threads") or "1").split()[0]))
        self.kind = self.world.device.type
        torch.manual_seed(self.hp.seed)
        self.model = self.drawn_model(self.hp.seed)
        self.features, self.logits = self.model.features, self.model.logits
        if self.kind == "cuda":  # as in the run, so that its cache has the programs
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self.model.compile(dynamic=False, fullgraph=True)
            import torch._inductor.config as compiler  # not before its environment is set
            fixed = {"deterministic": True} if hasattr(compiler, "deterministic") else {}
            fix = partial(torch.compile, dynamic=False, fullgraph=True, options=fixed)
            self.features, self.logits = fix(self.features), fix(self.logits)

    def drawn_model(self, seed: int):
        """With the initial weights of a seed."""
        model = self.script.GPT(self.hp, getattr(torch, self.hp.dtype), self.kind == "cuda")
        self.script.draw_weights(model, seed)
        return model.to(self.world.device)

    def take_final_weights(self):
        self.model.load_state_dict(self.read(self.final)["state"]["model"])
        self.model.eval()

    def compare_seeds(self):
        """Where the initial weights of another seed are the same, pairs of runs are one run that is
        counted several times."""
        others = self.drawn_model(self.hp.seed + 1)
        drawn = [(p, q) for p, q in zip(self.model.parameters(), others.parameters())
                 if p.ndim > 1 and not bool((p == p.flatten()[0]).all())]
        same = sum(int((p == q).sum()) for p, q in drawn)
        expect(2 * same < sum(p.numel() for p, _ in drawn), "most of its initial weights are the "
               "same for every seed")

    def read(self, checkpoint: Path) -> dict:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)

    def of_all_ranks(self, value) -> list:
        """What each rank has, so that all of them come to one conclusion."""
        values = [value] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(values, value)
        return values

    def train_again(self, first: int, count: int):
        """Trains these steps from the present state, and compares losses with those of the log."""
        script, hp, world = self.script, self.hp, self.world
        logged = {line.step: line.loss for line in self.run.lines if line.kind == "train"}
        shards = script.find_shards(hp.train_files)
        batches = script.train_batches(shards, hp, world, first)
        places = islice(script.step_starts(shards, hp), first, min(first + count, self.run.steps))
        for step, (shard, start) in enumerate(places, first):
            share = (script.tokens_seen(step + 1, hp) - script.tokens_seen(step, hp)) // world.size
            streams = self.streams(shard.path, start, share)
            seen = SeenBy(self.model)
            loss = float(script.train_step(seen, next(batches), self.optimizers, step, hp, world))
            expect(seen.read, "train_step does not call model(inputs, targets, window)")
            right = seen.has_read(streams) and sum(len(x) - 1 for x in streams) == share
            expect(all(self.of_all_ranks(right)), f"step {step} trains on other tokens than the "
                   f"{share * world.size} from {str(start)[:50]} on in {shard.path}, which "
                   "step_starts and tokens_seen name")
            difference = abs(loss - logged[step + 1])
            largest = self.found["replayed"][first > 0]
            self.found["replayed"][first > 0] = max(difference, largest or 0.0)
            expect(difference <= STEP_BOUND[self.kind],
                   f"its log has a training loss of {logged[step + 1]:.4f} for step {step + 1}; "
                   f"trained again from step {first}, that is {loss:.4f}")

    def streams(self, path, start, share: int) -> list:
        """What this rank reads in a step: the tokens from a place on; or packs, if the script names
        pieces (begin, end) of a shard for each of them."""
        if isinstance(start, int):
            return [self.tokens([path], start + self.world.rank * share, share + 1)]
        count = len(start) // self.world.size
        mine = start[self.world.rank * count:][:count]
        text = self.tokens([path], 0, max(end for pack in mine for _, end in pack))
        return [torch.cat([text[begin:end] for begin, end in pack]) for pack in mine]

    def replay(self):
        self.train_again(0, FIRST)
        step, checkpoint = self.middle
        expect(checkpoint or not 0 < self.hp.save_every < self.run.steps,
               f"it has saved no checkpoint after {self.hp.save_every} steps")
        if checkpoint:
            state = self.read(checkpoint)["state"]
            self.script.load_training_state(state, self.model, self.optimizers, self.world)
            self.validate(step)
            self.train_again(step, LATER)

    def validate(self, step: int):
        """Has the script validate a sequence, which must change nothing; the window for it."""
        gather = partial(self.script.gather_training_state, self.model, self.optimizers)
        before = tree_map(lambda x: x.to("cpu", copy=True), gather())
        shards = self.script.find_shards(self.hp.val_files)
        sequences = self.script.load_validation(shards, self.hp, self.world)
        seen = SeenBy(self.model)
        self.script.evaluate(seen, sequences[:1], step, self.hp, self.world)
        changed = [f"{kind}, {name}" for kind, values in gather().items()
                   for name, x in values.items() if not torch.equal(x.cpu(), before[kind][name])]
        expect(not any(self.of_all_ranks(changed)),
               f"validation changes the training state ({''.join(changed[:1])})")
        return next((call[2] for call in seen.read),
                    self.script.window_tensor(step, self.hp, self.world.device))

    def tokens(self, paths, start: int, count: int):
        """Tokens of shards, one after the other, in int32."""
        shards = [check_shard(path, self.hp.vocab_size) for path in paths]
        tokens = np.concatenate(shards)[start:start + count].astype(np.int32)
        return torch.from_numpy(tokens).to(self.world.device)

    def sequences(self, stream):
        """The sequences of a stream, the last one padded, as a run validates."""
        padding = -(len(stream) - 1) % self.hp.val_seq_len
        tokens = F.pad(stream[:-1], (0, padding), value=self.hp.vocab_size - 1)
        return tokens.split(self.hp.val_seq_len)

    def loss(self, stream, asked) -> float:
        """The mean cross-entropy of all tokens of the stream after its first one. Where the other
        process was asked, what both say is compared."""
        total = 0.0
        sequences = [*enumerate(self.sequences(stream))]
        for number, tokens in sequences[self.world.rank::self.world.size]:
            start = number * self.hp.val_seq_len
            x_TD = self.features(tokens, self.window)
            for begin, x in zip(range(0, len(x_TD), CHUNK), x_TD.split(CHUNK)):
                logits_TV = self.logits(x).float()
                while asked and asked[0][0] == number and asked[0][1] <= begin + CHUNK:
                    self.compare(*asked.pop(0)[1:], x_TD, logits_TV)
                target_T = stream[start + begin + 1:][:len(x)].long()  # not there before
                logits_TV = logits_TV[:len(target_T)]
                summed = cross_entropy_loss(logits_TV, target_T, None, 2, -100, 0.0)  # 2: the sum
                total += float(summed)
        return sum(self.of_all_ranks(total)) / (len(stream) - 1)

    def ask(self, stream) -> list[tuple]:
        """Draws this rank's places, and asks the other process about them; [(sequence, place in
        it, whether later documents begin elsewhere too)]"""
        sequences = self.sequences(stream)
        own = range(len(sequences))[self.world.rank::self.world.size]
        draw = SystemRandom()
        generator = torch.Generator().manual_seed(draw.getrandbits(60))
        end_of_text = self.hp.vocab_size - 1
        asked = []
        changed = []
        for number, share, documents in sorted(
                (draw.choice(own), draw.random(), i % 2)
                for i in range(PLACES)[self.world.rank::self.world.size] if own):
            tokens = sequences[number]
            place = 1 + int(share * min(len(tokens), len(stream) - 1 - number * len(tokens)))
            other = torch.randint(0, end_of_text, (len(tokens),), generator=generator).to(tokens)
            begins = slice(place, None, 50) if documents else tokens == end_of_text
            other[begins] = end_of_text
            other[:place] = tokens[:place]
            asked.append((number, place, documents))
            changed.append((other.cpu().numpy(), place))
        self.other.send(([x.cpu().numpy() for x in tree_leaves(self.window)], changed))
        return asked

    @torch.no_grad()
    def answer(self, pipe):
        """The other process: sends what the model says before each place. Within a sequence the
        places come in order, so that no text shows the tokens that an earlier one hid."""
        self.other.close()
        try:
            window, changed = pipe.recv()
        except EOFError:  # the exam has ended before it asked
            return
        self.build()
        self.take_final_weights()
        _, spec = tree_flatten(self.script.window_tensor(self.run.steps, self.hp, "cpu"))
        window = [torch.as_tensor(x, device=self.world.device) for x in window]
        window = tree_unflatten(window, spec)
        for tokens, place in changed:
            x_TD = self.features(torch.as_tensor(tokens, device=self.world.device), window)
            chunk = (place - 1) // CHUNK
            logits_TV = self.logits(x_TD.split(CHUNK)[chunk])[:place - chunk * CHUNK]
            pipe.send([x.float().cpu().numpy() for x in (x_TD[:place], logits_TV)])

    def compare(self, place: int, documents: int, x_TD, logits_TV):
        """With what the other process says, which has read other tokens from this place on."""
        change = float(np.max([np.abs(before[:len(now)].float().cpu().numpy() - now).max()
                               for now, before in zip(self.other.recv(), (x_TD, logits_TV))]))
        self.found["future"][documents] = max(self.found["future"][documents], change)
        if not change <= FUTURE_BOUND[self.kind][documents]:  # also where it is no number
            self.future_seen = (f"what the model says before token {place} changes by {change:.2g} "
                                "when the tokens from there on change: it sees the future")

    @torch.no_grad()
    def examine(self, text: Path | None = None, place=0, count=0):
        """Finds the losses, and looks for the future in the text that is judged."""
        self.take_final_weights()
        self.window = self.validate(self.run.steps)
        self.model.eval()
        own = self.tokens([logs.shard_in(row)[0] for row in self.run.val_data], 0,
                          self.hp.val_tokens + 1)
        if text:
            stream = self.tokens([text], place, count + 1)
            self.found["text"] = self.loss(stream, self.ask(stream))
        loss = self.found["own"] = self.loss(own, [] if text else self.ask(own))
        self.found["future"] = [*map(max, zip(*self.of_all_ranks(self.found["future"])))]
        expect(abs(loss - self.run.loss) <= LOSS_BOUND[self.kind], "its log has a validation loss "
               f"of {self.run.loss:.4f}; its checkpoint has {loss:.4f} on the same text")
        seen = max(self.of_all_ranks(self.future_seen))
        expect(not seen, seen)

def main(argv=None):
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--place", type=between(0), default=0)
    parser.add_argument("--tokens", type=between(1), default=1)
    args = parser.parse_args(argv)
    size = int(logs.read_run(args.log, "").ranks or 1)
    if size > 1 and "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
                           "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        for rank in reversed(range(size)):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank:
                fork(main, argv)
    exam = Exam(args.script, args.log)
    problems = []
    for part in (exam.compare_seeds, exam.replay,
                 partial(exam.examine, args.text, args.place, args.tokens)):
        try:
            part()
        except Seen as e:
            problems.append(str(e))
    if exam.world.size > 1:
        dist.barrier()  # else the first rank to end could break another's last exchange
        dist.destroy_process_group()
    if exam.world.rank == 0:
        seconds = round(time.monotonic() - exam.began, 1)
        print(json.dumps(exam.found | {"seconds": seconds, "problem": "; ".join(problems)}),
              flush=True)

if __name__ == "__main__":
    status = run(main)
    sys.stdout.flush()
    os._exit(status or 0)  # what a script has left to run at the end could print another result
