"""The table PARAMETERS: how each parameter starts, who trains it, and what is refused."""

import pytest
import torch
from conftest import refused
from test_model import ALONE, HP, tiny_model
from torch import nn
import train_gpt
from train_gpt import (GPT, PARAMETERS, Adam, Muon, build_optimizers, draw_weights, parameter,
                       uniform)

pytestmark = pytest.mark.quick

def test_initial_weights():
    model, _ = tiny_model(randomize=False, model_dim=256, num_kv_heads=2)
    vectors = dict(residual_mix=[1, 0], value_mix=[0.5, 0.5], skip_weights=[1, 1])
    spread = dict(qkv=0.5 / 16, fc=0.5 / 16, proj=0, lm_head=0, embed=1)
    for name, p in model.named_parameters():
        kind = name.replace("value_tables.0", "embed").removesuffix(".weight").split(".")[-1]
        if kind in vectors:
            assert p.tolist() == vectors[kind]
        else:
            size = float(p.detach().square().mean().sqrt())
            assert size == pytest.approx(spread[kind], rel=0.02), name
    assert model.layers[0].attn.qkv.shape == (2 + 1 + 1, 2 * 16, 256), "four matrices for Muon"
    assert len(model.lm_head.weight) == 320 == len(model.embed.weight), "the padded vocabulary"

def drawn(seed=3, dtype=torch.float32, **changes):
    return tiny_model(seed, randomize=False, dtype=dtype, **changes)[0].state_dict()

def test_draws_depend_on_seed_and_name_alone():
    """So that runs of two scripts can be compared in pairs of equal seeds."""
    base = drawn()
    random = {name for name, p in base.items() if p.ndim > 1 and p.any()}
    assert {"embed.weight", "layers.3.mlp.fc.weight", "layers.0.attn.qkv"} <= random
    for changes in (dict(windows="LSSLSS", attention="xx.xxx", value_embeds="0..0.."),
                    dict(windows="LS", attention="xx", value_embeds="0."),
                    dict(attention="xxxx"), dict(value_embeds="01.0"), dict(value_embeds="...."),
                    dict(attention="....", value_embeds="....")):
        other = drawn(**changes)
        shared = {name for name in random & set(other) if base[name].shape == other[name].shape}
        assert "embed.weight" in shared and len(shared) >= len(random) - 4
        assert all(torch.equal(base[name], other[name]) for name in shared), changes
    torch.manual_seed(5)
    assert torch.equal(drawn()["embed.weight"], base["embed.weight"])
    assert not torch.equal(drawn(seed=4)["embed.weight"], base["embed.weight"])
    fc = [base[f"layers.{layer}.mlp.fc.weight"] for layer in range(4)]
    assert not any(torch.equal(fc[0], weight) for weight in fc[1:]), "layers begin alike"
    assert torch.equal(drawn(dtype=torch.bfloat16)["embed.weight"], base["embed.weight"].bfloat16())

def test_weights_are_drawn_once_and_nothing_trains_before():
    model = GPT(HP, torch.float32, flex=False)
    undrawn = {name for name, p in model.named_parameters() if p.isnan().all()}
    assert undrawn == {name for name, p in model.named_parameters() if p.ndim > 1}
    draw_weights(model, 0)
    with refused("has values"):
        draw_weights(model, 0)

def put(name, value):
    owner, _, name = f".{name}".rpartition(".")
    return lambda model: setattr(model.get_submodule(owner.strip(".")), name, value)

REFUSED = {
    "a row without a parameter": (lambda model: setattr(model, "lm_head", model.embed),
                                  r"no parameter follows the rule lm_head"),
    "a name that begins like a row's": (put("skip_weights_2", nn.Parameter(torch.ones(2))),
                                        r"no rule for skip_weights_2 \(2,\)"),
    "a vector that is left NaN": (put("skip_weights", parameter(2)), "skip_weights needs initial "),
    "a matrix whose row leaves it to its module": (
        put("layers.0.own_mix", nn.Parameter(torch.ones(2, 2))), r"layers\.0\.own_mix needs init")}
@pytest.mark.parametrize("change, words", REFUSED.values(), ids=REFUSED)
def test_a_model_that_does_not_fit_the_table_is_refused(change, words):
    model = GPT(HP, torch.float32, flex=False)
    with torch.no_grad():
        change(model)
    with refused(words):
        draw_weights(model, 0)

def test_the_optimizers_of_the_table():
    model, hp = tiny_model(num_kv_heads=2)
    optimizers = build_optimizers(model, hp, ALONE)
    layers = {"attn.qkv": (0, 1, 3), "attn.proj.weight": (0, 1, 3), "mlp.fc.weight": range(4),
              "mlp.proj.weight": range(4)}
    mixes = {f"layers.{layer}.residual_mix" for layer in range(4)}
    mixes |= {f"layers.{layer}.attn.value_mix" for layer in (0, 1, 3)}
    assert {(type(each), each.peak_lr, frozenset(each.params)) for each in optimizers} == {
        # Two kv heads are as wide as the model, so all embeddings have one shape.
        (Adam, hp.lm_head_lr, frozenset({"lm_head.weight"})),
        (Adam, hp.embed_lr, frozenset({"embed.weight", "value_tables.0.weight"})),
        (Adam, hp.scalar_lr, frozenset({"skip_weights"} | mixes)),
        *((Muon, hp.muon_lr, frozenset(f"layers.{i}.{name}" for i in which))
          for name, which in layers.items())}

def test_parameters_of_two_dtypes_do_not_share_an_adam():
    model, hp = tiny_model()
    model.embed.weight.data = model.embed.weight.data.bfloat16()
    groups = [{*each.params} for each in build_optimizers(model, hp, ALONE)]
    assert {"embed.weight"} in groups and {"value_tables.0.weight"} in groups

def test_a_row_of_ones_own_with_a_subclass_of_muon(monkeypatch):
    """Its options reach its optimizers, which are one for each shape."""
    class Sign(Muon):
        def __init__(self, *others, decay, **more):
            super().__init__(*others, **more)
            self.decay = decay
    row = r"layers\..*\.(fc|proj)\.weight", uniform, "Sign", dict(lr="embed_lr", decay=0.5)
    monkeypatch.setattr(train_gpt, "Sign", Sign, raising=False)
    monkeypatch.setattr(train_gpt, "PARAMETERS", [row, *PARAMETERS[:3], PARAMETERS[4]])
    model, hp = tiny_model(attention="xxxx", num_kv_heads=2)
    signs = [o for o in build_optimizers(model, hp, ALONE) if type(o) is Sign]
    shapes = {next(iter(o.params.values())).shape: len(o.params) for o in signs}
    assert shapes == {(128, 32): 4, (32, 128): 4, (32, 64): 4}
    assert all((o.peak_lr, o.decay) == (hp.embed_lr, 0.5) for o in signs)
