"""tools/hellaswag.py: batched scores, the file's format, the figures, the command line."""

import json
import pytest
import torch
from conftest import ROOT
from test_sample import complaint, run_sample, save_random_model, trained
import train_gpt
from data.common import sha256
from data.vocab import load_tokenizer
from records.tools import hellaswag
from records.tools.sample import load_model
from train_gpt import BLOCK

__all__ = ["run_sample", "trained"]  # fixtures
TINY_FILE = ROOT / "tests" / "fixtures" / "hellaswag_tiny.jsonl"
LINE = {"ctx_a": "It rains.", "ctx": "It rains. he", "label": 0,
        "endings": ["waits.", "eats it.", "sings.", "is rain."]}

def write_lines(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path

@torch.no_grad()
def plain_losses(run, items, blocks=0):
    window = train_gpt.window_tokens(run.hp.num_iterations, run.hp) + blocks * BLOCK
    losses = []
    for item in items:
        for ending in item.endings:
            tokens = item.context + ending
            targets = [-1] * (len(item.context) - 1) + ending + [-1]
            padding = -len(tokens) % BLOCK
            inputs = torch.tensor(tokens + [256] * padding, dtype=torch.int32)
            targets = torch.tensor(targets + [-1] * padding)
            losses.append(run.model(inputs, targets, torch.tensor(window, dtype=torch.int32)))
    return torch.stack(losses).view(len(items), 4)

def test_batched_scores_are_those_of_one_example_a_forward(tmp_path):
    """Were a document to begin within a block, one longer than a window would see more or less of
    itself than alone."""
    run = load_model(save_random_model(tmp_path / "run", "--num_iterations=1",
                                       "--val_seq_len=1024", "--window_end=384"))
    items = hellaswag.read_items(TINY_FILE, load_tokenizer("bytes"))
    long = [at for at, item in enumerate(items) if len(item.context) > 3.5 * BLOCK]
    assert len(items) == 12 and long
    batches = [hellaswag.ending_losses(run, part) for part in (items[:5], items[5:])]
    summed, lengths = (torch.cat(parts) for parts in zip(*batches))
    torch.testing.assert_close(summed.float(), plain_losses(run, items), rtol=1e-4, atol=1e-3)
    assert lengths.tolist() == [[len(ending) for ending in item.endings] for item in items]
    difference = (summed[long] - plain_losses(run, [items[at] for at in long], blocks=-1)).abs()
    assert difference.max() > 0.1, "a block more or less in the window shows"

def test_figures_of_a_trained_run_are_the_plain_ones(trained, run_sample):
    items = hellaswag.read_items(TINY_FILE, load_tokenizer("bytes"))
    sums = plain_losses(load_model(trained), items)
    means = sums / torch.tensor([[len(ending) for ending in item.endings] for item in items])
    labels = torch.tensor([item.label for item in items])
    norm, plain = ((scores.argmin(1) == labels).double().mean() for scores in (means, sums))
    assert norm != plain, "else one could stand for the other"
    log = trained.with_suffix(".log").read_bytes()
    done = run_sample(trained, "--data", TINY_FILE, program=hellaswag)
    assert (done.status, done.out) == (0, "".join(
        f"hellaswag_{name}:{share:.4f} standard_error:{(share * (1 - share) / 12) ** 0.5:.4f} "
        "n:12\n" for name, share in (("acc_norm", norm), ("acc", plain)))), done.err
    assert trained.with_suffix(".log").read_bytes() == log
    assert {path.suffix for path in trained.iterdir()} == {".pt"}

def test_labels_as_text_blank_lines_and_a_mark(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", LINE, "", {**LINE, "label": "3"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    items = hellaswag.read_items(path, load_tokenizer("bytes"))
    assert [item.label for item in items] == [0, 3]
    assert bytes(items[0].context[1:]) == b"It rains. he"
    assert bytes(items[0].endings[0]) == b" waits."

@pytest.mark.parametrize("lines, message", [
    ([LINE, LINE, '{"ctx": "cut off'], "line 3: expected a JSON object with ctx, "),
    ([LINE, {**LINE, "ctx": 5}], "line 2: expected"), (["5"], "line 1: expected"),
    ([{**LINE, "endings": ["a", "b", "c"]}], "line 1: expected"),
    ([{**LINE, "label": ""}], "line 1: expected"),  # the test split hides them
    (["", ""], "holds no item"), (None, "No such file or directory")])
def test_what_cannot_be_used_is_one_line(tmp_path, trained, run_sample, lines, message):
    path = tmp_path / "bad.jsonl"
    if lines:
        write_lines(path, *lines)
    message = f"error: {path}: {message}"
    assert complaint(run_sample(trained, "--data", path, program=hellaswag)).startswith(message)

def test_the_file_is_fetched_once_or_not_at_all(tmp_path, trained, run_sample, monkeypatch):
    published = write_lines(tmp_path / "published.jsonl", LINE, LINE)
    folder = tmp_path / "data" / "hellaswag"
    monkeypatch.setattr(hellaswag, "URL", published.as_uri())
    monkeypatch.setattr(hellaswag, "FOLDER", folder)
    wrong = run_sample(trained, program=hellaswag)
    monkeypatch.setattr(hellaswag, "SHA256", sha256(published))
    done = run_sample(trained, program=hellaswag)
    assert done.out.endswith(" n:2\n") and done.err.startswith("note: fetching file:")
    (kept,) = folder.iterdir()
    assert kept.name == "hellaswag_val.jsonl" and kept.read_bytes() == published.read_bytes()
    published.unlink()
    again = run_sample(trained, program=hellaswag)
    assert again.out == done.out and again.err == ""
    kept.unlink()
    gone = run_sample(trained, program=hellaswag)
    for failed, reason in ((wrong, "invalid hash"), (gone, "No such file")):
        _, error = failed.err.splitlines()
        assert failed.status == 2 and not list(folder.iterdir()) and reason in error
        assert error.startswith("error: hellaswag_val.jsonl: could not be fetched from file:")
