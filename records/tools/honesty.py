"""Is a copy of train_gpt.py honest? Says so in seconds, on a CPU, with a tiny model in float32:

    ./run.sh honest my_record.py [speedrun|demo] [--setting=value ...]

Honest means that its validation loss is what the verdict of a race takes it for:

- No loss depends on later tokens. It is tried by changing them, after two training steps, and with
  noise added to all weights, since some projections start at zero and would hide what they let in.
- The validation loss is the cross-entropy of `logits(features(tokens, window))`, each validation
  token counted once, and the same each time.
- Validation changes nothing. A run that validates at other steps ends in the same bits, and so does
  a run that was resumed.
- Two processes train what one trains, but for rounding.

The settings are those of the copy's demo, or the ones that are named; sizes, steps and data are the
check's own. It prints a line for each property and ends with `honest`. Where one does not hold, the
last line says what was seen, and the status is 3. A wrong command, or settings that the copy
refuses, are one line and status 2; another error of the copy keeps its traceback.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools.load import ROOT, TORCHRUN, UserError, installed, require, run

with installed():
    import numpy as np
    import torch
    import torch.nn.functional as F

    from data.common import shard_header
    from records.tools.launch import split_words
    from records.tools.sample import checked_script, one_line

SEQ_LEN = 512
STEPS = 16
SAVED = 12  # the step from which a run is resumed
END_OF_TEXT = 256
# These replace what the command line says.
SIZES = [
    "--model_dim=32", "--head_dim=16", "--train_seq_len=256",
    f"--val_seq_len={SEQ_LEN}", "--val_tokens=1400", "--micro_batches=4", "--epochs=1000",
    f"--vocab_size={END_OF_TEXT + 1}", f"--num_iterations={STEPS}", f"--save_every={SAVED}",
    "--seed=1", "--dtype=float32", "--name=honesty",
]

# Each is a wide multiple of what right scripts showed: train_gpt.py with 8 seeds of the demo and of
# the speedrun, a record attempt with 8 of the demo and 3 of the speedrun.
LOSS_BOUND = 1e-5  # share of the loss, for a sum in float32; at most 9e-8 was seen
# For targets up to a token, where later tokens begin other documents, so that the sums of another
# kind of attention may get another shape; 0 was seen.
BORDERS_BOUND = 1e-4
# For the losses of 8 steps on two processes; at most 0.0004 was seen. Rounding grows in an
# optimizer that takes full-size steps on tiny gradients: with an adam_eps of 1e-10 it became 0.016.
# Processes that read the same data differed by 0.04 on one text, and by 0.14 on another.
RANKS_BOUND = 0.03


class Dishonest(Exception):
    """What was seen, in one line."""


def expect(condition, message: str):
    if not condition:
        raise Dishonest(message)


class Trial:
    """A copy, its settings for the check, and a folder with the data."""

    def __init__(self, path: Path, flags, folder: Path):
        text = (ROOT / "train_gpt.py").read_bytes()
        stream = [t for part in text.split(b"\n\n") for t in (END_OF_TEXT, *part, 10)]
        self.folder = folder
        self.val_stream = torch.tensor(stream[:3000])
        for name, tokens in (("val", stream[:3000]), ("train", stream[3000:])):
            data = shard_header(len(tokens)) + np.array(tokens, "<u2").tobytes()
            (folder / f"{name}.bin").write_bytes(data)
        self.path = path
        self.files = [f"--{name}_files={folder}/{name}.bin" for name in ("train", "val")]
        self.script = checked_script(path)
        self.flags = ["--preset=demo", *flags, *SIZES, *self.files]
        if hasattr(self.script.Hyperparameters, "adam_eps"):
            # With the 1e-10 of `speedrun`, a gradient that is a mere rounding error makes a
            # full-size step, and processes differ.
            self.flags.append("--adam_eps=1e-7")
        self.world = self.script.World(0, 1, torch.device("cpu"))
        with self.users_errors():
            hp, _ = self.script.parse_flags(self.flags)
            self.script.check_settings(hp, 2)
        self.hp = self.script.resolve(hp, self.world.device)

    @contextlib.contextmanager
    def users_errors(self):
        """An error that the copy explains in one line keeps its line."""
        try:
            yield
        except self.script.UserError as error:
            raise UserError(f"{self.path}, in the check of its honesty: {error}") from None

    def trained(self):
        """(model, optimizers) after two steps, since an optimizer of a copy may skip one."""
        script, hp = self.script, self.hp
        torch.manual_seed(1)
        model = script.GPT(hp, torch.float32, flex=False)
        optimizers = script.build_optimizers(model, hp, self.world)
        batches = script.train_batches(script.find_shards(hp.train_files), hp, self.world, 0)
        for step in (0, 1):
            script.train_step(model, next(batches), optimizers, step, hp, self.world)
        return model, optimizers

    def evaluate(self, model):
        """(the validation loss, the arguments of each call of the model)"""
        script, hp = self.script, self.hp
        sequences = script.load_validation(script.find_shards(hp.val_files), hp, self.world)
        calls = []
        hook = model.register_forward_pre_hook(
            lambda model, args, named: calls.append((*args, *named.values())), with_kwargs=True)
        loss = script.evaluate(model, sequences, 2, hp, self.world)
        hook.remove()
        require(calls, f"{self.path}: evaluate does not call the model, which the check needs")
        return loss, calls

    def train(self, name: str, *flags, processes=1):
        """A run of the copy; {(kind, step): loss} of its log."""
        records = self.folder / name
        arguments = [*flags, f"--records={records}"]
        if not any(flag.startswith("--resume=") for flag in flags):
            arguments = [*self.flags, *arguments]
        if processes == 1:
            with contextlib.redirect_stdout(None), self.users_errors():
                self.script.main(arguments)
        else:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *TORCHRUN, f"--nproc_per_node={processes}",
                 str(self.path), *arguments],
                env=alone() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
            require(done.returncode == 0, f"{self.path} fails on {processes} processes: "
                    f"{one_line((done.stderr.strip() or 'no output')[-400:])}")
        (log,) = records.glob("*.log")
        found = re.findall(r"(?m)^step:(\d+)/.* (train|val)_loss:(\S+) ", log.read_text())
        return {(kind, int(step)): float(loss) for step, kind, loss in found}

    def checkpoint(self, name: str, step: int) -> Path:
        paths = list((self.folder / name).glob(f"*/step{step:08}.pt"))
        require(paths, f"{self.path} saves no checkpoint step{step:08}.pt; restore that")
        return paths[0]


def alone() -> dict:
    """The environment without a place among other processes, and without GPUs."""
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in places} | {
        "CUDA_VISIBLE_DEVICES": ""}


def difference(a: dict, b: dict) -> str | None:
    """The first tensor in which two training states differ."""
    for kind in a.keys() | b.keys():
        here, there = a.get(kind, {}), b.get(kind, {})
        for name in here.keys() | there.keys():
            if name not in here or name not in there or not torch.equal(here[name], there[name]):
                return f"{kind}, {name}"
    return None


# ---- The properties ------------------------------------------------------------------------------

@torch.no_grad()
def token_losses(model, tokens, targets, window):
    """By the definition: [T], zero where a target does not count."""
    logits_TV = model.logits(model.features(tokens, window)).double()
    return F.cross_entropy(logits_TV, targets, ignore_index=-1, reduction="none")


def check_validation(trial: Trial, model, optimizers, when: str) -> str:
    """Two validations agree and change nothing, and their loss is the definition's."""
    gathered = trial.script.gather_training_state(model, optimizers)
    before = {kind: {name: x.clone() for name, x in tensors.items()}
              for kind, tensors in gathered.items()}
    losses = []
    for _ in range(2):
        loss, calls = trial.evaluate(model)
        losses.append(loss)
        changed = difference(before, trial.script.gather_training_state(model, optimizers))
        expect(not changed, f"validation changes the training state ({changed}), {when}")
    expect(losses[0] == losses[1], f"two validations of the same weights give {losses[0]!r} and "
           f"{losses[1]!r}, {when}")
    model.eval()
    check_targets(trial, calls)
    total = sum(float(token_losses(model, *call[:3]).sum()) for call in calls)
    expected = total / trial.hp.val_tokens
    if not abs(losses[0] - expected) <= LOSS_BOUND * expected:
        where = unlike_the_definition(model, calls)
        raise Dishonest(f"the validation loss is {losses[0]:.6f}, but the cross-entropy of "
                        f"logits(features()) is {expected:.6f}, {when}{where}")
    return (f"validation: {losses[0]:.6f} twice, the cross-entropy of {trial.hp.val_tokens} "
            f"targets, each counted once, {when}")


