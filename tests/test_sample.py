"""tools/sample.py: text of saved runs as bytes, as GPT-2's tokens and as token numbers; which run
and which script; the command line and its errors."""

import dataclasses
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, launch
from test_data_common import status_of
from test_data_vocab import vocab_dir
from test_logs import log_text

import train_gpt
from data import vocab
from data.common import UserError
from records.tools import sample

__all__ = ["vocab_dir"]  # a fixture

SCRIPT = ROOT / "train_gpt.py"

@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards):
    """The folder of a tiny run on bytes."""
    records = tmp_path_factory.mktemp("records")
    launch(*TINY, *shards, "--num_iterations=20", "--val_loss_every=0", "--val_seq_len=1024",
           "--save_every=15", f"--records={records}")
    return next(path for path in records.iterdir() if path.is_dir())

def save_random_model(folder, *flags, step=0, seed=3, **facts):
    """Saves a model of random weights, also where a fresh one has zeros, so that every token
    counts."""
    hp, _ = train_gpt.parse_flags([*TINY, *flags])
    hp = train_gpt.resolve(hp, torch.device("cpu"))
    model = train_gpt.GPT(hp, getattr(torch, hp.dtype), flex=False)
    train_gpt.draw_weights(model, seed)
    torch.manual_seed(seed)
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.5)
    folder.mkdir(exist_ok=True)
    saved = {"step": step, "seconds": 1.0, "settings": dataclasses.asdict(hp), "data_read": [],
             "script": sample.source_hash(SCRIPT), "state": {"model": model.state_dict()}}
    torch.save(saved | facts, folder / f"step{step:08}.pt")
    return folder

@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("gpt2_run"), "--vocab_size=50257",
                             "--model_dim=16", "--head_dim=16", "--value_embeds=....")

@pytest.fixture
def run_sample(capsys, monkeypatch):
    def run(*args, program=sample):
        """stdout, stderr and status of the program with these arguments."""
        monkeypatch.setattr(sys, "argv", ["program", *map(str, args), "--device=cpu"])
        capsys.readouterr()
        status = status_of(program.main)
        out, err = capsys.readouterr()
        return SimpleNamespace(out=out, err=err, status=status)
    return run

def complaint(done):
    assert done.status == 2 and done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    return done.err

def generated(folder, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """Tokens that continue the prompt, drawn as the program does by default."""
    run = sample.load_model(folder)
    run.model.float()
    eot = run.hp.vocab_size - 1
    endless = sample.generate(run, [eot, *prompt], generator=torch.Generator().manual_seed(seed))
    return [*itertools.takewhile(lambda x: x != eot, itertools.islice(endless, num_tokens))]

# ---- The text ------------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature, top_k", [(0.5, 3), (2.0, 0)])
def test_the_odds_follow_temperature_and_top_k(monkeypatch, temperature, top_k):
    """Over 4,000 tokens from a model whose odds are always the same. The padding of its vocabulary
    is never drawn."""
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0, 1.5, -99.0, 30.0, 30.0])
    model = SimpleNamespace(logits=lambda x_D: logits)
    run = sample.Trained(model, SimpleNamespace(vocab_size=6), train_gpt)
    monkeypatch.setattr(sample, "features", lambda run, tokens: torch.zeros(len(tokens), 1))
    endless = sample.generate(run, [5], temperature, top_k, torch.Generator().manual_seed(0))
    drawn = Counter(itertools.islice(endless, 4000))
    odds = (logits[:6] / temperature).exp()
    if top_k == 3:
        odds[[1, 3, 5]] = 0
    for token, share in enumerate((odds / odds.sum()).tolist()):
        assert drawn[token] / 4000 == pytest.approx(share, abs=0.03), (token, drawn)
        assert share > 0 or drawn[token] == 0

def test_the_likeliest_token_is_that_of_the_training_loss(trained, run_sample):
    """According to GPT.forward, which tells the loss of any token that could come next."""
    run = sample.load_model(trained)
    window = torch.tensor(train_gpt.window_tokens(20, run.hp))
    tokens = [256, *b"The harbour"]
    inputs = torch.tensor(tokens + [256] * (128 - len(tokens)), dtype=torch.int32)
    losses = {}
    for candidate in (10, *range(32, 127)):
        targets = torch.full((128,), -1)
        targets[len(tokens) - 1] = candidate
        with torch.no_grad():
            losses[candidate] = float(run.model(inputs, targets, window))
    likeliest = min(losses, key=losses.get)
    done = run_sample(trained, "--prompt=The harbour", "--tokens=1", "--temperature=0")
    assert done.out == f"The harbour{chr(likeliest)}\n"

