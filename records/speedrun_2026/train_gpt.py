"""Train a GPT on token shards as fast as the hardware allows: the NanoGPT speedrun in one file.

The task: a validation loss of 3.28 nats on FineWeb, in the least training time on 8 H100 GPUs. The
preset `speedrun` takes half the tokens of the record of 2025-01-26 by what later records found;
`demo` is the same code, small. The number of ranks changes how long that takes, not what is
trained.

    torchrun --nproc_per_node=8 train_gpt.py            # the speedrun
    python train_gpt.py --preset=demo                   # the demo, on a CPU or one GPU
    python train_gpt.py --help                          # every hyperparameter is a flag
    python train_gpt.py --resume=records/<run>.log      # go on with a run that was ended

A run writes records/<UTC time>_<name>.log (settings, environment, this source, a line for each
step) and, in a folder of that name, its two newest checkpoints. To change the method, copy this
file: settings go into section 1, what changes during the run into 2, techniques and the loss into
5, parameters and optimizers into the table of 7. The training loop is in 12.

A suffix tells most tensors' shapes, so x_TD is [T, D]: T tokens, D width of the model, H heads, K
width of a head, V vocabulary, N blocks of 128 tokens, M key blocks that a query block reads, 1 one.
"""

import argparse
import copy
import glob
import hashlib
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens in a block of attention

class UserError(Exception):
    """What a user can cause. The message is one line: what is wrong, and what to do."""

def require(condition, message: str):
    if not condition:
        raise UserError(message)

def first_line(e: Exception) -> str:
    return str(e).partition("\n")[0] or type(e).__name__

# -------- 1. Hyperparameters and presets
def flag(default, help: str, least=-math.inf, most=math.inf, multiple=1, pattern=".+"):
    """A field: its help, and its range (inclusive) and divisor, or the pattern that a text fits."""
    limits = dict(help=help, range=(least, most, multiple), pattern=pattern)
    return field(default=default, metadata=limits)

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. The presets change these defaults."""
    # The run
    name: str = flag("speedrun", "name, of letters, digits and ._-", pattern=r"[\w.-]+(?<!\.log)")
    records: str = flag("records", "folder of the log and the checkpoints")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", -1, 2**63 - 1)
    dtype: str = flag("auto", "of activations; auto: by device", pattern="auto|bfloat16|float32")
    save_every: int = flag(500, "steps between checkpoints, besides one at the end; 0: none", 0)
    val_loss_every: int = flag(125, "steps between validations, besides one at the end; 0: none", 0)
    # Data
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "number of tokens; the last one is the end of text", 2, 65536)
    train_seq_len: int = flag(48 * 1024, "tokens in a training sequence", 1, multiple=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens in a validation sequence", 1, multiple=BLOCK)
    val_tokens: int = flag(10485760, "tokens to validate on; 0 takes all", 0)
    micro_batches: int = flag(8, "training sequences a step, divided among the ranks", 1, 10**5)
    stages: str = flag("", "BATCH:LR:WINDOW,... of equal parts of the run: factors on micro-batches"
                       " and learning rates, and the long window; empty: none of these",
                       pattern=r"(?!,)((^|,)[1-9]\d?:\d{1,2}([.]\d{1,9})?:[1-9]\d{0,6})*")
    epochs: int = flag(1, "passes over the training shards that the run may use", 1, 10**5)
    # Model. The layer table: strings of one character for each layer
    windows: str = flag("LSSSLSSLSSSL", "L: long window, S: half of it", pattern="[LS]{2,}")
    value_embeds: str = flag("012......012", "a value embedding, .: none", pattern="[.0-9]+")
    attention: str = flag("xxxxxxx.xxxx", "x: with attention, .: without", pattern="[.x]*x[.x]*")
    skips: str = flag("", "layer (0 to 9) whose output is added to the input; empty: a U-Net's",
                      pattern="([.]*[0-9][.0-9]*)?")
    late_input: int = flag(-1, "layer whose output later attention reads; -1: none", -1)
    backout: int = flag(-1, "layer whose output is in part subtracted last; -1: none", -1)
    model_dim: int = flag(768, "width of the residual stream", 1, multiple=16)
    num_heads: int = flag(6, "heads of attention", 1)
    head_dim: int = flag(128, "width of a head", 1, multiple=16)
    smear: bool = flag(False, "add a learned share of the token before to each embedding")
    key_offset: bool = flag(False, "take half of each key from the token before")
    pair_rows: int = flag(0, "rows in the embedding of pairs of tokens; 0: no such embedding", 0)
    attention_scale: float = flag(0.12, "factor on the attention scores")
    rope_base: float = flag(1024.0, "base of the rotary frequencies", 1)
    lm_head_softcap: float = flag(15.0, "cap c of the logits: 2c * sigmoid(2 * logit / c)", 0.1, 35)
    softcap_height: float = flag(0.0, "in place of 2c as the height of the cap; 0: 2c", 0, 70)
    softcap_shift: float = flag(0.0, "added to each logit before its cap", -99, 99)
    use_fp8: bool = flag(True, "train the head in FP8 where the hardware has it")
    window_start: int = flag(128, "tokens in the long window at first; not with stages", 1, 2**30)
    window_end: int = flag(1792, "tokens in the long window at last; not with stages", 1, 2**30)
    # Optimization
    num_iterations: int = flag(1770, "training steps", 0)
    future_tokens: int = flag(0, "tokens after the next in the training loss, at first", 0, 9)
    cooldown_frac: float = flag(0.4, "share of the steps in which the learning rates fall", 0, 1)
    lr_floor: float = flag(0.1, "where the learning rates fall to, a factor on each", 0, 1)
    muon_lr: float = flag(0.05, "learning rate of Muon: the blocks' matrices", 0)
    muon_momentum_start: float = flag(0.85, "Muon's momentum at the first step", 0, 1)
    muon_momentum_end: float = flag(0.95, "Muon's momentum after its warmup", 0, 1)
    muon_momentum_steps: int = flag(300, "steps of Muon's momentum warmup", 0)
    muon_beta2: float = flag(0.0, "NorMuon's decay of mean squares; 0: plain Muon", 0, 1 - 1e-9)
    muon_decay: float = flag(0.0, "Muon's cautious weight decay, a factor on its squared rate", 0)
    head_lr: float = flag(0.008, "learning rate of Adam: the output head", 0)
    embed_lr: float = flag(0.6, "learning rate of Adam: token, pair and value embeddings", 0)
    scalar_lr: float = flag(0.04, "learning rate of Adam: all other weights", 0)
    adam_beta1: float = flag(0.8, "Adam's decay of mean gradients", 0, 1 - 1e-9)
    adam_beta2: float = flag(0.95, "Adam's decay of mean squares", 0, 1 - 1e-9)
    adam_eps: float = flag(1e-10, "Adam's epsilon, for gradients of the mean loss", 1e-30)
    adam_every: int = flag(1, "Adam steps on each n-th step, with n steps' gradients", 1)
    embed_decay: float = flag(0.0, "embeddings' cautious decay, a factor on their squared rate", 0)

PRESETS = {
    "speedrun": Hyperparameters(  # what the records of the 18 months after it found
        name="speedrun_2026", train_seq_len=16 * 1024, num_iterations=1284,
        stages="1:1:384,2:1.52:896,3:1.73:1408", windows="SSSLSSSSSSL", attention="xxxxxx.xxxx",
        value_embeds="12......012", skips="......3....", late_input=7, backout=7, smear=True,
        key_offset=True, pair_rows=5 * 50304, softcap_height=23, softcap_shift=5, future_tokens=2,
        cooldown_frac=0.6, lr_floor=0.15, muon_lr=0.023, muon_beta2=0.95, muon_decay=1.2,
        adam_every=2, embed_decay=0.025,
    ),
    "demo": Hyperparameters(
        name="demo", save_every=100, val_loss_every=50, train_files="data/demo/demo_train_*.bin",
        val_files="data/demo/demo_val_*.bin", vocab_size=257, train_seq_len=1024, val_seq_len=2048,
        val_tokens=131072, micro_batches=4, windows="LSSL", value_embeds="0..0", attention="xx.x",
        model_dim=128, num_heads=4, head_dim=32, smear=True, key_offset=True, pair_rows=8192,
        attention_scale=0.3, window_start=256, window_end=256, num_iterations=450, muon_lr=0.045,
        muon_momentum_end=0.9, muon_momentum_steps=0, muon_beta2=0.9, embed_lr=0.3,
        adam_eps=1e-7,  # at 1e-10 gradients of nothing but rounding make full steps
    ),
}

def boolean(text: str) -> bool:
    return bool(["false", "true"].index(text.lower()))  # argparse reports a ValueError

def parse_flags(argv: list[str], default_preset: str) -> tuple[Hyperparameters, argparse.Namespace]:
    """The hyperparameters that a command line asks for; and its .preset, .check, .resume (a path or
    None) and .given (the hyperparameters that it names). Raises UserError."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], allow_abbrev=False,
        usage="%(prog)s [--preset=NAME] [--check] [--resume=PATH] [--field=value ...]")
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    parser.add_argument("--preset", default=default_preset, choices=PRESETS, metavar="NAME",
                        help="speedrun (the default with a CUDA GPU) or "
                        "demo (the default without)")
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    parser.add_argument("--resume", metavar="PATH", help="go on with the run of this log, folder "
                        "or checkpoint, in its settings but for those given here")
    for f in fields(Hyperparameters):
        kind = {bool: boolean}.get(type(f.default), type(f.default))
        alone = dict(nargs="?", const=True) if kind is boolean else {}
        defaults = [str(f.default)]
        defaults += [f"{name}: {value}" for name, preset in PRESETS.items()
                     if (value := getattr(preset, f.name)) != f.default]
        parser.add_argument(f"--{f.name}", type=kind, metavar=kind.__name__, **alone,
                            default=argparse.SUPPRESS,
                            help=f"{f.metadata['help']} (default: {', '.join(defaults)})")
    command = parser.parse_args(argv)
    hp = PRESETS[command.preset]
    command.given = {name: value for name, value in vars(command).items() if hasattr(hp, name)}
    return replace(hp, **command.given), command

