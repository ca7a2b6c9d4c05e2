"""Compares train_gpt.py's model with the record's in float64, by equal weights and tokens:

    python records/2026-11-26_equal/equal.py record.txt

record.txt is the record's log, which begins with its source (records/README.md links to it). From
there come its modules; in place of FlexAttention stands dense attention by the same block mask."""

import dataclasses
import itertools
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt

WIDTH, HEADS, HEAD_DIM, TOKENS = 64, 2, 32, 1024

def dense_attention(q, k, v, block_mask, scale):
    seen = torch.zeros(q.size(2), k.size(2), dtype=torch.bool)
    position = torch.arange(len(seen))
    inside = block_mask.mask_mod(0, 0, position[:, None], position)
    for kind in ("kv", "full_kv"):
        counts = getattr(block_mask, f"{kind}_num_blocks")[0, 0]
        for i, row in enumerate(getattr(block_mask, f"{kind}_indices")[0, 0]):
            for j in row[:max(0, counts[i])]:
                tile = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
                seen[tile] = inside[tile] | (kind == "full_kv")
    return torch.where(seen, q @ k.mT * scale, -torch.inf).softmax(-1) @ v

def record_of(path: str):
    """The record's GPT, at this width."""
    source = Path(path).read_text()
    imports = source[source.index("from torch import Tensor, nn"):source.index("torch._inductor.conf")]
    modules = source[source.index("# PyTorch nn.Module definitions for the model"):]
    modules = modules[:modules.index("# Our own simple Distributed Data Loader")]
    for old, new in (('device="cuda"', 'device="cpu"'), ("torch.float32", "torch.float64"),
                     ("head_dim=128", f"head_dim={HEAD_DIM}")):
        modules = modules.replace(old, new)
    space = {"os": os, "torch": torch}
    exec("import torch.nn.functional as F\n" + imports + modules, space)
    space["flex_attention"] = dense_attention
    return space["GPT"](50257, 12, HEADS, WIDTH, TOKENS).double().eval()

def name_here(name: str) -> str:
    for old, new in (("attn.qkv_w", "attn.qkv"), ("attn.lambdas", "attn.value_mix"),
                     (".lambdas", ".residual_mix"), ("c_proj", "proj"), ("c_fc", "fc"),
                     ("value_embeds.embed.", "value_tables."), ("blocks.", "layers.")):
        name = name.replace(old, new)
    return name

def as_here(name: str, x):
    """The record rotates channel i with i + K / 2, ours with i + K / 4: q and k in another order."""
    if not name.endswith("qkv"):
        return x
    quarters = x.view(3, HEADS, 4, HEAD_DIM // 4, WIDTH).clone()
    quarters[:2] = quarters[:2][:, :, [0, 2, 1, 3]]
    return quarters.view_as(x)

def main():
    torch.manual_seed(0)
    torch.Tensor.float = torch.Tensor.double  # what both compute in float32
    record = record_of(sys.argv[1])
    model = train_gpt.GPT(dataclasses.replace(
        train_gpt.PRESETS["speedrun"], model_dim=WIDTH, num_heads=HEADS, head_dim=HEAD_DIM,
        train_seq_len=TOKENS, val_seq_len=TOKENS, use_fp8=False), torch.float64, flex=False).double()
    theirs = {name_here(name): p for name, p in record.named_parameters()}
    ours = dict(model.named_parameters())
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, p in theirs.items():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.5))
            ours[name].zero_()  # also the rows that pad our vocabulary
            ours[name][:len(p)] = as_here(name, p)
    worst = {"loss": 0.0, "matrices' gradients": 0.0, "vectors' gradients": 0.0}
    print("tokens at once in the head, between documents, in the window: loss")
    cases = itertools.product((24576, 300), (TOKENS, 60, 200, 700), (128, 384, 1792))
    for train_gpt.GPT.LOGITS_TOKENS, spacing, window in cases:
        tokens = torch.randint(50256, (TOKENS,), dtype=torch.int32)
        tokens[::spacing] = 50256
        targets = torch.randint(50257, (TOKENS,))
        theirs_loss = record(tokens, targets, torch.tensor(window // 128, dtype=torch.int32))
        ours_loss = model(tokens, targets, torch.tensor(window, dtype=torch.int32)) / TOKENS
        gradients = torch.autograd.grad(ours_loss, list(ours.values()))
        found = [("loss", float(abs(ours_loss - theirs_loss) / theirs_loss))]
        for name, g in zip(theirs, torch.autograd.grad(theirs_loss, list(theirs.values()))):
            mine, g = dict(zip(ours, gradients))[name], as_here(name, g)
            kind = "matrices' gradients" if g.ndim > 1 else "vectors' gradients"
            found.append((kind, float((mine[:len(g)] - g).norm() / g.norm())))
        for kind, error in found:
            worst[kind] = max(worst[kind], error)
        print(train_gpt.GPT.LOGITS_TOKENS, spacing, window, f"{float(ours_loss):.6f}", flush=True)
    for kind, error in worst.items():
        print(f"largest relative difference, {kind}: {error:.1e}")

if __name__ == "__main__":
    main()
