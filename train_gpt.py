# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9.1", "numpy"]
# ///
"""The NanoGPT speedrun in one file: train a GPT to a validation loss of 3.28 on FineWeb, fast.

    torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node=8 train_gpt.py   # the speedrun
    python train_gpt.py --preset=demo                      # a small version, on a CPU or one GPU
    python train_gpt.py --resume=records/<run>/step<n>.pt  # continue from a checkpoint
    python train_gpt.py --help                             # every setting is a flag

To try an idea, change a copy of this file. Every run writes a log to the records folder: settings,
machine, this source, and a line per step. If a run is killed, --resume continues it from its last
checkpoint. Read sections 1 to 9 in order; section 10 is support code.

The model has 276 million parameters, 193 million of them in four embeddings and the output head.
A step trains on 393,216 tokens, the whole run on 696 million. Losses are in nats per token. They
start at ln 50304 = 10.83, because an all-zero head makes all 50,304 tokens equally likely.

    preset        steps  hardware     time     final loss           standard deviation
    speedrun (*)   1770  8 x H100     176 s    3.28                 0.0019
    short           250  one GPU      not measured
    demo            720  1 CPU core   185 s    2.18                 0.0073

(*) The world record of 2025-01-26, whose method this file uses; not measured here. A date such as
(2024-11-24) names the record that introduced a part. All records are listed at
https://github.com/KellerJordan/modded-nanogpt#world-record-history, and records/method.md in the
repository says how much each part helped. Model and schedules are the record's. What differs here:

- Gradients of the layers' matrices are rounded to bfloat16 before they are summed over the ranks.
- The gradient of the loss is coded by hand (CrossEntropy).
- Weights are clamped before the cast to FP8.
- The embeddings are padded to 50,304 rows, as the head is.
- Rotary embeddings rotate different pairs of channels, and their angles are computed in float64.
- Initial weights have the same distributions, but different random numbers.
- The number of GPUs does not change the batch.
- The ranks share the work of Adam. The clock starts at step 0, not at step 10.
- The compiler does not search for faster kernels (coordinate descent tuning).

One sequence in a step, with the shapes of `speedrun`:

    tokens [49152] -----> block masks (long, short), 3 value embeddings [49152, 768]
       |                              |
       |                      +-------+-------+
       v                      v               v
    x [49152, 768] -----> layers 0-5 ---> layers 6-11 -----> norm, lm_head, softcap
                              |               ^                            |
                              +---- skips ----+                            v
                            5 to 6, 4 to 7 ... 0 to 11     loss <-- logits [49152, 50304]

    loss.backward(); after the last sequence, all optimizers take a step (section 6)

Many names end in the tensor's shape: x_TD is [T, D]. T is the number of tokens, D the model width,
H the number of attention heads, K the head width, V the padded vocabulary, N the number of
128-token blocks. The model takes one long sequence of many documents at a time, so there is no
batch dimension. Steps start at 0.
"""

import argparse
import gc
import glob
import io
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Iterator, NamedTuple

if __name__ == "__main__" and not (find_spec("torch") and find_spec("numpy")):
    print("error: this Python lacks torch or numpy: install them", file=sys.stderr)
    sys.exit(2)

# Read before torch, whose import takes seconds: the file could change meanwhile.
SOURCE = Path(__file__).read_text(encoding="utf-8") if __name__ == "__main__" else None

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_map

class UserError(Exception):
    """An error that the user can fix. Its message is one line."""

def require(condition, message: str):
    if not condition:
        raise UserError(message)

# ---- 1. Settings and schedules ------------------------------------------------------------------

BLOCK = 128  # tokens; attention masks and windows consist of whole blocks

def flag(default, text: str, low=0, high=10**9, unit=1, pattern=".+"):
    """A setting. Numbers lie in [low, high], integers are multiples of unit, and strings match the
    pattern."""
    return field(default=default, metadata=dict(help=text, limits=(low, high, unit, pattern)))

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. The defaults are the preset `speedrun`."""
    # The run
    name: str = flag("speedrun", "up to 100 letters, digits and ._-", pattern=r"[\w.-]{1,100}")
    records: str = flag("records", "folder for the log and the checkpoints")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", low=-1, high=2**63 - 1)
    dtype: str = flag("auto", "bfloat16, float32 or auto", pattern="auto|bfloat16|float32")
    save_every: int = flag(500, "steps between checkpoints; 0 never saves, not even at the end")
    val_loss_every: int = flag(125, "steps between validations (also at each save and the end)")
    # Data. In one step all ranks together train on `micro_batches` sequences.
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "token ids; the last one begins each document", low=2, high=65536)
    train_seq_len: int = flag(48 * 1024, "tokens per training sequence", low=1, unit=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens per validation sequence", low=1, unit=BLOCK)
    val_tokens: int = flag(10485760, "validation tokens; 0 uses all", high=10**12)
    micro_batches: int = flag(8, "sequences per step, across all ranks", low=1, high=10**5)
    epochs: int = flag(1, "at most this many passes over the training shards", low=1, high=10**5)
    # The layers. Each of these strings has one character per layer.
    windows: str = flag("LSSSLSSLSSSL", "L: long window, S: half as long", pattern="[LS]+")
    attention: str = flag("xxxxxxx.xxxx", "x: with attention, .: without", pattern="[x.]+")
    value_embeds: str = flag("012......012", "digit: value embedding, .: none", pattern="[0-9.]+")
    # The model
    model_dim: int = flag(768, "width of the residual stream", low=16, high=2**16, unit=16)
    num_heads: int = flag(6, "query heads; need not divide model_dim", low=1, high=2**10)
    num_kv_heads: int = flag(0, "key and value heads; 0 means num_heads")
    head_dim: int = flag(128, "width of an attention head", low=16, high=2**10, unit=16)
    attention_scale: float = flag(0.12, "multiplies q @ k.T; retune if head_dim changes", low=0.001)
    rope_base: float = flag(1024.0, "base of the rotary frequencies", low=1)
    lm_head_softcap: float = flag(15.0, "c: logits z become c + c * tanh(z / c)", low=0.1, high=38)
    use_fp8: bool = flag(True, "train lm_head in FP8, if the GPU and dtype allow it")
    window_start: int = flag(128, "long window at the start, in tokens", low=BLOCK, unit=BLOCK)
    window_end: int = flag(1792, "long window at the end, in tokens", low=BLOCK, unit=BLOCK)
    # Optimization
    num_iterations: int = flag(1770, "training steps", high=10**7)
    cooldown_frac: float = flag(0.4, "final fraction of the run, in which rates fall", high=1)
    lr_floor: float = flag(0.1, "learning rates at the end, as a fraction of their peak", high=1)
    muon_lr: float = flag(0.05, "learning rate of the layers' matrices (Muon)")
    muon_momentum_start: float = flag(0.85, "Muon's momentum at the first step", high=1)
    muon_momentum_end: float = flag(0.95, "Muon's momentum after the ramp", high=1)
    muon_momentum_steps: int = flag(300, "steps until Muon's momentum reaches its final value")
    lm_head_lr: float = flag(0.008, "learning rate of the output head (Adam)")
    embed_lr: float = flag(0.6, "learning rate of all embeddings (Adam)")
    scalar_lr: float = flag(0.04, "learning rate of vectors and scalars (Adam)")
    adam_beta1: float = flag(0.8, "decay rate of Adam's mean gradient", high=1 - 1e-9)
    adam_beta2: float = flag(0.95, "decay rate of Adam's mean square", high=1 - 1e-9)
    adam_eps: float = flag(1e-10, "Adam's epsilon: below it, gradients hardly count", low=1e-18)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batches * self.train_seq_len

PRESETS = {
    "speedrun": Hyperparameters(),
    # The speedrun's model and batch, on one shard of FineWeb
    "short": Hyperparameters(
        name="short", num_iterations=250, muon_momentum_steps=42, save_every=0,
        train_files="data/fineweb10B/fineweb_train_000001.bin"),
    # A small model. Its optimizer settings were tuned for this size and length.
    "demo": Hyperparameters(
        name="demo", save_every=120, val_loss_every=120, train_files="data/demo/demo_train_*.bin",
        val_files="data/demo/demo_val_*.bin", vocab_size=1025, train_seq_len=1024,
        val_seq_len=16384, val_tokens=131072, micro_batches=4, windows="SL", attention="xx",
        value_embeds=".0", model_dim=128, num_heads=6, head_dim=32, attention_scale=0.2,
        window_start=256, window_end=256, num_iterations=720, lr_floor=0.0, muon_lr=0.07,
        muon_momentum_end=0.75, muon_momentum_steps=0, adam_beta1=0.3, adam_eps=1e-7)}

def tokens_seen(done: int, hp: Hyperparameters) -> int:
    return done * hp.tokens_per_step

def window_tokens(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens. It grows during the run, since short-range context is learned
    first and costs less (2024-11-24). At steps 0, 500, 1000 and 1770 it is 128, 512, 1024, 1792."""
    # As in the record, the ramp ends half a block below window_end; rounding up closes the gap.
    grown = (hp.window_end - BLOCK / 2) * step / max(1, hp.num_iterations)
    return max(hp.window_start, math.ceil(grown / BLOCK) * BLOCK)

