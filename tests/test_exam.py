"""tools/exam.py and its part of trial.py: cheating copies are found, unusual ones pass."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from conftest import TINY, log_path, train, write_shard
from test_edits import GROWING, loaded
from data.common import check_shard
from records.tools import exam, trial
from records.tools.load import LEASH

FLAGS = [*TINY, "--num_iterations=24", "--val_loss_every=8", "--save_every=13", "--epochs=1000"]
STEP = "    mean_loss = torch.zeros((), dtype=torch.float64, device=world.device)\n"
AGAIN = r"a training loss of \S+ for step \d+; trained again from step {}, that is"
OWN = AGAIN.format(13) + r"|a validation loss of \S+; its checkpoint has \S+ on the same text"
TOKENS = r"step \d+ trains on other tokens than the 1024 from \d+ on in \S+"
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
    "sees the next token": ("it sees the future", [
        "norm(self.embed(tokens_T)«→ + self.embed(tokens_T.roll(-1))»)"])}
UNUSUAL = {
    "sequences in another order": ["yield list(zip(inputs, targets))«→[::-1]»\n"],
    "a growing batch": GROWING,
    "weights that are averaged in the end": [
        "    model.zero_grad(set_to_none=True)\n«→    if step + 1 == hp.num_iterations:\n"
        "        for p in model.parameters():\n            p.data.mul_(0.999)\n»"],
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
        text = shards[1].partition("=")[2].replace("*", "000000")
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
    assert re.search(words, found["problem"]), found

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
    rows = [line.partition(" ") for line in
            notes.read_text(errors="surrogateescape").splitlines()]
    assert [name for _, _, name in rows] == [
        repr(str(tmp_path / name)) for name in ("one.bin", "two.pt", "fo ur\udce4.npy")]
    assert [float(time) for time, _, _ in rows] and done.stdout == "False\n"

@pytest.mark.parametrize("events, words", [
    (["t.bin", "v.bin", trial.FIRST_STEP, "t.bin", "r/a/step1.pt", "r/a.log"], "$"),
    (["v.bin", trial.FIRST_STEP, "v.bin"], "its run opened the validation text .*/v.bin after"),
    (["../v.bin"], "its run opened .*/v.bin, which it was not given"),
    ([trial.FIRST_STEP, "r/b/step1.pt"], "its run opened .*/r/b/step1.pt, which it was not given")])
def test_what_a_run_opened_is_compared_with_what_it_was_given(events, words, tmp_path):
    run = SimpleNamespace(path="r/a.log", environment={"data": "t.bin 9 tokens f; u.bin 9 tokens"},
                          val_data=["v.bin 9 tokens f"])
    names = [name if name == trial.FIRST_STEP else os.path.abspath(name) for name in events]
    rows = [f"{100 + i}.5 {name!r}\n" for i, name in enumerate(names)]
    (tmp_path / "notes").write_text("".join(sorted(rows, reverse=True)))
    assert re.match(words, trial.opened_wrongly(run, tmp_path / "notes") or "")

def test_the_text_is_divided_between_runs_and_exams(tmp_path):
    def divided(tokens, val_tokens):
        shard = write_shard(tmp_path / "v.bin", np.arange(tokens) % 250)
        run = SimpleNamespace(val_data=[f"{shard} {tokens} tokens f"], hyperparameters={
            "vocab_size": "257", "val_tokens": str(val_tokens)})
        found = trial.text_for(run, tmp_path / "text[1]")
        for name, end in (("given", None), ("kept", found.get("left"))):
            if found["exam"]:
                held = check_shard(tmp_path / "text[1]" / f"{name}_000000.bin", 257)
                assert len(held) == (end or tokens - found["left"])
        return found.get("left"), found.get("tokens"), found["flags"][1:]
    assert divided(100_000, 50_000) == (49_999, 37_499, ["--val_tokens=50000"])
    assert divided(100_000, 20_000) == (79_999, 20_000, ["--val_tokens=20000"])
    assert divided(120_000, 119_999) == (40_000, 30_000, ["--val_tokens=79999"])
    assert divided(90_000, 89_999) == (None, None, [])
