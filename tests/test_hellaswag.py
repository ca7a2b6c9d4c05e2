"""tools/hellaswag.py: batched scores against one example a forward, the file's format, the
figures, the command line."""

import json
import re

import pytest
import torch
from conftest import ROOT
from test_sample import run_sample, save_random_model, trained

import train_gpt
from data.common import UserError
from data.vocab import load_tokenizer
from records.tools import hellaswag
from records.tools.sample import load_model
from train_gpt import BLOCK

__all__ = ["run_sample", "trained"]  # fixtures

TINY_FILE = ROOT / "tests" / "fixtures" / "hellaswag_tiny.jsonl"
LINE = {"ind": 1, "activity_label": "a", "ctx_a": "It rains.", "ctx_b": "he",
        "ctx": "It rains. he", "split": "val",
        "endings": ["waits.", "eats it.", "sings.", "is rain."], "label": 0}

def write_lines(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path

def plain_losses(model, item, window: int) -> list[float]:
    """The summed losses of an item's endings by GPT.forward, an example at a time."""
    losses = []
    for ending in item.endings:
        tokens = item.context + ending
        targets = [-1] * (len(item.context) - 1) + ending + [-1]
        padding = -len(tokens) % BLOCK
        inputs = torch.tensor(tokens + [model.hp.vocab_size - 1] * padding, dtype=torch.int32)
        targets = torch.tensor(targets + [-1] * padding)
        with torch.no_grad():
            losses.append(float(model(inputs, targets, torch.tensor(window, dtype=torch.int32))))
    return losses

def load(folder):
    """A run and its last step's window."""
    run = load_model(folder)
    run.model.float()
    return run, train_gpt.window_tokens(run.hp.num_iterations, run.hp)

@pytest.mark.parametrize("batch_size", [5, 12])
def test_batched_scores_are_those_of_one_example_a_forward(tmp_path, batch_size):
    """Documents up to five blocks, with windows of three blocks and of one. Were a document to
    begin within a block, those longer than a window would see more or less of themselves than
    alone."""
    folder = save_random_model(tmp_path / "run", "--num_iterations=1", "--val_seq_len=1024",
                               "--window_end=384")
    run, window = load(folder)
    items = hellaswag.read_items(TINY_FILE, load_tokenizer("bytes"), None)
    longest = max(len(item.context) + len(ending) for item in items for ending in item.endings)
    assert len(items) == 12 and window == 384 < 3.5 * BLOCK < longest
    want = torch.tensor([plain_losses(run.model, item, window) for item in items])
    starts = range(0, len(items), batch_size)
    batches = [hellaswag.ending_losses(run, items[at:at + batch_size]) for at in starts]
    summed, lengths = (torch.cat(parts) for parts in zip(*batches))
    torch.testing.assert_close(summed.float(), want, rtol=1e-4, atol=1e-3)
    assert lengths.tolist() == [[len(ending) for ending in item.endings] for item in items]
    near_misses = [plain_losses(run.model, item, window - BLOCK) for item in items]
    difference = (summed - torch.tensor(near_misses)).abs()
    assert difference.max() > 0.1, "a block more or less in the window shows"

def figures(out: str) -> dict:
    line = r"^hellaswag_(\w+):(\d\.\d{4}) standard_error:(\d\.\d{4}) n:(\d+)$"
    found = re.findall(line, out, re.MULTILINE)
    assert [name for name, *_ in found] == ["acc_norm", "acc"] and out.count("\n") == 2, out
    return {name: (float(share), float(error), int(n)) for name, share, error, n in found}

def test_figures_of_a_trained_run_are_the_plain_ones(trained, run_sample):
    run, window = load(trained)
    items = hellaswag.read_items(TINY_FILE, load_tokenizer("bytes"), None)
    right = {"acc": 0, "acc_norm": 0}
    for item in items:
        sums = plain_losses(run.model, item, window)
        means = [loss / len(ending) for loss, ending in zip(sums, item.endings)]
        right["acc"] += sums.index(min(sums)) == item.label
        right["acc_norm"] += means.index(min(means)) == item.label
    assert right["acc"] != right["acc_norm"], "else one could stand for the other"
    log = (trained.parent / f"{trained.name}.log").read_bytes()
    for batch_size in (1, 7):
        done = run_sample(trained, "--data", TINY_FILE, f"--batch_size={batch_size}",
                          program=hellaswag)
        assert done.status == 0, done.err
        for name, (share, error, n) in figures(done.out).items():
            assert n == 12 and share == pytest.approx(right[name] / 12, abs=1e-4)
            assert error == pytest.approx((share * (1 - share) / 12) ** 0.5, abs=1e-4)
    assert (trained.parent / f"{trained.name}.log").read_bytes() == log
    assert {path.suffix for path in trained.iterdir()} == {".pt"}

def test_bfloat16_runs_are_scored_in_float32(tmp_path, run_sample, monkeypatch):
    folder = save_random_model(tmp_path / "run", "--dtype=bfloat16")
    used = []
    score = hellaswag.ending_losses
    monkeypatch.setattr(hellaswag, "ending_losses", lambda trained, items: used.append(
        trained.model.embed.weight.dtype) or score(trained, items))
    done = run_sample(folder, "--data", TINY_FILE, "--limit=1", program=hellaswag)
    assert figures(done.out)["acc"][2] == 1 and used == [torch.float32]

def test_labels_as_text_blank_lines_a_mark_and_limit(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", LINE, "", {**LINE, "label": "3"}, "not JSON")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    items = hellaswag.read_items(path, load_tokenizer("bytes"), 2)
    assert [item.label for item in items] == [0, 3]
    assert bytes(items[0].context[1:]) == b"It rains. he"
    assert bytes(items[0].endings[0]) == b" waits."

@pytest.mark.parametrize("lines, message", [
    ([LINE, LINE, '{"ctx": "cut off'], "line 3: no JSON"),
    ([LINE, {**LINE, "ctx": ""}], "line 2: ctx is no text"),
    ([{**LINE, "endings": ["a", "b", "c"]}], "line 1: endings are not four texts"),
    ([{**LINE, "label": ""}], "line 1: label is not 0, 1, 2 or 3"),  # the test split hides them
    (["", ""], "holds no item"), (None, "No such file or directory")])
def test_what_cannot_be_used_is_one_line(tmp_path, trained, run_sample, lines, message):
    path = tmp_path / "bad.jsonl"
    if lines:
        write_lines(path, *lines)
    done = run_sample(trained, "--data", path, program=hellaswag)
    assert done.status == 2 and done.err.startswith(f"error: {path}: {message}")
    assert done.err.count("\n") == 1 and done.out == ""

def test_an_unknown_vocabulary_is_one_line(tmp_path, run_sample):
    run = save_random_model(tmp_path / "unknown", "--vocab_size=1000")
    done = run_sample(run, program=hellaswag)
    assert done.status == 2 and done.err == (
        "error: no tokenizer is known for a vocabulary of 1000 tokens\n")

@pytest.fixture
def published(tmp_path, monkeypatch):
    """The published file's place, on this machine."""
    source = write_lines(tmp_path / "published.jsonl", LINE, LINE)
    monkeypatch.setattr(hellaswag, "URL", source.as_uri())
    monkeypatch.setattr(hellaswag, "ITEMS", 2)
    monkeypatch.setattr(hellaswag, "FOLDER", tmp_path / "data" / "hellaswag")
    return source

def test_the_published_file_is_fetched_once(published, trained, run_sample):
    done = run_sample(trained, program=hellaswag)
    assert figures(done.out)["acc"][2] == 2 and done.err.startswith("note: fetching file:")
    kept = list(hellaswag.FOLDER.iterdir())
    assert [path.name for path in kept] == ["hellaswag_val.jsonl"]
    assert kept[0].read_bytes() == published.read_bytes()
    published.unlink()
    again = run_sample(trained, program=hellaswag)
    assert again.out == done.out and again.err == ""

def test_a_download_that_fails_is_one_line_and_leaves_nothing(published, trained, run_sample,
                                                              monkeypatch):
    write_lines(published, LINE)
    with pytest.raises(UserError, match="gave 1 lines instead of 2; give a copy of it by --data"):
        hellaswag.download(hellaswag.FOLDER)
    monkeypatch.setattr(hellaswag, "URL", "http://127.0.0.1:1/hellaswag_val.jsonl")
    done = run_sample(trained, program=hellaswag)
    assert done.status == 2
    assert "error: hellaswag_val.jsonl: could not be fetched from http://127.0.0.1:1/" in done.err
    assert done.err.count("\n") == 2 and not hellaswag.FOLDER.exists()
