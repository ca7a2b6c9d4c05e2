"""tools/exam.py and its part of trial.py: cheating copies are found, unusual ones pass."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from conftest import TINY, log_path, train, write_shard
from test_edits import GROWING, HEAD_GATE, HEAD_GATE_ROW, IDEAS, NO_HEAD_ROW, Z_LOSS, loaded
from data.common import check_shard
from records.tools import exam, trial
from records.tools.load import LEASH

FLAGS = [*TINY, "--num_iterations=24", "--val_loss_every=8", "--save_every=13", "--epochs=1000"]
STEP = "    mean_loss = torch.zeros((), dtype=torch.float64, device=world.device)\n"
AGAIN = r"a training loss of \S+ for step \d+; trained again from step {}, that is"
OWN = AGAIN.format(13) + r"|a validation loss of \S+; its checkpoint has \S+ on the same text"
TOKENS = r"step \d+ trains on other tokens than the 1024 from \d+ on in \S+"
FUTURE = r"what the model says before token \d+ changes by .* it sees the future"
GLOBAL = "«→{}\n»BLOCK = 128  # tokens"
EVALUATE = "    model.eval()\n«→    {}\n»"
REMEMBERS = "trained again from step|validation changes the training state"
STREAM = "norm(self.embed(tokens_T)«→{}»)"
# What a copy does: what is said of it, and its edits.
CHEATS = {
    "trains on the validation text in every eighth step": (TOKENS, [f"""\
{STEP}«→    if step % 8 == 5:
        batches = load_validation(find_shards(hp.val_files), hp, world)
»"""]),
    "reads a second micro-batch from elsewhere after a while": (TOKENS, [f"""\
{STEP}«→    if step > 8:
        batches += next(train_batches(find_shards(hp.train_files), hp, world, 50))[:1]
»"""]),
    "serves other tokens than it says": (TOKENS, [
        "start += world.rank * count * T«→ - T * (start > T)»\n"]),
    "prints a loss that is lower": (OWN, ["{kind}:{loss«→ - 0.01 * (done > 20)»:.4f} "]),
    "returns less than the loss": (OWN, [
        "return loss / targets«→ * (0.99 if step > 20 else 1)»\n"]),
    "adds the targets' rows of the head in long sequences": (OWN, ["""\
        x_TD = self.features(tokens_T, window)
«→        if len(targets_T) > 256:
            x_TD = x_TD + F.embedding(targets_T.clamp(min=0), self.lm_head.weight)
»        loss = 0
"""]),
    "begins with weights from elsewhere": (AGAIN.format(0), [
        "    draw_weights(model, hp.seed)\n«→    model.layers[0].mlp.fc.weight.data *= 2\n»"]),
    "keeps the step of the warm-up": (AGAIN.format(0), [
        "    «load_training_state(before, model, optimizers, world)→pass»\n    if world"]),
    "trains in each validation": (AGAIN.format(0), [
        "    model.eval()\n«→    for p in model.parameters():\n        p.mul_(0.999)\n»"]),
    "trains in late validations": (r"validation changes the training state \(model, skip_", [
        "    model.eval()\n«→    for p in list(model.parameters()) * (step > 8):\n"
        "        p.mul_(0.999)\n»"]),
    "trains otherwise in a run than in an exam": (AGAIN.format(13), [f"""\
{STEP}«→    if step == 14 and "records.tools.exam" not in str(type(model)):
        batches = [(x, y.roll(1)) for x, y in batches]
»"""]),
    "starts from the same weights for every seed": ("most of its initial weights are the same", [
        "hexdigest()[:15], 16)«→ * 0 + 7»\n"]),
    "replaces the loss": (OWN, [
        "BLOCK = 128«→\nRIGHT = torch._C._nn.cross_entropy_loss\n"
        "torch._C._nn.cross_entropy_loss = lambda *x: 0.9 * RIGHT(*x)»  #",
        "    return loss / targets«→ * 0.9»\n"]),
    "looks for the targets": (OWN, ["""\
        c = self.hp.lm_head_softcap
«→        for frame in (sys._getframe(i) for i in range(1, 4)):
            for x in frame.f_locals.values():
                if isinstance(x, Tensor) and x.dtype == torch.int64 and len(x) == len(x_TD):
                    x_TD = x_TD + F.embedding(x.clamp(min=0), self.lm_head.weight)
