"""Newton-Schulz, Muon and Adam: against oracles, in one process and (with gloo, by torchrun) in
several; which optimizer trains which parameters; the state that is saved."""

import dataclasses

import pytest
import torch
from conftest import ROOT, TINY, load_checkpoint, load_script, refused, run_helper, train
from test_model import ALONE, WINDOW, sequence, tiny_model
from torch import nn

import train_gpt
from train_gpt import (PRESETS, Adam, Muon, Optimizer, build_optimizers,
                       evaluate, gather_training_state, newton_schulz,
                       train_step)

HP = dataclasses.replace(PRESETS["demo"], dtype="float32", cooldown_frac=0.0)


def take_step(optimizer, step=0):
    """One step of one optimizer, on the gradients that its parameters have."""
    with torch.no_grad():
        optimizer.begin()
        optimizer.update(step)
        optimizer.finish(step)


def with_momentum(momentum, **changes):
    return dataclasses.replace(HP, muon_momentum_start=momentum, muon_momentum_end=momentum,
                               **changes)


# ---- Newton-Schulz and Muon

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, cols", [(64, 64), (256, 64), (64, 256)])
def test_singular_values_of_an_update_lie_in_the_band(rows, cols, dtype):
    x = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-4  # the scale of a gradient does not matter
    x[2] *= torch.logspace(0, -1.5, cols)  # neither does an uneven one, much
    u = newton_schulz(x.to(dtype))
    assert u.shape == x.shape and u.dtype == dtype
    values = torch.linalg.svdvals(u.float())
    assert float(values.max()) < 1.3 and float(values[:2].median()) > 0.6
    assert float((values[:2] > 0.5).float().mean()) > 0.95
    before = torch.linalg.svdvals(x[2])
    assert float(before.max() / before.min()) > 5  # what went in was far from flat


def test_zero_matrices_stay_zero():
    """Those that fill up a stack, among others."""
    assert not newton_schulz(torch.zeros(2, 8, 8)).any()


@pytest.mark.parametrize("parts, rows, cols", [(3, 32, 32), (3, 32, 16), (4, 16, 64)])
def test_the_matrices_of_a_stacked_parameter_are_orthogonalized_one_by_one(parts, rows, cols):
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.zeros(parts, rows, cols)) for name in "ab"}
    muon = Muon(params, 1.0, with_momentum(0.0), ALONE)
    for p in params.values():
        p.grad = torch.randn(p.shape)
    take_step(muon)
    for p in params.values():
        for matrix, gradient in zip(p.detach(), p.grad):
            want = -max(1, rows / cols) ** 0.5 * newton_schulz(gradient[None])[0]
            torch.testing.assert_close(matrix, want, rtol=1e-4, atol=1e-5)


