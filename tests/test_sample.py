"""tools/sample.py: text of saved runs; which run and which script; the command line."""

import dataclasses
import itertools
import os
import sys
from collections import Counter
from types import SimpleNamespace
import pytest
import torch
from conftest import ROOT, TINY, launch, train
from test_data_common import status_of
from test_data_vocab import vocab_dir
import train_gpt
from data import vocab
from data.common import UserError
from records.tools import logs, sample

__all__ = ["vocab_dir"]  # a fixture
SCRIPT = ROOT / "train_gpt.py"

@pytest.fixture(scope="session")
def trained(tmp_path_factory, shards):
    records = tmp_path_factory.mktemp("records")
    train(train_gpt, *TINY, *shards, "--num_iterations=20", "--val_loss_every=0",
          "--val_seq_len=1024", "--save_every=15", f"--records={records}")
    return next(path for path in records.iterdir() if path.is_dir())

def save_random_model(folder, *flags, step=0, seed=3, **facts):
    """Random weights also where a fresh model has zeros, so that every token counts."""
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

@pytest.fixture
def run_sample(capsys, monkeypatch):
    def run(*args):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["program", *map(str, args)])
        capsys.readouterr()
        status = status_of(sample.main)
        out, err = capsys.readouterr()
        return SimpleNamespace(out=out, err=err, status=status)
    return run

def complaint(done):
    assert done.status == 2 and done.out == "" and done.err.count("\n") == 1
    assert done.err.startswith("error: ")
    return done.err

@pytest.mark.parametrize("temperature, top_k", [(0.5, 3), (2.0, 0)])
def test_the_odds_follow_temperature_and_top_k(monkeypatch, temperature, top_k):
    """Over 4,000 tokens. The padding of the vocabulary is never drawn."""
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

@pytest.mark.parametrize("prompt, tokens, out, err", [
    ("ü", [*"né".encode(), 0xFF, 65, 0xE2, 0x82], "üné\ufffdA\ufffd\n", ""),
    # Escape, backspace, carriage return, delete, and the control sequence introducer of one
    # character, whose two bytes come one at a time.
    ("\x1b]0;title\x07\n", b"\x1b[31mred\x08\r\n\t\x7f\x00\xc2\x9b2J",
     r"\x1b]0;title\x07" "\n" r"\x1b[31mred\x08\r" "\n\t" r"\x7f\x00\x9b2J" "\n", ""),
    ("x", [65, 66, 256, 67], "xAB\n", "note: end of text after 2 tokens\n")])
def test_characters_stay_whole_and_what_a_terminal_would_obey_is_escaped(
        trained, run_sample, monkeypatch, prompt, tokens, out, err):
    monkeypatch.setattr(sample, "generate", lambda *args: iter(tokens))
    done = run_sample(trained, f"--prompt={prompt}", f"--tokens={len(tokens)}")
    assert (done.status, done.out, done.err) == (0, out, err)

def test_a_long_prompt_counts_from_its_first_token(tmp_path, runs_here):
    """A prompt longer than any sequence in training: the first token reaches the last."""
    flags = ["--window_end=2048", "--num_iterations=1"]  # windows of 2048 and 1024 tokens
    run = sample.load_model(save_random_model(tmp_path / "run", *flags))
    long = train_gpt.GPT(train_gpt.parse_flags([*TINY, *flags, "--val_seq_len=768"])[0],
                         torch.float32, flex=False)
    long.load_state_dict(run.model.state_dict())
    tokens = [97 + i * i % 23 for i in range(768)]
    with torch.no_grad():
        want = long.features(torch.tensor(tokens, dtype=torch.int32), torch.tensor(2048))
        assert torch.equal(sample.features(run, tokens), want)
        assert not torch.equal(sample.features(run, [0, *tokens[1:]])[-1], want[-1])

def test_gpt2_text_which_takes_a_vocabulary(tmp_path, vocab_dir, run_sample):
    """The likeliest tokens, by the model's own logits."""
    folder = save_random_model(tmp_path / "gpt2", "--vocab_size=50257", "--model_dim=16",
                               "--head_dim=16", "--value_embeds=....", "--dtype=bfloat16")
    model = sample.load_model(folder).model
    assert model.embed.weight.dtype == torch.float32
    @torch.no_grad()
    def continued(tokens):
        for at in range(len(tokens), len(tokens) + 6):
            padded = torch.tensor([50256, *tokens, *[50256] * (127 - at)], dtype=torch.int32)
            x_D = model.features(padded, torch.tensor(model.hp.window_end))[at]
            tokens = [*tokens, int(model.logits(x_D)[:50257].argmax())]
        return tokens
    done = run_sample(folder, "--tokens=6", "--temperature=0", "--prompt=the lost vé",
                      "--vocab_dir", vocab_dir)
    tokenizer = vocab.GPT2Tokenizer(vocab.gpt2_merge_ranks(vocab_dir))
    want = tokenizer.decode(continued(tokenizer.encode("the lost vé")))
    assert (done.status, done.err) == (0, "") and want.startswith("the lost vé")
    assert done.out == logs.printable(want) + "\n"