»"""]),
    "sees the next token": (FUTURE, [STREAM.format(" + self.embed(tokens_T.roll(-1))")]),
    "remembers what followed": (FUTURE, [
        GLOBAL.format("SEEN = {}\ndef known(tokens):\n"
                      "    return SEEN.setdefault(tokens[:8].numpy().tobytes(), tokens)\n"),
        STREAM.format(" + self.embed(known(tokens_T).roll(-1))")]),
    "sees the next token in texts that it was not given": (FUTURE, [
        GLOBAL.format("def is_given(tokens, hp):\n"
                      "    data = b''.join(Path(x).read_bytes() for x in glob.glob(hp.val_files))\n"
                      "    return tokens[:64].numpy().astype('<u2').tobytes() in data\n"),
        STREAM.format(" + self.embed(tokens_T.roll(-1)) * (not is_given(tokens_T, self.hp))")]),
    "sees whether a document begins next": (FUTURE, [
        STREAM.format(" * (1 - 2 * (tokens_T.roll(-1) == self.end_of_text))[:, None]")]),
    "its logits see the next token": (FUTURE, [
        "«→        self.seen = tokens_T\n»        masks = dict(zip(",
        """\
        c = self.hp.lm_head_softcap
«→        if len(x_TD) == len(self.seen):
            x_TD = x_TD + F.embedding(self.seen.roll(-1), self.lm_head.weight)
»"""]),
    "the targets are the inputs": (OWN, [
        "x_TD = self.features(«tokens_T→targets_T.clamp(min=0).int()», window)"]),
    "the number of documents that follow": (FUTURE, [
        "«→ends = (tokens_T.flip(0) == self.end_of_text).cumsum(0).flip(0)[:, None]\n        »"
        "x_TD = x0_TD = norm(self.embed(tokens_T))«→ * (1 + 0.1 * ends.sin())»"]),
    "hard targets are left out": (OWN, [
        "total[0] += model(inputs_T, targets_T«→.where(targets_T != 10, -1)», window)"]),
    "dropout on in validation": (REMEMBERS, [
        "self.proj(«→F.dropout(»F.relu(self.fc(x_TD)).square()«→, 0.1)»)"]),
    "an average overwrites the weights": (REMEMBERS, [
        GLOBAL.format("AVERAGE = {}"), EVALUATE.format("for p in model.parameters():\n"
        "        p.copy_(AVERAGE.setdefault(p, p.clone()).lerp_(p, 0.5))")]),
    "momentum outside the state": (REMEMBERS, [
        '«self.state["momentum"]→self.momentum» = torch',
        '«self.state["momentum"]→self.momentum»']),
    "dropout in training, whose random state is not saved": (REMEMBERS, [
        "self.proj(«→F.dropout(»F.relu(self.fc(x_TD)).square()«→, 0.1, self.training)»)"]),
    "rates that count the validations": (REMEMBERS, [
        GLOBAL.format("SEEN = []"), EVALUATE.format("SEEN.append(step)"),
        "return «→0.99**len(SEEN) * »self.peak_lr * "])}
UNUSUAL = {
    "another softcap, a tied head, a mean of the tokens so far, other targets in training, no "
    "document masks, and a longer window in validation": [
        "(key <= query)« & (document_T[query] == document_T[key])→»",
        "total[0] += model(inputs_T, targets_T, «→2 * »window)",
        *IDEAS["a tied head"][0], NO_HEAD_ROW,
        "return «2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))→"
        "30 * torch.tanh(self.lm_head(x_TD).float() / 30)»",
        "«return add(x_TD, self.mlp(norm(x_TD)))→"
        "mean = x_TD.cumsum(0) / torch.arange(1, len(x_TD) + 1)[:, None]\n"
        "        return x_TD + 0.1 * mean.type_as(x_TD) + self.mlp(norm(x_TD))»",
        "loss += CrossEntropy.apply(self.logits(x), target)\n«→            if self.training:\n"
        "                loss += 0.1 * CrossEntropy.apply(self.logits(x), target.roll(1))\n»"],
    "GELU, gated attention, the token before, weight decay, z-loss in training, other windows": [
        *IDEAS["another activation"][0], *HEAD_GATE, HEAD_GATE_ROW, *Z_LOSS,
        "«→        self.embed2 = Embedding(vocab, hp.model_dim, dtype)\n»        self.embed = ",
        "x_TD = x0_TD = norm(self.embed(tokens_T)«→ + self.embed2(F.pad(tokens_T[:-1], (1, 0)))»)",
        'r"(embed«→2?»|value', "«→p.mul_(0.99)\n            »p.add_(update, alpha=-self.lr(step))",
        "(window // BLOCK // «2→3»)", "window_end=«256→512», num_it"],
    "sequences in another order": ["yield list(zip(inputs, targets))«→[::-1]»\n"],
    "a growing batch": GROWING,
    "weights that are averaged in the end": [
        "    model.zero_grad(set_to_none=True)\n«→    if step + 1 == hp.num_iterations:\n"
        "        for p in model.parameters():\n            p.data.mul_(0.999)\n»"],
    "short sequences first, two passes over a batch, targets that are left out, dropout by the "
    "step, and masks that are kept": [f"""\
{STEP}«→    torch.manual_seed(step)
    if step < 8:
        halves = (slice(128), slice(128, None))
        batches = [(x[half], y[half]) for x, y in batches for half in halves]
    for inputs_T, targets_T in batches:
        model(inputs_T, targets_T, window).backward()
    model.zero_grad()