def test_agrees_with_the_muon_of_torch(monkeypatch):
    """On the same gradients for several steps, whose rate and momentum change; torch's own takes
    one matrix at a time and works in bfloat16."""
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25, 0.125, 0.1]
    monkeypatch.setattr(train_gpt, "lr_scale", lambda step, hp: scales[step])
    ours = [nn.Parameter(torch.randn(s)) for s in ((32, 16), (16, 32), (32, 16), (16, 16))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    oracle = torch.optim.Muon(theirs, nesterov=True, weight_decay=0.0, ns_steps=5, eps=1e-7,
                              ns_coefficients=(3.4445, -4.775, 2.0315))
    hp = dataclasses.replace(HP, dtype="bfloat16", muon_momentum_start=0.8, muon_momentum_end=0.9,
                             muon_momentum_steps=4)
    table = [Muon({str(i): ours[i] for i in same_shape}, 0.05, hp, ALONE)
             for same_shape in ((0, 2), (1,), (3,))]
    for step, scale in enumerate(scales):
        oracle.param_groups[0]["lr"] = 0.05 * scale
        oracle.param_groups[0]["momentum"] = min(0.9, 0.8 + 0.025 * step)
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for muon in table:
            take_step(muon, step)
        oracle.step()
        for p, q in zip(ours, theirs):
            # Updates of size 0.05 and less, each rounded to bfloat16
            torch.testing.assert_close(p, q, rtol=0, atol=0.005)


# ---- Adam

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_torchs(dtype, monkeypatch):
    torch.manual_seed(0)
    scales = [1.0, 1.0, 0.5, 0.25]
    monkeypatch.setattr(train_gpt, "lr_scale", lambda step, hp: scales[step])
    values = [torch.randn(shape, dtype=dtype) for shape in ((30, 8), (5,), ())]
    ours = [nn.Parameter(value.clone()) for value in values]
    theirs = [nn.Parameter(value.clone()) for value in values]
    hp = dataclasses.replace(HP, dtype=str(dtype).removeprefix("torch."), adam_beta1=0.8,
                             adam_beta2=0.95, adam_eps=1e-7)
    table = [Adam({"0": ours[0]}, 0.1, hp, ALONE),
             Adam({"1": ours[1], "2": ours[2]}, 0.02, hp, ALONE)]
    groups = [dict(params=theirs[:1], lr=0.1), dict(params=theirs[1:], lr=0.02)]
    reference = torch.optim.Adam(groups, fused=True, betas=(0.8, 0.95), eps=1e-7)
    for step, scale in enumerate(scales):
        for group, peak in zip(reference.param_groups, (0.1, 0.02)):
            group["lr"] = peak * scale
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        for adam in table:
            take_step(adam, step)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    state = gather_training_state(nn.Module(), table)
    for ours_is, theirs_is in (("Adam mean", "exp_avg"), ("Adam mean_square", "exp_avg_sq")):
        for i, q in enumerate(theirs):
            assert torch.equal(state[ours_is][str(i)], reference.state[q][theirs_is]), ours_is


# ---- Training steps

class Descent(Optimizer):
    """Plain gradient descent on whole parameters, without state."""

    def begin(self):
        self.gradients = [self.world.all_reduce(p.grad) for p in self.params.values()]

    def update(self, step):
        for p, gradient in zip(self.params.values(), self.gradients):
            p.sub_(self.lr(step) * gradient.result())

    def finish(self, step):
        pass


def test_a_step_follows_the_mean_gradient_of_its_micro_batches():
    """... at the rate of the step, and leaves no gradient to the next one."""
    model, hp = tiny_model(micro_batches=3, window_start=256, num_iterations=10, cooldown_frac=1.0,
                           lr_floor=0.0)
    batches = [sequence(seed=seed) for seed in range(3)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = torch.stack([model(*batch, WINDOW) for batch in batches]).mean()
    gradients = dict(zip(before, torch.autograd.grad(mean, list(model.parameters()))))
    descent = Descent(dict(model.named_parameters()), 0.5, hp, ALONE)
    loss = train_step(model, batches, [descent], 4, hp, ALONE)
    assert float(loss) == pytest.approx(float(mean.detach()), abs=1e-6)
    assert not loss.requires_grad, "it would keep the activations"
    for name, p in model.named_parameters():
        want = before[name] - 0.5 * 0.6 * gradients[name]
        torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)
        assert p.grad is None and not torch.equal(p, before[name]), name


def test_a_validation_is_the_mean_over_its_tokens_and_leaves_the_model_in_training():
    model, hp = tiny_model(val_tokens=300, val_seq_len=256, window_start=256)
    sequences = [sequence(seed=seed) for seed in range(2)]
    sequences[1][1][300 - 256:] = -1  # padding
    with torch.no_grad():
        logits = [model.logits(model.features(tokens, WINDOW)) for tokens, _ in sequences]
    targets = torch.cat([targets for _, targets in sequences])[:300]
    want = torch.nn.functional.cross_entropy(torch.cat(logits)[:300], targets)
    got = evaluate(model, sequences, 0, hp, ALONE)
    assert got == pytest.approx(float(want), abs=1e-5)
    assert all(module.training for module in model.modules())


# ---- Which optimizer trains what

def test_the_table_has_a_stack_for_each_shape_of_matrices():
    model, hp = tiny_model(num_kv_heads=2)
    table = build_optimizers(model, hp, ALONE)
    muons = {frozenset(row.params): row for row in table if isinstance(row, Muon)}
    assert set(muons) == {frozenset(f"blocks.{layer}.{name}" for layer in layers)
                          for name, layers in (("attn.qkv", (0, 1, 3)),
                                               ("attn.proj.weight", (0, 1, 3)),
                                               ("mlp.fc.weight", range(4)),
                                               ("mlp.proj.weight", range(4)))}
    assert {row.peak_lr for row in muons.values()} == {hp.muon_lr}
    adams = {frozenset(row.params): row.peak_lr for row in table if isinstance(row, Adam)}
    mixes = {f"blocks.{layer}.residual_mix" for layer in range(4)}
    mixes |= {f"blocks.{layer}.attn.value_mix" for layer in (0, 1, 3)}
    assert adams == {  # two kv heads are as wide as the model, so all embeddings have one shape
        frozenset({"lm_head.weight"}): hp.head_lr,
        frozenset({"embed.weight", "value_embeds.0.weight"}): hp.embed_lr,
        frozenset({"skip_weights"} | mixes): hp.scalar_lr}


def test_a_vector_or_a_number_that_no_row_names_is_trained_by_adam():
    model, hp = tiny_model()
    model.gains = nn.Parameter(torch.ones(7))
    model.temperature = nn.Parameter(torch.tensor(1.0))
    last = build_optimizers(model, hp, ALONE)[-1]
    assert type(last) is Adam and last.peak_lr == hp.scalar_lr
    assert {"gains", "temperature", "skip_weights"} <= set(last.params)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    take_step(last)
    for p in (model.gains, model.temperature):
        torch.testing.assert_close(p.detach(), torch.ones_like(p) - hp.scalar_lr)


def test_a_row_that_no_parameter_fits_is_refused():
    """It may have a mistake in its pattern; what it was meant for would train at another rate."""
    model, hp = tiny_model()
    model.tokens = model.embed
    del model.embed, model.value_embeds
    with refused(r"no parameter fits the row embed.*weight"):
        build_optimizers(model, hp, ALONE)


# Lines of the script at which a tweak is made.
TWEAK_MODEL = "        self.skip_weights = "
TWEAK_STREAM = "norm(self.embed(tokens_T))\n"
TWEAK_OPTIMIZERS = "    optimizers = build_optimizers("


def tweaked(folder, parameter, use="", frozen=()):
    """A copy of the script, as a module, whose model has one more parameter, `own`. What enters the
    layers is multiplied by `use`, if given, and the parameters in `frozen` need no gradient."""
    text = (ROOT / "train_gpt.py").read_text()
    freeze = "".join(f"    model.get_parameter({name!r}).requires_grad_(False)\n"
                     for name in frozen)
    for place, before, after in (
            (TWEAK_MODEL, f"        self.own = nn.Parameter({parameter})\n", ""),
            (TWEAK_STREAM, "", f" * ({use})\n" if use else "\n"),
            (TWEAK_OPTIMIZERS, freeze, "")):
        assert text.count(place) == 1, f"the script has no single line {place!r} any more"
        text = text.replace(place, before + (place.rstrip("\n") if after else place) + after)
    path = folder / "tweaked.py"
    path.write_text(text)
    return load_script(path, "tweaked")


def test_check_finds_a_matrix_that_no_row_takes(tmp_path, shards):
    script = tweaked(tmp_path, "torch.ones(2, 3)", "self.own.sum()")
    with pytest.raises(script.UserError, match="no row of the table in .* takes own$"):
        train(script, *TINY, *shards, "--check")


def test_a_parameter_that_nothing_uses_is_named(tmp_path, shards):
    script = tweaked(tmp_path, "torch.ones(2)")
    with pytest.raises(script.UserError, match="no gradient reaches own:"):
        train(script, *TINY, *shards, f"--records={tmp_path}")


@pytest.mark.parametrize("frozen", ["embed.weight", "blocks.0.mlp.fc.weight", "skip_weights"])
def test_frozen_parameters_stay_and_the_others_train(tmp_path, shards, frozen):
    """Also where a run resumes; a frozen matrix needs no row in the table."""
    script = tweaked(tmp_path, "torch.ones(2, 3)", "self.own.mean()", {"own", frozen})
    train(script, *TINY, *shards, f"--records={tmp_path}", "--save_every=3", "--micro_batches=2")
    paths = sorted(tmp_path.glob("*/step*.pt"))
    first, last = (torch.load(path, weights_only=True)["state"]["model"] for path in paths)
    unchanged = {name for name in first if torch.equal(first[name], last[name])}
    assert unchanged == {"own", frozen}
    train(script, f"--resume={paths[0]}", f"--records={tmp_path}/again")
    again = load_checkpoint(tmp_path / "again")["state"]["model"]
    assert all(torch.equal(again[name], last[name]) for name in last)


# ---- What is saved

@pytest.mark.parametrize("kind, state", [
    (Adam, [torch.zeros(4, 4)]),  # one for two parameters
    (Adam, [torch.zeros(4), torch.zeros(4)]),  # of a matrix's rows, but World divides no vector
    (Muon, torch.zeros(3, 4, 1))])  # a stack of another length than the parameters'
def test_a_state_that_would_not_be_saved_whole_is_refused(kind, state):
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
    optimizer = kind(dict(model.named_parameters()), 0.1, HP, ALONE)
    gather_training_state(model, [optimizer])
    optimizer.state["more"] = state
    with pytest.raises((AssertionError, ValueError)):
        gather_training_state(model, [optimizer])
    optimizer.state["more"] = (torch.zeros(2, 4, 1) if kind is Muon
                               else [torch.zeros(4, 1), torch.zeros(4, 1)])
    saved = gather_training_state(model, [optimizer])
    assert saved[f"{kind.__name__} more"]["b.weight"].shape == (4, 1)


# ---- Several processes

@pytest.mark.parametrize("ranks, dtype", [(3, "float32"), (4, "bfloat16")])
def test_distributed_optimizers_equal_a_single_process(ranks, dtype):
    """With 5, 2 and 1 parameters of a shape: the stacks are filled up, and some processes have none
    of the matrices. Two optimizers are a user's own. The collectives come early or late, as NCCL's
    may, and the state is saved in the middle and restored."""
    assert run_helper("optimizer_worker.py", dtype, ranks=ranks).count("equal") == ranks