@pytest.mark.parametrize("prompt, tokens, out, err", [
    ("ü", [*"né".encode(), 0xFF, 65, 0xE2, 0x82], "üné\ufffdA\ufffd\n", ""),
    # Escape, backspace, carriage return, delete, and the control sequence introducer of one
    # character, whose two bytes come one at a time.
    ("\x1b]0;title\x07\n", b"\x1b[31mred\x08\r\n\t\x7f\x00\xc2\x9b2J",
     r"\x1b]0;title\x07" "\n" r"\x1b[31mred\x08\x0d" "\n\t" r"\x7f\x00\x9b2J" "\n", ""),
    ("x", [65, 66, 256, 67], "xAB\n", "note: end of text after 2 tokens\n")])
def test_characters_stay_whole_and_what_a_terminal_would_obey_is_escaped(
        trained, run_sample, monkeypatch, prompt, tokens, out, err):
    monkeypatch.setattr(sample, "generate", lambda *args: iter(tokens))
    done = run_sample(trained, f"--prompt={prompt}", "--tokens=99")
    assert (done.status, done.out, done.err) == (0, out, err)

def test_a_long_prompt_counts_from_its_first_token(tmp_path, runs_here):
    """With a prompt longer than any sequence in training (512 tokens) a model gives what the same
    weights give in a model that was built for longer ones, and the first token reaches the last."""
    flags = ["--window_end=2048", "--num_iterations=1"]  # windows of 2048 and 1024 tokens
    tokens = [97 + i * i % 23 for i in range(700)]
    short, long = (sample.load_model(save_random_model(tmp_path / name, *flags, *more))
                   for name, more in (("short", []), ("long", ["--val_seq_len=2048"])))
    with torch.no_grad():
        last = sample.features(short, tokens)[699]
        assert torch.equal(last, sample.features(long, tokens)[699])
        assert not torch.equal(last, sample.features(short, [0, *tokens[1:]])[699])

def test_gpt2_text_and_token_numbers_without_a_vocabulary(gpt2_run, vocab_dir, run_sample,
                                                          monkeypatch):
    tokenizer = vocab.GPT2Tokenizer(vocab.gpt2_merge_ranks(vocab_dir))
    done = run_sample(gpt2_run, "--prompt=the lost vé", "--tokens=6", "--seed=3",
                      "--vocab_dir", vocab_dir)
    tokens = tokenizer.encode("the lost vé")
    want = tokenizer.decode([*tokens, *generated(gpt2_run, tokens, 6, 3)])
    assert done.status == 0 and done.err == "" and want.startswith("the lost vé")
    assert done.out == want.translate(sample.ESCAPES) + "\n"

    def fail():
        raise ConnectionError("no network")
    monkeypatch.setattr("tiktoken_ext.openai_public.gpt2", fail)
    done = run_sample(gpt2_run, "--prompt=464, 3290", "--tokens=4", "--seed=3")
    continued = generated(gpt2_run, [464, 3290], 4, 3)
    assert done.status == 0 and [int(n) for n in done.out.split()] == [464, 3290, *continued]
    assert done.err.startswith("note: showing token numbers, because there is no vocabulary: "
                               "GPT-2's vocabulary could not be downloaded")
    for prompt in ("464 50257", "words"):
        assert "error: --prompt: without the vocabulary" in run_sample(
            gpt2_run, f"--prompt={prompt}").err

# ---- Which run and which script ------------------------------------------------------------------

def test_a_resumed_run_has_the_checkpoints_of_its_chain(tmp_path):
    """Its own, or else those of the log that it continues, from before the step where it did."""
    def checkpoint_of(run):
        path = sample.find_checkpoint(tmp_path / run)
        return f"{path.parent.name}{int(path.stem[4:])}"

    for name, step in (("a", 2), ("a", 4), ("b", 6)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"step{step:08}.pt").touch()
    for name, parent, first in (("a", None, 0), ("b", "a", 2), ("c", "b", 4), ("d", "c", 8)):
        text = log_text((4.0, 3.9), parent=parent and f"gone/{parent}", first=first, every=2)
        (tmp_path / f"{name}.log").write_text(text)
    (tmp_path / "d.log").write_text(text[:text.index("step:8/")])  # has not begun yet
    names = ["a.log", "b.log", "b", "c.log", "d.log"]
    assert [*map(checkpoint_of, names)] == ["a4", "b6", "b6", "a2", "a2"]
    (tmp_path / "b" / "step00000006.pt").unlink()  # b began at step 2, before a's second one
    assert {*map(checkpoint_of, names[1:])} == {"a2"}
    (tmp_path / "a.log").unlink()
    with pytest.raises(UserError, match="saved no checkpoint yet, and a.log is missing"):
        sample.load_model(tmp_path / "c.log")