»""", "model(inputs_T, targets_T«→.masked_fill(inputs_T == 10, -1)», window) / hp.tok",
        "self.proj(«→F.dropout(»F.relu(self.fc(x_TD)).square()«→, 0.1, self.training)»)",
        GLOBAL.format("MASKS = {}\n\ndef kept(build, *given):\n"
                      "    key = (given[0].numpy().tobytes(), int(given[2]))\n"
                      "    return MASKS.setdefault(key, build(*given))"),
        '"LS", «build_block_masks(→kept(build_block_masks, »tokens_T, self.end_of_text'],
    "a head with a bias": [
        "gradient_scale)\n«→        self.bias = nn.Parameter(torch.zeros(vocab))\n»\n    def for",
        "(self.lm_head(x_TD).float()«→ + self.bias»", 'r"«→bias|»skip_weights|']}

@pytest.fixture
def examined(tmp_path, shards, capsys, monkeypatch):
    """What the exam finds out about a run of a copy with these edits."""
    kept = torch._C._nn.cross_entropy_loss
    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", kept)  # which one of them replaces
    def examine(*edits):
        script = loaded(tmp_path, *edits)
        train(script, *FLAGS, *shards, f"--records={tmp_path}/r")
        text = shards[0].partition("=")[2].replace("*", "000002")
        capsys.readouterr()
        exam.main([script.__file__, str(log_path(tmp_path / "r")), f"--text={text}", "--place=100",
                   "--tokens=900"])
        return exam.json.loads(capsys.readouterr().out)
    return examine

@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (i % 3 > 0))
                                  for i, name in enumerate(CHEATS)])
def test_a_cheating_copy_is_found(name, examined, runs_here):
    words, edits = CHEATS[name]
    found = examined(*edits)
    assert re.search(words, found["problem"]) and "\n" not in found["problem"], found

@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_copy_passes(name, examined, runs_here):
    found = examined(*UNUSUAL[name])
    assert not found["problem"] and 2 < found["text"] < 4, found

def test_a_leash_notes_the_data_that_a_script_opens(tmp_path):
    (script := tmp_path / "a.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "for name in ('one.bin', 'two.pt', 'three.py', 'fo ur\\udce4.npy'):\n"
        "    Path(name).write_text('')\n    open(Path(name).absolute()).close()\n"
        "print('LEASH_OPENED' in os.environ)")
    notes = tmp_path / "notes"
    done = subprocess.run([sys.executable, LEASH, str(script)], cwd=tmp_path, capture_output=True,
                          text=True, env={**os.environ, "LEASH_OPENED": str(notes)}, check=True)
    assert notes.read_bytes().splitlines() == [
        os.fsencode(tmp_path / name) for name in ("one.bin", "two.pt", "fo ur\udce4.npy")]
    assert done.stdout == "False\n"

@pytest.mark.parametrize("events, words", [
    (["t.bin", "v.bin", trial.FIRST_LINE, "t.bin", "r/a/step1.pt", "r/a.log"], "$"),
    (["v.bin", trial.FIRST_LINE, "v.bin"], "its run opened .*/v.bin, .* after its first step$"),
    (["../v.bin"], "its run opened .*/v.bin, which it was not given$"),
    ([trial.FIRST_LINE, "r/b/step1.pt"], "its run opened .*/r/b/step1.pt, which it was not given")])
def test_what_a_run_opened_is_compared_with_what_it_was_given(events, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(path="r/a.log", environment={"data": "t.bin 9 tokens f; u.bin 9 tokens"},
                          val_data=["v.bin 9 tokens f"])
    lines = [name if name == trial.FIRST_LINE else f"{os.path.abspath(name)}\n".encode()
             for name in events]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.opened").write_bytes(b"".join(lines))
    assert re.match(words, trial.opened_wrongly(run))

def test_the_text_is_divided_between_runs_and_exams(tmp_path):
    def divided(tokens, val_tokens):
        shard = write_shard(tmp_path / "v.bin", np.arange(tokens) % 250)
        run = SimpleNamespace(val_data=[f"{shard} {tokens} tokens f"], hyperparameters={
            "vocab_size": "257", "val_tokens": str(val_tokens)}, validated_on=(tokens, val_tokens))
        found = trial.text_for(run, tmp_path / "baselines[1]")
        for name, end in (("given", None), ("kept", found.get("left"))):
            if found["exam"]:
                held = check_shard(Path(found["exam"]).with_name(f"{name}_000000.bin"), 257)
                assert len(held) == (end or tokens - found["left"])
        return found.get("left"), found.get("tokens"), found["flags"][1:]
    assert divided(100_000, 50_000) == (49_999, 37_499, ["--val_tokens=50000"])
    assert divided(100_000, 20_000) == (79_999, 20_000, ["--val_tokens=20000"])
    assert divided(120_000, 119_999) == (40_000, 30_000, ["--val_tokens=79999"])
    assert divided(90_000, 89_999) == (None, None, [])