def window_tensor(step: int, hp: Hyperparameters, device: torch.device) -> Tensor:
    """The long window as a tensor on the device. torch.compile would recompile for each new int,
    and torch.tensor would wait for the GPU."""
    return torch.full((), window_tokens(step, hp), dtype=torch.int32, device=device)

def lr_factor(step: int, hp: Hyperparameters) -> float:
    """The multiplier of every learning rate: 1 at first, then a line down to lr_floor. Large
    steps make fast progress, and small ones reach a lower loss at the end."""
    left = max(0, 1 - step / max(1, hp.num_iterations))
    height = min(1, left / hp.cooldown_frac) if hp.cooldown_frac else 1
    return hp.lr_floor + height * (1 - hp.lr_floor)

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Muon's momentum. In `speedrun` it rises at first, because early gradients quickly go stale,
    and then stays constant (2024-11-06)."""
    risen = min(1, step / hp.muon_momentum_steps) if hp.muon_momentum_steps else 1
    return hp.muon_momentum_start + risen * (hp.muon_momentum_end - hp.muon_momentum_start)

# ---- 2. The model -------------------------------------------------------------------------------

class GPT(nn.Module):
    """model(tokens_T, targets_T, window) returns the sum of the losses of one sequence, in nats.
    With flex=True it uses FlexAttention and must be compiled, because uncompiled FlexAttention
    ignores windows.

    The embeddings and the residual stream x_TD are in `dtype`. All other parameters are float32, so
    cast a vector or matrix with type_as before you multiply the stream by it. Scalars need no
    cast."""

    # The head works on this many tokens at a time: logits [24576, 50304] in float32 take 4.6 GiB.
    LOGITS_TOKENS = 24576

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype, flex: bool):
        super().__init__()
        self.hp = hp
        self.flex = flex
        self.end_of_text = hp.vocab_size - 1
        # FP8 needs a multiple of 16 rows. A multiple of 64 can be divided by 2, 4, 8, ... 64 ranks.
        vocab = math.ceil(hp.vocab_size / 64) * 64
        self.embed = Embedding(vocab, hp.model_dim, dtype)
        # Layers with the same digit share a value embedding (2024-12-08).
        digits = sorted(set(hp.value_embeds) - {"."})
        width = hp.kv_heads * hp.head_dim
        self.value_tables = nn.ModuleDict({d: Embedding(vocab, width, dtype) for d in digits})
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len), hp.rope_base)
        self.layers = nn.ModuleList(Layer(hp, i, rotary) for i in range(len(hp.windows)))
        self.skip_weights = nn.Parameter(torch.ones(len(self.layers) // 2))
        gradient_scale = TOKEN_GRADIENT_SCALE * hp.tokens_per_step if hp.use_fp8 else None
        self.lm_head = CastedLinear(hp.model_dim, vocab, gradient_scale)

    def forward(self, tokens_T: Tensor, targets_T: Tensor, window: Tensor) -> Tensor:
        x_TD = self.features(tokens_T, window)
        loss = 0
        for x, target in zip(x_TD.split(self.LOGITS_TOKENS), targets_T.split(self.LOGITS_TOKENS)):
            loss += CrossEntropy.apply(self.logits(x), target)
        return loss

    def features(self, tokens_T: Tensor, window: Tensor) -> Tensor:
        """Returns the normalized residual stream [T, D] after the last layer."""
        masks = dict(zip("LS", build_block_masks(tokens_T, self.end_of_text, window, self.flex)))
        value_embed_of = {digit: table(tokens_T) for digit, table in self.value_tables.items()}
        x_TD = x0_TD = norm(self.embed(tokens_T))
        # A U-Net (2024-11-10): with 12 layers, layer 5's output is added to layer 6's input, layer
        # 4's output to layer 7's input, and so on.
        skips = []
        half = len(self.layers) // 2
        for i, layer in enumerate(self.layers):
            if i >= half:
                x_TD = x_TD + self.skip_weights[i - half] * skips.pop()
            value_embed = value_embed_of.get(self.hp.value_embeds[i])  # None for "."
            x_TD = layer(x_TD, x0_TD, value_embed, masks[self.hp.windows[i]])
            if i < half:
                skips.append(x_TD)
            assert x_TD.dtype == self.embed.weight.dtype, f"layer {i} or x0 needs a type_as"
        return norm(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Caps logits smoothly, as Gemma 2 does (arXiv:2408.00118), so that confident errors do not
        cost too much (2024-11-06). A logit z becomes c + c tanh(z / c). Adding c changes no
        probabilities."""
        c = self.hp.lm_head_softcap
        return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))

class Layer(nn.Module):
    """Mixes the residual stream with x0, the token's own normalized embedding, so that no layer
    loses sight of it (2024-11-06). Then the layer adds attention and an MLP."""

    def __init__(self, hp: Hyperparameters, index: int, rotary: "Rotary"):
        super().__init__()
        # Layer 7 of `speedrun` has no attention, to save time (2024-12-17).
        self.attn = CausalSelfAttention(hp, rotary) if hp.attention[index] == "x" else None
        self.mlp = MLP(hp.model_dim)
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x_TD: Tensor, x0_TD: Tensor, value_embed: Tensor | None, mask) -> Tensor:
        x_TD = self.residual_mix[0] * x_TD + self.residual_mix[1] * x0_TD
        if self.attn is not None:
            x_TD = add(x_TD, self.attn(norm(x_TD), value_embed, mask))
        return add(x_TD, self.mlp(norm(x_TD)))