def check_targets(trial: Trial, calls):
    """Each target is the stream's next token, counted once, and read after those before it only."""
    at = 0  # how many targets were counted
    for tokens, targets, *_ in calls:
        counted = (targets != -1).nonzero().flatten().tolist()
        if not counted:
            continue
        first, end = counted[0], counted[-1] + 1
        known = at - first  # the place in the stream of the sequence's first token
        expect(known >= 0 and counted == list(range(first, end)),
               f"validation leaves out targets after token {at}")
        for what, seen, place in (("target", targets[first:end], known + first + 1),
                                  ("input", tokens[:end], known)):
            wrong = (seen != trial.val_stream[place:place + len(seen)]).nonzero().flatten()
            expect(not len(wrong), f"validation's {what} is not token "
                   f"{place + int(wrong[0]) if len(wrong) else 0} of the text where it should be")
        at += end - first
    expect(at == trial.hp.val_tokens, f"validation counts {at} targets, expected "
           f"{trial.hp.val_tokens}")


@torch.no_grad()
def unlike_the_definition(model, calls) -> str:
    """Where the model's own loss differs from the definition's."""
    for number, (tokens, targets, *rest) in enumerate(calls):
        none = float(model(tokens, torch.full_like(targets, -1), *rest))
        if none:
            return f": it adds {none:.6f} in a sequence where no target counts"
        losses = token_losses(model, tokens, targets, rest[0])
        for token in (targets != -1).nonzero().flatten().tolist():
            one = torch.full_like(targets, -1)
            one[token] = targets[token]
            own = float(model(tokens, one, *rest)) * len(tokens)
            if not abs(own - float(losses[token])) <= LOSS_BOUND * (1 + own):
                return (f": at token {token} of sequence {number} it is {own:.6f}, not "
                        f"{losses[token]:.6f}")
    return ""


