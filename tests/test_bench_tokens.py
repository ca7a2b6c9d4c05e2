"""The benchmark of tokens to a loss: its budget, its vocabulary, and a run of it."""

import itertools
import json
import sys

import bench_tokens
import pytest
from bench_tokens import ATTEMPT, MINI, SmallVocabulary, steps_for, table, tokens_of
from conftest import losses, refused

from records.sample import load_script

NEW = ["--preset=speedrun", *MINI["speedrun_2026"].split(), *MINI["both"].split()]


def some_ranks(vocab_dir):
    """More than 2,048 merges, of letters."""
    pairs = itertools.product(b"abcdefghijklmnopqrstuvwxyz ,.;:!?()-'0123456789", repeat=2)
    tokens = [bytes([i]) for i in range(256)] + [bytes(pair) for pair in pairs]
    return {token: rank for rank, token in enumerate(tokens)}


def test_the_budget_is_used_and_not_exceeded():
    script = load_script(ATTEMPT)
    for budget in (1024 * 30, 100_000, 1_382_400):
        steps = steps_for(budget, script, NEW)
        assert tokens_of(steps, script, NEW) <= budget < tokens_of(steps + 1, script, NEW)
    assert tokens_of(1350, script, NEW) == 1350 * 2 * 512


def test_the_small_vocabulary_is_the_first_merges(monkeypatch):
    monkeypatch.setattr(bench_tokens, "gpt2_merge_ranks", some_ranks)
    tokenizer = SmallVocabulary(None)
    ids = tokenizer.encode("abba")
    assert max(ids) < 2047 and tokenizer.decode(ids) == "abba" and len(ids) == 2


@pytest.fixture
def documents(tmp_path, text, monkeypatch):
    monkeypatch.setattr(bench_tokens, "gpt2_merge_ranks", some_ranks)
    monkeypatch.setattr(bench_tokens, "HELD_OUT", 1500)
    path = tmp_path / "documents.jsonl"
    document = json.dumps({"text": text.decode()[:4000]})
    path.write_text(f"{document}\n" * 40)
    return path


def test_all_sides_train_and_are_compared(documents, tmp_path, monkeypatch, capsys):
    flags = ["--steps=4", "--seeds=2", "--first_seed=5", "--share=0.6", "--val_tokens=1000",
             "--model_dim=16", "--num_heads=1", "--head_dim=16", f"--keep={tmp_path}/logs",
             f"--out={tmp_path}/losses.csv"]
    monkeypatch.setattr(sys, "argv", ["bench_tokens.py", str(documents), *flags])
    bench_tokens.main()
    printed = capsys.readouterr().out
    logs = sorted(tmp_path.glob("logs_*/*.log"))
    names = sorted(log.name.partition("Z_")[2] for log in logs)
    assert names == ["speedrun-5.log", "speedrun-6.log", "speedrun_2026-5.log",
                     "speedrun_2026-6.log", "without_memory-5.log", "without_memory-6.log"]
    assert all(losses(log.read_text()) for log in logs)
    assert "speedrun_2026: 3072 tokens\n" in printed
    rows = [row.split(",") for row in (tmp_path / "losses.csv").read_text().splitlines()]
    assert rows[0] == ["what", "seed", "val_loss"] and len(rows) == 7
    for name, seed, loss in rows[1:]:
        (log,) = tmp_path.glob(f"logs_{name}/*_{name}-{seed}.log")
        assert f"final_val_loss: {float(loss):.4f} " in log.read_text()
        assert (name == "without_memory") == ("memory_rows = 1\n" in log.read_text())
    assert [row.split(" | ")[:2] for row in printed.splitlines()[-3:]] == [
        ["| speedrun", "2"], ["| speedrun_2026", "2"], ["| without_memory", "2"]]


def test_the_data_and_the_flags_for_an_ablation(documents, tmp_path, monkeypatch, capsys):
    flags = ["--steps=4", "--share=0.6", f"--shards={tmp_path}/mini", "--tune",
             "--val_tokens=1000"]
    monkeypatch.setattr(sys, "argv", ["bench_tokens.py", str(documents), *flags])
    bench_tokens.main()
    script = load_script(ATTEMPT)
    hp, _ = script.parse_flags(["--preset=speedrun", *capsys.readouterr().out.split()])
    assert hp.val_files == f"{tmp_path}/mini/tune.bin" and hp.val_tokens == 1000
    assert script.tokens_seen(hp.num_iterations, hp) == 3 * 2 * 512 <= 0.6 * 4 * 3 * 512
    (train,) = script.find_shards(hp.train_files)
    assert train.tokens > 4 * 3 * 512


def test_the_table_has_differences_and_p_values():
    rows = table({"a": [1.0, 1.2], "b": [2.0, 2.2], "c": [3.0]}, "a", "what").splitlines()
    assert rows[0].startswith("| what | runs | ")
    assert rows[2:] == ["| a | 2 | 1.1000 (0.1414) | | |",
                        "| b | 2 | 2.1000 (0.1414) | +1.0000 | 0.019 |"]


@pytest.mark.parametrize("content, words", [
    ('{"text": "abc"}\n' * 2, "too few documents"), ("[]\n", "not JSON with a field"),
    ("\n", "not JSON with a field")])
def test_unusable_text_is_one_line(documents, monkeypatch, content, words):
    documents.write_text(content)
    monkeypatch.setattr(sys, "argv", ["bench_tokens.py", str(documents)])
    with refused(words):
        bench_tokens.main()