def test_a_run_has_several_names_and_of_several_runs_the_newest_is_taken(tmp_path, trained,
                                                                         run_sample):
    """... of logs, folders or checkpoints as a shell lists them."""
    names = (trained, trained / "step00000020.pt", f"{trained}.log", f"{trained}/")
    texts = {run_sample(run, "--tokens=9").out for run in names}
    assert len(texts) == 1 and len(texts.pop()) > 1
    for name in ("2025-12-31T23-59-59Z_z", "2026-01-02T00-00-00Z_a"):
        save_random_model(tmp_path / name)
        (tmp_path / f"{name}.log").touch()
    for pattern in ("*", "*.log", "*/*.pt"):
        runs = sorted(tmp_path.glob(pattern))
        done = run_sample(*runs, "--tokens=1")
        assert done.status == 0 and done.err.startswith(
            f"note: the newest of {len(runs)} runs: {tmp_path}/2026-01-02T00-00-00Z_a")

@pytest.fixture
def tweak(tmp_path, monkeypatch):
    """The folder of a run by my_record.py, which lies beside it."""
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.read_text() + "MINE = 1\n"
    (tmp_path / "my_record.py").write_text(text)
    return save_random_model(tmp_path / "2026-01-01T00-00-00Z_mine",
                             script=hashlib.sha256(text.encode()).hexdigest())

def test_a_run_of_another_script_needs_that_script(tweak, run_sample, monkeypatch):
    """The script is looked for among those of this folder, of the repository and its records. It is
    never run unless it is asked for."""
    mine = tweak.parent / "my_record.py"
    message = complaint(run_sample(tweak))
    assert f"was trained by another script than {SCRIPT} as it is now" in message
    assert message.endswith("; add --script my_record.py\n")
    done = run_sample(tweak, "--script=my_record.py", "--tokens=5")
    assert done.status == 0 and done.err in ("", "note: end of text after 0 tokens\n")
    assert sample.load_model(tweak, "cpu", mine).script.MINE == 1
    other = run_sample(tweak, "--script", SCRIPT, "--tokens=5")  # is tried, if it is asked for
    assert other.status == 0 and other.out == done.out
    assert f"was trained by another script than {SCRIPT} as it is now\n" in other.err
    attempt = tweak.parent / "records" / "attempt" / "train_gpt.py"
    attempt.parent.mkdir(parents=True)
    shutil.move(mine, attempt)
    message = complaint(run_sample(tweak))
    assert "add --script FILE" in message and f"or --script {SCRIPT} to try this one" in message
    shutil.copy(SCRIPT, tweak.parent)
    monkeypatch.setattr(sample, "ROOT", tweak.parent)
    assert complaint(run_sample(tweak)).endswith(f"; add --script {attempt}\n")

# ---- What cannot be used -------------------------------------------------------------------------

@pytest.mark.parametrize("args, message", [
    (["--tokens=0"], "argument --tokens: invalid whole number from 1 on value: '0'"),
    (["--temperature=nan"], "argument --temperature"),
    (["--vocab_dir=/nowhere"], "could not be read from /nowhere"),
    (["--script=broken.py"], "broken.py: cannot be loaded (SyntaxError: '(' was never closed"),
    (["--script=other.py"], "other.py: is not a training script, because it has no GPT"),
])
def test_wrong_arguments_are_one_line(gpt2_run, run_sample, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("x = (1,\n")
    (tmp_path / "other.py").write_text("BLOCK = 128\n")
    assert message in complaint(run_sample(gpt2_run, *args))

def test_models_that_cannot_be_used_are_one_line(tmp_path, trained, run_sample):
    for name in ("nothing", "nothing.log", "nothing.pt"):
        assert "there is no such run" in complaint(run_sample(tmp_path / name))
    (tmp_path / "unsaved.log").write_text(log_text())
    assert "(--save_every=0)" in complaint(run_sample(tmp_path / "unsaved.log"))
    (tmp_path / "bad.log").touch()
    assert "bad.log: no log (" in complaint(run_sample(tmp_path / "bad.log"))
    saved = torch.load(trained / "step00000020.pt", weights_only=True)
    settings = saved["settings"]
    path = tmp_path / "run" / "step00000001.pt"
    path.parent.mkdir()
    for content, reason in [
            ([1, 2], "cannot be used"),
            ({**saved, "settings": {**settings, "what": 1}}, "what"),
            ({**saved, "settings": {**settings, "model_dim": 48}}, "mismatch")]:
        torch.save(content, path)
        message = complaint(run_sample(path.parent))
        assert "run/step00000001.pt" in message and reason in message
    args = SimpleNamespace(run=[str(trained)], device="cuda:99", script=None)
    with pytest.raises(UserError, match="^--device=cuda:99 cannot be used"):
        sample.load_run(args)

def test_the_command_itself(trained):
    """Started in another folder, and with a terminal that knows ASCII only."""
    command = [sys.executable, ROOT / "records" / "tools" / "sample.py", trained.name]
    done = subprocess.run([*command, "--prompt=é", "--tokens=2", "--device=cpu"],
                          cwd=trained.parent, capture_output=True, timeout=200, check=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"})
    assert done.stdout.startswith(rb"\xe9") and done.stderr == b"", done