@torch.no_grad()
def check_future(trial: Trial, model, when: str) -> str:
    """No target's loss depends on the tokens after it."""
    _, calls = trial.evaluate(model)
    model.eval()
    tokens, targets, *rest = calls[0]
    generator = torch.Generator().manual_seed(1)
    T = len(tokens)
    begins = tokens == END_OF_TEXT
    border = int(begins[T // 3:].nonzero()[0]) + T // 3
    cuts = sorted({1, 77, border, border + 1, T // 4, T // 2, T // 2 + 44, T - 99, T - 1})
    losses = token_losses(model, tokens, targets, rest[0])
    for cut in cuts:
        for moves_borders in (False, True):
            # Another byte for each that follows, which is never the token that begins a document.
            shift = torch.randint(1, END_OF_TEXT, (T,), generator=generator)
            other = ((tokens + shift) % END_OF_TEXT).where(~begins | moves_borders, tokens)
            if moves_borders:
                other[cut + 5::50] = END_OF_TEXT
            other = torch.cat((tokens[:cut], other[cut:].to(tokens.dtype)))
            bound = BORDERS_BOUND if moves_borders else 0
            known = torch.where(torch.arange(T) < cut, targets, -1)
            others = token_losses(model, other, targets, rest[0])
            changes = (others - losses).abs()[:cut]
            seen = ~(changes <= bound)
            if seen.any():
                token = int(seen.nonzero()[0])
                raise Dishonest(f"the loss of token {token} changes by {changes[token]:.2g} when "
                                f"tokens from {cut} on change, {when}: it sees the future")
            own = float(model(tokens, known, *rest)) - float(model(other, known, *rest))
            expect(abs(own) <= bound, f"the loss of the tokens up to {cut - 1} changes by "
                   f"{own:.2g} when tokens from {cut} on change, {when}: it sees the future")
    return (f"future: no loss up to a token changes with those from {', '.join(map(str, cuts))} "
            f"on, {when}")


@torch.no_grad()
def add_noise(model):
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))


def check_model(trial: Trial):
    model, optimizers = trial.trained()
    for when in ("after two steps", "with noise on all weights"):
        yield check_validation(trial, model, optimizers, when)
        yield check_future(trial, model, when)
        add_noise(model)


def check_runs(trial: Trial):
    """A run's last bits depend neither on its validations nor on a break; a second process changes
    no more than rounding."""
    losses = trial.train("plain", "--val_loss_every=4")
    saved = torch.load(trial.checkpoint("plain", STEPS), weights_only=True)["state"]
    trial.train("seldom", "--val_loss_every=0")
    others = torch.load(trial.checkpoint("seldom", STEPS), weights_only=True)["state"]
    changed = difference(saved, others)
    expect(not changed, f"a run of {STEPS} steps that validates at other steps ends with other "
           f"numbers ({changed})")
    trial.train("resumed", f"--resume={trial.checkpoint('plain', SAVED)}", "--val_loss_every=1")
    others = torch.load(trial.checkpoint("resumed", STEPS), weights_only=True)["state"]
    changed = difference(saved, others)
    expect(not changed, f"a run that is resumed at step {SAVED} ends with other numbers "
           f"({changed}): what it remembers must be in an optimizer's state")
    yield (f"runs: with other validations, or resumed at step {SAVED}, {STEPS} steps end in the "
           "same bits")
    yield check_ranks(trial, losses)


def check_ranks(trial: Trial, losses: dict) -> str:
    """Of two processes, the first 8 steps have the losses of one."""
    others = trial.train("two", "--val_loss_every=4", processes=2)
    largest = 0.0
    for (kind, step), loss in sorted(losses.items(), key=lambda item: item[0][1]):
        if step > 8:
            break
        other = others.get((kind, step), float("nan"))
        expect(abs(loss - other) <= RANKS_BOUND, f"{kind}_loss at step {step} is {loss} on one "
               f"process and {other} on two, which rounding does not explain")
        largest = max(largest, abs(loss - other))
    return f"processes: on two, the losses of 8 steps are those of one within {largest:.4f}"


def check(path, flags=(), say=lambda line: None):
    """Tries all properties. Raises Dishonest with what was seen, and UserError where the copy
    cannot be tried."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bits of sums depend on their number
    try:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(path).resolve(), flags, Path(folder))
            for properties in (check_model, check_runs):
                for line in properties(trial):
                    say(line)
    finally:
        torch.set_num_threads(threads)


def main():
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    path, flags = split_words(words)
    require(path in words, "name the script first: ./run.sh honest my_record.py "
            "[speedrun|demo] [--setting=value ...]")
    require(Path(path).is_file(), f"{path}: there is no such file")
    for name in os.environ.keys() - alone().keys():
        del os.environ[name]
    os.environ |= alone()
    try:
        check(path, flags, lambda line: print(line, flush=True))
    except Dishonest as seen:
        print(f"not honest: {seen}")
        sys.exit(3)
    print("honest")


if __name__ == "__main__":
    sys.exit(run(main))
