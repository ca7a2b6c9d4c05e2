"""Samples from saved runs: by bytes, by GPT-2's tokens, by token numbers; the command line and its errors."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY
from test_data_vocab import write_vocabulary

import train_gpt
from data import vocab
from records import sample
from train_gpt import UserError, parse_flags, resolve, write_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards):
    """The folder of a tiny run on bytes."""
    records = tmp_path_factory.mktemp("records")
    train_gpt.run([*TINY, *shards, "--num_iterations=20", "--val_loss_every=0", "--val_seq_len=1024", f"--records={records}"])
    return next(path for path in records.iterdir() if path.is_dir())


def save_random_model(folder, *flags):
    """A model of random weights, where a fresh one has zeros too, so that every token counts."""
    torch.manual_seed(3)
    hp, _ = resolve(parse_flags([*TINY, *flags], "demo")[0], torch.device("cpu"))
    model = train_gpt.GPT(hp, train_gpt.block_sparse, getattr(torch, hp.dtype))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.5)
    write_checkpoint(folder / "model.pt", dict(step=0, hyperparameters=dataclasses.asdict(hp), model=model.state_dict()))
    return folder


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("gpt2_run"), "--vocab_size=50257", "--model_dim=16", "--head_dim=8",
                             "--value_embeds=....")


@pytest.fixture
def vocab_dir(tmp_path, monkeypatch):
    """A folder for --vocab_dir with a vocabulary in GPT-2's form, taken for GPT-2's."""
    folder = write_vocabulary(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(vocab, "GPT2_SHA256", {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                                               for name in vocab.GPT2_SHA256})
    return folder


@pytest.fixture
def run_sample(capsys, monkeypatch):
    def run(*args, program=sample):
        """stdout, stderr and status of the program with these arguments."""
        monkeypatch.setattr(sys, "argv", ["program", *map(str, args), "--device=cpu"])
        monkeypatch.setattr("data.common.signal.signal", lambda *args: None)  # the tests keep their own handlers
        capsys.readouterr()
        status = sample.start(program.main)
        out, err = capsys.readouterr()
        return SimpleNamespace(out=out, err=err, status=status)
    return run


def offline(monkeypatch):
    def fail():
        raise ConnectionError("no network")
    monkeypatch.setattr("tiktoken_ext.openai_public.gpt2", fail)


def generated(folder, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """What train_gpt.generate makes of it in one call, without the prompt and the end of text."""
    model, hp = sample.load_model(folder)
    tokens = train_gpt.generate(model.float(), [hp.vocab_size - 1, *prompt], num_tokens, train_gpt.window_tokens(hp.num_iterations, hp),
                                generator=torch.Generator().manual_seed(seed))[1 + len(prompt):]
    return tokens[:-1] if tokens[-1] == hp.vocab_size - 1 else tokens


def test_text_is_what_generate_makes_of_the_prompt(trained, run_sample):
    prompt = "The harbour clock"
    done = run_sample(trained, "--prompt", prompt, "--tokens=40", "--seed=5")
    want = bytes([*prompt.encode(), *generated(trained, list(prompt.encode()), 40, 5)]).decode("utf-8", "replace")
    assert done.status == 0 and done.out == want + "\n" and len(want) > len(prompt)


def test_one_seed_one_text(trained, run_sample):
    first, again, other = (run_sample(trained, "--tokens=20", f"--seed={seed}").out for seed in (1, 1, 2))
    assert first == again != other


def test_folder_model_and_log_name_the_same_run(trained, run_sample):
    texts = {run_sample(run, "--tokens=5").out for run in (trained, trained / "model.pt", f"{trained}.log", f"{trained}/")}
    assert len(texts) == 1 and len(texts.pop()) > 1


def test_temperature_0_and_top_k_1_take_the_likeliest(trained, run_sample):
    greedy = run_sample(trained, "--tokens=15", "--temperature=0", "--seed=1").out
    assert greedy == run_sample(trained, "--tokens=15", "--top_k=1", "--seed=2").out
    assert greedy != run_sample(trained, "--tokens=15", "--temperature=3", "--top_k=0").out


def test_bytes_that_are_no_text_are_replaced_and_characters_stay_whole(trained, run_sample, monkeypatch):
    script = iter([*"né".encode(), 0xFF, 65, 0xE2, 0x82])
    monkeypatch.setattr(sample, "generate", lambda model, tokens, *rest: [*tokens, next(script)])
    assert run_sample(trained, "--prompt=ü", "--tokens=6").out == "üné\ufffdA\ufffd\n"


def test_an_end_of_text_ends_the_text_and_is_said(trained, run_sample, monkeypatch):
    script = iter([65, 66, 256, 67])
    monkeypatch.setattr(sample, "generate", lambda model, tokens, *rest: [*tokens, next(script)])
    done = run_sample(trained, "--prompt=x", "--tokens=9")
    assert done.out == "xAB\n" and done.err == "note: end of text after 2 tokens\n"


def test_a_long_prompt_counts_from_its_first_token(tmp_path, run_sample, monkeypatch):
    """A prompt longer than any sequence in training (512 tokens) gives what it does to the same weights in a model built
    for longer ones, and the first token reaches the last."""
    flags = ["--window_end=2048", "--num_iterations=1"]  # windows of 2048 and 1024 tokens
    prompt = "".join(chr(97 + i * i % 23) for i in range(700))
    heads = []
    generate = train_gpt.generate

    def watch(model, tokens, *rest):
        heads.append(model.logits(model.features(torch.tensor([*tokens, *[256] * (-len(tokens) % 128)], dtype=torch.int32),
                                                 torch.tensor(rest[1])))[len(tokens) - 1].detach())
        return generate(model, tokens, *rest)

    monkeypatch.setattr(sample, "generate", watch)
    for name, *more in [("short",), ("long", "--val_seq_len=2048")]:
        folder = save_random_model(tmp_path / name, *flags, *more)
        assert run_sample(folder, "--prompt", prompt, "--tokens=1").out.startswith(prompt)
    assert run_sample(tmp_path / "short", "--prompt", "X" + prompt[1:], "--tokens=1").status == 0
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_gpt2_text(gpt2_run, vocab_dir, run_sample):
    tokenizer = vocab.GPT2Tokenizer(vocab.gpt2_merge_ranks(vocab_dir))
    done = run_sample(gpt2_run, "--prompt=the lost vé", "--tokens=6", "--seed=3", "--vocab_dir", vocab_dir)
    tokens = tokenizer.encode("the lost vé")
    want = tokenizer.decode([*tokens, *generated(gpt2_run, tokens, 6, 3)])
    assert done.status == 0 and done.err == "" and done.out == want + "\n" and want.startswith("the lost vé")


def test_token_numbers_without_a_vocabulary(gpt2_run, run_sample, monkeypatch):
    offline(monkeypatch)
    done = run_sample(gpt2_run, "--prompt=464, 3290", "--tokens=4", "--seed=3")
    assert done.status == 0 and [int(n) for n in done.out.split()] == [464, 3290, *generated(gpt2_run, [464, 3290], 4, 3)]
    assert done.err.startswith("note: token numbers, for want of a vocabulary: GPT-2's vocabulary could not be downloaded")
    for prompt in ("The dog", "464 50257", "-1"):
        done = run_sample(gpt2_run, f"--prompt={prompt}")
        assert done.status == 2 and "error: --prompt: without its vocabulary" in done.err and done.out == ""


def test_token_numbers_of_an_unknown_vocabulary(tmp_path, run_sample):
    folder = save_random_model(tmp_path / "run", "--vocab_size=1000")
    done = run_sample(folder, "--tokens=3")
    assert done.status == 0 and all(0 <= int(n) < 999 for n in done.out.split()) and "vocabulary of 1000 tokens" in done.err


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_stays_where_it_is_fast(tmp_path, run_sample, monkeypatch, fast):
    folder = save_random_model(tmp_path / "run", "--dtype=bfloat16")
    monkeypatch.setattr(sample, "fast_bf16", lambda device: fast)
    generate, used = train_gpt.generate, set()
    monkeypatch.setattr(sample, "generate", lambda model, *rest: used.add(model.embed.weight.dtype) or generate(model, *rest))
    done = run_sample(folder, "--tokens=3", "--prompt=a")
    assert done.status == 0 and done.out.startswith("a") and used == {torch.bfloat16 if fast else torch.float32}


@pytest.mark.parametrize("args, message", [
    (["--tokens=0"], "argument --tokens: invalid whole number from 1 on value: '0'"),
    (["--tokens=many"], "argument --tokens"),
    (["--temperature=-1"], "argument --temperature"),
    (["--temperature=nan"], "argument --temperature"),
    (["--top_k=-1"], "argument --top_k"),
    (["--seed=99999999999999999999"], "argument --seed"),
    (["--sed=1"], "unrecognized arguments: --sed=1"),
    (["--vocab_dir=/nowhere"], "no such file; --vocab_dir needs"),
])
def test_wrong_arguments_are_one_line(gpt2_run, run_sample, args, message, monkeypatch):
    offline(monkeypatch)
    done = run_sample(gpt2_run, *args)
    assert done.status == 2 and done.out == "" and message in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_models_that_cannot_be_used_are_one_line(tmp_path, trained, run_sample):
    def complaint(run):
        done = run_sample(run)
        assert done.status == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1 and done.out == ""
        return done.err

    assert "holds no model.pt" in complaint(tmp_path / "nothing")
    assert "holds no model.pt" in complaint(tmp_path / "nothing.log")
    payload = torch.load(trained / "model.pt", weights_only=True)
    settings = payload["hyperparameters"]
    for name, content in {"no model": [1, 2], "unknown flag": {**payload, "hyperparameters": {**settings, "num_experts": 8}},
                          "other shape": {**payload, "hyperparameters": {**settings, "model_dim": 48}}}.items():
        (tmp_path / name).mkdir()
        torch.save(content, tmp_path / name / "model.pt")
        assert f"{name}/model.pt: is damaged, or no checkpoint" in complaint(tmp_path / name)


@pytest.mark.parametrize("device", ["tpu9000", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(trained, device):
    with pytest.raises(UserError, match=f"^--device={device} cannot be used"):
        sample.load_run(str(trained), device)


def test_the_command_itself(trained):
    """From another folder, into a terminal that knows ASCII only."""
    done = subprocess.run([sys.executable, ROOT / "records" / "sample.py", trained.name, "--prompt=é", "--tokens=2", "--device=cpu"],
                          cwd=trained.parent, capture_output=True, timeout=200,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stdout.startswith(b"?") and done.stderr == b"", done
