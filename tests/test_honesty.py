"""tools/honesty.py: it finds each planted way to a loss that is too low, and no right idea."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT
from test_data_common import status_of

import train_gpt
from records.tools import honesty, logs


def test_the_script_is_honest():
    lines = []
    honesty.check(train_gpt.__file__, say=lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        "validation", "future", "validation", "future", "runs", "processes"]


def changed(folder: Path, *changes) -> Path:
    """A copy of train_gpt.py in which each (old, new) was replaced."""
    text = (ROOT / "train_gpt.py").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "my_record.py"
    path.write_text(text)
    return path


EMBED = "x_TD = x0_TD = norm(self.embed(tokens_T))"
MLP = "return x_TD + self.mlp(norm(x_TD))"
LOSS = "            loss += CrossEntropy.apply(self.logits(x), target)\n"
SUM = "        return loss\n"
EVALUATE = "    model.eval()\n"
RELU = "F.relu(self.fc(x_TD)).square()"
SEQUENCES = "    for inputs_T, targets_T in sequences:\n"
CALL = "        total[0] += model(inputs_T, targets_T, window)\n"

IN_A_MODEL = {
    "the targets are the inputs": (
        [("x_TD = self.features(tokens_T, window)",
          "x_TD = self.features(targets_T.clamp(min=0).int(), window)")],
        r"but the cross-entropy of logits\(features\(\)\) is .*: at token 0 of sequence 0"),
    "the validation's inputs are its targets": (
        [("inputs = F.pad(stream[:-1]", "inputs = F.pad(stream[1:]")],
        "validation's input is not token 0 of the text"),
    "the embedding of the next token is added": (
        [(EMBED, "x_TD = x0_TD = norm(self.embed(tokens_T) + self.embed(tokens_T.roll(-1)))")],
        "the loss of token 0 changes by .* when tokens from 1 on change, after two steps"),
    "a mean over the sequence": (
        [(MLP, "return x_TD + x_TD.mean(0) + self.mlp(norm(x_TD))")],
        "the loss of token 0 changes by .* it sees the future"),
    "a mean over the sequence behind a projection that starts at zero": (
        [(MLP, "return x_TD + self.mlp(norm(x_TD + x_TD.mean(0)))"),
         ("windows=\"SSSL\"", "muon_lr=0.0, windows=\"SSSL\""), ("muon_lr=0.045, ", "")],
        "the loss of token 0 changes by .* with noise on all weights: it sees the future"),
    "a mask that is off by one": (
        [("(key <= query)", "(key <= query + 1)")],
        "the loss of token 0 changes by .* when tokens from 1 on change"),
    "attention to the whole block": (
        [("(key <= query) & ", "")], "the loss of token 0 changes by .* it sees the future"),
    "the number of documents that follow": (
        [(EMBED, ("ends = (tokens_T.flip(0) == self.end_of_text).cumsum(0).flip(0)[:, None]\n"
                 "        x_TD = x0_TD = norm(self.embed(tokens_T)) * (1 + 0.1 * ends.sin())"))],
        "the loss of token 0 changes by .* it sees the future"),
    "a loss that validation counts too": (
        [(SUM, SUM.replace("\n", " + 1e-3 * x_TD.float().square().sum()\n"))],
        "it adds .* in a sequence where no target counts"),
    "a z-loss that validation counts too": (
        [(LOSS, LOSS + "            loss += 1e-4 * (self.logits(x).logsumexp(-1)**2 * (target >= "
          "0)).sum()\n")],
        "at token 0 of sequence 0 it is"),
    "label smoothing in validation": (
        [(LOSS, "            loss += F.cross_entropy(self.logits(x), target, ignore_index=-1,\n"
          "                                    reduction='sum', label_smoothing=0.01)\n")],
        "at token 0 of sequence 0 it is"),
    "the last sequence is left out": (
        [(SEQUENCES, SEQUENCES.replace("sequences", "sequences[:-1]"))],
        "validation counts 1024 targets, expected 1400"),
    "hard targets are left out": (
        [(CALL, CALL.replace("targets_T,", "targets_T.where(targets_T != 10, -1),"))],
        "validation leaves out targets after token 0"),
    "the padding counts as targets": (
        [("total[1] += (targets_T >= 0).sum()", "total[1] += len(targets_T)")],
        r"but the cross-entropy of logits\(features\(\)\) is"),
    "noise in validation": (
        [(EMBED, EMBED + " + 0.01 * torch.randn(len(tokens_T), 1)")],
        "two validations of the same weights give"),
    "dropout on in validation": (
        [(RELU, f"F.dropout({RELU}, 0.1)")], "two validations of the same weights give"),
    "an average overwrites the weights": (
        [("@torch.no_grad()\ndef evaluate", "AVERAGE = {}\n\n@torch.no_grad()\ndef evaluate"),
         (EVALUATE, EVALUATE + "    for p in model.parameters():\n"
          "        p.copy_(AVERAGE.setdefault(p, p.clone()).lerp_(p, 0.5))\n")],
        r"validation changes the training state \(model, "),
    "validation trains an optimizer's state": (
        [(EVALUATE, EVALUATE + "    STATE[0].add_(1.0)\n"),
         ('        self.state["momentum"] = torch.zeros(stack, device=world.device)\n',
          ('        self.state["momentum"] = torch.zeros(stack, device=world.device)\n'
          '        STATE.insert(0, self.state["momentum"])\n')),
         ("BLOCK = 128", "STATE = []\nBLOCK = 128")],
        r"validation changes the training state \(Muon momentum, "),
}


@pytest.mark.method
@pytest.mark.parametrize("name", IN_A_MODEL)
def test_what_is_planted_in_the_model_is_found(name, tmp_path, runs_here):
    changes, words = IN_A_MODEL[name]
    trial = honesty.Trial(changed(tmp_path, *changes), [], tmp_path)
    with pytest.raises(honesty.Dishonest, match=words) as seen:
        list(honesty.check_model(trial))
    assert "\n" not in str(seen.value)


IN_A_RUN = {
    "momentum outside the state": (
        [('self.state["momentum"] = torch', "self.momentum = torch"),
         ('self.state["momentum"]', "self.momentum"),
         ("        for stack in self.state.values():\n", "        for stack in ():\n")],
        "a run that is resumed at step 12 ends with other numbers"),
    "dropout in training, whose random state is not saved": (
        [(RELU, f"F.dropout({RELU}, 0.1, self.training)")],
        "a run that is resumed at step 12 ends with other numbers"),
    "rates that count the validations": (
        [("BLOCK = 128", "VALIDATIONS = []\nBLOCK = 128"),
         (EVALUATE, EVALUATE + "    VALIDATIONS.append(step)\n"),
         ("return self.peak_lr * ", "return 0.99**len(VALIDATIONS) * self.peak_lr * ")],
        "a run of 16 steps that validates at other steps ends with other numbers"),
}


@pytest.mark.method
@pytest.mark.parametrize("name", IN_A_RUN)
def test_what_is_planted_in_a_run_is_found(name, tmp_path, runs_here):
    changes, words = IN_A_RUN[name]
    trial = honesty.Trial(changed(tmp_path, *changes), [], tmp_path)
    with pytest.raises(honesty.Dishonest, match=words):
        next(honesty.check_runs(trial))


@pytest.mark.method
def test_processes_that_read_the_same_data_are_found(tmp_path, runs_here):
    copy = changed(tmp_path, ("        start += world.rank * count * T\n", ""))
    trial = honesty.Trial(copy, [], tmp_path)
    losses = trial.train("plain", "--val_loss_every=4")
    with pytest.raises(honesty.Dishonest, match="_loss at step [2-8] is .* on one process and"):
        honesty.check_ranks(trial, losses)


HEAD_ROW = ('    (r"lm_head\\.weight",                     zero,    Adam, dict(lr="head_lr")),'
            "    # [50304, 768]\n")
SOFTCAP = "return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))"
RIGHT = {
    "GELU": [(RELU, "F.gelu(self.fc(x_TD))")],
    "another softcap": [(SOFTCAP, "return 30 * torch.tanh(self.lm_head(x_TD).float() / 30)")],
    "tied head": [(HEAD_ROW, ""), ("rows, fp8_scale)\n", (
        "rows, fp8_scale)\n        self.lm_head.weight = self.embed.weight\n"))],
    "gated attention": [
        ("        self.value_mix =", (
            "        self.gate = CastedLinear(hp.model_dim, hp.num_heads)\n"
            "        self.value_mix =")),
        ("        return self.proj(y_1HTK", (
            "        gate = torch.sigmoid(self.gate(x_TD)).T[None, :, :, None]\n"
            "        y_1HTK = y_1HTK * gate\n        return self.proj(y_1HTK")),
        (r"\.(qkv|", r"\.(gate\.weight|qkv|")],
    "an embedding of the token before": [
        ("        self.embed = ", (
            "        self.embed2 = Embedding(rows, hp.model_dim, dtype)\n"
            "        self.embed = ")),
        (EMBED, ("before = F.pad(tokens_T[:-1], (1, 0))\n        "
         "x_TD = x0_TD = norm(self.embed(tokens_T) + self.embed2(before))")),
        (r'r"(embed|', r'r"(embed2?|')],
    "weight decay": [('dict(lr="muon_lr")', 'dict(lr="muon_lr", weight_decay=0.1)')],
    "z-loss in training": [(LOSS, LOSS + (
        "            if self.training:\n"
        "                loss += 1e-4 * self.logits(x).logsumexp(-1).square().sum()\n"))],
    "the token after the next one in training": [(LOSS, LOSS + (
        "            if self.training:\n"
        "                later = F.pad(target[1:], (0, 1), value=-1)\n"
        "                loss += 0.1 * CrossEntropy.apply(self.logits(x), later)\n"))],
    "other windows": [("BLOCK // 2).clamp(min=1)", "BLOCK // 3).clamp(min=1)"),
                      ("window_end=256, num_it", "window_end=512, num_it")],
    "a mean of the tokens so far": [(MLP, (
        "mean = x_TD.cumsum(0) / torch.arange(1, len(x_TD) + 1, device=x_TD.device)[:, None]\n"
        "        return x_TD + 0.1 * mean.type_as(x_TD) + self.mlp(norm(x_TD))"))],
    "attention without document masks": [(" & (document_T[query] == document_T[key])", "")],
    "a longer window in validation": [
        (SEQUENCES, "    window = 2 * window\n" + SEQUENCES)],
}


@pytest.mark.method
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_idea_passes(name, tmp_path, runs_here):
    trial = honesty.Trial(changed(tmp_path, *RIGHT[name]), [], tmp_path)
    assert len(list(honesty.check_model(trial))) == 4
    assert next(honesty.check_runs(trial)).startswith("runs: ")


@pytest.mark.method
def test_right_ideas_together_pass_on_two_processes(tmp_path):
    together = ("GELU", "gated attention", "an embedding of the token before", "weight decay",
                "z-loss in training", "other windows")
    lines = []
    changes = [change for name in together for change in RIGHT[name]]
    honesty.check(changed(tmp_path, *changes), say=lines.append)
    assert lines[-1].startswith("processes: ")


@pytest.mark.method
def test_a_copy_of_a_former_script_passes_and_starts_from_other_weights(tmp_path, runs_here):
    """Whose constructor draws, and whose loss is a mean: the script of a log from before."""
    log = min((ROOT / "records" / "demo").glob("*.log"))
    former = tmp_path / "former.py"
    former.write_text(logs.read_run(log, log.stem).source)
    trial = honesty.Trial(former, [], tmp_path)
    assert len(list(honesty.check_model(trial))) == 4
    assert next(honesty.check_runs(trial)).startswith("runs: ")
    ours, theirs = honesty.weights(ROOT / "train_gpt.py"), honesty.weights(former)
    assert ours.keys() == theirs.keys() and ours["embed.weight"] != theirs["embed.weight"]
    assert ours["skip_weights"] == theirs["skip_weights"]
    copy = changed(tmp_path, (RELU, "F.gelu(self.fc(x_TD))"))
    assert honesty.weights(copy) == ours != honesty.weights(copy, ["--num_heads=4"])


def check(*arguments):
    return subprocess.run([sys.executable, "-W", "ignore", ROOT / "records/tools/honesty.py",
                           *arguments], capture_output=True, text=True, env=ENVIRONMENT,
                          check=False)


@pytest.mark.method
def test_the_program_ends_with_what_was_seen_and_status_3(tmp_path):
    """Here with a setting of the copy's own, which makes it dishonest."""
    setting = "    peek: int = flag(0, 'tokens')\n"
    copy = changed(tmp_path, ("    epochs: int", setting + "    epochs: int"),
                   (EMBED, EMBED + " + self.embed(tokens_T.roll(-1)) * bool(self.hp.peek)"))
    done = check(copy, "demo", "--peek=1", "--num_iterations=3")
    assert done.returncode == 3 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("validation: ") and len(lines) == 2
    assert lines[1].startswith("not honest: the loss of token 0 changes by ")


@pytest.mark.method
@pytest.mark.parametrize("words, message", [
    ([], "name the script first"), (["absent.py"], "absent.py: there is no such file"),
    (["train_gpt.py", "--peek=1"], "unrecognized arguments: --peek=1"),
    (["train_gpt.py", "--num_kv_heads=4"], "--num_kv_heads must divide --num_heads"),
    (["data/common.py"], "is not a training script")])
def test_wrong_usage_is_one_line(words, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["honesty.py", *words])
    for name in honesty.alone():  # which the program may change
        monkeypatch.setenv(name, honesty.alone()[name])
    assert status_of(honesty.main) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
