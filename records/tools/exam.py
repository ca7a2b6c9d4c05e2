"""Examines a run for a race, which believes nothing that a script says of itself:

    python records/tools/exam.py SCRIPT LOG [--text=SHARD --place=N --tokens=N]
    python records/tools/exam.py SCRIPT --offer [flags]     can runs of this script be examined?

It starts as many processes as the run had, after the run has ended. The model comes from the
run's final checkpoint and is asked for `logits(features(tokens, window))`; it never sees a target.
Tokens, softmax and sums are this program's own. What it finds out:

- The loss on a text that the run was not given, from the place N on. It is what a verdict judges.
- The loss on the run's own validation text, which must be that of the log.
- Whether features or logits change with later tokens, at eight places of a sequence as long as the
  run's own.
- Whether the first three steps, from the initial weights, and eight steps from the checkpoint that
  the run saved on its way give the training losses of the log when they are trained again, on
  tokens that are read here at the places that `step_starts` names.

Prints one line of JSON: text and own (the losses; text is null without --text) and problem (what
was seen that must not be, or nothing). A script may still do all that a process of its user may do.
"""

import json
import os
import sys
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import logs
from records.tools.load import (LEASH, TORCHRUN, ArgumentParser, UserError, between, child, require,
                                run)

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._nn import cross_entropy_loss  # as it is before a script can replace it

from data.common import check_shard
from records.tools.launch import split_words
from records.tools.sample import checked_script, checkpoints_in, folder_of, one_line

PLACES = 8  # at which later tokens are changed
FIRST, LATER = 3, 8  # steps that are trained again
CHUNK = 4096  # tokens whose logits are held at a time
# How far a loss may be from the log's. On a CPU, where a run repeats its bits, these are the digits
# that a log rounds away; the loss of the own text also has another order of sums, and so have masks
# whose later documents change. Those for a GPU are guesses until honest runs have been measured.
LOSS_BOUND = {"cpu": 2e-4, "cuda": 2e-3}
STEP_BOUND = {"cpu": 6e-5, "cuda": 2e-2}
FUTURE_BOUND = {"cpu": (0.0, 1e-4), "cuda": (0.1, 0.1)}  # if documents stay, if they change too
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

    def has_read(self, stream) -> bool:
        """Whether these were all sequences of the stream, each once, in any order, with the next
        token as target."""
        def sorted_bytes(pairs):
            return sorted(torch.stack((x.int(), y.int())).cpu().numpy().tobytes() for x, y in pairs)
        length = len(self.read[0][0])
        own = zip(stream[:-1].split(length), stream[1:].split(length))
        return sorted_bytes(own) == sorted_bytes(call[:2] for call in self.read)

def model_of(script, hp, flex: bool):
    try:
        model = script.GPT(hp, getattr(torch, hp.dtype), flex)
        if callable(model.features) and callable(model.logits):
            return model
    except (TypeError, AttributeError) as e:
        raise UserError("a race examines models that GPT(hp, dtype, flex) makes, by their methods "
                        f"features(tokens, window) and logits(x): {one_line(e)}") from None

def offer(path: Path, words: list[str]):
    """Whether runs of a script with these flags can be examined, and how many steps they have."""
    script = checked_script(path, *NEEDED)
    text = any(word.startswith("--text=") for word in words)
    flags = [word for word in split_words(words)[1] if not word.startswith("--text")]
    hp, _ = script.parse_flags(["--preset=demo"] * text + flags)
    device = script.world_of_this_process().device
    model_of(script, script.resolve(hp, device), device.type == "cuda")
    print(f"steps: {hp.num_iterations}")