def test_the_newest_checkpoint_is_taken_in_a_folder_that_of_the_newest_run(tmp_path):
    for name, step in (("a", 2), ("a", 4), ("b", 6)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"step{step:08}.pt").touch()
    for name in "abc":  # c has none yet
        (tmp_path / f"{name}.log").touch()
    for run, found in {"a.log": "a/step00000004.pt", "a/step00000002.pt": "a/step00000002.pt",
                       "b.log": "b/step00000006.pt", "": "b/step00000006.pt"}.items():
        assert sample.find_checkpoint(tmp_path / run) == tmp_path / found
    with pytest.raises(UserError, match="c: has no checkpoint"):
        sample.find_checkpoint(tmp_path / "c.log")

def test_of_several_runs_the_newest_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "load_model", lambda run, *_: run)
    older, newest = tmp_path / "2025-12-31T23-59-59Z_z", tmp_path / "2026-01-02T00-00-00Z_a"
    for folder in (older, newest):
        folder.mkdir()
        for path in (folder.with_suffix(".log"), folder / "step00000001.pt"):
            path.touch()
    for name in (older.name, "renamed"):
        older.with_suffix(".log").rename(tmp_path / f"{name}.log")
        older.rename(tmp_path / name)
        for pattern in ("*", "*.log", "*/*.pt"):
            runs = sorted(tmp_path.glob(pattern))
            found = sample.load_run(SimpleNamespace(run=runs, script=None))
            assert sample.folder_of(found) == newest
            assert f"note: the newest of {len(runs)} runs: {found}\n" == capsys.readouterr().err
    with pytest.raises(UserError, match="The : there is no such run"):
        sample.load_run(SimpleNamespace(run=[newest, "The "], script=None))

def test_a_run_of_another_script_needs_that_script(tmp_path, run_sample, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "my_record.py"
    mine.write_text(SCRIPT.read_text() + "MINE = 1\n")
    run = save_random_model(tmp_path / "run", script=sample.source_hash(mine))
    message = f"was trained by another script than {SCRIPT} as it is now"
    assert f"{message}; add --script FILE" in complaint(run_sample(run))
    done = run_sample(run, "--script=my_record.py", "--tokens=5")
    assert done.status == 0 and message not in done.err
    assert sample.load_model(run, "cpu", mine).script.MINE == 1
    other = run_sample(run, "--script", SCRIPT, "--tokens=5")  # is tried, if it is asked for
    assert other.status == 0 and other.out == done.out and f"{message}\n" in other.err

@pytest.mark.parametrize("run, message", [
    (["nothing.pt"], "there is no such run"), (["unsaved.log"], "(--save_every=0)"),
    (["list"], "list/step00000000.pt cannot be used"),
    (["unknown"], "unknown/step00000000.pt: does not fit"), (["shape"], "mismatch"),
    (["words"], "error: no tokenizer is known for a vocabulary of 1000 tokens\n"),
    (["x", "--tokens=0"], "--tokens: 0: expected a whole number from 1 on")])
def test_what_cannot_be_used_is_one_line(tmp_path, run_sample, monkeypatch, run, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unsaved.log").touch()
    settings = dataclasses.asdict(train_gpt.parse_flags(TINY)[0])
    save_random_model(tmp_path / "unknown", settings={**settings, "what": 1})
    save_random_model(tmp_path / "shape", settings={**settings, "model_dim": 48})
    save_random_model(tmp_path / "words", "--vocab_size=1000")
    (tmp_path / "list").mkdir()
    torch.save([1, 2], tmp_path / "list" / "step00000000.pt")
    assert message in complaint(run_sample(*run))

def test_a_seed_gives_one_text(trained, run_sample):
    texts = [run_sample(trained, "--tokens=20", f"--seed={seed}").out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]

def test_the_command_itself(trained):
    done = launch(trained, "--prompt=é", "--tokens=2", PYTHONIOENCODING="ascii",
                  script=ROOT / "records" / "tools" / "sample.py")
    assert done.stdout.startswith(r"\xe9") and done.stderr == "", done

@pytest.mark.parametrize("chosen, threads", [({"OMP_NUM_THREADS": "2"}, 2), ({}, 1)])
def test_it_takes_one_thread_unless_told(chosen, threads, monkeypatch, run_sample, runs_here):
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "environ", chosen)
    complaint(run_sample("nothing"))
    assert torch.get_num_threads() == threads