def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Bit-identical to x_TD + y_TD. The compiler would fuse a plain sum into the preceding matmul,
    which makes torch 2.13 copy x_TD first (75 MB). If y_TD is still float32, the sum is too, and
    the assertion in `features` fails."""
    sum_TD = x_TD.float() + y_TD
    return sum_TD.type_as(x_TD) if x_TD.dtype == y_TD.dtype else sum_TD

class CausalSelfAttention(nn.Module):
    """Attention with normalized queries and keys, which bounds the scores (arXiv:2010.04245).
    Values are mixed with the layer's value embedding [T, kv heads * K], a second embedding of the
    token, which reminds the layer of the token itself (arXiv:2410.17897, 2024-12-04). Several query
    heads may share a key-value head (arXiv:2305.13245)."""

    def __init__(self, hp: Hyperparameters, rotary: "Rotary"):
        super().__init__()
        self.hp = hp
        self.rotary = rotary
        # Muon orthogonalizes q, k and v separately, so they are matrices of equal shape in one
        # stack. With 6 heads and 3 kv heads the stack has four: two for q, one for k, one for v.
        parts = hp.num_heads // hp.kv_heads + 2
        self.qkv = parameter(parts, hp.kv_heads * hp.head_dim, hp.model_dim)
        self.proj = CastedLinear(hp.num_heads * hp.head_dim, hp.model_dim)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))  # for v and value_embed

    def forward(self, x_TD: Tensor, value_embed: Tensor | None, mask) -> Tensor:
        T, heads, kv_heads = len(x_TD), self.hp.num_heads, self.hp.kv_heads
        qkv = F.linear(x_TD, self.qkv.flatten(0, 1).type_as(x_TD)).view(T, -1, self.hp.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # each [T, heads, K]
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        v = self.value_mix[0] * v  # initially halved, even without a value embedding
        if value_embed is not None:
            v = v + self.value_mix[1] * value_embed.view_as(v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, T, K]
        y_1HTK = attend(q, k, v, mask, self.hp.attention_scale)
        return self.proj(y_1HTK.squeeze(0).transpose(0, 1).reshape(T, -1))

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc = CastedLinear(dim, 4 * dim)
        self.proj = CastedLinear(4 * dim, dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x_TD)).square())  # ReLU^2 (arXiv:2109.08668)

class Rotary(nn.Module):
    """Rotary position embeddings (arXiv:2104.09864). Channels i and i + K/4 of a head, for i < K/4,
    are rotated as a pair. The second half is not rotated, so it matches content at any distance
    (2024-12-17):

        quarter of a head   first            second           third and fourth
        x                   a                b                c
        swapped             b                a                (anything, times 0)
        result              a cos + b sin    b cos - a sin    c"""

    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        frequencies = base ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
        # Angles are [T, 1, K/4]. In float32 they would be off by 0.005 at position 262143.
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)[:, None]
        c, s = angles.cos().float(), angles.sin().float()
        ones = torch.ones_like(c).repeat(1, 1, 2)
        self.register_buffer("cos", torch.cat((c, c, ones), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((s, -s, 0 * ones), dim=-1), persistent=False)

    def forward(self, x_THK: Tensor) -> Tensor:
        x = x_THK.float()
        # Swapping quarters avoids torch.cat, which would write a copy in float32.
        swapped = x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)
        return (x * self.cos[:len(x)] + swapped * self.sin[:len(x)]).type_as(x_THK)

class Embedding(nn.Module):
    """An embedding in `dtype`. Where a token occurs several times in one sequence, its gradients
    are summed in float32. Across micro-batches they are summed in `dtype`."""

    def __init__(self, num_embeddings: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(num_embeddings, width, dtype=dtype)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight.float()).type_as(self.weight)

class CastedLinear(nn.Module):
    """A linear layer without a bias. Its weight is float32 and is cast to the input's dtype. With a
    gradient_scale, it multiplies in FP8 during training, but not in validation, as in the record.
    """

    def __init__(self, in_features: int, out_features: int, gradient_scale: float | None = None):
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.gradient_scale = gradient_scale

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_scale and self.training:
            return FP8Linear.apply(x, self.weight, self.gradient_scale)
        return F.linear(x, self.weight.type_as(x))

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

# ---- 3. Block masks and attention ---------------------------------------------------------------

def build_block_masks(tokens_T: Tensor, end_of_text: int, window: Tensor, flex: bool) -> list:
    """Returns the long and the short mask, for FlexAttention (arXiv:2412.05496) if flex is True. A
    token sees itself and the earlier tokens of its document, as far back as the window reaches. The
    window is counted in blocks of 128 tokens, the token's own block included. The short window has
    half as many blocks, but at least one (2025-01-16).

    For each query block, FlexAttention needs a list of the full key blocks and a list of the
    partial ones. In a full block all pairs of tokens are visible. In a partial block it asks `sees`
    about each pair. All other blocks are skipped, which saves time. Here a second document begins
    within block 1, and the window has two blocks (p: partial, f: full, w: beyond the window):

        query block   key block 0 1 2 3
                  0             p . . .     the diagonal is partial, since no token sees the future
                  1             p p . .     only tokens of the first document see block 0
                  2             . p p .     block 0 is in the first document only
                  3             . w f p     with a longer window, block 1 would be partial
    """
    document_T = (tokens_T == end_of_text).cumsum(0, dtype=torch.int32)

    # FlexAttention calls `sees` in partial blocks only. So if you change it, change any_visible_NN
    # and all_visible_NN to match. `./run.sh honest` compares them with it.
    def sees(batch, head, query, key):
        return (key <= query) & (document_T[query] == document_T[key])

    block_N = torch.arange(len(tokens_T) // BLOCK, dtype=torch.int32, device=tokens_T.device)
    distance_NN = block_N[:, None] - block_N  # [query block, key block]
    first_N = document_T[::BLOCK]  # the document of each block's first token
    last_N = document_T[BLOCK - 1::BLOCK]
    # Document numbers never decrease. So some pair is visible if the key block is not later, and
    # does not end before the query block's first document. All pairs are visible if the key block
    # is earlier, and the query block ends in the document in which the key block begins.
    any_visible_NN = (distance_NN >= 0) & (last_N >= first_N[:, None])
    all_visible_NN = (distance_NN > 0) & (first_N == last_N[:, None])

    def ordered(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
        """For each row: the number of chosen columns, and a list of all columns, the chosen ones
        first. For the row [0, 1, 0, 1], that is 2 and [1, 3, 0, 2]."""
        # place_NN is each column's place in the list. A sort would take minutes to compile.
        count_NN = chosen_NN.cumsum(1)
        place_NN = torch.where(chosen_NN, count_NN - 1, count_NN[:, -1:] + block_N - count_NN)
        order_NN = torch.zeros_like(distance_NN).scatter_(1, place_NN, block_N.expand_as(place_NN))
        return count_NN[:, -1].int()[None, None], order_NN[None, None]  # [batch, head, ...]

    def make_mask(window_blocks: Tensor):
        visible_NN = any_visible_NN & (distance_NN < window_blocks)
        if not flex:
            return plain_mask(visible_NN, sees)
        partial_NN, full_NN = visible_NN & ~all_visible_NN, visible_NN & all_visible_NN
        # The backward pass needs the query blocks of each key block.
        keys, full_keys = ordered(partial_NN), ordered(full_NN)
        queries, full_queries = ordered(partial_NN.T), ordered(full_NN.T)
        return BlockMask((len(tokens_T), len(tokens_T)), *keys, *full_keys, *queries,
                         *full_queries, (BLOCK, BLOCK), sees)

    return [make_mask(window // BLOCK), make_mask((window // BLOCK // 2).clamp(min=1))]

def plain_mask(visible_NN: Tensor, sees) -> list[tuple[slice, Tensor]]:
    """For each query block a slice of keys and a bias [128, keys]: 0 where visible, else -inf."""
    position_T = torch.arange(len(visible_NN) * BLOCK, device=visible_NN.device)
    mask = []
    for query, visible_N in zip(position_T.split(BLOCK), visible_NN):
        key_range = slice(int(visible_N.nonzero()[0]) * BLOCK, int(query[-1]) + 1)
        key = position_T[key_range]
        visible = visible_N[key // BLOCK] & sees(None, None, query[:, None], key)
        mask.append((key_range, torch.where(visible, 0.0, -torch.inf)))
    return mask

def plain_attend(q: Tensor, k: Tensor, v: Tensor, mask: list, scale: float) -> Tensor:
    """Attention without FlexAttention, which has no backward pass on CPUs."""
    if k.size(1) < q.size(1):  # query heads share kv heads
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    outputs = []
    for q_block, (key_range, bias) in zip(q.split(BLOCK, dim=2), mask):
        scores = (scale * q_block) @ k[:, :, key_range].mT + bias.to(q.dtype)
        outputs.append(scores.softmax(-1) @ v[:, :, key_range])
    return torch.cat(outputs, dim=2)

def attend(q: Tensor, k: Tensor, v: Tensor, mask, scale: float) -> Tensor:
    """Attention for q [1, H, T, K] and for k and v [1, kv heads, T, K]."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return plain_attend(q, k, v, mask, scale)

# ---- 4. The head: FP8 and the loss --------------------------------------------------------------

# The head does a third of all arithmetic, and FP8 halves its time (2025-01-13). But FP8 has a
# small range, so each tensor is multiplied by a scale before the cast:
#
#     tensor     format   largest value                      times scale    maximum of the format
#     input      e4m3     27.7 = sqrt(768) after the norm    55.4             448
#     weight     e4m3     0.875, to which it is clamped      448              448
#     gradient   e5m2     1 / tokens_per_step                10.7           57344
#
# (e4m3 has 4 exponent bits and 3 mantissa bits, e5m2 has 5 and 2.) The gradient's scale is 2^19 for
# a step of 48K tokens, as in the record, and grows with tokens_per_step: 2^22 in `speedrun`.
INPUT_SCALE, WEIGHT_SCALE, TOKEN_GRADIENT_SCALE = 2.0, 2.0**9, 2.0**19 / (48 * 1024)