class Exam:
    def __init__(self, path: Path, log: Path):
        self.run = logs.read_run(log, log.stem)
        self.script = checked_script(path, *NEEDED)
        self.losses = {"text": None, "own": None}
        found = {self.read(path)["step"]: path for path in checkpoints_in(folder_of(log))}
        self.final = found.pop(self.run.steps, None)
        self.middle = max(found, default=0), found.get(max(found, default=0))
        require(self.final, f"there is no checkpoint of step {self.run.steps}, the last one")
        self.hp = self.script.Hyperparameters(**self.read(self.final)["settings"])
        self.world = self.script.world_of_this_process()  # which chooses the GPU
        torch.set_num_threads(int((self.run.environment.get("threads") or "1").split()[0]))
        self.kind = self.world.device.type
        cuda = self.kind == "cuda"
        if self.world.size > 1:
            dist.init_process_group("nccl" if cuda else "gloo",
                                    device_id=self.world.device if cuda else None)
        torch.manual_seed(self.hp.seed)
        self.model = model_of(self.script, self.hp, cuda)
        self.script.draw_weights(self.model, self.hp.seed)
        self.model.to(self.world.device)
        self.features, self.logits = self.model.features, self.model.logits
        if cuda:  # as in the run, so that its cache has the programs
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self.model.compile(dynamic=False, fullgraph=True)
            self.features, self.logits = (torch.compile(each, dynamic=False, fullgraph=True)
                                          for each in (self.features, self.logits))
        self.optimizers = self.script.build_optimizers(self.model, self.hp, self.world)

    def compare_seeds(self):
        """Where the initial weights of another seed are the same, pairs of runs are one run that is
        counted several times."""
        others = model_of(self.script, self.hp, self.world.device.type == "cuda")
        self.script.draw_weights(others, self.hp.seed + 1)
        others.to(self.world.device)
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

    # ---- Training again

    def train_again(self, first: int, count: int):
        """Trains these steps from the present state, and compares losses with those of the log."""
        script, hp, world = self.script, self.hp, self.world
        logged = {line.step: line.loss for line in self.run.lines if line.kind == "train"}
        shards = script.find_shards(hp.train_files)
        batches = script.train_batches(shards, hp, world, first)
        places = islice(script.step_starts(shards, hp), first, min(first + count, self.run.steps))
        for step, (shard, start) in enumerate(places, first):
            share = (script.tokens_seen(step + 1, hp) - script.tokens_seen(step, hp)) // world.size
            tokens = self.tokens([shard.path], start + world.rank * share, share + 1)
            seen = SeenBy(self.model)
            loss = float(script.train_step(seen, next(batches), self.optimizers, step, hp, world))
            expect(all(self.of_all_ranks(seen.has_read(tokens))), f"step {step} trains on other "
                   f"tokens than the {share * world.size} from {start} on in {shard.path}, which "
                   "step_starts and tokens_seen name")
            expect(abs(loss - logged[step + 1]) <= STEP_BOUND[self.kind],
                   f"its log has a training loss of {logged[step + 1]:.4f} for step {step + 1}; "
                   f"trained again from step {first}, that is {loss:.4f}")

    def replay(self):
        self.train_again(0, FIRST)
        step, checkpoint = self.middle
        if checkpoint:
            state = self.read(checkpoint)["state"]
            self.script.load_training_state(state, self.model, self.optimizers, self.world)
            self.validate(step)
            self.train_again(step, LATER)

    def validate(self, step: int):
        """Has the script validate two sequences, which must change nothing; the window for them."""
        def state():
            now = self.script.gather_training_state(self.model, self.optimizers)
            return {(kind, name): x for kind in now for name, x in now[kind].items()}
        before = {key: x.to("cpu", copy=True) for key, x in state().items()}
        shards = self.script.find_shards(self.hp.val_files)
        sequences = self.script.load_validation(shards, self.hp, self.world)
        seen = SeenBy(self.model)
        self.script.evaluate(seen, sequences[:2], step, self.hp, self.world)
        changed = [key for key, x in state().items() if not torch.equal(x.cpu(), before[key])]
        expect(not any(self.of_all_ranks(changed)), "validation changes the training state "
               f"({', '.join(changed[:1] and changed[0])})")
        return next((call[2] for call in seen.read),
                    self.script.window_tensor(step, self.hp, self.world.device))

    # ---- The loss

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

    def loss(self, stream) -> float:
        """The mean cross-entropy of all tokens of the stream after its first one."""
        total = 0.0
        sequences = [*enumerate(self.sequences(stream))]
        for number, tokens in sequences[self.world.rank::self.world.size]:
            place = number * self.hp.val_seq_len
            for x in self.features(tokens, self.window).split(CHUNK):
                logits_TV = self.logits(x).float()
                target_T = stream[place + 1:place + 1 + len(x)].long()  # not there before
                place += len(x)
                logits_TV = logits_TV[:len(target_T)]
                summed = cross_entropy_loss(logits_TV, target_T, None, 2, -100, 0.0)  # 2: the sum
                total += float(summed)
        return sum(self.of_all_ranks(total)) / (len(stream) - 1)

    def look_for_the_future(self, stream):
        """Nothing before a place may change with the tokens after it."""
        tokens = self.sequences(stream)[0]
        begins = tokens == self.hp.vocab_size - 1
        generator = torch.Generator().manual_seed(1)
        right_TD = self.features(tokens, self.window).clone()
        length = min(len(tokens), len(stream) - 1)
        found = ""
        for i in range(PLACES)[self.world.rank::self.world.size]:
            place = max(1, length * (i + 1) // (PLACES + 1) + (-3, -2, -1, 0, 1, 2, 40, 64)[i])
            other = torch.randint(0, self.hp.vocab_size - 1, (len(tokens),), generator=generator)
            changed = torch.where(begins, tokens, other.to(tokens))
            if i % 2:  # later documents begin elsewhere
                changed[place + 5::50] = self.hp.vocab_size - 1
            changed[:place] = tokens[:place]
            x_TD = self.features(changed, self.window)
            chunk = slice((place - 1) // CHUNK * CHUNK, place // CHUNK * CHUNK + CHUNK)
            for now, before in ((x_TD[:place], right_TD[:place]),
                                [self.logits(x[chunk])[:place - chunk.start]
                                 for x in (x_TD, right_TD)]):
                change = float((now.float() - before.float()).abs().max())
                if not change <= FUTURE_BOUND[self.kind][i % 2]:  # also where it is no number
                    found = (f"what the model says before token {place} changes by {change:.2g} "
                             "when the tokens from there on change: it sees the future")
        found = max(self.of_all_ranks(found))
        expect(not found, found)

    @torch.no_grad()
    def examine(self, text: Path | None = None, place=0, count=0):
        """Finds `losses`, and looks for the future."""
        self.model.load_state_dict(self.read(self.final)["state"]["model"])
        self.window = self.validate(self.run.steps)
        self.model.eval()
        if text:
            self.losses["text"] = self.loss(self.tokens([text], place, count + 1))
        own = self.tokens([logs.shard_in(row)[0] for row in self.run.val_data], 0,
                          self.hp.val_tokens + 1)
        loss = self.losses["own"] = self.loss(own)
        expect(abs(loss - self.run.loss) <= LOSS_BOUND[self.kind], "its log has a validation loss "
               f"of {self.run.loss:.4f}; its checkpoint has {loss:.4f} on the same text")
        self.look_for_the_future(own)

def main(argv=None):
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--offer", action="store_true")
    options, words = parser.parse_known_args(argv)
    if options.offer:
        return offer(options.script, words)
    parser.add_argument("log", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--place", type=between(0), default=0)
    parser.add_argument("--tokens", type=between(1), default=1)
    args = parser.parse_args(argv)
    one = logs.read_run(args.log, "")
    if int(one.ranks or 1) > 1 and "RANK" not in os.environ:
        ranks = [*TORCHRUN, f"--nproc_per_node={one.ranks}", LEASH, __file__]
        with child("-W", "ignore", *ranks, *(argv or sys.argv[1:])) as processes:
            processes.wait()
        return processes.returncode
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
        print(json.dumps({**exam.losses, "problem": "; ".join(problems)}), flush=True)

if __name__ == "__main__":
    status = run(main)
    sys.stdout.flush()
    os._exit(status or 0)  # what a script has left to run at the end could print another result
