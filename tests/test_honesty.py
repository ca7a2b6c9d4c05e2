"""tools/honesty.py: it finds each planted way to a loss that is too low, and no right idea."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_data_common import status_of

import train_gpt
from records.tools import honesty, logs

def test_the_script_is_honest(runs_here):
    assert [line.partition(":")[0] for line in honesty.check(train_gpt.__file__)] == [
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
EVALUATE = "    model.eval()\n"
RELU = "F.relu(self.fc(x_TD)).square()"
CALL = "total[0] += model(inputs_T, targets_T, window)"
GLOBAL = "BLOCK = 128"
PROJ = r'(r"blocks\..*\.proj\.weight",            zero,    Muon, dict(lr="muon_lr"))'
FUTURE = "the loss of token 0 changes by .* it sees the future"
ENTROPY = r"but the cross-entropy of logits\(features\(\)\) is"
RANDOM = "two validations of the same weights give"

IN_A_MODEL = {
    "the targets are the inputs": (ENTROPY, [
        ("x_TD = self.features(tokens_T, window)",
         "x_TD = self.features(targets_T.clamp(min=0).int(), window)")]),
    "the validation's inputs are its targets": ("validation's sequence 0 does not predict", [
        ("inputs = F.pad(stream[:-1]", "inputs = F.pad(stream[1:]")]),
    "the embedding of the next token is added": (
        "token 0 changes by .* when tokens from 1 on change, after two steps", [
            (EMBED, "x_TD = x0_TD = norm(self.embed(tokens_T) + self.embed(tokens_T.roll(-1)))")]),
    "a mean over the sequence": (FUTURE, [
        (MLP, "return x_TD + x_TD.mean(0) + self.mlp(norm(x_TD))")]),
    "a mean over the sequence behind a projection that stays at zero": (
        "with noise on all weights: it sees the future", [
            (MLP, "return x_TD + self.mlp(norm(x_TD + x_TD.mean(0)))"),
            (PROJ, PROJ.replace('"muon_lr"', "0.0"))]),
    "a mask that is off by one": ("when tokens from 1 on change", [
        ("(key <= query)", "(key <= query + 1)")]),
    "attention to the whole block": (FUTURE, [("(key <= query) & ", "")]),
    "the number of documents that follow": (FUTURE, [
        (EMBED, "ends = (tokens_T.flip(0) == self.end_of_text).cumsum(0).flip(0)[:, None]\n"
         "        x_TD = x0_TD = norm(self.embed(tokens_T)) * (1 + 0.1 * ends.sin())")]),
    "a loss that validation counts too": (ENTROPY, [
        ("        loss = 0 ", "        loss = 1e-3 * x_TD.float().square().sum() ")]),
    "a z-loss that validation counts too": (ENTROPY, [
        (LOSS, LOSS + "            loss += 1e-4 * self.logits(x).logsumexp(-1).square().sum()\n")]),
    "label smoothing in validation": (ENTROPY, [
        ("CrossEntropy.apply(self.logits(x), target)", "F.cross_entropy(self.logits(x), target, "
         "ignore_index=-1, reduction='sum', label_smoothing=0.01)")]),
    "the last sequence is left out": ("validation counts 1024 targets, expected 1400", [
        (f"    for inputs_T, targets_T in sequences:\n        {CALL}",
         f"    for inputs_T, targets_T in sequences[:-1]:\n        {CALL}")]),
    "hard targets are left out": ("validation's sequence 0 does not predict", [
        (CALL, CALL.replace("targets_T", "targets_T.where(targets_T != 10, -1)"))]),
    "the padding counts as targets": (ENTROPY, [
        ("total[1] += (targets_T >= 0).sum()", "total[1] += len(targets_T)")]),
    "noise in validation": (RANDOM, [(EMBED, EMBED + " + 0.01 * torch.randn(len(tokens_T), 1)")]),
    "dropout on in validation": (RANDOM, [(RELU, f"F.dropout({RELU}, 0.1)")]),
    "an average overwrites the weights": (r"validation changes the training state \(model, ", [
        (GLOBAL, "AVERAGE = {}\n" + GLOBAL),
        (EVALUATE, EVALUATE + "    for p in model.parameters():\n"
         "        p.copy_(AVERAGE.setdefault(p, p.clone()).lerp_(p, 0.5))\n")]),
    "validation trains an optimizer's state": (
        r"validation changes the training state \(Muon momentum, ", [
            (GLOBAL, "STATE = []\n" + GLOBAL), (EVALUATE, EVALUATE + "    STATE[0].add_(1.0)\n"),
            ("        self.orthogonalize = newton_schulz\n",
             "        STATE.insert(0, self.state['momentum'])\n"
             "        self.orthogonalize = newton_schulz\n")]),
    "a step reads more than is said": ("step 0 trains on 1280 tokens, tokens_seen says 1024", [
        ("        yield list(zip(inputs, targets))\n",
         "        yield [*zip(inputs, targets), (inputs[0].roll(1), targets[0].roll(1))]\n")]),
}
MOMENTUM = ('self.state["momentum"] = torch', "self.momentum = torch")
RESUMED = "resumed at step 12, and validates at other steps, ends with other numbers"
IN_A_RUN = {
    "momentum outside the state": (RESUMED, [
        MOMENTUM, ('self.state["momentum"]', "self.momentum")]),
    "dropout in training, whose random state is not saved": (
        RESUMED, [
            (RELU, f"F.dropout({RELU}, 0.1, self.training)")]),
    "rates that count the validations": (
        RESUMED, [
            (GLOBAL, "VALIDATIONS = []\n" + GLOBAL),
            (EVALUATE, EVALUATE + "    VALIDATIONS.append(step)\n"),
            ("return self.peak_lr * ", "return 0.99**len(VALIDATIONS) * self.peak_lr * ")]),
    "processes that read the same data": ("_loss at step [2-8] is .* on one process and", [
        ("        start += world.rank * count * T\n", "")]),
}

@pytest.mark.method
@pytest.mark.parametrize("name", [*IN_A_MODEL, *IN_A_RUN])
def test_what_is_planted_is_found(name, tmp_path, runs_here):
    words, changes = (IN_A_MODEL | IN_A_RUN)[name]
    trial = honesty.Trial(changed(tmp_path, *changes), [], tmp_path)
    with pytest.raises(honesty.Dishonest, match=words) as seen:
        list(honesty.check_model(trial) if name in IN_A_MODEL else honesty.check_runs(trial))
    assert "\n" not in str(seen.value)

TRAINING = "            if self.training:\n                loss += "
RIGHT = {
    "GELU": [(RELU, "F.gelu(self.fc(x_TD))")],
    "another softcap": [("return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))",
                         "return 30 * torch.tanh(self.lm_head(x_TD).float() / 30)")],
    "tied head": [
        ('    (r"lm_head\\.weight",                     zero,    Adam, dict(lr="head_lr")),    '
         "# [50304, 768]\n", ""),
        ("rows, fp8_scale)\n",
         "rows, fp8_scale)\n        self.lm_head.weight = self.embed.weight\n")],
    "gated attention": [
        ("        self.value_mix =",
         "        self.gate = CastedLinear(hp.model_dim, hp.num_heads)\n        self.value_mix ="),
        ("        return self.proj(y_1HTK",
         "        y_1HTK = y_1HTK * torch.sigmoid(self.gate(x_TD)).T[None, :, :, None]\n"
         "        return self.proj(y_1HTK"),
        ("(qkv|", r"(gate\.weight|qkv|")],
    "an embedding of the token before": [
        ("        self.embed = ", "        self.embed2 = Embedding(rows, hp.model_dim, dtype)\n"
         "        self.embed = "),
        (EMBED, "before = F.pad(tokens_T[:-1], (1, 0))\n        "
         "x_TD = x0_TD = norm(self.embed(tokens_T) + self.embed2(before))"),
        (r'r"(embed|value', r'r"(embed2?|value')],
    "weight decay": [(PROJ, PROJ.replace('dict(', 'dict(weight_decay=0.1, '))],
    "z-loss in training": [(LOSS, LOSS + TRAINING
                            + "1e-4 * self.logits(x).logsumexp(-1).square().sum()\n")],
    "the token after the next one in training": [(LOSS, LOSS + TRAINING + (
        "0.1 * CrossEntropy.apply(self.logits(x), F.pad(target[1:], (0, 1), value=-1))\n"))],
    "other windows": [("(window // BLOCK // 2)", "(window // BLOCK // 3)"),
                      ("window_end=256, num_it", "window_end=512, num_it")],
    "a mean of the tokens so far": [(MLP, (
        "mean = x_TD.cumsum(0) / torch.arange(1, len(x_TD) + 1, device=x_TD.device)[:, None]\n"
        "        return x_TD + 0.1 * mean.type_as(x_TD) + self.mlp(norm(x_TD))"))],
    "attention without document masks": [(" & (document_T[query] == document_T[key])", "")],
    "a longer window in validation": [(CALL, CALL.replace("window", "2 * window"))],
}

@pytest.mark.method
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_idea_passes(name, tmp_path, runs_here):
    trial = honesty.Trial(changed(tmp_path, *RIGHT[name]), [], tmp_path)
    assert len(list(honesty.check_model(trial))) == 4
    assert next(honesty.check_runs(trial)).startswith("runs: ")

@pytest.mark.method
def test_right_ideas_together_pass_on_two_processes(tmp_path, runs_here):
    together = ("GELU", "gated attention", "an embedding of the token before", "weight decay",
                "z-loss in training", "other windows")
    copy = changed(tmp_path, *(change for name in together for change in RIGHT[name]))
    assert [*honesty.check(copy)][-1].startswith("processes: ")

@pytest.mark.method
def test_a_copy_of_a_former_script_passes_and_starts_from_other_weights(tmp_path, runs_here):
    """Whose constructor draws, and whose loss is a mean: the script of a log from before."""
    log = min((ROOT / "records" / "demo").glob("*.log"))
    former = tmp_path / "former.py"
    former.write_text(logs.read_run(log, log.stem).source)
    trial = honesty.Trial(former, [], tmp_path)
    assert len(list(honesty.check_model(trial))) == 4
    assert next(honesty.check_runs(trial)).startswith("runs: ")

    def weights(path, *flags):
        return dict(line.split()[1:] for line in honesty.check(path, flags, [honesty.weights]))
    ours, theirs = weights(ROOT / "train_gpt.py"), weights(former)
    assert ours.keys() == theirs.keys() and ours["embed.weight"] != theirs["embed.weight"]
    assert ours["skip_weights"] == theirs["skip_weights"]
    copy = changed(tmp_path, (RELU, "F.gelu(self.fc(x_TD))"))
    assert weights(copy) == ours != weights(copy, "--num_heads=4")

@pytest.mark.method
@pytest.mark.parametrize("words, status, message", [
    ("my_record.py demo --peek=1 --num_iterations=3", 3, "not honest: the loss of token 0 changes"),
    ("", 2, "name the script first"), ("absent.py", 2, "absent.py: there is no such script"),
    ("train_gpt.py --peek=1", 2, "unrecognized arguments: --peek=1"),
    ("train_gpt.py --num_kv_heads=4", 2, "--num_kv_heads must divide --num_heads"),
    ("data/common.py", 2, "is not a training script")])
def test_the_program(words, status, message, tmp_path, monkeypatch, capsys, runs_here):
    """Here with a setting of a copy's own, which makes it dishonest."""
    monkeypatch.chdir(ROOT)
    copy = changed(tmp_path, ("    epochs: int", "    peek: int = flag(0, 'x')\n    epochs: int"),
                   (EMBED, EMBED + " + self.embed(tokens_T.roll(-1)) * bool(self.hp.peek)"))
    words = [str(copy) if word == copy.name else word for word in words.split()]
    monkeypatch.setattr(sys, "argv", ["honesty.py", *words])
    for name in ("RANK", "CUDA_VISIBLE_DEVICES"):  # which the program changes
        monkeypatch.setenv(name, "")
    try:
        seen = status_of(honesty.main)
    except SystemExit as end:
        seen = end.code
    assert seen == status
    out, err = capsys.readouterr()
    last = (out if status == 3 else err).splitlines()
    assert last[-1].removeprefix("error: ").startswith(message) or message in last[-1]
    assert len(last) == (2 if status == 3 else 1)