def to_e4m3(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

def fp8_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """Computes a @ b.T / scale. FP8 units sum along the rows of a and b, which must be
    contiguous. fast=True sums less precisely, which only the forward pass tolerates."""
    one, inverse = (torch.full((), x, device=a.device) for x in (1.0, 1 / scale))
    return torch._scaled_mm(a, b.T, one, inverse, out_dtype=dtype, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """Computes x_TD @ w_VD.T with FP8 matmuls, forward and backward."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, w_VD: Tensor, gradient_scale: float) -> Tensor:
        x8_TD = to_e4m3(x_TD, INPUT_SCALE)
        w8_VD = to_e4m3(w_VD, WEIGHT_SCALE)
        ctx.scale = gradient_scale
        ctx.save_for_backward(x8_TD, w8_VD)
        return fp8_matmul(x8_TD, w8_VD, INPUT_SCALE * WEIGHT_SCALE, x_TD.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad_TV: Tensor):
        x8_TD, w8_VD = ctx.saved_tensors
        g8_TV = (grad_TV.float() * ctx.scale).to(torch.float8_e5m2).contiguous()
        g8_VT, x8_DT, w8_DV = (x.T.contiguous() for x in (g8_TV, x8_TD, w8_VD))
        grad_x_TD = fp8_matmul(g8_TV, w8_DV, ctx.scale * WEIGHT_SCALE, grad_TV.dtype, fast=False)
        grad_w_VD = fp8_matmul(g8_VT, x8_DT, ctx.scale * INPUT_SCALE, torch.float32, fast=False)
        return grad_x_TD, grad_w_VD, None

class CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax(logits_TV)[target] over all tokens. A target of -1 does not count.
    No maximum is subtracted: softcaps up to 38 keep logits below 76, and exp(76) is finite.

    F.cross_entropy gives the same loss, but its backward pass sums over the vocabulary. The
    compiler would fuse that sum with FP8Linear's cast and transposed copy into one slow kernel, so
    the gradient is coded by hand, without a sum."""

    @staticmethod
    def forward(ctx, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        exp_TV = (logits_TV * math.log2(math.e)).exp2_()
        sum_T = exp_TV.sum(-1)
        target_logit_T = logits_TV.gather(-1, target_T.clamp(min=0)[:, None])[:, 0]
        ctx.save_for_backward(exp_TV, sum_T, target_T)
        return torch.where(target_T < 0, 0.0, sum_T.log() - target_logit_T).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        exp_TV, sum_T, target_T = ctx.saved_tensors
        grad_TV = torch.zeros_like(exp_TV).scatter_(-1, target_T.clamp(min=0)[:, None], -1.0)
        grad_TV.addcmul_(exp_TV, (1 / sum_T)[:, None])  # softmax - target
        return grad_TV.mul_(torch.where(target_T < 0, 0.0, grad)[:, None]), None

# ---- 5. Parameters ------------------------------------------------------------------------------
# The modules above create parameters. A table says how each is initialized and trained.

def parameter(*shape: int, dtype=torch.float32) -> nn.Parameter:
    """A parameter filled with NaN, so that one missed by draw_weights is noticed."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))

def zero(x: Tensor, generator):
    x.zero_()

def normal(x: Tensor, generator):
    x.normal_(generator=generator)

def uniform(x: Tensor, generator):  # the standard deviation is 0.5 / sqrt(number of inputs)
    bound = 0.5 * math.sqrt(3 / x.size(-1))
    x.uniform_(-bound, bound, generator=generator)

# Each parameter follows the first rule whose pattern matches its full name. A rule names a function
# for the initial values, the optimizer (section 6) and its options. An option that is a string
# names a setting. Initial `None` keeps the values that the module set (only for vectors and
# scalars). Muon treats a three-dimensional parameter as a stack of matrices.
PARAMETERS = [
    # names                               initial  optimizer and its options       one of the shapes
    (r"lm_head\.weight",                  zero,    "Adam", dict(lr="lm_head_lr")),  # [50304, 768]
    (r"(embed|value_tables\.\d)\.weight", normal,  "Adam", dict(lr="embed_lr")),    # [50304, 768]
    (r"layers\..*\.(qkv|fc\.weight)",     uniform, "Muon", dict(lr="muon_lr")),     # [3072, 768]
    (r"layers\..*\.proj\.weight",         zero,    "Muon", dict(lr="muon_lr")),     # [768, 3072]
    (r"skip_weights|layers\.\d+\..*_mix", None,    "Adam", dict(lr="scalar_lr")),   # [6], [2]
]

def find_rules(model: nn.Module) -> dict[str, int]:
    """{name of a parameter: index of its rule in PARAMETERS}"""
    rules = {}
    for name, p in model.named_parameters():
        fitting = [i for i, (pattern, *_) in enumerate(PARAMETERS) if re.fullmatch(pattern, name)]
        require(fitting, f"PARAMETERS has no rule for {name} {tuple(p.shape)}")
        rules[name] = fitting[0]
    for i, (pattern, *_) in enumerate(PARAMETERS):
        require(i in rules.values(), f"PARAMETERS: no parameter follows the rule {pattern}")
    return rules

@torch.no_grad()
def draw_weights(model: nn.Module, seed: int):
    """Initializes the parameters by their rules. The random numbers depend only on seed and name.
    So scripts with the same seed start from equal weights where names and shapes agree, which
    lowers the noise of paired comparisons."""
    for name, rule in find_rules(model).items():
        p = model.get_parameter(name)
        _, initial, _, _ = PARAMETERS[rule]
        if initial is None:
            require(p.ndim < 2 and not p.isnan().any(), f"PARAMETERS: {name} needs initial values")
            continue
        require(p.isnan().all(), f"{name} has values, which its rule in PARAMETERS would replace: "
                "create it with parameter(...), and let the rule say how it starts")
        values = torch.empty(p.shape)  # on the CPU; devices draw different numbers
        number = int(sha256(f"{seed} {name}".encode()).hexdigest()[:15], 16)
        initial(values, torch.Generator().manual_seed(number))
        p.copy_(values)

# ---- 6. Ranks and optimizers --------------------------------------------------------------------
# torchrun starts one process, called a rank, for each GPU. Every rank holds all weights and
# computes gradients on its own part of the batch.

if not hasattr(dist, "all_gather_single"):  # torch 2.13 renamed these two functions
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor

class Pending(NamedTuple):
    """A tensor that ranks may still be exchanging. wait() returns it. On a GPU, Python does not
    wait; only the GPU's later work does."""
    tensor: Tensor
    work: "dist.Work | None" = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor

@dataclass(frozen=True)
class World:
    """The ranks that train together, as seen from one of them. A tensor of two or more dimensions
    is sharded along the first if the ranks can divide it equally: with two ranks, each updates
    25,152 rows of [50304, 768]. For all other tensors every rank does the whole update."""
    rank: int  # the number of this process, from 0
    size: int
    device: torch.device

    def is_sharded(self, whole: Tensor) -> bool:
        return self.size > 1 and whole.ndim > 1 and len(whole) % self.size == 0

    def shard(self, whole: Tensor) -> Tensor:
        """A view of the rows that this rank updates."""
        return whole.chunk(self.size)[self.rank] if self.is_sharded(whole) else whole

    def reduce_scatter(self, whole: Tensor) -> Pending:
        """Sums a tensor over the ranks. If it is sharded, each rank receives only its rows."""
        if not self.is_sharded(whole):
            return self.all_reduce(whole)
        local = torch.empty_like(self.shard(whole))
        return Pending(local, dist.reduce_scatter_single(local, whole, async_op=True))

    def all_gather(self, whole: Tensor) -> Pending:
        """Fetches the rows of the other ranks, in place."""
        if not self.is_sharded(whole):
            return Pending(whole)
        return Pending(whole, dist.all_gather_single(whole, self.shard(whole), async_op=True))

    def all_reduce(self, whole: Tensor) -> Pending:
        """Sums a tensor over the ranks, in place."""
        return Pending(whole, dist.all_reduce(whole, async_op=True) if self.size > 1 else None)

    def all_reduce_together(self, tensors: list[Tensor]) -> list[Pending]:
        """Sums small tensors over the ranks in one exchange, because every exchange takes some 20
        microseconds, however small it is."""
        flat, work = self.all_reduce(torch.cat([x.flatten() for x in tensors]))
        parts = flat.split([x.numel() for x in tensors])
        return [Pending(part.view_as(x), work) for part, x in zip(parts, tensors)]

class Optimizer:
    """Trains some of the parameters. The ranks share the arithmetic, as in ZeRO (arXiv:1910.02054),
    but each keeps tensors of full size. A step has three phases. Each runs for all optimizers
    before the next one starts, so that one computes while another's tensors travel. On two ranks:

                      rank 0                         rank 1
        begin         sends its gradients   <---->   sends its gradients; both get sums
        update(step)  computes the first half        computes the second half
                      sends it              <---->   sends it
        finish(step)  has everything                 has everything

    Adam changes the weights in update(). Muon computes changes there, and applies them in finish().
    Only update() sees sums over all ranks, and for a sharded tensor just this rank's rows.

    `state` is what an optimizer remembers from step to step: {name: one tensor per parameter, with
    as many rows as it}, or in Muon {name: one padded stack}. It is saved, loaded on resume, and
    restored after the warm-up, so keep all state here. A rank uses only its own rows,
    world.shard(tensor).
    """

    def __init__(self, params: dict, hp: Hyperparameters, world: World, lr: float):
        self.params = params
        self.hp = hp
        self.world = world
        self.peak_lr = lr
        self.state = {}

    def lr(self, step: int) -> float:
        return self.peak_lr * lr_factor(step, self.hp)

    def gather_state(self):
        for tensors in self.state.values():
            for x, p in zip(tensors, self.params.values(), strict=True):
                assert (x.ndim, x.shape[:1]) == (p.ndim, p.shape[:1]), f"{x.shape} for {p.shape}"
                self.world.all_gather(x).wait()

class Adam(Optimizer):
    """Adam (arXiv:1412.6980), computed by PyTorch's fused AdamW kernel. Its state has the dtype of
    the parameter. In bfloat16 a change of less than 1/512 of the value is lost to rounding."""

    def __init__(self, params, hp, world, lr, betas=None):
        super().__init__(params, hp, world, lr)
        self.betas = betas or (hp.adam_beta1, hp.adam_beta2)
        self.state["mean"] = [torch.zeros_like(p) for p in params.values()]
        self.state["mean_square"] = [torch.zeros_like(p) for p in params.values()]

    def begin(self):
        gradients = [p.grad for p in self.params.values()]
        small = all(x.ndim < 2 for x in gradients)
        self.pending_sums = (self.world.all_reduce_together(gradients) if small else
                             [self.world.reduce_scatter(x) for x in gradients])

    def update(self, step: int):
        gradients = [pending.wait() for pending in self.pending_sums]
        self.pending_sums = []
        local = [self.world.shard(p.detach()) for p in self.params.values()]
        means = [self.world.shard(mean) for mean in self.state["mean"]]
        squares = [self.world.shard(square) for square in self.state["mean_square"]]
        count = torch.full((), step + 1.0, device=self.world.device)  # for the bias correction
        torch._fused_adamw_(local, gradients, means, squares, [], [count] * len(local),
                            lr=self.lr(step), beta1=self.betas[0], beta2=self.betas[1],
                            weight_decay=0, eps=self.hp.adam_eps, amsgrad=False, maximize=False)
        self.pending_params = [self.world.all_gather(p.detach()) for p in self.params.values()]

    def finish(self, step: int):
        for pending in self.pending_params:
            pending.wait()

class Muon(Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz (https://kellerjordan.github.io/posts/muon/). For
    one square matrix it does this:

        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum + (1 - beta) * gradient  # as in Nesterov momentum
        weight -= lr * newton_schulz(ahead)

    A few directions of a gradient are usually much larger than all the others. Muon makes all
    directions of the update about equally large, so that small ones are learned too. It suits the
    matrices of the layers, not embeddings, the output head or vectors.

    All parameters of a Muon optimizer have one shape. Their gradients, updates and momentum are
    stored in stacks, padded with zeros so that the ranks can divide them equally. With 11
    parameters on two ranks the stack has 12, six for each rank."""

    def __init__(self, params, hp, world, lr):
        super().__init__(params, hp, world, lr)
        (shape,) = {p.shape for p in params.values()}
        stack = (math.ceil(len(params) / world.size) * world.size, *shape)  # such as [12, 768, 768]
        # Gradients are summed over the ranks in the dtype of the activations.
        self.gradients = torch.zeros(stack, dtype=getattr(torch, hp.dtype), device=world.device)
        self.updates = torch.zeros_like(self.gradients)
        self.state["momentum"] = torch.zeros(stack, device=world.device)
        self.orthogonalize = newton_schulz
        if world.device.type == "cuda":
            self.orthogonalize = torch.compile(newton_schulz, dynamic=False, fullgraph=True)

    def begin(self):
        for gradient, p in zip(self.gradients, self.params.values()):
            gradient.copy_(p.grad)
        self.pending_sum = self.world.reduce_scatter(self.gradients)

    def update(self, step: int):
        gradients = self.pending_sum.wait().float()
        updates = self.compute_update(gradients, step)
        assert updates.shape == gradients.shape, f"{updates.shape} for {gradients.shape}"
        self.world.shard(self.updates).copy_(updates)
        self.pending_updates = self.world.all_gather(self.updates)

    def finish(self, step: int):
        for update, p in zip(self.pending_updates.wait(), self.params.values()):
            p.add_(update, alpha=-self.lr(step))

    def compute_update(self, gradients: Tensor, step: int) -> Tensor:
        """Returns this rank's part of the updates, in the shape of `gradients`, which are
        float32."""
        beta = muon_momentum(step, self.hp)
        momentum = self.world.shard(self.state["momentum"]).lerp_(gradients, 1 - beta)
        ahead = gradients.lerp(momentum, beta).to(self.updates.dtype)
        # All singular values end up near 1. A tall matrix spreads their effect over more outputs.
        # This factor makes each output change as much as in a square matrix.
        tall_factor = max(1, ahead.size(-2) / ahead.size(-1)) ** 0.5
        # Every matrix is orthogonalized separately: qkv [n, 3, 768, 768] becomes [3n, 768, 768].
        return tall_factor * self.orthogonalize(ahead.flatten(0, -3)).view_as(ahead)

    def gather_state(self):
        for stack in self.state.values():
            assert len(stack) == len(self.updates) and stack.ndim > 1, "not a padded stack"
            self.world.all_gather(stack).wait()

def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Replaces each matrix U S V^T of x [n, rows, columns] with approximately U V^T, so that all
    its singular values are near 1. A step multiplies the matrix by a polynomial in x x^T, which
    leaves U and V as they are and maps each singular value s to a s + b s^3 + c s^5. Dividing x by
    its norm first makes all s at most 1. The slope at zero is large, so even 0.01 grows in five
    steps: 0.03, 0.12, 0.40, 1.09, 0.70. All but tiny values end up between 0.68 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram @ gram
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x

def build_optimizers(model: nn.Module, hp: Hyperparameters, world: World) -> list[Optimizer]:
    """Parameters with the same rule and dtype (for Muon also the same shape) share an optimizer."""
    groups = {}
    for name, rule in find_rules(model).items():
        p = model.get_parameter(name)
        _, _, optimizer, _ = PARAMETERS[rule]
        shape = p.shape if issubclass(globals()[optimizer], Muon) else None
        if p.requires_grad:
            groups.setdefault((rule, p.dtype, shape), {})[name] = p
    optimizers = []
    for (rule, *_), params in groups.items():
        _, _, optimizer, options = PARAMETERS[rule]
        values = {key: getattr(hp, x) if isinstance(x, str) else x for key, x in options.items()}
        optimizers.append(globals()[optimizer](params, hp, world, **values))
    return optimizers

# ---- 7. Data ------------------------------------------------------------------------------------
# A shard is a file: a header of 256 int32 values (magic number, version, number of tokens, zeros),
# then the tokens as uint16. Each document begins with the end-of-text token, vocab_size - 1.

SHARD_MAGIC = 20240520
SHARD_HEADER_BYTES = 4 * 256

class Shard(NamedTuple):
    path: str
    tokens: int
    fingerprint: str  # a hash of samples from some 65 places in the file, to detect changed data

def find_shards(pattern: str) -> list[Shard]:
    """The shards that a glob matches, sorted by path."""
    shards = []
    folder, name = os.path.split(os.path.expanduser(pattern))
    folder = glob.escape(folder) if os.path.isdir(folder) else folder  # it may contain brackets
    for path in sorted(glob.glob(os.path.join(folder, name), recursive=True)):
        problem = f"{path} is not a complete shard: in the repository, ./run.sh inspect says why"
        require(os.path.isfile(path) and os.path.getsize(path) > SHARD_HEADER_BYTES, problem)
        data = np.memmap(path, dtype=np.uint8, mode="r")
        magic, version, tokens = data[:12].view("<i4").tolist()
        expected = (SHARD_MAGIC, 1, SHARD_HEADER_BYTES + 2 * tokens)
        require((magic, version, len(data)) == expected, problem)
        places = [*range(0, len(data), max(4096, len(data) // 64)), max(0, len(data) - 4096)]
        sample = b"".join(data[at:at + 4096].tobytes() for at in places)
        shards.append(Shard(path, tokens, sha256(sample).hexdigest()[:16]))
    require(shards, f"no file matches {pattern}: in a clone of the repository, make shards with "
            "./run.sh demo --check, ./run.sh fineweb or ./run.sh tokenize, and run this there")
    return shards

def read_tokens(path: str, start: int, count: int, vocab_size: int) -> Tensor:
    """Reads `count` tokens as uint16. With a GPU they are in pinned memory, so that copies to the
    GPU are asynchronous."""
    tokens = torch.empty(count, dtype=torch.uint16, pin_memory=torch.cuda.is_available())
    with open(path, "rb") as f:
        f.seek(SHARD_HEADER_BYTES + 2 * start)
        require(f.readinto(tokens.numpy()) == tokens.nbytes, f"{path} was truncated")
    largest = tokens.numpy().max(initial=0)  # torch would start threads, which slow training down
    require(largest < vocab_size, f"{path} holds the token {largest}, which is not below "
            f"--vocab_size={vocab_size}; in the repository, ./run.sh inspect says where")
    return tokens

UNREAD = 0.02  # the largest share of tokens that may stay unread

def step_starts(shards: list[Shard], hp: Hyperparameters) -> Iterator[tuple[Shard, int]]:
    """Yields (shard, first token) for each step, the same on every rank and after a resume. Each
    pass begins one block later than the previous one, so that sequences begin at different places
    in the text. If more than UNREAD of a shard would stay unread, one more step covers its last
    tokens and overlaps the previous step."""
    for epoch in range(hp.epochs):
        for shard in shards:
            start = (epoch * BLOCK) % hp.train_seq_len
            last = shard.tokens - 1 - hp.tokens_per_step  # targets extend one token further
            while start <= last:
                yield shard, start
                start += hp.tokens_per_step
            if last >= 0 and shard.tokens - 1 - start > UNREAD * shard.tokens:
                yield shard, last

def train_batches(shards: list[Shard], hp: Hyperparameters, world: World, first_step: int):
    """Yields the micro-batches of this rank for each step: a list of (inputs_T int32, targets_T
    int64). Python does not wait for the copy to the GPU."""
    T = hp.train_seq_len
    count = hp.micro_batches // world.size
    for shard, start in islice(step_starts(shards, hp), first_step, None):
        start += world.rank * count * T
        # torch cannot compute with uint16, so the bits are read as int16. & 0xFFFF drops the sign.
        tokens = read_tokens(shard.path, start, count * T + 1, hp.vocab_size).view(torch.int16)
        tokens = tokens.to(world.device, non_blocking=True).to(torch.int32) & 0xFFFF
        inputs = tokens[:-1].view(count, T)
        targets = tokens[1:].to(torch.int64).view(count, T)
        yield list(zip(inputs, targets))

def load_validation(shards: list[Shard], hp: Hyperparameters, world: World) -> list:
    """The validation sequences of this rank. Together the ranks predict val_tokens tokens, from
    the second one on. The last sequence is padded with targets of -1, which the loss ignores."""
    stream = torch.empty(0, dtype=torch.int32)
    for shard in shards:
        count = min(shard.tokens, hp.val_tokens + 1 - len(stream))
        stream = torch.cat((stream, read_tokens(shard.path, 0, count, hp.vocab_size).int()))
    require((stream == hp.vocab_size - 1).any(), f"no document in --val_files begins with token "
            f"{hp.vocab_size - 1}, the last of the vocabulary: lower --vocab_size={hp.vocab_size}")
    padding = -hp.val_tokens % hp.val_seq_len
    inputs = F.pad(stream[:-1], (0, padding), value=hp.vocab_size - 1)
    targets = F.pad(stream[1:].long(), (0, padding), value=-1)
    sequences = list(zip(inputs.split(hp.val_seq_len), targets.split(hp.val_seq_len)))
    return [(x.to(world.device), y.to(world.device)) for x, y in sequences[world.rank::world.size]]

# ---- 8. Steps -----------------------------------------------------------------------------------

def train_step(model, batches, optimizers, step: int, hp: Hyperparameters, world: World) -> Tensor:
    """Takes one training step on this rank's micro-batches. Returns the mean loss over all ranks,
    as a tensor, so that Python need not wait for the GPU."""
    window = window_tensor(step, hp, world.device)
    mean_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for inputs_T, targets_T in batches:
        loss = model(inputs_T, targets_T, window) / hp.tokens_per_step
        loss.backward()
        mean_loss += loss.detach()
    with torch.no_grad():  # each p.grad is a sum over the micro-batches of this rank only
        for optimizer in optimizers:
            optimizer.begin()
        for optimizer in optimizers:
            optimizer.update(step)
        for optimizer in optimizers:
            optimizer.finish(step)
    model.zero_grad(set_to_none=True)
    return world.all_reduce(mean_loss).wait()

@torch.no_grad()
def evaluate(model, sequences: list, step: int, hp: Hyperparameters, world: World) -> float:
    """The mean loss per target over the sequences of all ranks."""
    model.eval()
    window = window_tensor(step, hp, world.device)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # losses, targets
    for inputs_T, targets_T in sequences:
        total[0] += model(inputs_T, targets_T, window)
        total[1] += (targets_T >= 0).sum()
    model.train()
    loss, targets = world.all_reduce(total).wait().tolist()
    return loss / targets

def gather_training_state(model: nn.Module, optimizers: list[Optimizer]) -> dict:
    """All tensors on which further training depends: {"model": {name: tensor}, "Muon momentum":
    ...}. These are the live tensors, whole on every rank. If your method keeps tensors outside
    modules and optimizers, add them here."""
    state = {"model": dict(model.state_dict())}
    for optimizer in optimizers:
        optimizer.gather_state()
        for name, entries in optimizer.state.items():
            kind = f"{type(optimizer).__name__} {name}"
            state.setdefault(kind, {}).update(zip(optimizer.params, entries))  # without padding
    return state

@torch.no_grad()
def load_training_state(saved: dict | None, model: nn.Module, optimizers: list, world: World):
    """Copies the state that rank 0 has in `saved` to the model and the optimizers of every rank."""
    state = gather_training_state(model, optimizers)
    if world.rank == 0:
        ours = {(kind, name, *x.shape) for kind in state for name, x in state[kind].items()}
        theirs = {(kind, name, *x.shape) for kind in saved for name, x in saved[kind].items()}
        require(ours == theirs, "the checkpoint does not match the script: only the script has "
                f"{sorted(ours - theirs)[:1]}; only the checkpoint has {sorted(theirs - ours)[:1]}")
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            if world.rank == 0:
                tensor.copy_(saved[kind][name])
            if world.size > 1:
                dist.broadcast(tensor, src=0)

def warm_up(model, optimizers, shards: list[Shard], hp: Hyperparameters, world: World):
    """Runs a validation and a training step on random tokens before the clock starts, and undoes
    them. This compiles all code and allocates the memory. On a GPU, compiling anything afterwards
    raises an error, because it would count as training time. If your method runs different code at
    some steps, run that code once here too.

    Undoing the step also makes the weights of all ranks equal to those of rank 0."""
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    state = gather_training_state(model, optimizers)
    before = tree_map(lambda x: x.to("cpu", copy=True), state) if world.rank == 0 else None
    tokens = torch.randint(hp.vocab_size, (hp.val_seq_len + 1,), device=world.device)
    evaluate(model, [(tokens[:-1].int(), tokens[1:].clone())], 0, hp, world)
    # Reading a batch as in training allocates its memory. Random tokens then replace the real ones.
    read = next(train_batches(shards, hp, world, 0))
    batches = tree_map(lambda x: x.random_(hp.vocab_size), read[:1])
    loss = model(*batches[0], window_tensor(0, hp, world.device))
    (loss / hp.tokens_per_step).backward()  # so that train_step accumulates gradients
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    require(not unused, f"no gradient reaches {', '.join(unused)}: use, freeze or remove each")
    train_step(model, batches, optimizers, 0, hp, world).to("cpu", non_blocking=True)
    load_training_state(before, model, optimizers, world)
    if world.device.type == "cuda":
        torch.compiler.set_stance("fail_on_recompile")
        torch.cuda.reset_peak_memory_stats()
        gc.collect()
        gc.freeze()  # so that garbage collection skips what compiling left behind

# ---- 9. The run ---------------------------------------------------------------------------------

def main(argv: list[str]):
    # The plan. Rank 0 plans for all ranks; with --check, each plans for itself.
    require(torch.__version__ >= (2, 9, 1), f"torch {torch.__version__}: install 2.9.1 or newer")
    script = SOURCE or Path(__file__).read_text(encoding="utf-8")
    hp, command = parse_flags(argv)
    world = world_of_this_process()
    saved = plan = None
    if world.rank == 0 or command.check:
        saved = read_checkpoint(command.resume) if command.resume else None
        plan = make_plan(hp, command, script, world, saved)
    if command.check:
        world = World(0, 1, world.device)
    elif world.size > 1:
        plan = connect(plan, script, world)
    hp = plan.hp
    cuda = world.device.type == "cuda"

    # The model. TORCH_COMPILE_DISABLE=1 helps with debugging on a GPU.
    torch.manual_seed(hp.seed)
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    compiles = cuda and "1" not in map(os.environ.get, switches)
    model = GPT(hp, getattr(torch, hp.dtype), flex=compiles)
    draw_weights(model, hp.seed)
    model.to(world.device)
    optimizers = build_optimizers(model, hp, world)
    if plan.checkpoint:
        load_training_state(saved["state"] if saved else None, model, optimizers, world)
    val_sequences = load_validation(plan.val_shards, hp, world)
    if command.check:
        print("checks passed")
        return

    log = RunLog(plan, world)
    try:
        log.write(f"log: {log.path}")
        log.write(f"to resume: {sys.argv[0]} --resume=FILE, with FILE from a `checkpoint:` line")
        for line in notices(plan, saved, world):
            log.write(line)
        log.write(f"model: {sum(p.numel() for p in model.parameters())} parameters; "
                  f"{hp.micro_batches} x {hp.train_seq_len} tokens a step, {world.size} rank(s)")
        log.write("\n".join(f"{type(each).__name__}, lr {each.peak_lr}: {', '.join(each.params)}"
                            for each in optimizers), console=False)

        # The warm-up. model.compile, unlike torch.compile, keeps the parameters' names.
        if compiles:
            model.compile(dynamic=False, fullgraph=True)
        batches_of_steps = train_batches(plan.train_shards, hp, world, plan.first_step)
        began = time.perf_counter()
        warm_up(model, optimizers, plan.train_shards, hp, world)
        log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")
        if world.size > 1:
            log.write(time_all_gather(world), console=False)

        # Training. The clock stops while the model is validated or saved.
        clock = StepClock(world.device, plan.seconds)
        save_worked = True
        clock.start()
        for step in range(plan.first_step, hp.num_iterations + 1):
            last = step == hp.num_iterations
            save_due = step > 0 and hp.save_every > 0 and (last or step % hp.save_every == 0)
            val_due = hp.val_loss_every > 0 and step % hp.val_loss_every == 0
            if last or save_due or val_due:
                clock.stop()
                for done, value, seconds in clock.read_losses(keep=0):
                    log.write_loss("train_loss", done, hp, value, seconds)
                val_loss = evaluate(model, val_sequences, step, hp, world)
                log.write_loss("val_loss", step, hp, val_loss, clock.seconds)
                if save_due and step > plan.first_step:
                    save_worked = save_checkpoint(step, clock.seconds, model, optimizers, plan, log,
                                                  warn=save_worked or last)
                clock.start()
            if last:
                break
            loss = train_step(model, next(batches_of_steps), optimizers, step, hp, world)
            clock.add_loss(step + 1, loss)
            for done, value, seconds in clock.read_losses(keep=clock.lag):
                log.write_loss("train_loss", done, hp, value, seconds)

        if cuda:
            log.write(f"peak_memory: {torch.cuda.max_memory_allocated() >> 20} MiB on rank 0")
        log.write(f"final_val_loss: {val_loss:.4f} nats per token, on {hp.val_tokens} tokens")
        log.write(f"log: {log.path}")
    except Exception as e:  # rank 0's log says why the run ended; other ranks have no log
        prefix = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        log.write(f"error: {prefix}{e}", console=False)
        raise
    if world.size > 1:
        dist.destroy_process_group()

# ---- 10. What a run needs besides the method: skip it if you only want the algorithm ------------

def world_of_this_process() -> World:
    """Reads what torchrun has set in the environment. Without torchrun there is one rank."""
    rank, local_rank, size = (int(os.environ.get(name, default)) for name, default in
                              (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    require("WORLD_SIZE" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1",
            "these processes do not know about each other: have srun start torchrun, once per node")
    if not torch.cuda.is_available():
        # One thread, which is torchrun's own default for several ranks
        torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1)
        return World(rank, size, torch.device("cpu"))
    require(local_rank < torch.cuda.device_count(), "start at most one process per GPU")
    # The compiler's processes take up to a gigabyte each, so they are limited to one per core and
    # 32 per rank.
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(32, share))))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF",  # torch 2.9 knows only this name
                          os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"))
    torch.cuda.set_device(local_rank)
    return World(rank, size, torch.device("cuda", local_rank))

TIMEOUT = timedelta(minutes=10)  # how long a rank waits for another, including while rank 0 saves

def connect(plan: "Plan | None", script: str, world: World) -> "Plan":
    """Connects the ranks and gives all of them rank 0's plan, if they have the same script and
    data."""
    gpu = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
        plans = [plan]
        dist.broadcast_object_list(plans, src=0)
    except (RuntimeError, ValueError) as e:
        reason = " ".join(str(e).split())  # NCCL's own reason is on its last lines
        advice = ("enlarge /dev/shm (in Docker with --shm-size=1g)" if "/dev/shm" in reason else
                  "start them with torchrun, or set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME")
        raise UserError(f"the ranks cannot reach each other ({reason}); {advice}") from None
    here = (script, find_shards(plans[0].hp.train_files), find_shards(plans[0].hp.val_files))
    everywhere = [None] * world.size
    dist.all_gather_object(everywhere, here)
    require(everywhere.count(here) == world.size, "script or data differ between the machines")
    return plans[0]

def cpu_info() -> dict[str, str]:
    info = Path("/proc/cpuinfo")  # lines "key\t: value", with an empty line after each processor
    text = info.read_text(errors="replace") if info.exists() else ""
    return dict(re.findall(r"(?m)^([^\t]+)\t+: (.*)$", text.partition("\n\n")[0]))

# ---- Flags and checks

def true_or_false(text: str) -> bool:
    return bool(["false", "true"].index(text.lower()))  # any other word raises ValueError

def parse_flags(argv: list[str]) -> tuple[Hyperparameters, argparse.Namespace]:
    """Returns the settings that a command line asks for, and argparse's result, whose .named holds
    the settings that were given. Raises UserError."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    parser.usage = "%(prog)s [--preset=NAME | --resume=CHECKPOINT] [--check] [--setting=value ...]"
    parser.epilog = "On a CPU each rank uses one thread, unless OMP_NUM_THREADS is set."
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    either = parser.add_mutually_exclusive_group()
    preset = "speedrun" if torch.cuda.is_available() else "demo"
    either.add_argument("--preset", choices=PRESETS, metavar="NAME", default=preset,
                        help=f"{', '.join(PRESETS)}; on this machine the default is {preset}")
    either.add_argument("--resume", metavar="CHECKPOINT", type=lambda text: Path(text).expanduser(),
                        help="continue from a checkpoint; other flags replace its settings")
    for f in fields(Hyperparameters):
        kind = true_or_false if f.type is bool else f.type
        values = ", ".join(f"{name}: {getattr(hp, f.name)}" for name, hp in PRESETS.items())
        text = f"{f.metadata['help']} ({values})".replace("%", "%%")
        parser.add_argument(f"--{f.name}", type=kind, help=text, default=argparse.SUPPRESS)
    command = parser.parse_args(argv)
    hp = PRESETS[command.preset]
    command.named = {name: value for name, value in vars(command).items() if name in asdict(hp)}
    return replace(hp, **command.named), command

def check_settings(hp: Hyperparameters, world_size: int):
    for f, value in zip(fields(hp), asdict(hp).values()):
        low, high, unit, pattern = f.metadata["limits"]
        if isinstance(value, str):
            require(re.fullmatch(pattern, value), f"--{f.name}={value}: use {f.metadata['help']}")
        else:
            require(low <= value <= high, f"--{f.name}={value} is not between {low} and {high}")
            require(unit == 1 or value % unit == 0, f"--{f.name}={value}: use a multiple of {unit}")
    require(len(hp.windows) % 2 == 0, f"--windows={hp.windows}: give an even number of layers")
    for name, marks in (("attention", hp.attention), ("value_embeds", hp.value_embeds)):
        require(len(marks) == len(hp.windows), f"--{name} and --windows differ in length")
    unused = [v for v, a in zip(hp.value_embeds, hp.attention) if v != "." and a == "."]
    require(not unused, f"--value_embeds={hp.value_embeds} marks a layer that has no attention")
    require(hp.window_start <= hp.window_end, "--window_start is above --window_end")
    require(hp.num_heads % hp.kv_heads == 0, "--num_kv_heads must divide --num_heads")
    require(hp.micro_batches % world_size == 0, f"{world_size} ranks cannot share "
            f"{hp.micro_batches} micro-batches equally: use a number of ranks that divides them")

def resolve(hp: Hyperparameters, device: torch.device) -> Hyperparameters:
    """Decides what `auto` and a seed of -1 stand for, and whether FP8 is possible. A resumed run
    keeps these decisions, but turns FP8 off where the GPU lacks it."""
    cuda = device.type == "cuda"
    has_fp8 = cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    fast_bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if cuda else
                 bool(re.search("amx_bf16|avx512_bf16", cpu_info().get("flags", ""))))
    if hp.dtype == "auto":
        hp = replace(hp, dtype="bfloat16" if fast_bf16 else "float32")
    if hp.seed < 0:
        hp = replace(hp, seed=int(np.random.default_rng().integers(2**31)))
    return replace(hp, use_fp8=hp.use_fp8 and has_fp8 and hp.dtype == "bfloat16")

@dataclass
class Plan:
    """What a run will do, as checked by rank 0."""
    hp: Hyperparameters
    script: str  # the text of this file
    train_shards: list[Shard]
    val_shards: list[Shard]
    checkpoint: Path | None  # to resume from
    first_step: int = 0  # a checkpoint covers the steps before this one
    seconds: float = 0.0  # the training time of those steps

    def data_read(self, done: int) -> str:
        """A hash of the data that the first `done` steps have read."""
        steps = islice(step_starts(self.train_shards, self.hp), done)
        starts = [(shard.fingerprint, start) for shard, start in steps]
        return sha256(f"{starts} {tokens_seen(done, self.hp)}".encode()).hexdigest()

def make_plan(hp: Hyperparameters, command, script: str, world: World, saved: dict | None) -> Plan:
    """Checks the settings, the checkpoint's settings and the data. A resumed run has the settings
    of its checkpoint, except those that the command line names. Raises UserError."""
    if saved:
        # A setting in neither the checkpoint nor the flags would silently get its default.
        own = {f.name for f in fields(Hyperparameters)}
        given = saved["settings"].keys() | command.named.keys()
        require(own == given, "--resume: script and checkpoint differ in the settings "
                f"{sorted(own ^ given)}: pass new ones as flags, or use the script from the log")
        hp = Hyperparameters(**(saved["settings"] | command.named))
    check_settings(hp, world.size)
    hp = resolve(hp, world.device)

    train_shards, val_shards = find_shards(hp.train_files), find_shards(hp.val_files)
    by_fingerprint = {}
    for shard in train_shards + val_shards:
        first = by_fingerprint.setdefault(shard.fingerprint, shard)
        require(shard is first, f"{shard.path} has the same tokens as {first.path}: keep only one")
    available = sum(shard.tokens for shard in val_shards) - 1  # the first token is not predicted
    hp = replace(hp, val_tokens=hp.val_tokens or available)
    require(0 < hp.val_tokens <= available, f"--val_files={hp.val_files} has {available} tokens to "
            f"predict, not {hp.val_tokens}: add shards, or lower --val_tokens (0 uses all)")
    steps = sum(1 for _ in islice(step_starts(train_shards, hp), hp.num_iterations))
    require(steps == hp.num_iterations, f"--train_files={hp.train_files} suffices for {steps} "
            f"steps, not {hp.num_iterations}: add shards, raise --epochs or lower --num_iterations")
    small = [s.tokens for s in train_shards if s.tokens <= hp.tokens_per_step]
    require(sum(small) <= UNREAD * sum(s.tokens for s in train_shards), f"{len(small)} training "
            f"shards are no longer than a step ({hp.tokens_per_step} tokens): merge them")

    plan = Plan(hp, script, train_shards, val_shards, command.resume)
    if saved:
        plan = replace(plan, first_step=(done := saved["step"]), seconds=saved["seconds"])
        require(done <= hp.num_iterations, f"the run has already done {done} steps")
        require(plan.data_read(done) == saved["data_read"], "--resume: do not change "
                "micro_batches, train_seq_len, the shards already read, or how they are read")
    return plan

def notices(plan: Plan, saved: dict | None, world: World) -> Iterator[str]:
    """Log lines: whether a GPU trains without FP8, and what a resumed run has changed."""
    if world.device.type == "cuda" and not plan.hp.use_fp8:
        yield ("fp8: off, so the head takes about twice as long; FP8 needs a GPU with compute "
               "capability 8.9 or higher, dtype bfloat16 and use_fp8")
    for name, value in asdict(plan.hp).items() if saved else ():
        if value != (old := saved["settings"].get(name)):
            yield f"changed: {name} = {value!r}, was {old!r}"
            if name == "num_iterations":
                yield "changed: rates and window depend on step / num_iterations, so both jump"
    if saved and saved["script"] != sha256(plan.script.encode()).hexdigest():
        yield "changed: the script is not the one that saved the checkpoint"

# ---- Log and clock

def print_line(text: str):
    """Prints text, unless the console is gone."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):  # it is closed, full, or cannot show a character
        sys.stdout = open(os.devnull, "w")

class RunLog:
    """The log of rank 0: settings, environment and source, with a line of 100 `=` after each, then
    a line per step."""

    def __init__(self, plan: Plan, world: World):
        self.path = self.file = None
        self.failed = False  # whether the last write failed
        if world.rank > 0:
            return
        folder = Path(plan.hp.records).expanduser()
        now = datetime.now(timezone.utc)
        try:
            os.makedirs(folder, exist_ok=True)
            while self.file is None:
                self.path = folder / f"{now:%Y-%m-%dT%H-%M-%SZ}_{plan.hp.name}.log"
                with suppress(FileExistsError):  # another run started in the same second
                    self.file = open(self.path, "xb", buffering=0)
                now += timedelta(seconds=1)
        except OSError as e:
            raise UserError(f"--records={plan.hp.records} cannot hold logs: {e.strerror}") from None
        settings = [f"{name} = {value!r}" for name, value in asdict(plan.hp).items()]
        script = plan.script.removesuffix("\n")
        for part in (settings, environment(plan, world), [script]):
            self.write("\n".join([*part, "=" * 100]), console=False)

    def write(self, text: str, console: bool = True):
        """Writes to the log and the console. If the disk is full, training goes on, and a line that
        was cut short ends with "..."."""
        if self.file is None:
            return
        if console:
            print_line(text)
        line = ("...\n" * self.failed + text + "\n").encode(errors="backslashreplace")
        complete = False
        with suppress(OSError):
            complete = self.file.write(line) == len(line)
        if not complete and not self.failed:
            print_line(f"warning: {self.path} cannot be written (disk full?); training goes on")
        self.failed = not complete

    def write_loss(self, kind: str, done: int, hp: Hyperparameters, loss: float, seconds: float):
        """Writes a loss. If it is not finite, the run ends."""
        step = done - 1 if kind == "train_loss" else done  # whose lr and window were used
        average = f"{1000 * seconds / done:.2f}" if done else "nan"
        self.write(f"step:{done}/{hp.num_iterations} {kind}:{loss:.4f} "
                   f"train_time:{1000 * seconds:.0f}ms step_avg:{average}ms "
                   f"tokens:{tokens_seen(done, hp)} lr:{lr_factor(step, hp):.3f} "
                   f"window:{window_tokens(step, hp)}")
        require(math.isfinite(loss), f"step {done}: {kind} is {loss}; try lower learning rates")

def environment(plan: Plan, world: World) -> list[str]:
    """Machine, software and data as `key: value` lines."""
    cpu = cpu_info()
    units = re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", cpu.get("flags", ""))
    model = cpu.get("model name", platform.processor())
    lines = [f"command: {' '.join(sys.argv)}",
             f"host: {platform.node()}, {platform.platform()}",
             f"cpu: {', '.join([f'{os.cpu_count()} x {model}', *units])}",
             f"torch: {torch.__version__}, Python {platform.python_version()}",
             f"ranks: {world.size}",
             f"threads: {torch.get_num_threads()} a rank",
             f"git: {subprocess.getoutput('git describe --always --dirty --abbrev=40')}"]
    for key, shards in (("data", plan.train_shards), ("val_data", plan.val_shards)):
        lines += [f"{key}: {s.path} {s.tokens} tokens {s.fingerprint}" for s in shards]
    once = step_starts(plan.train_shards, replace(plan.hp, epochs=1))
    ends = {shard: start + plan.hp.tokens_per_step + 1 for shard, start in once}
    unread = [(shard.tokens - ends.get(shard, 0), shard.tokens) for shard in plan.train_shards]
    lines.append("unread: {} of {} training tokens per pass".format(*map(sum, zip(*unread))))
    if world.device.type == "cuda":
        lines.append(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        table = subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv").splitlines()
        lines += [f"gpu: {line}" for line in table]
    if plan.checkpoint:
        lines.append(f"resumed: {plan.checkpoint.absolute()} at step {plan.first_step}")
    count = plan.script.count("\n")
    lines.append(f"script: sha256 {sha256(plan.script.encode()).hexdigest()} {count} lines")
    return [" ".join(line.split()) for line in lines]  # a file's name may contain a line break

class StepClock:
    """Measures training time in seconds. On a GPU it marks times with events in the GPU's queue, so
    that the GPU never waits for Python."""

    def __init__(self, device: torch.device, seconds: float):
        self.cuda = device.type == "cuda"
        self.seconds = seconds  # at the last stop
        self.pending = []  # (steps done, loss, mark at the step's end), oldest first
        self.lag = 3 if self.cuda else 0  # steps by which Python may lead the GPU

    def mark(self):
        """The current time on a CPU, or an event in a GPU's queue."""
        if self.cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def seconds_at(self, mark) -> float:
        """The training time at a mark. Waits until the GPU has reached it."""
        if self.cuda:
            mark.synchronize()
            return self.before + self.started.elapsed_time(mark) / 1000
        return self.before + mark - self.started

    def start(self):
        self.before = self.seconds
        self.started = self.mark()

    def stop(self):
        self.seconds = self.seconds_at(self.mark())

    def add_loss(self, done: int, loss: Tensor):
        self.pending.append((done, loss.to("cpu", non_blocking=True), self.mark()))

    def read_losses(self, keep: int) -> Iterator[tuple[int, float, float]]:
        """Yields (steps done, loss, seconds) for all pending losses except the `keep` newest."""
        while len(self.pending) > keep:
            done, loss, mark = self.pending.pop(0)
            seconds = self.seconds_at(mark)
            yield done, float(loss), seconds

def time_all_gather(world: World) -> str:
    """A log line: how fast ranks fetch each other's rows. If this is slow, every step is."""
    whole = torch.zeros(world.size, 2**26 // world.size, dtype=torch.int8, device=world.device)
    for _ in range(2):  # the first time, ranks may wait for one that is still warming up
        began = time.perf_counter()
        world.all_gather(whole).wait()[-1, -1].item()  # .item() waits for the GPU
        seconds = time.perf_counter() - began
    return f"all_gather: {1000 * seconds:.2f} ms for {whole.nbytes / 1e6:.0f} MB"

# ---- Checkpoints

def read_checkpoint(path: Path) -> dict:
    """Opens a checkpoint. Its tensors stay on disk until they are used. Raises UserError."""
    try:
        require(zipfile.ZipFile(path).testzip() is None, "a checksum is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require("data_read" in saved, "it was not saved by this script")
        return saved
    except Exception as e:  # a damaged archive raises many kinds of exception
        reason = str(e).partition("\n")[0]
        raise UserError(f"--resume={path} cannot be used ({reason}): give a checkpoint, "
                        "step<n>.pt; if it is damaged, use the previous one") from None

def save_checkpoint(done: int, seconds: float, model, optimizers, plan: Plan, log, warn) -> bool:
    """Saves what a run needs to continue, even with fewer or more ranks, and keeps the two newest
    files. A file gets its name once it is complete. Returns whether the save worked."""
    state = gather_training_state(model, optimizers)
    if log.file is None:  # only rank 0 saves
        return True
    path = log.path.with_suffix("") / f"step{done:08}.pt"
    unfinished = path.with_name("unfinished")
    saved = dict(step=done, seconds=seconds, settings=asdict(plan.hp), state=state,
                 script=sha256(plan.script.encode()).hexdigest(), log=str(log.path),
                 data_read=plan.data_read(done))
    file = io.BytesIO()  # so that any OSError below comes from the disk
    torch.save(saved, file)
    try:
        path.parent.mkdir(exist_ok=True)
        unfinished.write_bytes(file.getbuffer())
        os.replace(unfinished, path)
    except OSError as e:
        with suppress(OSError):
            unfinished.unlink()  # it may be what fills the disk
        if warn:
            log.write(f"warning: {path} not saved ({e.strerror}); training goes on")
        return False
    log.write(f"checkpoint: {path}")
    for old in sorted(path.parent.glob("step????????.pt"))[:-2]:
        with suppress(OSError):
            old.unlink()
    return True

if __name__ == "__main__":
    # Ctrl+C ends this process at once, even while it waits for a GPU. In a container it may be
    # process 1, which ignores signals that it does not handle.
    end = signal.SIG_DFL if os.getpid() > 1 else lambda number, frame: os._exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        main(sys.argv[1:])
    except Exception as e:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # rank 0 reports the same error first, and then torchrun ends this rank
        if not isinstance(e, UserError):
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # an orderly exit could wait for ranks that wait for this rank
        with suppress(OSError):
            print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)