# -------- 2. Schedules: pure functions of the step
class Stage(NamedTuple):
    """A part of the run."""
    batch: int  # factor on micro_batches
    lr: float  # factor on the learning rates
    window: int  # tokens in the long window

@cache
def parse_stages(text: str) -> list[Stage]:
    parts = [part.split(":") for part in text.split(",") if text]
    return [Stage(int(batch), float(lr), int(window)) for batch, lr, window in parts]

def stage(step: int, hp: Hyperparameters) -> Stage:
    """The one that a step is in (records #39 and #46). Without stages, all of the run is one."""
    stages = parse_stages(hp.stages) or [Stage(1, 1.0, hp.window_end)]
    return stages[min(len(stages) - 1, len(stages) * step // max(1, hp.num_iterations))]

def batch_size(step: int, hp: Hyperparameters) -> int:
    """Micro-batches in a step."""
    return hp.micro_batches * stage(step, hp).batch

@cache
def tokens_before(hp: Hyperparameters) -> list[int]:
    """Tokens that have been trained on before each step, the last one being the end of the run."""
    counts = (batch_size(step, hp) * hp.train_seq_len for step in range(hp.num_iterations))
    return list(accumulate(counts, initial=0))

def window_tokens(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens: the stage's; or a linear rise from 0 in whole blocks, from
    window_start on."""
    if hp.stages:
        return stage(step, hp).window
    # Less half a block: as in the record (1728 of 1792), the end is reached before the last step.
    grown = (hp.window_end - BLOCK / 2) * step / max(1, hp.num_iterations)
    rounded = math.ceil(grown / BLOCK) * BLOCK
    return min(hp.window_end, max(hp.window_start, rounded))

def lr_scale(step: int, hp: Hyperparameters) -> float:
    """Factor on the learning rates: the stage's, falling linearly to lr_floor at the end."""
    left = max(0, 1 - step / max(1, hp.num_iterations))
    peak = stage(step, hp).lr
    if left >= hp.cooldown_frac:
        return peak
    return hp.lr_floor + (peak - hp.lr_floor) * left / hp.cooldown_frac

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    if step >= hp.muon_momentum_steps:
        return hp.muon_momentum_end
    rise = hp.muon_momentum_end - hp.muon_momentum_start
    return hp.muon_momentum_start + rise * (step / hp.muon_momentum_steps)

def future_weights(step: int, hp: Hyperparameters) -> list[float]:
    """What each token after the next weighs in the training loss (record #53): half as much as the
    one before it. In each of K + 1 equal parts of the run the last one's weight falls to 0."""
    K = hp.future_tokens
    part = (K + 1) * step / max(1, hp.num_iterations)
    return [0.5**k * min(1.0, max(0.0, K + 1 - k - part)) for k in range(1, K + 1)]

# -------- 3. Shards and the loader
# A shard is a header of 256 int32 (magic number, version, number of tokens, zeros), then the tokens
# in uint16. A document begins with the end-of-text token, which is vocab_size - 1.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 4 * 256

def find_shards(pattern: str) -> dict[str, int]:
    """{path: number of tokens} of the shards that a glob matches."""
    shards = {}
    for path in sorted(glob.glob(pattern, recursive=True)):
        header = np.fromfile(path, dtype="<i4", count=3).tolist()
        held = max(1, (os.path.getsize(path) - SHARD_HEADER_BYTES) / 2)
        require(header == [SHARD_MAGIC, SHARD_VERSION, held], f"{path}: begins with {header}, not "
                f"{[SHARD_MAGIC, SHARD_VERSION, held]}: it is no token shard, or not whole")
        shards[path] = header[2]
    require(shards, f"no file matches {pattern}; ./run.sh makes or fetches a preset's data, "
            "data/tokenize_text.py other data")
    return shards

def read_tokens(path: str, start: int, count: int, vocab_size: int, pin: bool = False) -> Tensor:
    """tokens[count] uint16 of a shard from token start on, in pinned memory if asked for."""
    tokens = torch.empty(count, dtype=torch.uint16, pin_memory=pin)
    with open(path, "rb") as f:
        f.seek(SHARD_HEADER_BYTES + 2 * start)
        read = f.readinto(tokens.numpy())
    require(read == tokens.nbytes, f"{path}: has become shorter since the run began")
    largest = tokens.numpy().max()  # by NumPy, which starts no threads
    require(largest < vocab_size, f"{path}: holds the token {largest}, which is not below "
            f"--vocab_size={vocab_size}; data/inspect_shards.py says where")
    return tokens

def steps_of(shards: dict[str, int], hp: Hyperparameters) -> Iterator[tuple[str, int]]:
    """(shard, first token) of each step that the shards hold. What is too short for a step at a
    shard's end is left out. Each pass begins at another offset, so that borders differ."""
    step = 0
    for epoch in range(hp.epochs):
        offset = int(epoch * 0.6180339887 * hp.train_seq_len) % hp.train_seq_len  # golden ratio
        for path, tokens in shards.items():
            start = offset
            while (end := start + batch_size(step, hp) * hp.train_seq_len) < tokens:
                yield path, start
                start = end
                step += 1

def train_batches(shards: dict[str, int], hp: Hyperparameters, ranks: "Ranks",
                  first: int = 0) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """This rank's contiguous share of each step's micro-batches, (inputs_T int32, targets_T int64),
    from step first on: read into pinned memory, and copied to the device asynchronously."""
    T = hp.train_seq_len
    pin = ranks.device.type == "cuda"
    for step, (path, start) in islice(enumerate(steps_of(shards, hp)), first, None):
        share = batch_size(step, hp) // ranks.world_size
        start += ranks.rank * share * T
        tokens = read_tokens(path, start, share * T + 1, hp.vocab_size, pin).view(torch.int16)
        # uint16 has no arithmetic: the bits travel as int16, and lose their sign on the device.
        tokens = tokens.to(ranks.device, non_blocking=True).to(torch.int32) & 0xFFFF
        inputs = tokens[:-1].view(share, T)
        targets = tokens[1:].to(torch.int64).view(share, T)
        yield list(zip(inputs, targets))

def load_validation(shards: dict[str, int], hp: Hyperparameters, ranks: "Ranks", log=None) -> list:
    """This rank's validation sequences, (inputs_T int32, targets_T int64) each, which predict the
    first val_tokens tokens once. Targets of -1, which no loss counts, fill up the last one."""
    parts = [read_tokens(path, 0, tokens, hp.vocab_size) for path, tokens in shards.items()]
    stream = torch.cat(parts)[:hp.val_tokens + 1].to(torch.int32)
    if log and hp.vocab_size - 1 not in stream:
        log.write(f"note: no end-of-text token ({hp.vocab_size - 1}) in the validation data: are "
                  "the shards, or --vocab_size, another tokenizer's?")
    padding = -hp.val_tokens % hp.val_seq_len
    inputs = F.pad(stream[:-1], (0, padding), value=hp.vocab_size - 1).split(hp.val_seq_len)
    targets = F.pad(stream[1:].long(), (0, padding), value=-1).split(hp.val_seq_len)
    mine = range(ranks.rank, len(inputs), ranks.world_size)
    return [(inputs[i].to(ranks.device), targets[i].to(ranks.device)) for i in mine]

# -------- 4. Block masks and attention
def ordered_blocks(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of a map has, and which they are, from the diagonal outwards."""
    block_N = torch.arange(len(chosen_NN), dtype=torch.int32, device=chosen_NN.device)
    distance_NN = (block_N[:, None] - block_N).abs()
    order_NN = torch.where(chosen_NN, distance_NN, len(chosen_NN)).argsort(stable=True)
    count_N = chosen_NN.sum(1, dtype=torch.int32)
    return count_N[None, None], order_NN.to(torch.int32).contiguous()[None, None]

def build_block_masks(tokens_T: Tensor, eot: int, window: Tensor) -> list[BlockMask]:
    """The long and the short mask: a token sees itself and what came before it in its document and
    window. window is the long one in tokens, an int tensor on the device, so that it can grow
    without a recompile. It is rounded up to blocks, a query's own and those before; the short one
    has half of them, at least one."""
    assert len(tokens_T) % BLOCK == 0, f"{len(tokens_T)} tokens are not whole blocks of {BLOCK}"
    document_T = (tokens_T == eot).cumsum(0, dtype=torch.int32)  # the number of its document

    def sees(batch, head, query, key):
        return (key <= query) & (document_T[query] == document_T[key])

    # The same by blocks, from the documents of a block's first and last token. A block before the
    # query's with but one document between them is seen whole, and needs no mask by token.
    key_N = torch.arange(len(tokens_T) // BLOCK, dtype=torch.int32, device=tokens_T.device)
    query_N1 = key_N[:, None]
    first_N = document_T[::BLOCK]
    last_N = document_T[BLOCK - 1::BLOCK]
    reachable_NN = (key_N <= query_N1) & (first_N[:, None] <= last_N)
    whole_NN = (key_N < query_N1) & (last_N[:, None] == first_N)

    def mask(window_blocks: Tensor) -> BlockMask:
        seen_NN = reachable_NN & (query_N1 - key_N < window_blocks)
        partial_NN, full_NN = seen_NN & ~whole_NN, seen_NN & whole_NN
        keys_of_queries = [*ordered_blocks(partial_NN), *ordered_blocks(full_NN)]
        queries_of_keys = [*ordered_blocks(partial_NN.T), *ordered_blocks(full_NN.T)]
        return BlockMask((len(tokens_T),) * 2, *keys_of_queries, *queries_of_keys,
                         BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)

    long = (window + BLOCK - 1) // BLOCK
    return [mask(long), mask((long // 2).clamp(min=1))]

def flex(mask: BlockMask, scale: float) -> Callable:
    """Attention under the mask by FlexAttention, for CUDA under torch.compile."""
    return partial(flex_attention, block_mask=mask, scale=scale)

def block_sparse(mask: BlockMask, scale: float) -> Callable:
    """Attention under the same mask in plain PyTorch, for devices on which FlexAttention has no
    gradient. Each query block gathers its key blocks: memory grows with T times the window."""
    num_partial_N1 = mask.kv_num_blocks[0, 0][:, None]
    num_seen_N1 = num_partial_N1 + mask.full_kv_num_blocks[0, 0][:, None]
    N, M = len(num_seen_N1), int(num_seen_N1.max())
    # Key blocks: the partial ones, the full ones, then any, masked. seen is [N, BLOCK, M, BLOCK].
    slot_M = torch.arange(M, device=num_seen_N1.device)
    full_NM = mask.full_kv_indices[0, 0].gather(1, (slot_M - num_partial_N1).clamp(min=0))
    blocks_NM = torch.where(slot_M < num_partial_N1, mask.kv_indices[0, 0, :, :M], full_NM)
    token = torch.arange(BLOCK, device=num_seen_N1.device)
    query = torch.arange(N * BLOCK, device=num_seen_N1.device).view(N, BLOCK, 1, 1)
    key = (blocks_NM[:, :, None] * BLOCK + token)[:, None]
    seen = (slot_M < num_seen_N1)[:, None, :, None] & mask.mask_mod(0, 0, query, key)
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf).flatten(2)

    def attend(q_1HTK: Tensor, k_1HTK: Tensor, v_1HTK: Tensor) -> Tensor:
        _, H, T, K = q_1HTK.shape

        def gathered(x_1HTK: Tensor) -> Tensor:
            blocks = x_1HTK.view(H, N, BLOCK, K).index_select(1, blocks_NM.flatten())
            return blocks.view(H * N, M * BLOCK, K)
        q = q_1HTK.reshape(H * N, BLOCK, K)
        biases = bias.to(q.dtype).expand(H, N, BLOCK, -1).reshape(H * N, BLOCK, -1)
        scores = torch.baddbmm(biases, q, gathered(k_1HTK).mT, alpha=scale)
        return (scores.softmax(-1) @ gathered(v_1HTK)).view(1, H, T, K)
    return attend

# -------- 5. Model
def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def token_before(x: Tensor, begins_T: Tensor) -> Tensor:
    """x[T, ...] of the token before each token, zero where a document begins."""
    one_in_front = (0, 0) * (x.ndim - 1) + (1, 0)
    return F.pad(x[:-1], one_in_front).masked_fill(begins_T.view(-1, *[1] * (x.ndim - 1)), 0)

def embedding(rows: int, width: int, dtype: torch.dtype) -> nn.Embedding:
    """Drawn in float32 and cast, since what is drawn in bfloat16 depends on the torch version."""
    return nn.Embedding.from_pretrained(torch.randn(rows, width).to(dtype), freeze=False)

class CastedLinear(nn.Linear):
    """A linear layer without bias whose weight is kept in float32 and cast at use. With fp8_scales
    (of input, weight and gradient) its products run in FP8 while it trains (section 6)."""
    def __init__(self, in_features: int, out_features: int, fp8_scales: tuple | None = None):
        super().__init__(in_features, out_features, bias=False)
        self.fp8_scales = fp8_scales

    def reset_parameters(self):
        bound = math.sqrt(3) * 0.5 * self.in_features**-0.5  # std 0.5 / sqrt(fan_in)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_scales and self.training:
            return FP8Linear.apply(x, self.weight, self.fp8_scales)
        return F.linear(x, self.weight.type_as(x))

def rotated(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x in float32, the first half of a head's channels rotated as pairs (record 2024-12-17)."""
    x = x_THK.float().unflatten(-1, (2, 2, -1))
    return torch.addcmul(x * cos, x.roll(1, -2), sin).flatten(-3)

class NormAndRotate(torch.autograd.Function):
    """rotated(norm(x)). A rotation keeps lengths, so its gradient follows from the output and the
    scale of the norm. Compiled, it is one pass; what autograd derives stores x in float32."""
    @staticmethod
    def forward(ctx, x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mean_square_TH1 = x_THK.float().square().mean(-1, keepdim=True)
        scale_TH1 = (mean_square_TH1 + torch.finfo(torch.float32).eps).rsqrt()
        y_THK = (rotated(x_THK, cos, sin) * scale_TH1).type_as(x_THK)
        ctx.save_for_backward(y_THK, scale_TH1, cos, sin)
        return y_THK

    @staticmethod
    def backward(ctx, grad_THK: Tensor):
        y_THK, scale_TH1, cos, sin = ctx.saved_tensors
        outward_TH1 = (grad_THK.float() * y_THK).mean(-1, keepdim=True)
        across_THK = grad_THK - outward_TH1 * y_THK
        return (rotated(across_THK, cos, -sin) * scale_TH1).type_as(grad_THK), None, None

class Rotary(nn.Module):
    """Queries or keys, normed (arXiv:2010.04245) and given rotary positions (arXiv:2104.09864)."""
    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        frequency = base ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
        turns = torch.tensor([[[1.0], [-1.0]], [[0.0], [0.0]]]) * frequency
        position = torch.arange(max_seq_len, dtype=torch.float64)  # float32 is off at 256K tokens
        angle = position.view(-1, 1, 1, 1, 1) * turns  # position, head, half, quarter, channel
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x_THK: Tensor) -> Tensor:
        return NormAndRotate.apply(x_THK, self.cos[:len(x_THK)], self.sin[:len(x_THK)])

class LayerInput(NamedTuple):
    """What a layer reads beside the residual stream; the mixes are rows of parameters of GPT."""
    x0_TD: Tensor  # the embedded tokens
    late_TD: Tensor | None  # what attention reads instead of the stream
    begins_T: Tensor  # where a document begins
    residual_mix: Tensor  # weights of the stream and of x0
    value_mix: Tensor  # weights of the values and of their embedding
    value_embed: Tensor | None  # [T, H * K]
    rotary: Rotary
    attend: Callable  # (q_1HTK, k_1HTK, v_1HTK) -> y_1HTK, under the layer's mask

class CausalSelfAttention(nn.Module):
    """Attention with normed queries and keys, and embeddings of the tokens mixed into the values
    (record 2024-12-04, after arXiv:2410.17897). key_offset takes the half of a key that carries no
    position from the token before, so that looking for a token finds the next (record #49)."""
    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.head_dim = hp.head_dim
        self.key_offset = hp.key_offset
        self.qkv = CastedLinear(hp.model_dim, 3 * hp.num_heads * hp.head_dim)
        self.proj = CastedLinear(hp.num_heads * hp.head_dim, hp.model_dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x_TD: Tensor, given: LayerInput) -> Tensor:
        T = len(x_TD)
        q, k, v = self.qkv(x_TD).view(T, -1, self.head_dim).chunk(3, dim=1)
        q = given.rotary(q)  # and normed
        k = given.rotary(k)
        if self.key_offset:
            placed, unplaced = k.chunk(2, dim=-1)
            k = torch.cat((placed, token_before(unplaced, given.begins_T)), dim=-1)
        v = given.value_mix[0] * v
        if given.value_embed is not None:
            v = v + given.value_mix[1] * given.value_embed.view_as(v)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        y_1HTK = given.attend(q, k, v)
        return self.proj(y_1HTK.squeeze(0).transpose(0, 1).reshape(T, -1))

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc = CastedLinear(dim, 4 * dim)
        self.proj = CastedLinear(4 * dim, dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x_TD))
        return self.proj(hidden * hidden)  # ReLU^2 (arXiv:2109.08668)

class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, has_attention: bool):
        super().__init__()
        self.attn = CausalSelfAttention(hp) if has_attention else None
        self.mlp = MLP(hp.model_dim)

    def forward(self, x_TD: Tensor, given: LayerInput) -> Tensor:
        x_TD = given.residual_mix[0] * x_TD + given.residual_mix[1] * given.x0_TD
        if self.attn is not None:
            read_TD = x_TD
            if given.late_TD is not None:
                read_TD = given.late_TD
            x_TD = x_TD + self.attn(norm(read_TD), given)
        return x_TD + self.mlp(norm(x_TD))

class GPT(nn.Module):
    """forward(tokens_T, targets_T, window) is the mean loss, in nats, over a sequence's tokens;
    future has tensors that weigh the same loss on the token after the target, and so on.
    attention is flex or block_sparse; dtype is that of the embeddings and so of all activations:
    parameters in float32 are cast at use (type_as), or they would make the stream float32."""
    LOGITS_TOKENS = 65536  # tokens whose logits exist at once; a validation sequence has more
    def __init__(self, hp: Hyperparameters, attention: Callable, dtype=torch.float32):
        super().__init__()
        self.hp = hp
        self.attention = attention
        self.eot = hp.vocab_size - 1
        L = len(hp.windows)
        V = math.ceil(hp.vocab_size / 64) * 64  # a padded vocabulary suits the matrix units
        self.embed = embedding(V, hp.model_dim, dtype)
        if hp.pair_rows:
            self.pair_embed = embedding(hp.pair_rows, hp.model_dim, dtype)
        if hp.smear:
            self.smear = nn.Parameter(torch.zeros(hp.model_dim))
        self.value_embeds = nn.ModuleDict()  # layers may share a table (record 2024-12-08)
        for number in sorted(set(hp.value_embeds) - {"."}):
            self.value_embeds[number] = embedding(V, hp.num_heads * hp.head_dim, dtype)
        self.rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len), hp.rope_base)
        self.blocks = nn.ModuleList([Block(hp, mark == "x") for mark in hp.attention])
        self.residual_mix = nn.Parameter(torch.tensor([[1.0, 0.0]]).repeat(L, 1))
        self.value_mix = nn.Parameter(torch.tensor([[0.5, 0.5]]).repeat(L, 1))
        if hp.skips:
            self.skips = {i: int(mark) for i, mark in enumerate(hp.skips) if mark != "."}
        else:
            self.skips = {L - 1 - i: i for i in range(L // 2)}
        self.skip_weights = nn.Parameter(torch.ones(len(self.skips)))
        if hp.backout >= 0:
            self.backout = nn.Parameter(torch.full((1,), 0.5))
        scales = (2.0, 2.0**9, 2.0**19 * hp.micro_batches)  # train_step divides by these or more
        self.lm_head = CastedLinear(hp.model_dim, V, scales if hp.use_fp8 else None)
        nn.init.zeros_(self.lm_head.weight)

    def embedded(self, tokens_T: Tensor, begins_T: Tensor) -> Tensor:
        """x_TD of the tokens, with what came right before each in its document: an embedding of the
        pair, of which pairs share rows by a hash (record #62), and a learned share (record #34)."""
        x_TD = self.embed(tokens_T)
        if self.hp.pair_rows:
            before_T = F.pad(tokens_T[:-1], (1, 0), value=self.eot).masked_fill(begins_T, self.eot)
            hash_T = before_T.long() * 2654435761 + tokens_T  # the prime spreads the pairs
            x_TD = x_TD + self.pair_embed(hash_T % self.hp.pair_rows)
        x_TD = norm(x_TD)
        if self.hp.smear:
            x_TD = x_TD + self.smear.type_as(x_TD) * token_before(x_TD, begins_T)
        return x_TD

    def features(self, tokens_T: Tensor, window: Tensor) -> Tensor:
        """x_TD as the head reads it. The layers form a U-Net (record 2024-11-10): each layer of the
        first half adds its output to the input of its mirror image in the second. Or (records #40
        and #45) there are the skips of the table, attention in late layers reads an earlier one's
        output, and of such an output a share is taken out at the end."""
        begins_T = tokens_T == self.eot
        masks = zip("LS", build_block_masks(tokens_T, self.eot, window))
        attends = {mark: self.attention(mask, self.hp.attention_scale) for mark, mask in masks
                   if mark in self.hp.windows}
        value_embeds = {number: embed(tokens_T) for number, embed in self.value_embeds.items()}
        residual_mixes = self.residual_mix.unbind()
        value_mixes = self.value_mix.unbind()
        skip_weights = list(self.skip_weights.unbind())
        x_TD = x0_TD = self.embedded(tokens_T, begins_T)
        outputs = []
        for i, block in enumerate(self.blocks):
            if i in self.skips:
                x_TD = x_TD + skip_weights.pop(0) * outputs[self.skips[i]]
            late_TD = None
            if 0 <= self.hp.late_input < i:
                late_TD = outputs[self.hp.late_input]
            value_embed = value_embeds.get(self.hp.value_embeds[i])
            given = LayerInput(x0_TD, late_TD, begins_T, residual_mixes[i], value_mixes[i],
                               value_embed, self.rotary, attends[self.hp.windows[i]])
            x_TD = block(x_TD, given)
            outputs.append(x_TD)
        if self.hp.backout >= 0:
            x_TD = x_TD - self.backout.type_as(x_TD) * outputs[self.hp.backout]
        return norm(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits_TV in float32, capped smoothly to 0 ... 2c, which is c tanh(z / c) shifted; or by
        a lower cap that begins elsewhere (record #54)."""
        c = self.hp.lm_head_softcap
        shifted_TV = self.lm_head(x_TD).float() + self.hp.softcap_shift
        return (self.hp.softcap_height or 2 * c) * torch.sigmoid(shifted_TV * (2 / c))

    def summed_loss(self, weights: tuple, x_TD: Tensor, *targets: Tensor) -> Tensor:
        """The cross-entropies log sum exp(logits) - logit of the target, in sum (0 for targets of
        -1), weighted. As c <= 35, e^2c sums in float32 without a maximum subtracted."""
        logits_TV = self.logits(x_TD)
        log_sum_T = logits_TV.exp().sum(-1).log()
        total = 0
        for weight, targets_T in zip(weights, targets):
            nll_T = F.nll_loss(logits_TV, targets_T, reduction="none", ignore_index=-1)
            total = total + weight * (log_sum_T.masked_fill(targets_T < 0, 0) + nll_T).sum()
        return total

    def forward(self, tokens_T: Tensor, targets_T: Tensor, window: Tensor,
                future: tuple = ()) -> Tensor:
        x_TD = self.features(tokens_T, window)
        weights = (1.0, *future)
        targets = [F.pad(targets_T[k:], (0, k), value=-1) for k in range(len(weights))]
        portions = zip(*[tensor.split(self.LOGITS_TOKENS) for tensor in (x_TD, *targets)])
        losses = [self.summed_loss(weights, *portion) for portion in portions]
        return torch.stack(losses).sum() / len(x_TD)

# -------- 6. FP8 linear
# FP8 products take half the time of bf16 ones. A value has 8 bits: e4m3 (up to 448, 3 bits of
# mantissa) for inputs and weights, e5m2 (up to 57344, 2 bits) for gradients, which spread more. It
# is multiplied by a factor before its cast, and the product is divided by both:
#     input     normed, so |x| <= sqrt(D) = 28 at D = 768: x2 leaves room to 448
#     weight    starts at zero and learns slowly: x2^9 holds weights up to 0.875
#     gradient  of a mean over T tokens, so |g| <= 1/T: at T = 48K x2^19 makes that 11, and at
#               16K, with further tokens in the loss, 56

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # casting more gives NaN, inf or this, by version and type
    return (x.float() * scale).clamp(-limit, limit).to(dtype)

def fp8_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T / scale, of contiguous FP8 matrices, in dtype. fast: sums of less precision."""
    one = torch.full((), 1.0, device=a.device)
    inverse = torch.full((), 1 / scale, device=a.device)
    return torch._scaled_mm(a, b.T, one, inverse, out_dtype=dtype, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """x_TD @ w_VD.T by products in FP8 (record 2025-01-13); scales are of x, w and gradient."""
    @staticmethod
    def forward(ctx, x_TD: Tensor, w_VD: Tensor, scales: tuple[float, float, float]) -> Tensor:
        x8_TD = to_fp8(x_TD, scales[0], torch.float8_e4m3fn)
        w8_VD = to_fp8(w_VD, scales[1], torch.float8_e4m3fn)
        ctx.scales = scales
        ctx.save_for_backward(x8_TD, w8_VD)
        return fp8_matmul(x8_TD, w8_VD, scales[0] * scales[1], x_TD.dtype, True)

    @staticmethod
    def backward(ctx, grad_TV: Tensor):
        x_scale, w_scale, grad_scale = ctx.scales
        x8_TD, w8_VD = ctx.saved_tensors
        g8_TV = to_fp8(grad_TV, grad_scale, torch.float8_e5m2).contiguous()
        g8_VT, x8_DT, w8_DV = (x.T.contiguous() for x in (g8_TV, x8_TD, w8_VD))
        grad_x_TD = fp8_matmul(g8_TV, w8_DV, grad_scale * w_scale, grad_TV.dtype, False)
        grad_w_VD = fp8_matmul(g8_VT, x8_DT, grad_scale * x_scale, torch.float32, False)
        return grad_x_TD, grad_w_VD, None

# -------- 7. Optimizers
def build_optimizers(model: nn.Module, hp: Hyperparameters, ranks: "Ranks") -> list["Optimizer"]:
    """The table of optimizers: a new parameter, learning rate or optimizer is one row."""
    params = dict(model.named_parameters())

    def named(pattern: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in params.items() if re.fullmatch(pattern, name)}

    table = [
        # optimizer and parameters              peak learning rate           shape in `speedrun`
        Adam(named(r"lm_head\.weight"), hp.head_lr, hp, ranks),            # [50304, 768]
        Adam(named(r"(pair_|value_)?embeds?\..*"), hp.embed_lr, hp, ranks, hp.embed_decay),
        Adam(named("(residual|value)_mix|skip_weights|smear|backout"), hp.scalar_lr, hp, ranks),
        Muon(named(r".*attn\.qkv\.weight"), hp.muon_lr, hp, ranks, 3),     # [2304, 768]
        Muon(named(r".*attn\.proj\.weight"), hp.muon_lr, hp, ranks),       # [768, 768]
        Muon(named(r".*mlp\.fc\.weight"), hp.muon_lr, hp, ranks),          # [3072, 768]
        Muon(named(r".*mlp\.proj\.weight"), hp.muon_lr, hp, ranks),        # [768, 3072]
    ]
    owned = [name for optimizer in table for name in optimizer.params]
    for name in params:
        require(owned.count(name) == 1, f"the parameter {name} is in {owned.count(name)} rows of "
                "the table in build_optimizers; enter it in one")
    return [optimizer for optimizer in table if optimizer.params]

class Optimizer:
    """One row of the table. A step calls send_gradients, compute and apply, each on all rows before
    the next, so that what one row sends travels while another computes. A rank keeps the state of
    its share (ZeRO, arXiv:1910.02054), equally many rows of each parameter, or all where they do
    not divide. An optimizer defines update(grads, step), which fills its share of what is sent."""
    def __init__(self, params: dict, lr: float, hp: Hyperparameters, ranks: "Ranks"):
        self.params = params  # {name: parameter}
        self.lr = lr  # at its peak
        self.hp = hp
        self.ranks = ranks
        self.every = 1  # steps from one of its own to the next, in which gradients add up
        self.sent = [p.detach() for p in params.values()]  # here, the parameters themselves
        self.mine = [ranks.rows(whole) for whole in self.sent]  # this rank's share of them
        self.state = {}  # {kind: a tensor for each of the share}; checkpoints save and restore it

    def share(self, wholes: list[Tensor]) -> list[Tensor]:
        """This rank's share of a kind of state, given whole, a tensor for each of params."""
        return [self.ranks.rows(whole) for whole in wholes]

    def gather(self, shares: list[Tensor]) -> list[Tensor]:
        """The whole tensors again, from all ranks' shares."""
        return [self.ranks.whole(x, len(p)) for x, p in zip(shares, self.params.values())]

    def send_gradients(self):
        """Start summing the gradients over the ranks, each of which receives its share."""
        self.sums = [self.ranks.reduce_scatter(p.grad) for p in self.params.values()]

    def compute(self, step: int):
        """Update this rank's share, and start sending it."""
        for _, pending in self.sums:
            pending.wait()
        self.update([grad for grad, _ in self.sums], step)
        self.sums = None
        self.pending = [self.ranks.all_gather(whole) for whole in self.sent]

    def apply(self, step: int):
        """Complete the parameters, and drop their gradients."""
        for pending in self.pending:
            pending.wait()
        for p in self.params.values():
            p.grad = None

def compiled_on_cuda(function: Callable) -> Callable:
    """function, compiled when it is first called on CUDA: importing the compiler takes seconds."""
    compiled = cache(lambda: torch.compile(function, dynamic=False, fullgraph=True))
    return lambda x, *args: (compiled() if x.is_cuda else function)(x, *args)

@compiled_on_cuda
def shrinking(update: Tensor, p: Tensor, rate: Tensor) -> Tensor:
    """What cautious weight decay (arXiv:2510.12402, record #43) makes of an update that will be
    subtracted from p: it adds to it where that shrinks p anyway."""
    return update + rate * p * (update * p > 0)

class Adam(Optimizer):
    """AdamW (arXiv:1711.05101) by torch.optim's own kernel; importing torch.optim takes seconds."""
    def __init__(self, params: dict, lr: float, hp: Hyperparameters, ranks: "Ranks", decay=0.0):
        super().__init__(params, lr, hp, ranks)
        self.every = hp.adam_every
        self.decay = decay
        self.state["exp_avg"] = [torch.zeros_like(p) for p in self.mine]
        self.state["exp_avg_sq"] = [torch.zeros_like(p) for p in self.mine]

    def update(self, grads: list[Tensor], step: int):
        lr = self.lr * lr_scale(step, self.hp)
        number = torch.full((), (step + 1.0) // self.every, device=self.ranks.device)  # from 1
        rate = torch.full((), self.decay * lr**2, device=self.ranks.device)
        olds = [p.clone() for p in self.mine if self.decay]  # none without decay
        torch._fused_adamw_(self.mine, grads, self.state["exp_avg"], self.state["exp_avg_sq"], [],
                            [number] * len(grads), lr=lr,
                            beta1=self.hp.adam_beta1, beta2=self.hp.adam_beta2,
                            eps=self.hp.adam_eps, weight_decay=0, amsgrad=False, maximize=False)
        for p, old in zip(self.mine, olds):
            torch.sub(old, shrinking(old - p, old, rate), out=p)

@compiled_on_cuda
def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V^T for each matrix U S V^T of x[n, rows, cols]: the singular values end up
    between 0.7 and 1.2, by a quintic iteration steep at zero (Keller Jordan, record 2024-10)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x

def orthogonalize(x: Tensor, parts: int) -> Tensor:
    """newton_schulz of x[n, rows, cols], each matrix as so many matrices below each other. Those
    with more rows than columns are scaled by sqrt(rows / cols), to change outputs as much."""
    u = newton_schulz(x.unflatten(1, (parts, -1)).flatten(0, 1))
    return u.reshape(x.shape) * max(1, u.size(1) / u.size(2)) ** 0.5

@compiled_on_cuda
def even_rows(x: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv:2510.05491, record #41): divide each row of x[n, rows, cols] by its root mean
    square, averaged over the steps in squares[n, rows, 1]; then restore the norm of each x[i]."""
    square = x.float().square().mean(-1, keepdim=True)
    squares.lerp_(square, 1 - beta2)  # the bias of its start at 0 cancels
    factor = (squares + 1e-10).rsqrt()
    evened = (square * factor.square()).sum(1, keepdim=True)
    factor = factor * (square.sum(1, keepdim=True) / (evened + 1e-10)).sqrt()
    return (x * factor).type_as(x)

class Muon(Optimizer):
    """Momentum, orthogonalized (Keller Jordan et al., 2024), for matrices of one shape. parts: how
    many matrices each one is, as Q, K and V. A rank's share is equally many whole matrices, filled
    up with zeros. Gradients and then updates are sent from the same buffer."""
    def __init__(self, params: dict, lr: float, hp: Hyperparameters, ranks: "Ranks", parts=1):
        super().__init__(params, lr, hp, ranks)
        self.parts = parts
        self.per_rank = math.ceil(len(params) / ranks.world_size)
        shapes = {tuple(p.shape) for p in params.values()} or {(0, 0)}
        require([len(s) for s in shapes] == [2], f"Muon: no matrices of one shape: {list(params)}")
        rows, cols = min(shapes)
        self.state["momentum"] = torch.zeros(self.per_rank, rows, cols, device=ranks.device)
        self.state["row_squares"] = torch.zeros(self.per_rank, rows, 1, device=ranks.device)
        self.updates = torch.zeros(self.per_rank * ranks.world_size, rows, cols,
                                   dtype=getattr(torch, hp.dtype), device=ranks.device)
        self.sent = [self.updates]
        self.mine = [ranks.rows(self.updates)]

    def share(self, wholes: list[Tensor]) -> list[Tensor]:
        return wholes[self.ranks.rank * self.per_rank:][:self.per_rank]

    def gather(self, shares: Tensor) -> Tensor:
        return self.ranks.whole(shares, len(self.updates))

    def send_gradients(self):
        for sent, p in zip(self.updates, self.params.values()):
            sent.copy_(p.grad)  # rounded to the dtype of activations, as a micro-batch's is
        self.sums = [self.ranks.reduce_scatter(self.updates)]

    def update(self, grads: list[Tensor], step: int):
        momentum = muon_momentum(step, self.hp)
        grad = grads[0].float()
        self.state["momentum"].lerp_(grad, 1 - momentum)
        update = grad.lerp(self.state["momentum"], momentum)  # Nesterov: one step ahead
        update = orthogonalize(update.to(self.updates.dtype), self.parts)
        if self.hp.muon_beta2:
            update = even_rows(update, self.state["row_squares"], self.hp.muon_beta2)
        self.mine[0].copy_(update)

    def apply(self, step: int):
        super().apply(step)
        lr = self.lr * lr_scale(step, self.hp)
        rate = torch.full((), self.hp.muon_decay * lr, device=self.ranks.device)
        for p, update in zip(self.params.values(), self.updates):
            if self.hp.muon_decay:
                update = shrinking(update, p, rate)
            p.add_(update, alpha=-lr)

# -------- 8. Ranks
DONE = SimpleNamespace(wait=lambda: None)  # in place of a torch.distributed.Work

@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train, and what they send each other."""
    rank: int
    world_size: int
    device: torch.device

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows (along the first dimension); all of them where they do not divide."""
        if len(whole) % self.world_size:
            return whole
        return whole.chunk(self.world_size)[self.rank]

    def reduce_scatter(self, whole: Tensor) -> tuple:
        """(this rank's rows, summed over the ranks; what to wait for)"""
        mine = self.rows(whole)
        if len(mine) == len(whole):
            return mine, self.all_reduce(whole)
        mine = torch.empty_like(mine)
        return mine, dist.reduce_scatter_single(mine, whole, async_op=True)

    def all_gather(self, whole: Tensor):
        """Fill in the other ranks' rows; returns what to wait for."""
        mine = self.rows(whole)
        if len(mine) == len(whole):
            return DONE
        return dist.all_gather_single(whole, mine, async_op=True)

    def whole(self, mine: Tensor, rows: int) -> Tensor:
        """A tensor of so many rows, of which each rank has its own in mine."""
        whole = mine.new_empty(rows, *mine.shape[1:])
        self.rows(whole).copy_(mine)
        self.all_gather(whole).wait()
        return whole

    def all_reduce(self, tensor: Tensor):
        """Sum over the ranks in place; returns what to wait for."""
        if self.world_size == 1:
            return DONE
        return dist.all_reduce(tensor, async_op=True)

def start_ranks() -> Ranks:
    """This process's place among those that torchrun started; without torchrun it is alone."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        require(local_rank < torch.cuda.device_count(), f"no GPU {local_rank}: start fewer ranks")
        device = torch.device("cuda", local_rank)
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    return Ranks(rank, world_size, device)

def connect(ranks: Ranks):
    """Join the other ranks. A first barrier shows who is missing before anything slow."""
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
        dist.barrier()
    except (RuntimeError, ValueError) as e:
        raise UserError(f"the ranks do not reach each other ({first_line(e)}); set the network "
                        "interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME") from None

# -------- 9. Run log and clock
SEPARATOR = "=" * 100
class RunLog:
    """Rank 0's log file and console; on other ranks, which open none, writing does nothing."""
    file = path = None
    def open(self, path: Path, size: int = 0):
        """Begin a log; or cut one to its first size bytes, and append to it."""
        self.path = path
        self.folder = path.with_suffix("")  # of the checkpoints
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "r+b" if size else "xb")
        self.file.truncate(size)
        self.file.seek(size)

    def write(self, text: str, console: bool = True):
        if self.file is None:
            return
        self.file.write(f"{text}\n".encode(errors="backslashreplace"))
        self.file.flush()
        if console:
            print(text, flush=True)

    def step_line(self, kind: str, loss: float, step: int, seconds: float, hp: Hyperparameters):
        """Write a train_loss, or the val_loss after a step. UserError if it is not finite."""
        at = step if kind == "val_loss" else step - 1  # the first step has the schedules' start
        average = f"{1000 * seconds / step:.2f}" if step else "nan"
        self.write(f"step:{step}/{hp.num_iterations} {kind}:{loss:.4f} "
                   f"train_time:{1000 * seconds:.0f}ms step_avg:{average}ms "
                   f"tokens:{tokens_before(hp)[step]} "
                   f"lr:{lr_scale(at, hp):.3f} window:{window_tokens(at, hp)}")
        require(math.isfinite(loss), f"step {step}: {kind} is {loss}; lower the learning rates "
                "or look at the data; the log and the checkpoints are kept")

class StepClock:
    """Training time in seconds, started and stopped on an idle device; and the queue of losses,
    read two steps late on a GPU, so that the host does not wait for the newest."""
    def __init__(self, device: torch.device, elapsed: float, log: RunLog, hp: Hyperparameters):
        self.cuda = device.type == "cuda"
        self.elapsed = elapsed
        self.log = log
        self.hp = hp
        self.losses = deque()

    def start(self):
        if self.cuda:
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def stop(self):
        self.read_losses(keep=0)
        if self.cuda:
            torch.cuda.synchronize()
        self.elapsed += time.perf_counter() - self.began

    def add_loss(self, step: int, loss: Tensor):
        loss = loss.to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if self.cuda else None
        self.losses.append((step, loss, arrived))
        self.read_losses(keep=2 if self.cuda else 0)

    def read_losses(self, keep: int):
        while len(self.losses) > keep:
            step, loss, arrived = self.losses.popleft()
            if arrived:
                arrived.synchronize()
            seconds = self.elapsed + time.perf_counter() - self.began
            self.log.step_line("train_loss", float(loss), step, seconds, self.hp)

def environment(plan: "Plan", ranks: Ranks) -> list[str]:
    """The machine, the software and the data, as lines `key: value`."""
    model = subprocess.getoutput("grep -sm1 'model name' /proc/cpuinfo").partition(": ")[2]
    lines = [f"command: {' '.join(sys.argv)}",
             f"host: {platform.node()}, {platform.platform()}",
             f"cpu: {os.cpu_count()} x {model}, {torch.backends.cpu.get_cpu_capability()}",
             f"torch: {torch.__version__}, Python {platform.python_version()}",
             f"ranks: {ranks.world_size}",
             f"threads: {torch.get_num_threads()} a rank",
             f"git: {subprocess.getoutput('git describe --always --dirty --abbrev=40')}",
             *[f"data: {line}" for line in plan.data]]
    if ranks.device.type == "cuda":
        lines.append(f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        query = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
        table = subprocess.getoutput(f"nvidia-smi --query-gpu={query} --format=csv").splitlines()
        lines += [f"gpu: {line}" for line in table]
    lines.append(f"script: sha256 {plan.script_hash} {plan.script.count(chr(10))} lines")
    return [" ".join(line.split()) for line in lines]  # a name with a line break stays one line

# -------- 10. Checkpoints
# One file has all that a run needs to go on, on any number of ranks: the weights, the optimizers'
# state, the settings, and how long the log was. The two newest are kept.
FACTS = ("step", "seconds", "log_bytes", "hyperparameters", "script", "data")

def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(Path(folder).glob("step*.pt"), reverse=True)

def training_state(model: nn.Module, optimizers: list) -> dict:
    """{kind: {parameter's name: tensor}}, whole on every rank; weights are of the kind "model"."""
    state = {"model": dict(model.state_dict())}
    for optimizer in optimizers:
        for kind, tensors in optimizer.state.items():
            tensors = optimizer.gather(tensors)
            state.setdefault(kind, {}).update(zip(optimizer.params, tensors))
    return state

@torch.no_grad()
def load_training_state(saved: dict, model: nn.Module, optimizers: list, ranks: Ranks):
    """Copy what rank 0 has in saved to the model and the optimizers of every rank."""
    state = training_state(model, optimizers)
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            if ranks.rank == 0:
                found = saved.get(kind, {}).get(name)
                require(found is not None and found.shape == tensor.shape, "the checkpoint lacks "
                        f"{kind} of {name} in this shape; resume with the script that saved it")
                tensor.copy_(found)
            if ranks.world_size > 1:
                dist.broadcast(tensor, src=0)
    for optimizer in optimizers:
        for kind, tensors in optimizer.state.items():
            wholes = [state[kind][name] for name in optimizer.params]
            for tensor, whole in zip(tensors, optimizer.share(wholes)):
                tensor.copy_(whole)

def save_checkpoint(step: int, seconds: float, log_bytes: int, state: dict, plan, log: RunLog):
    """Under its name only when it is whole on the disk, so that what is there always loads."""
    facts = dict(step=step, seconds=seconds, log_bytes=log_bytes, data=plan.data,
                 hyperparameters=asdict(plan.hp), script=plan.script_hash, script_path=sys.argv[0])
    path = log.folder / f"step{step:08}.pt"
    unfinished = log.folder / "unfinished"
    log.folder.mkdir(exist_ok=True)
    try:
        with open(unfinished, "wb") as f:
            torch.save(facts | state, f)
            f.flush()
            os.fsync(f.fileno())
        os.fsync(log.file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as e:  # torch.save makes a RuntimeError of a full disk
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be saved ({first_line(e)}); make room, --resume") from None
    for old in checkpoints_in(log.folder)[2:]:
        old.unlink()
    log.write(f"checkpoint: {path}")

def read_checkpoint(path: Path) -> dict:
    """A checkpoint whose checksums are right, its tensors mapped from the disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            require(archive.testzip() is None, "a checksum is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require(set(FACTS) < set(saved), "it is not of this version of the script")
    except Exception as e:  # a damaged archive leads to many kinds
        raise UserError(f"{path}: cannot be used ({first_line(e)}); if it is damaged, delete it to "
                        "go on from the one before it") from None
    return saved

def find_checkpoint(argument: str) -> tuple[Path, Path]:
    """(newest checkpoint, log) of the run whose log, folder or newest checkpoint is named."""
    path = Path(argument).resolve()
    require(path.exists(), f"--resume={argument} does not exist; name a run's log or folder")
    folder = path.parent if path.match("step*.pt") else Path(str(path).removesuffix(".log"))
    checkpoints = checkpoints_in(folder)
    require(checkpoints, f"--resume={argument}: this run has saved no checkpoint; start it anew")
    require(path in (folder, checkpoints[0]) or path.suffix == ".log", f"--resume={argument}: "
            f"{checkpoints[0].name} is newer; resume from it, or delete it to give it up")
    return checkpoints[0], folder.with_name(f"{folder.name}.log")

# -------- 11. Checks
def check_settings(hp: Hyperparameters, world_size: int):
    """Refuse settings that contradict themselves or each other."""
    for f in fields(hp):
        value = getattr(hp, f.name)
        said = f"--{f.name}={value}: {f.metadata['help']}; it takes"
        if isinstance(value, str):
            require(re.fullmatch(f.metadata["pattern"], value), f"{said} {f.metadata['pattern']}")
            continue
        least, most, multiple = f.metadata["range"]
        require(least <= value <= most and abs(value) < math.inf, f"{said} {least} to {most}")
        require(multiple == 1 or value % multiple == 0, f"{said} multiples of {multiple}")
    L = len(hp.windows)
    require(len(hp.value_embeds) == len(hp.attention) == L and len(hp.skips) in (0, L),
            "--windows, --value_embeds, --attention, --skips: not for the same number of layers")
    require(all(mark == "." or int(mark) < i for i, mark in enumerate(hp.skips)),
            f"--skips={hp.skips}: adds the output of a layer that comes later")
    require(max(hp.late_input, hp.backout) < L,
            f"--late_input, --backout: the last layer is {L - 1}")
    require(hp.save_every % hp.adam_every == hp.num_iterations % hp.adam_every == 0,
            f"--save_every and --num_iterations take multiples of --adam_every={hp.adam_every}")
    fitting = [n for n in range(1, hp.micro_batches + 1) if hp.micro_batches % n == 0]
    require(world_size in fitting, f"{world_size} ranks do not divide {hp.micro_batches} "
            f"micro-batches: start one of {fitting}, or change --micro_batches")

def resolve(hp: Hyperparameters, device: torch.device) -> Hyperparameters:
    """The settings with `auto` decided, and without an FP8 head where the hardware has no FP8."""
    cuda = device.type == "cuda"
    if hp.dtype == "auto":
        if cuda:
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            bf16 = torch.cpu.get_capabilities().get("amx_bf16", False)
        hp = replace(hp, dtype="bfloat16" if bf16 else "float32")
    has_fp8 = cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    return replace(hp, use_fp8=hp.use_fp8 and has_fp8)

@dataclass
class Plan:
    """What a run does, as rank 0 has decided and checked it."""
    hp: Hyperparameters
    train: dict[str, int]  # {shard: number of tokens}
    val: dict[str, int]
    script: str  # this file's text
    checkpoint: Path | None  # to go on from
    log: Path | None  # of the run that goes on
    facts: dict  # of the checkpoint: what it has but for tensors
    changes: list[str] = field(default_factory=list)  # in settings, script or data since then

    def __post_init__(self):
        self.script_hash = hashlib.sha256(self.script.encode()).hexdigest()
        self.data = [f"{path} {tokens} tokens" for path, tokens in (self.train | self.val).items()]

def prepare(hp: Hyperparameters, command: argparse.Namespace, script: str, ranks: Ranks) -> Plan:
    """Every check that one process can do without reading tokens."""
    checkpoint = log_path = None
    facts = {}
    if command.resume is not None:
        checkpoint, log_path = find_checkpoint(command.resume)
        facts = {name: v for name, v in read_checkpoint(checkpoint).items() if name in FACTS}
        saved = {name: v for name, v in facts["hyperparameters"].items() if hasattr(hp, name)}
        hp = Hyperparameters(**saved | command.given)
    check_settings(hp, ranks.world_size)
    hp = resolve(hp, ranks.device)
    if ranks.device.type == "cuda":
        compilers = os.environ.get("CC", "gcc clang").split()
        header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
        require(any(map(shutil.which, compilers)) and header.exists(), "Triton needs a C compiler "
                f"(gcc, clang or $CC) and {header}: install gcc and the Python headers")
    train_shards = find_shards(hp.train_files)
    val_shards = find_shards(hp.val_files)
    folder = next(p for p in Path(hp.records, "log").absolute().parents if p.exists())
    require(os.access(f"{folder}/.", os.W_OK), f"--records={hp.records}: {folder} is not writable")
    shared = set(map(os.path.realpath, train_shards)) & set(map(os.path.realpath, val_shards))
    require(not shared, f"--train_files and --val_files share {', '.join(shared)}")
    held = sum(val_shards.values()) - 1  # the first token is not predicted
    hp = replace(hp, val_tokens=hp.val_tokens or held)
    if hp.seed < 0:
        hp = replace(hp, seed=int(np.random.default_rng().integers(2**31)))
    require(0 < hp.val_tokens <= held, f"--val_files={hp.val_files} holds {held} tokens to "
            f"predict, not {hp.val_tokens}: add shards, or lower --val_tokens (0 takes all)")
    steps = len(list(islice(steps_of(train_shards, hp), hp.num_iterations)))
    require(steps == hp.num_iterations, f"--train_files={hp.train_files} holds {steps} steps of "
            f"{hp.micro_batches * hp.train_seq_len} tokens{hp.stages and ' or more'}, not "
            f"{hp.num_iterations}: add shards, raise --epochs, or lower --num_iterations or "
            "--train_seq_len")
    plan = Plan(hp, train_shards, val_shards, script, checkpoint, log_path, facts)
    if checkpoint:
        text = log_path.read_bytes()
        require(len(text) >= facts["log_bytes"], f"{log_path}: was cut to before {checkpoint.name}")
        finished = b"\nlog: " in text[facts["log_bytes"]:]  # its last line
        asked = f"--resume={command.resume}"
        require(not finished or "num_iterations" in command.given, f"{asked}: the run is finished")
        require(facts["step"] <= hp.num_iterations, f"{asked}: is past --num_iterations")
        before = Hyperparameters(**saved)
        stays = (before.stages, before.num_iterations) == (hp.stages, hp.num_iterations)
        require(stays or not before.stages + hp.stages, f"{asked}: stages are parts of "
                "--num_iterations; both must stay as they are")
        then = dict(facts["hyperparameters"], script=facts["script"], data=facts["data"])
        for name, value in dict(asdict(hp), script=plan.script_hash, data=plan.data).items():
            if then.get(name) != value:
                plan.changes.append(f"changed: {name} was {then.get(name)} and is {value}")
    return plan

# -------- 12. Main
def window_tensor(step: int, hp: Hyperparameters, ranks: Ranks) -> Tensor:
    # Filled, not copied, since a copy would wait for the device.
    return torch.full((), window_tokens(step, hp), dtype=torch.int32, device=ranks.device)

def future_tensors(step: int, hp: Hyperparameters, ranks: Ranks) -> tuple[Tensor, ...]:
    return tuple(torch.full((), w, device=ranks.device) for w in future_weights(step, hp))

@torch.no_grad()
def evaluate(model, sequences: list, step: int, hp: Hyperparameters, ranks: Ranks) -> float:
    """The mean loss, in nats, over the validation tokens of all ranks."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for inputs_T, targets_T in sequences:
        total += model(inputs_T, targets_T, window_tensor(step, hp, ranks)).double() * len(inputs_T)
    model.train()
    ranks.all_reduce(total).wait()
    return float(total) / hp.val_tokens

def train_step(model, batches: list, optimizers: list, step: int, hp: Hyperparameters,
               ranks: Ranks) -> Tensor:
    """One step on this rank's micro-batches; returns the mean loss of all ranks'. It only launches
    work: nothing here waits for the device, and ranks talk after the last micro-batch only."""
    window = window_tensor(step, hp, ranks)
    future = future_tensors(step, hp, ranks)
    loss = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for inputs_T, targets_T in batches:
        micro_loss = model(inputs_T, targets_T, window, future) / batch_size(step, hp)
        micro_loss.backward()
        loss += micro_loss.detach()
    due = [optimizer for optimizer in optimizers if (step + 1) % optimizer.every == 0]
    with torch.no_grad():
        for optimizer in due:
            optimizer.send_gradients()
        for optimizer in due:
            optimizer.compute(step)
        for optimizer in due:
            optimizer.apply(step)
    ranks.all_reduce(loss).wait()
    return loss

def warm_up(model, optimizers: list, hp: Hyperparameters, ranks: Ranks):
    """Compile and allocate by a step and a validation on random tokens; they are undone later."""
    def dummy(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(hp.vocab_size, (length + 1,), device=ranks.device)
        return tokens[:-1].int(), tokens[1:].clone()
    scheduled = window_tensor(0, hp, ranks), future_tensors(0, hp, ranks)
    model(*dummy(hp.train_seq_len), *scheduled).backward()
    for optimizer in optimizers:
        for name, p in optimizer.params.items():
            require(p.grad is not None, f"no gradient reaches the parameter {name}: use it in the "
                    "forward pass, or remove it")
    train_step(model, [dummy(hp.train_seq_len)], optimizers, hp.adam_every - 1, hp, ranks)
    evaluate(model, [dummy(hp.val_seq_len)], 0, hp, ranks)

def train(plan: Plan, ranks: Ranks, log: RunLog):
    """Build, warm up, restore, train."""
    hp = plan.hp
    cuda = ranks.device.type == "cuda"
    torch.manual_seed(hp.seed)
    plain = GPT(hp, flex if cuda else block_sparse, getattr(torch, hp.dtype)).to(ranks.device)
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # our two
    model = torch.compile(plain, dynamic=False, fullgraph=True) if cuda else plain
    optimizers = build_optimizers(plain, hp, ranks)
    val_sequences = load_validation(plan.val, hp, ranks, log)
    log.write(f"model: {sum(p.numel() for p in plain.parameters())} parameters; "
              f"{hp.micro_batches} x {hp.train_seq_len} tokens a step{hp.stages and ' at first'}, "
              f"{ranks.world_size} rank(s)")
    began = time.perf_counter()
    start = copy.deepcopy(training_state(plain, optimizers))
    if plan.checkpoint and ranks.rank == 0:  # after the warmup, all ranks get rank 0's start
        start = read_checkpoint(plan.checkpoint)
    warm_up(model, optimizers, hp, ranks)
    load_training_state(start, plain, optimizers, ranks)
    del start
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.compiler.set_stance("fail_on_recompile")  # scheduled numbers go in as tensors
    log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")
    first = plan.facts.get("step", 0)
    batches = train_batches(plan.train, hp, ranks, first)
    clock = StepClock(ranks.device, plan.facts.get("seconds", 0.0), log, hp)
    clock.start()
    for step in range(first, hp.num_iterations + 1):
        last = step == hp.num_iterations
        saves = hp.save_every and step > first and (last or step % hp.save_every == 0)
        validates = last or (hp.val_loss_every and step % hp.val_loss_every == 0)

        # Untimed: validate and save
        if saves or validates:
            clock.stop()
            log_bytes = log.file.tell() if log.file else 0  # where a resumed run cuts it
            if validates:
                val_loss = evaluate(model, val_sequences, step, hp, ranks)
                log.step_line("val_loss", val_loss, step, clock.elapsed, hp)
            if saves:
                state = training_state(plain, optimizers)
                if ranks.rank == 0:
                    save_checkpoint(step, clock.elapsed, log_bytes, state, plan, log)
            if last:
                break
            clock.start()

        # Timed: one step
        loss = train_step(model, next(batches), optimizers, step, hp, ranks)
        clock.add_loss(step + 1, loss)
    log.write(f"throughput: {tokens_before(hp)[-1] / max(clock.elapsed, 1e-9):.0f} tokens/s")
    if cuda:
        log.write(f"peak_memory: {torch.cuda.max_memory_allocated() >> 20} MiB on rank 0")
    log.write(f"final_val_loss: {val_loss:.4f} nats per token, on {hp.val_tokens} tokens")
    log.write(f"log: {log.path}")

def begin_log(log: RunLog, plan: Plan, ranks: Ranks):
    """Write what comes before the steps; or, of a run that goes on, that it does."""
    now = datetime.now(timezone.utc)
    if plan.checkpoint:
        log.open(plan.log, plan.facts["log_bytes"])
        log.write(f"resumed: step {plan.facts['step']} at {now:%Y-%m-%dT%H:%M:%SZ}, on "
                  f"{ranks.world_size} rank(s) of {platform.node()} with torch {torch.__version__}")
    else:
        log.open(Path(plan.hp.records, f"{now:%Y-%m-%dT%H-%M-%SZ}_{plan.hp.name}.log"))
        settings = [f"{name} = {value!r}" for name, value in asdict(plan.hp).items()]
        head = [*settings, SEPARATOR, *environment(plan, ranks), SEPARATOR]
        log.write("\n".join([*head, plan.script.removesuffix("\n"), SEPARATOR]), console=False)
    for change in plan.changes:
        log.write(change)

def end_at_signals(log: RunLog):
    """Have a signal end the run at once; on rank 0 with a line on how to go on with it."""
    def end(number, frame):
        said = f"error: stopped by {signal.Signals(number).name}"
        for newest in checkpoints_in(log.folder)[:1]:
            said += f"; {newest} is saved, and --resume={log.path} goes on from it"
        os.write(2, f"{said}\n".encode())
        os._exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end if log.file else signal.SIG_DFL)

def run(argv: list[str]):
    script = Path(__file__).read_text(encoding="utf-8")  # before anyone edits it
    hp, command = parse_flags(argv, "speedrun" if torch.cuda.is_available() else "demo")
    ranks = start_ranks()
    log = RunLog()
    plans = [None]
    if command.check or ranks.rank == 0:  # rank 0 decides, and where it finds an error all end
        plans = [prepare(hp, command, script, ranks)]
    if command.check:
        print("checks passed", *plans[0].data, sep="\n")
        return
    if ranks.rank == 0:
        begin_log(log, plans[0], ranks)
    if ranks.world_size > 1:
        connect(ranks)
        dist.broadcast_object_list(plans, src=0)
    end_at_signals(log)
    train(plans[0], ranks, log)
    if ranks.world_size > 1:
        dist.destroy_process_group()

def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # for paths that the console cannot print
    try:
        run(sys.argv[1:])
    except (UserError, OSError, torch.OutOfMemoryError) as e:
        said = f"error: {first_line(e)}"
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # where rank 0 says the same, torchrun has ended this one by then
            said += f" (rank {os.environ['RANK']} on {platform.node()})"
        print(said, file=sys.stderr, flush=True)
        os._exit(2)  # an orderly end could wait for ranks that wait for this one

if __name__ == "__main__":
    main()
