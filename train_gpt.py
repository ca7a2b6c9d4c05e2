"""Train a GPT on token shards as fast as the hardware allows: the NanoGPT speedrun in one file.

The task: reach a validation loss of 3.28 nats on FineWeb in the least training time on one node of 8 H100 GPUs. The
same file trains on any number of GPUs, on several nodes and on a plain CPU.

    torchrun --nproc_per_node=8 train_gpt.py                     # the full speedrun on 8 GPUs
    python train_gpt.py --preset=demo                            # the same code, small, on one CPU or GPU
    torchrun --nproc_per_node=8 train_gpt.py --resume            # the newest unfinished run goes on
    python train_gpt.py --help                                   # every hyperparameter is a flag

Every run writes one log, records/<UTC time>_<name>.log: hyperparameters, environment, this source, the steps.

The sections, in reading order:
    1 hyperparameters and presets      5 model                     9 run log and checkpoints
    2 schedules                        6 FP8 linear               10 preflight checks
    3 shards and the loader            7 optimizers               11 main: build, warm up, restore, train
    4 block masks and attention        8 gradient exchange
Shapes, as in x_TD: T tokens of one sequence, D model width, H heads, G key/value heads, K head width, V vocabulary
(padded), N blocks of 128 tokens, M key blocks that one query block sees.
"""

import argparse
import dataclasses
import fcntl
import glob
import hashlib
import math
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache, partial, reduce
from itertools import zip_longest
from pathlib import Path

LAUNCHER = os.getppid()  # torchrun, if that started this process; asked here, since importing torch takes seconds

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

BLOCK = 128  # tokens in an attention block

class UserError(Exception):
    """What a user can cause: the message is one line that says what is wrong and what to do. everywhere: every rank
    raises it, so that rank 0 speaks for all. status: the process's exit status."""

    def __init__(self, message: str, everywhere: bool = False, status: int = 2):
        super().__init__(message)
        self.everywhere, self.status = everywhere, status

def say_error(text: str):
    try:
        os.write(2, f"{text}\n".encode())  # unlike print, this may be done in a signal's handler
    except OSError:
        pass  # whoever read the console has gone

def first_line(e: Exception) -> str:
    return (str(e) or type(e).__name__).splitlines()[0]

def require(condition, message: str, everywhere: bool = False):
    if not condition:
        raise UserError(message, everywhere)

# ----------------------------------------------------------------------------------------------------------------------
# 1. Hyperparameters and presets

def flag(default, help: str, least: float = -math.inf, most: float = math.inf, multiple: int = 0):
    return field(default=default, metadata={"help": help, "range": (least, most, multiple)})

@dataclass(frozen=True)
class Hyperparameters:
    """Every field is a flag of the same name. The defaults are the preset `speedrun` (the record of 2025-01-26)."""

    # The run
    name: str = flag("speedrun", "name of the run: records/<UTC time>_<name>.log")
    records: str = flag("records", "folder of the log and the checkpoint")
    seed: int = flag(-1, "seed of the initial weights; -1 draws one", -1, 2**63 - 1)
    dtype: str = flag("auto", "activations: bfloat16, float32, or auto: bfloat16 where the hardware is fast at it")
    deterministic: bool = flag(False, "the same bits on any number of ranks, at a price in speed and memory")
    save_every: int = flag(0, "steps from one checkpoint to the next; 0: only when a signal stops the run", 0)
    # Data
    train_files: str = flag("data/fineweb10B/fineweb_train_*.bin", "glob of the training shards")
    val_files: str = flag("data/fineweb10B/fineweb_val_*.bin", "glob of the validation shards")
    vocab_size: int = flag(50257, "tokens in the vocabulary; the last one is the end-of-text token", 2, 65536)
    train_seq_len: int = flag(48 * 1024, "tokens in a training sequence, a multiple of 128", 1, multiple=BLOCK)
    val_seq_len: int = flag(256 * 1024, "tokens in a validation sequence, a multiple of 128", 1, multiple=BLOCK)
    val_tokens: int = flag(10485760, "tokens to validate on; 0 takes all", 0)
    micro_batches: int = flag(8, "training sequences in a step, shared out to the ranks", 1)
    epochs: int = flag(1, "passes over the training shards that the run may use", 1)
    # Model: one character a layer in the three strings of the layer table
    windows: str = flag("LSSSLSSLSSSL", "layer table: L long window, S short window (half of the long one)")
    value_embeds: str = flag("012......012", "layer table: number of the layer's value embedding, or . for none")
    attention: str = flag("xxxxxxx.xxxx", "layer table: x a layer with attention, . without")
    smear: bool = flag(False, "add a learned share of the token before to each token's embedding")
    key_offset: bool = flag(False, "take the half of each key that carries no position from the token before")
    pair_rows: int = flag(0, "rows in the embedding of pairs of tokens, which share rows by a hash; 0: no such embedding", 0)
    model_dim: int = flag(768, "width of the residual stream, a multiple of 16", 1, multiple=16)
    num_heads: int = flag(6, "query heads", 1)
    num_kv_heads: int = flag(0, "key and value heads (grouped-query attention); 0: as many as query heads", 0)
    head_dim: int = flag(128, "width of a head, a multiple of 16", 1, multiple=16)
    attention_scale: float = flag(0.12, "factor on the attention scores")
    rope_base: float = flag(1024.0, "base of the rotary frequencies", 1)
    lm_head_softcap: float = flag(15.0, "cap c of the logits: 2c * sigmoid(2 * logit / c)", 1e-6, 35)  # e^2c x V x T is in float32
    window_start: int = flag(128, "tokens in the long window at the first step", 1, 2**30)
    window_end: int = flag(1792, "tokens in the long window at the last step", 1, 2**30)
    window_quantum: int = flag(128, "tokens by which the long window grows at a time", 1)
    # FP8 head: powers of two that each operand is multiplied by before its cast, set for a loss that is a mean
    use_fp8: bool = flag(True, "train the head in FP8 where the hardware has it")
    fp8_x_scale: float = flag(2.0, "FP8: factor on the head's input", 1e-30)
    fp8_w_scale: float = flag(2.0**9, "FP8: factor on the head's weight", 1e-30)
    fp8_grad_scale: float = flag(2.0**19, "FP8: factor on the gradient of the logits", 1e-30)
    # Optimization
    num_iterations: int = flag(1770, "training steps", 0)
    cooldown_frac: float = flag(0.4, "share of the steps over which the learning rates fall", 0, 1)
    lr_floor: float = flag(0.1, "where the learning rates fall to, as a share of their peak", 0, 1)
    muon_lr: float = flag(0.05, "learning rate of Muon: the blocks' matrices")
    muon_momentum_start: float = flag(0.85, "Muon's momentum at the first step", 0, 1)
    muon_momentum_end: float = flag(0.95, "Muon's momentum after its warmup", 0, 1)
    muon_momentum_steps: int = flag(300, "steps of Muon's momentum warmup", 0)
    muon_beta2: float = flag(0.0, "decay of the mean squares by which NorMuon evens out an update's rows; 0: plain Muon", 0, 1 - 1e-9)
    head_lr: float = flag(0.008, "learning rate of Adam: the output head")
    embed_lr: float = flag(0.6, "learning rate of Adam: token and value embeddings")
    scalar_lr: float = flag(0.04, "learning rate of Adam: residual, value and skip weights")
    adam_betas: tuple = flag((0.8, 0.95), "Adam's two decay rates, as 0.8,0.95", 0, 1 - 1e-9)
    adam_eps: float = flag(1e-10, "Adam's epsilon", 0)
    # Evaluation
    val_loss_every: int = flag(125, "steps from one validation to the next; 0: only after the last step", 0)
    sample_tokens: int = flag(0, "tokens to sample from the trained model at the end", 0)
    save: bool = flag(True, "keep the trained model in records/<log's name>/")

PRESETS = {
    "speedrun": Hyperparameters(),
    "demo": Hyperparameters(
        name="demo", train_files="data/demo/demo_train_*.bin", val_files="data/demo/demo_val_*.bin", vocab_size=257,
        train_seq_len=1024, val_seq_len=2048, val_tokens=131072, micro_batches=4, windows="LSSL", value_embeds="0..0",
        attention="xx.x", smear=True, key_offset=True, pair_rows=8192, model_dim=128, num_heads=4, head_dim=32,
        attention_scale=0.3, window_end=256, num_iterations=500, muon_lr=0.045, muon_momentum_end=0.9, muon_momentum_steps=0,
        muon_beta2=0.9, embed_lr=0.3, sample_tokens=300, save_every=125,
        adam_eps=1e-7,  # at 1e-10 a gradient of nothing but rounding makes a full step, and losses depend on the number of ranks
    ),
}

def boolean(text: str) -> bool:
    return bool(["false", "true"].index(text.lower()))  # ValueError for anything else, which argparse reports

def pair(text: str) -> tuple[float, float]:
    first, second = text.split(",")
    return float(first), float(second)

def parse_flags(argv: list[str], default_preset: str) -> tuple[Hyperparameters, argparse.Namespace]:
    """The hyperparameters that the command line asks for, and what to do with them: check, resume, resume_anyway."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     usage="%(prog)s [--preset=NAME] [--check] [--resume[=PATH]] [--field=value ...]")
    parser.error = lambda message: require(False, f"{message}; --help lists the flags", everywhere=True)
    parser.add_argument("--preset", default=default_preset, choices=PRESETS, metavar="NAME",
                        help=f"{' or '.join(PRESETS)} (default: speedrun where a CUDA GPU is present, demo elsewhere)")
    parser.add_argument("--check", action="store_true", help="check settings and data, then exit")
    parser.add_argument("--resume", nargs="?", const="", metavar="PATH", help="go on with the newest unfinished run of these "
                        "settings, or with the one whose log, folder or checkpoint PATH is")
    parser.add_argument("--resume_anyway", action="store_true", help="resume although settings, script or data differ")
    fields = dataclasses.fields(Hyperparameters)
    for f in fields:
        kind = {bool: boolean, tuple: pair}.get(type(f.default), type(f.default))
        optional = dict(nargs="?", const=True) if kind is boolean else {}
        defaults = dict.fromkeys(str(getattr(preset, f.name)) for preset in PRESETS.values())
        parser.add_argument(f"--{f.name}", type=kind, metavar=kind.__name__, default=argparse.SUPPRESS, **optional,
                            help=f"{f.metadata['help']} (default: {', demo: '.join(defaults)})")
    command = parser.parse_args(argv)
    given = {f.name: getattr(command, f.name) for f in fields if f.name in command}
    return dataclasses.replace(PRESETS[command.preset], **given), command

# ----------------------------------------------------------------------------------------------------------------------
# 2. Schedules: pure functions of the step

def window_tokens(step: int, hp: Hyperparameters) -> int:
    """Tokens in the long window, in quanta that grow with progress: the record's ceil(1728 * progress / 128) blocks for an
    end of 1792, which so is in force for the last steps and not the very last alone."""
    grown = (hp.window_end - hp.window_quantum / 2) * step / max(1, hp.num_iterations)
    return min(hp.window_end, max(hp.window_start, math.ceil(grown / hp.window_quantum) * hp.window_quantum))

def lr_scale(step: int, hp: Hyperparameters) -> float:
    """The learning rates as a share of their peak: 1, then falling linearly to lr_floor at the end."""
    left = 1 - step / max(1, hp.num_iterations)
    if left >= hp.cooldown_frac:
        return 1.0
    return hp.lr_floor + (1 - hp.lr_floor) * left / hp.cooldown_frac

def muon_momentum(step: int, hp: Hyperparameters) -> float:
    warmed = min(1.0, step / hp.muon_momentum_steps) if hp.muon_momentum_steps else 1.0
    return hp.muon_momentum_start + (hp.muon_momentum_end - hp.muon_momentum_start) * warmed

# ----------------------------------------------------------------------------------------------------------------------
# 3. Shards and the loader
# A shard is a header of 256 int32 (magic, version, token count, zeros), then uint16 tokens. A document begins with the
# end-of-text token, which is vocab_size - 1.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS

def check_shard(path, vocab_size: int) -> int:
    """The number of tokens in a shard, once its header, its size on disk and every token are right. Raises UserError
    naming the defect and its byte offset."""
    try:
        size, header = os.path.getsize(path), np.fromfile(path, dtype="<i4", count=3)
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from None
    require(size >= SHARD_HEADER_BYTES, f"{path}: {size} bytes, shorter than the {SHARD_HEADER_BYTES}-byte header; make it again")
    magic, version, num_tokens = header.tolist()
    held = (size - SHARD_HEADER_BYTES) / 2
    require(magic == SHARD_MAGIC, f"{path}: magic number {magic} at byte 0, expected {SHARD_MAGIC}; not a token shard")
    require(version == SHARD_VERSION, f"{path}: version {version} at byte 4, expected {SHARD_VERSION}; make the shard again")
    require(num_tokens > 0, f"{path}: token count {num_tokens} at byte 8; the shard is empty, make it again")
    require(held == num_tokens, f"{path}: the header at byte 8 promises {num_tokens} tokens, the file holds {held:g}; it is "
                                "damaged or was cut off, fetch or make it again")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES)
    if tokens.max() >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        raise UserError(f"{path}: token {tokens[at]} at byte {SHARD_HEADER_BYTES + 2 * at} is not below the vocabulary size "
                        f"{vocab_size}; wrong tokenizer or damaged file")
    return num_tokens

def read_tokens(path, num_tokens: int, start: int = 0, pin: bool = False) -> Tensor:
    """num_tokens uint16 tokens of a shard, read straight into (pinned) memory."""
    tokens = torch.empty(num_tokens, dtype=torch.uint16, pin_memory=pin)
    try:
        with open(path, "rb") as f:
            f.seek(SHARD_HEADER_BYTES + 2 * start)
            got = f.readinto(tokens.numpy())
    except OSError as e:
        raise UserError(f"{path}: cannot be read on {platform.node()} ({e.strerror}); put the shard there and start again") from None
    require(got == tokens.nbytes, f"{path}: became shorter while the run was using it; put the shard back and start again")
    return tokens

@dataclass(frozen=True)
class Span:
    """Consecutive steps that read one shard, in one pass over the shards."""

    epoch: int
    shard: int
    start: int  # the first token
    steps: int

def plan_spans(shard_tokens: list[int], step_tokens: int, seq_len: int, epochs: int) -> list[Span]:
    """Which tokens each step reads, the same for any number of ranks. The tail of a shard that is too short for a step
    (and the token after it, the last target) is left out; each pass starts at another offset within the first sequence,
    so that sequence borders fall elsewhere."""
    spans = []
    for epoch in range(epochs):
        offset = int(epoch * 0.6180339887 * seq_len) % seq_len  # the golden ratio spreads the offsets evenly
        for shard, tokens in enumerate(shard_tokens):
            steps = max(0, tokens - 1 - offset) // step_tokens
            if steps:
                spans.append(Span(epoch, shard, offset, steps))
    return spans

def count_cut_documents(tokens: Tensor, eot: int, seq_len: int) -> tuple[int, int]:
    """(documents that begin in tokens, those of them that a border between sequences of seq_len tokens cuts)."""
    tokens = tokens.numpy()  # torch would start OpenMP threads for the loader, and more threads than cores slow all of them down
    begins = np.flatnonzero(tokens == eot)
    ends = np.append(begins, len(tokens))[1:]
    cut = (begins // seq_len) != ((ends - 1) // seq_len)
    return len(begins), int(cut.sum())

class TrainLoader:
    """The steps' tokens for one rank, from step first on: its contiguous share of the micro-batches, (inputs_T int32,
    targets_T int64) each. The next shard is read ahead in a thread; the copy to the device is asynchronous."""

    def __init__(self, files: list, spans: list[Span], hp: Hyperparameters, rank: int, world_size: int, device, first: int = 0):
        self.files, self.spans, self.seq_len, self.eot = files, spans, hp.train_seq_len, hp.vocab_size - 1
        self.step_tokens = hp.micro_batches * hp.train_seq_len
        self.mine = hp.micro_batches // world_size  # micro-batches of a step that are this rank's
        self.skip = rank * self.mine * hp.train_seq_len
        self.device, self.wait_seconds, self.news = device, 0.0, []
        if device.type == "cuda":  # pinning stalls the device: fill PyTorch's cache before the clock starts
            longest = max(span.steps for span in spans) * self.step_tokens + 1
            [torch.empty(longest, dtype=torch.uint16, pin_memory=True) for _ in ("now", "ahead", "in flight")]
        self.thread = ThreadPoolExecutor(1)
        span = 0
        while span < len(spans) - 1 and first >= spans[span].steps:
            first, span = first - spans[span].steps, span + 1
        self.position, self.ahead = (span, first), self.thread.submit(self.read, span)  # (span, step within the span)
        self.load_next()
        self.wait_seconds = 0.0  # the first shard is read before the clock starts

    def read(self, index: int):
        """A span's tokens and a line about them. Runs in the thread."""
        if index == len(self.spans):
            return None
        span = self.spans[index]
        tokens = read_tokens(self.files[span.shard], span.steps * self.step_tokens + 1, span.start, self.device.type == "cuda")
        documents, cut = count_cut_documents(tokens[:-1], self.eot, self.seq_len)
        line = (f"data: pass {span.epoch + 1}, {Path(self.files[span.shard]).name}, {span.steps} steps from token "
                f"{span.start}, {documents} documents, {100 * cut / max(1, documents):.1f} % cut by sequence borders")
        return tokens, line

    def load_next(self):
        began = time.perf_counter()
        self.tokens, line = self.ahead.result()
        self.wait_seconds += time.perf_counter() - began
        self.news.append(line)
        self.ahead = self.thread.submit(self.read, self.position[0] + 1)

    def next_step(self) -> list[tuple[Tensor, Tensor]]:
        span, step = self.position
        if step == self.spans[span].steps:
            span, step = self.position = span + 1, 0
            self.load_next()
        self.position = span, step + 1
        start = step * self.step_tokens + self.skip
        # uint16 has no arithmetic on any device, so the bits travel as int16 and the sign goes on the other side.
        part = self.tokens[start:start + self.mine * self.seq_len + 1].view(torch.int16)
        part = part.to(self.device, non_blocking=True).to(torch.int32) & 0xFFFF
        inputs = part[:-1].view(self.mine, self.seq_len).clone()
        targets = part[1:].to(torch.int64).view(self.mine, self.seq_len)
        return list(zip(inputs, targets))

def load_validation(files: list, shard_tokens: list[int], hp: Hyperparameters, rank: int, world_size: int, device):
    """This rank's share of the validation sequences, [(inputs_T int32, targets_T int64)], and the bytes of text in all of
    them where tokens are bytes (else 0). The first val_tokens tokens of the shards are each predicted once; where they do
    not fill the last sequence, targets of -1 do, which no loss counts."""
    want, pieces = hp.val_tokens + 1, []
    for path, tokens in zip(files, shard_tokens):
        pieces.append(read_tokens(path, min(tokens, want)).to(torch.int32))
        want -= len(pieces[-1])
    stream = torch.cat(pieces)
    inputs, targets = stream[:-1], stream[1:].long()
    text_bytes = int((targets < 256).sum()) if hp.vocab_size == 257 else 0
    padding = -hp.val_tokens % hp.val_seq_len
    inputs = F.pad(inputs, (0, padding), value=hp.vocab_size - 1).view(-1, hp.val_seq_len)
    targets = F.pad(targets, (0, padding), value=-1).view(-1, hp.val_seq_len)
    mine = zip(inputs[rank::world_size], targets[rank::world_size])
    return [(i.to(device), t.to(device)) for i, t in mine], text_bytes

# ----------------------------------------------------------------------------------------------------------------------
# 4. Block masks and attention

def build_block_masks(tokens_T: Tensor, eot: int, window: Tensor, queries_of_keys: bool = True) -> list[BlockMask]:
    """The long and the short mask: a token sees itself and what came before it in its document, within the window.

    window is the long window in tokens, an int tensor on the tokens' device, so that it can grow without a recompile.
    Windows count in blocks: the long one is rounded up, the short one is half of its blocks, at least one, and a query
    block with a window of n blocks sees keys in itself and the n - 1 blocks before. A block that is visible as a whole
    goes to the full list, which needs no masking; a block that a document border or the diagonal crosses goes to the
    partial list. queries_of_keys adds the same lists the other way round, which FlexAttention's backward reads.
    """
    (T,) = tokens_T.shape
    assert T % BLOCK == 0, f"{T} tokens are not whole blocks of {BLOCK}"
    N, device = T // BLOCK, tokens_T.device
    position_T = torch.arange(T, dtype=torch.int32, device=device)
    # The position at which each token's document begins: all there is to know about the documents.
    begin_T = torch.where(tokens_T == eot, position_T, 0).cummax(0).values.to(torch.int32)
    begin_N, last_begin_N = begin_T.view(N, BLOCK)[:, 0], begin_T.view(N, BLOCK)[:, -1]
    single_N = begin_N == last_begin_N  # the block belongs to one document
    block_N = torch.arange(N, dtype=torch.int32, device=device)
    oldest_N = begin_N // BLOCK  # the first block that a query block's first token sees, were there no window
    parts_21 = torch.arange(1, 3, dtype=torch.int32, device=device)[:, None]  # the long window and half of it
    reach_21 = ((window + BLOCK - 1) // BLOCK // parts_21).clamp(min=1) - 1  # blocks beside a block's own

    def lists(direction: int, distance_N: Tensor, crossed_N: Tensor) -> list[list[Tensor]]:
        """The partial and the full blocks of each block, for both windows: counts and indices, from the nearest to the farthest.
        They are the block itself and an unbroken run on one side, which ends after distance_N blocks or where the window does.
        Partial are all those of a block of several documents; of another one, itself and the run's end if a border crosses that."""
        run_2N, crossed_2N = torch.minimum(distance_N, reach_21), (crossed_N & (distance_N <= reach_21)).int()
        partial_2N, full_2N = torch.where(single_N, crossed_2N, run_2N) + 1, torch.where(single_N, run_2N - crossed_2N, 0)
        away_NN = torch.where(single_N[:, None] & (block_N > 0), distance_N[:, None], block_N)
        partial_NN, full_NN = ((block_N[:, None] + direction * away).clamp(0, N - 1) for away in (away_NN, block_N + 1))
        both = zip(partial_2N, full_2N)
        return [[x.int()[None, None] for x in (partial_N, partial_NN, full_N, full_NN)] for partial_N, full_N in both]

    def sees(b, h, query, key):
        return (key <= query) & (begin_T[query] <= key)

    keys, queries = lists(-1, block_N - oldest_N, begin_N % BLOCK > 0), [[None] * 4] * 2
    if queries_of_keys:
        newest_N = (oldest_N <= block_N[:, None]).sum(1, dtype=torch.int32) - 1  # the last block that sees a key block's last token
        queries = lists(1, newest_N - block_N, ~single_N[newest_N])
    return [BlockMask((T, T), *k, *q, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees) for k, q in zip(keys, queries)]

def flex(mask: BlockMask, scale: float):
    """Attention under the mask by FlexAttention, for CUDA under torch.compile."""
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))

def block_sparse(mask: BlockMask, scale: float):
    """Attention under the same mask in plain PyTorch, for devices where FlexAttention has no backward: each query block
    gathers the key blocks that the mask names for it, so memory grows with T x window, never T x T."""
    partial_N, full_N = mask.kv_num_blocks[0, 0], mask.full_kv_num_blocks[0, 0]
    N, device = len(partial_N), partial_N.device
    M = int((partial_N + full_N).max())
    slot_M = torch.arange(M, device=device)
    after_partial_NM = slot_M - partial_N[:, None]
    keys_NM = torch.where(after_partial_NM < 0, mask.kv_indices[0, 0, :, :M],
                          mask.full_kv_indices[0, 0].gather(1, after_partial_NM.clamp(min=0)))
    listed_NM = slot_M < (partial_N + full_N)[:, None]
    offset = torch.arange(BLOCK, device=device)
    query = (torch.arange(N, device=device)[:, None] * BLOCK + offset)[:, :, None, None]
    key = (keys_NM[:, :, None] * BLOCK + offset)[:, None]
    seen = listed_NM[:, None, :, None] & mask.mask_mod(0, 0, query, key)  # which in a full block is true everywhere
    bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf).view(N, 1, BLOCK, M * BLOCK)
    keys = keys_NM.flatten()

    def attend(q, k, v):
        """q_1HTK, k_1GTK, v_1GTK -> y_1HTK"""
        _, H, T, K = q.shape
        G = k.size(1)
        # Query heads that share a key head stand one below the other in the rows of one matrix product.
        q = q.view(G, H // G, N, BLOCK, K).transpose(1, 2).reshape(G * N, -1, K)
        k, v = (x.view(G, N, BLOCK, K).index_select(1, keys).view(G * N, M * BLOCK, K) for x in (k, v))
        biases = bias.to(q.dtype).expand(G, N, H // G, BLOCK, M * BLOCK).reshape(G * N, -1, M * BLOCK)
        y = torch.baddbmm(biases, q, k.mT, alpha=scale).softmax(-1) @ v
        return y.view(G, N, H // G, BLOCK, K).transpose(1, 2).reshape(1, H, T, K)

    return attend

# ----------------------------------------------------------------------------------------------------------------------
# 5. Model

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def embedding(rows: int, dim: int, dtype: torch.dtype) -> nn.Embedding:
    """nn.Embedding, with the same first weights; its own way to draw them on the meta device would import the compiler."""
    return nn.Embedding.from_pretrained(torch.randn(rows, dim, dtype=dtype), freeze=False)

class CastedLinear(nn.Linear):
    """A linear layer without bias whose weight is kept in float32 and cast to the input's type at use. With use_fp8 its
    three matrix products run in FP8 while training (section 6); outside training it is always the plain one."""

    def __init__(self, in_features: int, out_features: int, use_fp8: bool = False, *scales: float):
        super().__init__(in_features, out_features, bias=False)
        self.use_fp8, self.scales = use_fp8, scales

    def reset_parameters(self):
        bound = math.sqrt(3) * 0.5 * self.in_features**-0.5  # uniform with standard deviation 0.5 / sqrt(fan_in)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_fp8 and self.training:
            return fp8_linear(x, self.weight, *self.scales)[0]
        return F.linear(x, self.weight.type_as(x))

class Rotary(nn.Module):
    """Half-rotary positions: of a head's four quarters of channels the first two are rotated, the other two carry no position.
    As x * cos + (x with the quarters of each half swapped) * sin, since a torch.cat of quarters compiles to branches."""

    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        with torch.device("cpu"):  # also for meta_model: arithmetic on meta tensors would import the compiler
            frequency = base ** -torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
            angle = torch.arange(max_seq_len, dtype=torch.float64)[:, None, None, None, None] * frequency  # float32 drifts at 256K
            half, quarter = torch.tensor([1.0, 0.0])[:, None, None], torch.tensor([1.0, -1.0])[:, None]
        self.register_buffer("cos", (angle.cos() * half + 1 - half).float(), persistent=False)
        self.register_buffer("sin", (angle.sin() * half * quarter).float(), persistent=False)

    def forward(self, x_THK: Tensor) -> Tensor:
        T, H, K = x_THK.shape
        x = x_THK.float().view(T, H, 2, 2, K // 4)
        return (x * self.cos[:T] + x.flip(3) * self.sin[:T]).type_as(x_THK).view(T, H, K)

def token_before(x: Tensor, begins_T: Tensor) -> Tensor:
    """x[T, ...] of the token before each token, zero where a document begins."""
    each = (1,) * (x.ndim - 1)
    return F.pad(x[:-1], (0, 0) * (x.ndim - 1) + (1, 0)).masked_fill(begins_T.view(-1, *each), 0)

class CausalSelfAttention(nn.Module):
    """With key_offset half of a key tells what came before its token (modded-nanogpt's partial key offset, 2025): a query that
    looks for a token finds what followed it."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.H, self.G, self.K, self.key_offset = hp.num_heads, hp.num_kv_heads, hp.head_dim, hp.key_offset
        self.qkv = CastedLinear(hp.model_dim, (self.H + 2 * self.G) * self.K)
        self.qkv.weight.row_split = (self.H * self.K, self.G * self.K, self.G * self.K)  # for Muon: three matrices
        self.proj = CastedLinear(self.H * self.K, hp.model_dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x_TD: Tensor, begins_T: Tensor, value_embed, value_mix: Tensor, rotary: Rotary, attend) -> Tensor:
        T = len(x_TD)
        qk, v = self.qkv(x_TD).view(T, -1, self.K).split((self.H + self.G, self.G), dim=1)
        q, k = rotary(norm(qk)).split((self.H, self.G), dim=1)
        if self.key_offset:
            placed, unplaced = k.chunk(2, dim=-1)
            k = torch.cat((placed, token_before(unplaced, begins_T)), dim=-1)
        v = value_mix[0] * v
        if value_embed is not None:
            v = v + value_mix[1] * value_embed.view_as(v)
        y = attend(*(x.transpose(0, 1)[None] for x in (q, k, v)))
        return self.proj(y[0].transpose(0, 1).reshape(T, -1))

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc = CastedLinear(dim, 4 * dim)
        self.proj = CastedLinear(4 * dim, dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x_TD)).square())  # ReLU^2, arXiv:2109.08668

class ValueEmbedding(nn.Module):
    """Embeddings of the tokens that are mixed into the values of the layers that the pattern names (record 2024-12-04).
    The pattern has a character a layer: the number of a table, or . for none; layers may share a table."""

    def __init__(self, pattern: str, vocab_size: int, dim: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.pattern = pattern
        self.tables = nn.ModuleDict({c: embedding(vocab_size, dim, dtype) for c in sorted(set(pattern) - {"."})})

    def forward(self, tokens_T: Tensor) -> list:
        embedded = {c: table(tokens_T) for c, table in self.tables.items()}
        return [embedded.get(c) for c in self.pattern]

class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, has_attention: bool):
        super().__init__()
        self.attn = CausalSelfAttention(hp) if has_attention else None
        self.mlp = MLP(hp.model_dim)

    def forward(self, x_TD, x0_TD, begins_T, mix, value_embed, value_mix, rotary, attend) -> Tensor:
        x_TD = mix[0] * x_TD + mix[1] * x0_TD
        if self.attn is not None:
            x_TD = x_TD + self.attn(norm(x_TD), begins_T, value_embed, value_mix, rotary, attend)
        return x_TD + self.mlp(norm(x_TD))

class GPT(nn.Module):
    """forward(tokens_T, targets_T, window) is the mean loss in nats over the T tokens of one sequence.

    attend is flex or block_sparse (section 4). dtype is that of the embeddings, and so of every activation."""

    LOGITS_TOKENS = 65536  # tokens whose logits exist at once: a validation sequence of 256K takes four portions

    def __init__(self, hp: Hyperparameters, attend, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.hp, self.attend = hp, attend
        L, V = len(hp.windows), -(-hp.vocab_size // 64) * 64  # a padded vocabulary suits the matrix units
        self.embed = embedding(V, hp.model_dim, dtype)
        self.pair_embed = embedding(hp.pair_rows, hp.model_dim, dtype) if hp.pair_rows else None
        self.smear = nn.Parameter(torch.zeros(hp.model_dim)) if hp.smear else None
        self.value_embed = ValueEmbedding(hp.value_embeds, V, hp.num_kv_heads * hp.head_dim, dtype)
        self.rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len), hp.rope_base)
        self.blocks = nn.ModuleList(Block(hp, c == "x") for c in hp.attention)
        self.residual_mix = nn.Parameter(torch.tensor([[1.0, 0.0]] * L))  # weights of the stream and of the embedding
        self.value_mix = nn.Parameter(torch.tensor([[0.5, 0.5]] * L))  # weights of the value and of its embedding
        self.skip_weights = nn.Parameter(torch.ones(L // 2))
        self.lm_head = CastedLinear(hp.model_dim, V, hp.use_fp8, hp.fp8_x_scale, hp.fp8_w_scale, hp.fp8_grad_scale)
        nn.init.zeros_(self.lm_head.weight)

    def embedded(self, tokens_T: Tensor, begins_T: Tensor) -> Tensor:
        """x_TD of the tokens; with what came right before them in their document, where the settings say so: the embedding
        of both as a pair (modded-nanogpt's bigram hash embedding, 2026) and a share of the token before, learned for each
        channel (after its smear gate, 2025)."""
        eot, x_TD = self.hp.vocab_size - 1, self.embed(tokens_T)
        if self.pair_embed is not None:
            before_T = torch.where(begins_T, eot, F.pad(tokens_T[:-1], (1, 0), value=eot)).long()
            x_TD = x_TD + self.pair_embed((before_T * 2654435761 + tokens_T) % self.hp.pair_rows)  # Knuth's factor spreads
        x_TD = norm(x_TD)
        if self.smear is not None:
            x_TD = x_TD + self.smear.type_as(x_TD) * token_before(x_TD, begins_T)
        return x_TD

    def features(self, tokens_T: Tensor, window: Tensor) -> Tensor:
        """x_TD as the head reads it."""
        eot = self.hp.vocab_size - 1
        masks, begins_T = build_block_masks(tokens_T, eot, window, queries_of_keys=self.attend is flex), tokens_T == eot
        attend = {c: self.attend(mask, self.hp.attention_scale) for c, mask in zip("LS", masks) if c in self.hp.windows}
        value_embeds = self.value_embed(tokens_T)
        mixes, value_mixes, skip_weights = self.residual_mix.unbind(), self.value_mix.unbind(), self.skip_weights.unbind()
        x_TD = x0_TD = self.embedded(tokens_T, begins_T)
        # U-Net: the first half's outputs are added to the inputs of the second half, the last to the first.
        L, skips = len(self.blocks), []
        for i, block in enumerate(self.blocks):
            if L - i <= L // 2:
                x_TD = x_TD + skip_weights[i - L + L // 2] * skips.pop()
            x_TD = block(x_TD, x0_TD, begins_T, mixes[i], value_embeds[i], value_mixes[i], self.rotary, attend[self.hp.windows[i]])
            if i < L // 2:
                skips.append(x_TD)
        return norm(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Softcapped logits_TV in float32, between 0 and 2c."""
        c = self.hp.lm_head_softcap
        return 2 * c * torch.sigmoid(self.lm_head(x_TD).float() * (2 / c))

    def summed_loss(self, x_TD: Tensor, targets_T: Tensor) -> Tensor:
        """The cross-entropies of the targets, summed. Capped logits need no maximum taken out before their exponentials are
        summed, and what is written so compiles to one pass over the logits forward and one backward."""
        logits_TV = self.logits(x_TD)
        log_sum_T = logits_TV.exp().sum(-1).log()
        return (log_sum_T.masked_fill(targets_T < 0, 0) + F.nll_loss(logits_TV, targets_T, reduction="none", ignore_index=-1)).sum()

    def forward(self, tokens_T: Tensor, targets_T: Tensor, window: Tensor) -> Tensor:
        portions = zip(*(x.split(self.LOGITS_TOKENS) for x in (self.features(tokens_T, window), targets_T)))
        return torch.stack([self.summed_loss(*portion) for portion in portions]).sum() / len(tokens_T)

@torch.no_grad()
def generate(model: GPT, tokens: list[int], num_tokens: int, window: int, temperature: float = 0.8, top_k: int = 50,
             generator: torch.Generator | None = None) -> list[int]:
    """Continue tokens by num_tokens, recomputing the prefix for each; stops early at an end of text."""
    device, eot, attend = model.embed.weight.device, model.hp.vocab_size - 1, model.attend
    was_training, model.attend = model.training, block_sparse  # lengths vary: nothing here is worth compiling
    model.eval()
    tokens, longest = list(tokens), len(model.rotary.cos)
    for _ in range(num_tokens):
        context = tokens[-longest:]
        padded = context + [eot] * (-len(context) % BLOCK)  # what follows a token does not change its logits
        x_TD = model.features(torch.tensor(padded, dtype=torch.int32, device=device),
                              torch.tensor(window, dtype=torch.int32, device=device))
        logits = model.logits(x_TD[len(context) - 1])[:model.hp.vocab_size].cpu() / max(temperature, 1e-6)
        values, ids = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
        tokens.append(int(ids[torch.multinomial(values.softmax(-1), 1, generator=generator)]))
        if tokens[-1] == eot:
            break
    model.attend = attend
    model.train(was_training)
    return tokens

# ----------------------------------------------------------------------------------------------------------------------
# 6. FP8 linear
#
# FP8 matrix units run at twice the rate of bf16 but a value has 8 bits: e4m3 (up to 448, 3 bits of mantissa) for inputs
# and weights, e5m2 (up to 57344, 2 bits of mantissa) for gradients, which spread over more orders of magnitude. Each
# operand is multiplied by a fixed power of two before its cast, so that its values sit in the middle of that range, and
# the product is divided by both factors. Too small a factor flushes small values to zero, too large a one saturates:
#     input     normed, so |x| <= sqrt(D) = 28 at D = 768: x2 leaves room to 448
#     weight    starts at zero and learns slowly: x2^9 holds weights up to 0.875
#     gradient  of a mean over T tokens, so |g| <= 1/T: at T = 48K x2^19 makes that 11, and its smallest step 3e-11
# A cast past the largest value gives NaN, inf or the largest value, by version and type; hence the clamp.

def compiled_on_cuda(function):
    """function under torch.compile where its first argument is on a CUDA device, as it is elsewhere."""
    compiled = cache(lambda: torch.compile(function, dynamic=False, fullgraph=True))  # the call imports the compiler: seconds
    return lambda x, *args: (compiled() if x.is_cuda else function)(x, *args)

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)

def fp8_matmul(a_mk: Tensor, b_nk: Tensor, scale: float, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T / scale; both contiguous, the layout that the FP8 units read. fast sums in reduced precision."""
    one, inverse = (torch.full((), s, dtype=torch.float32, device=a_mk.device) for s in (1.0, 1 / scale))
    return torch._scaled_mm(a_mk, b_nk.T, scale_a=one, scale_b=inverse, out_dtype=out_dtype, use_fast_accum=fast)

to_fp8_compiled = compiled_on_cuda(to_fp8)

# Custom ops with a registered backward are what torch.compile takes whole; an autograd.Function around such ops was
# silently wrong in torch 2.11. The backward is traced, so that its casts fuse with the loss's own backward.
@torch.library.custom_op("nanogpt::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, w: Tensor, x_scale: float, w_scale: float, grad_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x_TD @ w_VD.T in x's type, and what the backward needs: x and w in FP8)"""
    x8, w8 = to_fp8_compiled(x, x_scale, torch.float8_e4m3fn), to_fp8_compiled(w, w_scale, torch.float8_e4m3fn)
    return fp8_matmul(x8, w8, x_scale * w_scale, x.dtype, fast=True), x8, w8

@fp8_linear.register_fake
def _(x, w, x_scale, w_scale, grad_scale):
    fp8 = torch.float8_e4m3fn
    return x.new_empty(len(x), len(w)), torch.empty_like(x, dtype=fp8), torch.empty_like(w, dtype=fp8)

@torch.library.custom_op("nanogpt::fp8_grad_matmul", mutates_args=())
def fp8_grad_matmul(a: Tensor, b: Tensor, scale: float, out_dtype: torch.dtype) -> Tensor:
    return fp8_matmul(a, b, scale, out_dtype, fast=False)

@fp8_grad_matmul.register_fake
def _(a, b, scale, out_dtype):
    return a.new_empty(len(a), len(b), dtype=out_dtype)

def fp8_setup_context(ctx, inputs, output):
    _, _, *ctx.scales = inputs
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)

def fp8_autograd(ctx, g, *_):
    (x_scale, w_scale, grad_scale), (x8, w8) = ctx.scales, ctx.saved_tensors
    g8 = to_fp8(g, grad_scale, torch.float8_e5m2)
    grad_x = fp8_grad_matmul(g8.contiguous(), w8.T.contiguous(), grad_scale * w_scale, g.dtype)
    grad_w = fp8_grad_matmul(g8.T.contiguous(), x8.T.contiguous(), grad_scale * x_scale, torch.float32)
    return grad_x, grad_w, None, None, None

fp8_linear.register_autograd(fp8_autograd, setup_context=fp8_setup_context)

# ----------------------------------------------------------------------------------------------------------------------
# 7. Optimizers

def optimizer_groups(model: GPT, hp: Hyperparameters) -> tuple[list[nn.Parameter], list[dict]]:
    """Which optimizer owns which parameters: Muon's, and Adam's groups."""
    matrices = list(model.blocks.parameters())
    embeddings = [p for name, p in model.named_parameters() if "embed" in name]
    scalars = [p for name, p in model.named_parameters() if name in ("smear", "residual_mix", "value_mix", "skip_weights")]
    adam = [  # params, peak learning rate, betas, epsilon                                            example shape
        dict(params=[model.lm_head.weight], peak_lr=hp.head_lr, betas=hp.adam_betas, eps=hp.adam_eps),  # [50304, 768]
        dict(params=embeddings, peak_lr=hp.embed_lr, betas=hp.adam_betas, eps=hp.adam_eps),             # [50304, 768]
        dict(params=scalars, peak_lr=hp.scalar_lr, betas=hp.adam_betas, eps=hp.adam_eps),               # [12, 2]
    ]
    owned = matrices + [p for group in adam for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters())), "a parameter is in no group or in two"
    assert all(p.ndim == 2 for p in matrices), "Muon takes matrices"
    assert sum(hasattr(p, "row_split") for p in matrices) == hp.attention.count("x"), "Q, K and V are to be orthogonalized separately"
    return matrices, adam

def flat_gradients(params: list[nn.Parameter], numel: int) -> Tensor:
    """One tensor of numel elements that holds the gradients of params end to end: each p.grad is a view of it, and
    autograd accumulates in place, so what is sent to other ranks is never copied together first."""
    flat, sizes = torch.zeros(numel, dtype=params[0].dtype, device=params[0].device), [p.numel() for p in params]
    for p, part in zip(params, flat[:sum(sizes)].split(sizes)):
        p.grad = part.view_as(p)
    return flat

@compiled_on_cuda
def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """For each matrix of x[..., rows, cols] = U S V^T about U V^T: singular values end between 0.7 and 1.2, which serves
    as well as 1. Quintic iteration with coefficients that are steepest at zero (Keller Jordan's Muon, record 2024-10)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    shape, tall = x.shape, x.size(-2) > x.size(-1)
    x = x.flatten(0, -3)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)

def orthogonalize(x: Tensor, row_split: tuple) -> Tensor:
    """newton_schulz of the row_split parts of each x[n, rows, cols] by themselves, each scaled by sqrt(rows / cols)
    where it is tall, so that an update changes outputs by as much for any shape."""
    if len(set(row_split)) == 1:
        parts = newton_schulz(x.unflatten(1, (len(row_split), -1)))
        return parts.flatten(1, 2) * max(1, row_split[0] / x.size(-1)) ** 0.5
    return torch.cat([orthogonalize(part, (part.size(1),)) for part in x.split(row_split, dim=1)], dim=1)

@compiled_on_cuda
def even_rows(x: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv:2510.05491): each row of x[n, rows, cols] over the root of its mean square, of which squares[n, rows, 1] keeps
    a running mean, so that no output of a layer learns far faster than another; each matrix keeps its norm, Q, K and V as one."""
    now = x.float().square().mean(-1, keepdim=True)
    squares.lerp_(now, 1 - beta2)
    factor = (squares + 1e-10).rsqrt()  # squares begins at zero, but what all rows have in common is lost in the next line
    factor = factor * (now.sum(1, keepdim=True) / ((now * factor.square()).sum(1, keepdim=True) + 1e-10)).sqrt()
    return (x * factor).type_as(x)

class Muon:
    """Momentum, orthogonalized, for matrices (Keller Jordan et al., 2024). Parameters of equal shape form a group that is
    one batch of arithmetic; each rank owns an equal share of a group's slots (the last may be empty), keeps the
    state of those alone, and sends its updates to the others while it works on the next group."""

    STATE = ("momentum", "row_squares")

    def __init__(self, params: list[nn.Parameter], rank: int, world_size: int, dtype: torch.dtype, deterministic: bool = False):
        self.rank, self.world_size, self.dtype, self.deterministic = rank, world_size, dtype, deterministic
        by_shape = {}
        for p in params:
            by_shape.setdefault((p.shape, getattr(p, "row_split", (len(p),))), []).append(p)
        self.groups = []
        for (shape, row_split), members in by_shape.items():
            own = -(-len(members) // world_size)
            grads = flat_gradients(members, own * world_size * shape.numel()).view(-1, *shape)
            mine = grads.new_zeros(own, *shape) if world_size > 1 else grads
            self.groups.append(dict(
                params=members, row_split=row_split, grads=grads, mine=mine, received=None,
                momentum=torch.zeros_like(mine), row_squares=mine.new_zeros(own, shape[0], 1),
                updates=torch.zeros_like(grads, dtype=dtype) if world_size > 1 else None))

    def reduce_gradients(self):
        """Launch the exchange that leaves each rank with the summed gradients of the matrices it owns."""
        for group in self.groups if self.world_size > 1 else ():
            group["received"] = (tree_reduce_scatter if self.deterministic else reduce_scatter)(group["mine"], group["grads"])

    @torch.no_grad()
    def step(self, lr: float, momentum: float, beta2: float = 0.0):
        sent = []
        for group in self.groups:
            if group["received"]:
                group["received"].wait()
            grad, average = group["mine"], group["momentum"]
            average.lerp_(grad, 1 - momentum)
            update = grad.lerp(average, momentum)  # Nesterov: look ahead along the new average
            # The number of matrices in a batch, which depends on that of ranks, can change the order of sums.
            batches = update.to(self.dtype).split(1 if self.deterministic else len(update))
            updates = [orthogonalize(batch, group["row_split"]) for batch in batches]
            if beta2:
                updates = [even_rows(x, squares, beta2) for x, squares in zip(updates, group["row_squares"].split(len(updates[0])))]
            update, gathering = torch.cat(updates) if self.deterministic else updates[0], None
            if self.world_size > 1:
                update, gathering = group["updates"], all_gather(group["updates"], update.contiguous())
            sent.append((group, update, gathering))
        for group, update, gathering in sent:
            if gathering:
                gathering.wait()
            torch._foreach_add_(group["params"], list(update[:len(group["params"])].unbind()), alpha=-lr)
            group["grads"].zero_()

    def gathered(self, kind: str) -> dict:
        """{parameter: what of STATE belongs to it}, from the ranks that own it."""
        table = {}
        for group in self.groups:
            whole = own = group[kind]
            if self.world_size > 1:
                whole = own.new_empty(self.world_size * len(own), *own.shape[1:])
                all_gather(whole, own).wait()
            table |= zip(group["params"], whole)
        return table

    def take(self, kind: str, table: dict):
        """The inverse of gathered."""
        for group in self.groups:
            for own, p in zip(group[kind], group["params"][self.rank * len(group[kind]):]):
                own.copy_(table[p])

class Adam:
    """Adam (arXiv:1412.6980), by torch.optim's own kernel; an optimizer of torch.optim would import the compiler, seconds that a
    CPU has no use for. A group's gradients lie in one buffer, which travels on a channel of its own while Muon works."""

    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[dict], world_size: int, deterministic: bool = False):
        self.groups = []
        for group in groups:
            padded = -(-sum(p.numel() for p in group["params"]) // world_size) * world_size
            state = {kind: [torch.zeros_like(p) for p in group["params"]] for kind in self.STATE}
            self.groups.append(dict(group, **state, grads=flat_gradients(group["params"], padded)))
        self.steps = torch.zeros((), device=groups[0]["params"][0].device)
        self.world_size, self.deterministic, self.received = world_size, deterministic, []
        self.channel = dist.new_group() if world_size > 1 else None

    def reduce_gradients(self):
        """Launch the exchange that leaves each rank with the summed gradients."""
        buffers = [group["grads"] for group in self.groups]
        if self.world_size > 1 and self.deterministic:
            for grads in buffers:
                share = grads.new_empty(len(grads) // self.world_size)
                tree_reduce_scatter(share, grads)
                all_gather(grads, share).wait()
        elif self.world_size > 1:
            self.received = [dist.all_reduce(grads, group=self.channel, async_op=True) for grads in buffers]

    @torch.no_grad()
    def step(self, lr_scale: float):
        for received in self.received:
            received.wait()
        self.steps += 1
        for group in self.groups:
            params, (beta1, beta2) = group["params"], group["betas"]
            torch._fused_adam_(params, [p.grad for p in params], group["exp_avg"], group["exp_avg_sq"], [], [self.steps] * len(params),
                               lr=group["peak_lr"] * lr_scale, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"],
                               amsgrad=False, maximize=False)
            group["grads"].zero_()

    def gathered(self, kind: str) -> dict:
        """{parameter: what of STATE belongs to it}: the tensors themselves, which are the same on every rank."""
        return {p: own for group in self.groups for p, own in zip(group["params"], group[kind])}

# ----------------------------------------------------------------------------------------------------------------------
# 8. Gradient exchange: ranks, their collectives, and how an error on one is told to all

LOOK = ("look at what the others printed and at the network between the machines (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name "
        "its interface, NCCL_DEBUG=INFO tells more)")

@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None  # for words between the ranks: gloo, and as patient as saving takes

def start_ranks() -> Ranks:
    """This process's place among those that torchrun started (alone without torchrun), and its device."""
    rank, world_size, local_rank = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    cuda, count = torch.cuda.is_available(), torch.cuda.device_count()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        require(local_rank < count, f"rank {rank} has no GPU: {count} on this machine; lower --nproc_per_node")
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read at CUDA's first allocation
        torch.cuda.set_device(device)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=end_with_launcher, daemon=True).start()
    if world_size == 1:
        return Ranks(rank, world_size, device)

    def give_up():
        say_error(f"error: rank {rank} on {platform.node()} reached no common start with the other ranks in two minutes: {LOOK}")
        os._exit(2)

    alarm = threading.Timer(120, give_up)  # connecting can hang where no exception and no signal gets through
    alarm.daemon = True
    alarm.start()
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    silence = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    threading.Thread(target=end_with_neighbour, args=(rank, world_size, silence), daemon=True).start()
    ranks = Ranks(rank, world_size, device, dist.new_group(backend="gloo", timeout=timedelta(hours=1)))
    probe_connections()
    self_test(ranks)
    alarm.cancel()
    return ranks

def end_with_launcher():
    """A thread: torchrun's workers live in sessions of their own and would outlive a launcher that was killed."""
    while os.getppid() == LAUNCHER:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)  # as the launcher would have done: finish the step and save
    time.sleep(30)
    os._exit(1)

def probe_connections():
    """Have the kernel end the connections to a machine that has vanished without a word within a minute; else it is half an hour."""
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_USER_TIMEOUT", 60_000)):  # s, s, ms
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        except OSError:
            pass  # closed by now, or not of TCP

def end_with_neighbour(rank: int, world_size: int, channel: dist.ProcessGroup):
    """A thread: the end of a rank would leave the others waiting in a collective, but its connections close with it. So each
    rank listens to the next one, which never speaks."""
    try:
        dist.recv(torch.empty(1), src=(rank + 1) % world_size, group=channel)
    except Exception:
        time.sleep(5)  # where all end for one reason each says so itself
        say_error(f"error: rank {rank} ends, since rank {(rank + 1) % world_size} has; the first error that a rank printed, on "
                  "whichever machine, is the reason")
        os._exit(1)

def agree(ranks: Ranks, function, everyone: bool = False):
    """function()'s result on rank 0, on every rank. It runs on rank 0 alone, or on everyone; a UserError is raised on all."""
    result, complaint = None, None
    try:
        if everyone or ranks.rank == 0:
            result = function()
    except UserError as e:
        complaint = f"rank {ranks.rank} on {platform.node()}: {e}" if everyone and ranks.world_size > 1 else str(e)
    answers = [(result, complaint)] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(answers, (result, complaint), group=ranks.control)
    for _, complaint in answers:
        require(not complaint, complaint, everywhere=True)
    return answers[0][0]

def self_test(ranks: Ranks, seconds: float = 60):
    """Refuse to start where a rank is missing or a collective gives a wrong sum."""
    try:
        dist.monitored_barrier(ranks.control, timedelta(seconds=seconds), wait_all_ranks=True)
    except RuntimeError as e:
        missing = re.search(r"Ranks ([\d, ]+) failed|$", str(e))[1] or "0"
        raise UserError(f"rank {ranks.rank} waited {seconds:.0f} s in vain for rank(s) {missing}: {LOOK}") from None

    def add_up():
        x = torch.full((1024,), float(ranks.rank), device=ranks.device)
        dist.all_reduce(x)
        require((x == sum(range(ranks.world_size))).all(),
                "an all_reduce gave a wrong sum; its GPU, its driver or the network is at fault")

    agree(ranks, add_up, everyone=True)

# torch 2.13 renamed both collectives and warns of the old names, which torch 2.11 needs.
reduce_scatter = partial(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor, async_op=True)
all_gather = partial(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, async_op=True)

def tree_sum(terms) -> list[Tensor]:
    """The sum of lists of tensors, in pairs, pairs of pairs and so on: the same bits whether all terms are summed here or
    each rank sums an equal run of them, a power of two long, and the ranks' sums are summed here."""
    partial_sums = []
    for i, term in enumerate(terms):
        while i % 2:
            term, i = torch._foreach_add(partial_sums.pop(), term), i // 2
        partial_sums.append(term)
    return reduce(torch._foreach_add, partial_sums)

def tree_reduce_scatter(out: Tensor, parts: Tensor):
    """reduce_scatter whose sums are tree_sums over the ranks."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    out.copy_(tree_sum([part] for part in received.view(-1, *out.shape))[0])

# ----------------------------------------------------------------------------------------------------------------------
# 9. Run log and checkpoints

SEPARATOR, CHECKPOINT_FORMAT, STATE = "=" * 100, 2, ("model", *Muon.STATE, *Adam.STATE)
LOWER_RATES = "lower the learning rates (--muon_lr, --embed_lr, --head_lr)"

def lock(file) -> bool:
    """Whether this process now holds the lock on a log, which a run keeps to its end, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return not isinstance(e, BlockingIOError)  # any other error: a file system without locks
    return True

class RunLog:
    """Rank 0's log file and console. On other ranks, which never begin one, every call does nothing."""

    file = bar = None

    def begin(self, hp: Hyperparameters, start: dict):
        """start: the checkpoint that is resumed, whose log is cut back to where it was then."""
        self.path = Path(start["log"]) if start else Path(hp.records, f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%SZ}_{hp.name}.log")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not start and self.path.exists():  # another run began in the same second
                self.path = self.path.with_stem(f"{self.path.stem}_{os.getpid()}")
            self.file, self.folder = open(self.path, "a" if start else "x", encoding="utf-8"), self.path.with_suffix("")
            require(lock(self.file), f"{self.path}: this run is alive; wait for its end or stop it")
            if start:
                for path in checkpoints_in(self.folder):
                    if path.name > f"step{start['step']:08}.pt":  # damaged, or of a future that is given up
                        path.rename(path.with_suffix(".set_aside"))
                self.file.truncate(start["log_bytes"])
        except OSError as e:
            raise UserError(f"{self.path}: the log cannot be written ({e.strerror}); choose another --records") from None
        if sys.stdout.isatty():
            self.bar = tqdm(total=hp.num_iterations, unit="step", dynamic_ncols=True)

    def write(self, text: str, console: bool = True):
        if self.file is None:
            return
        if console:
            try:
                tqdm.write(text) if self.bar is not None else print(text, flush=True)
            except OSError:  # whoever read the console has gone; the log goes on
                sys.stdout = open(os.devnull, "w")
        try:
            self.file.write(text + "\n")
            self.file.flush()
        except OSError as e:
            raise UserError(f"{self.path}: the log cannot be written ({e.strerror}); free space and start again") from None

    def step_line(self, step: int, kind: str, loss: float, seconds: float, hp: Hyperparameters):
        schedule = step if kind == "val_loss" else step - 1  # training step n runs on the schedules' values at n - 1
        average = f"{1000 * seconds / step:.2f}" if step else "nan"
        self.write(f"step:{step}/{hp.num_iterations} {kind}:{loss:.4f} train_time:{1000 * seconds:.0f}ms "
                   f"step_avg:{average}ms tokens:{step * hp.micro_batches * hp.train_seq_len} "
                   f"lr:{lr_scale(schedule, hp):.3f} window:{window_tokens(schedule, hp)}",
                   console=kind == "val_loss" or self.bar is None)
        if self.bar is not None and kind == "train_loss":
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)

    def close(self):
        for what in (self.bar, self.file):
            try:
                what is None or what.close()
            except OSError:
                pass  # as write has said

class Clock:
    """Training time in seconds: the sum of the stretches between start and stop, each begun and ended with an idle device."""

    def __init__(self, device: torch.device, elapsed: float = 0.0):
        self.cuda, self.elapsed = device.type == "cuda", elapsed

    def start(self):
        if self.cuda:
            torch.cuda.synchronize()
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
        self.began = time.perf_counter()

    def stop(self):
        if self.cuda:
            torch.cuda.synchronize()
        self.elapsed += time.perf_counter() - self.began

    def mark(self):
        """A function that gives the training time at which the device gets to this point, and waits until it has."""
        if not self.cuda:
            seconds = self.elapsed + time.perf_counter() - self.began
            return lambda: seconds
        event, origin, elapsed = torch.cuda.Event(enable_timing=True), self.origin, self.elapsed
        event.record()
        return lambda: event.synchronize() or elapsed + origin.elapsed_time(event) / 1000

def shell(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""

def fingerprint(path: str) -> str:
    """A shard's path, size and a hash of its first and last megabyte."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    digest = hashlib.sha256(content[:1 << 20].tobytes() + content[-1 << 20:].tobytes()).hexdigest()
    return f"{path} {(len(content) - SHARD_HEADER_BYTES) // 2} tokens sha256 {digest[:16]}"

def describe_environment(hp: Hyperparameters, ranks: Ranks, data: dict) -> list[str]:
    """The environment as `key: value` lines."""
    lines = [f"command: {' '.join(sys.argv)}", f"host: {platform.node()}", f"platform: {platform.platform()}",
             f"python: {platform.python_version()}", f"torch: {torch.__version__}", f"ranks: {ranks.world_size}",
             f"nodes: {ranks.world_size // int(os.environ.get('LOCAL_WORLD_SIZE', ranks.world_size))}", f"seed: {hp.seed}"]
    if ranks.device.type == "cuda":
        query = "index,name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,ecc.mode.current"
        lines += [f"gpus: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}", f"cuda: {torch.version.cuda}",
                  f"nccl: {'.'.join(map(str, torch.cuda.nccl.version()))}",
                  *(f"gpu: {line}" for line in shell("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines())]
    else:
        model = shell("grep", "-m1", "model name", "/proc/cpuinfo").partition(": ")[2] or platform.machine()
        lines += [f"cpu: {os.cpu_count()} x {model}, {torch.backends.cpu.get_cpu_capability()}",
                  f"threads: {1 if hp.deterministic else torch.get_num_threads()} a rank"]
    if commit := shell("git", "rev-parse", "HEAD"):
        lines.append(f"git: {commit}{' with uncommitted changes' if shell('git', 'status', '--porcelain', '-uno') else ''}")
    return lines + [f"data: {line}" for line in data["fingerprints"]]

def write_checkpoint(path: Path, payload: dict):
    """payload, then the sha256 of it; under its final name only once it is whole on the disk."""
    unfinished = path.with_name("unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as f:
            torch.save(dict(payload, format=CHECKPOINT_FORMAT), f)
            f.flush()
            f.write(hashlib.sha256(np.memmap(unfinished, dtype=np.uint8, mode="r")).digest())  # torch.load ignores what follows
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as e:
        unfinished.unlink(missing_ok=True)
        reason = e.strerror if isinstance(e, OSError) else first_line(e)
        raise UserError(f"{path}: cannot be saved ({reason}); free space, then go on with --resume; what was saved before is "
                        "whole") from None

def read_checkpoint(path: Path) -> dict:
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        require(hashlib.sha256(content[:-32]).digest() == content[-32:].tobytes(), "its checksum is wrong")
        payload = torch.load(path, map_location="cpu", weights_only=True)
        require(payload["format"] == CHECKPOINT_FORMAT, "another version of this script wrote it")
    except Exception as e:
        raise UserError(f"{path}: is damaged, or no checkpoint of this script ({first_line(e)})") from None
    return payload

def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step*.pt"), reverse=True)

def training_state(params: dict, muon: Muon, adam: Adam) -> dict:
    """{each of STATE: {parameter's name: tensor}}, whole, on every rank."""
    tables = {kind: optimizer.gathered(kind) for optimizer in (muon, adam) for kind in optimizer.STATE}
    tables["model"] = {p: p.detach() for p in params.values()}
    return {kind: {name: tables[kind][p] for name, p in params.items() if p in tables[kind]} for kind in STATE}

def save_checkpoint(payload: dict, ranks: Ranks, log: RunLog):
    """One file for any number of ranks; the two newest files are kept."""
    began = time.perf_counter()
    require(all(p.isfinite().all() for p in payload["model"].values()), f"step {payload['step']}: a weight is no longer finite; "
            f"{LOWER_RATES}; the checkpoint before it is kept", everywhere=True)

    def write() -> Path:
        os.fsync(log.file.fileno())
        path = log.folder / f"step{payload['step']:08}.pt"
        write_checkpoint(path, dict(payload, log_bytes=os.path.getsize(log.path)))
        for old in checkpoints_in(path.parent)[2:]:
            old.unlink()
        return path

    path = agree(ranks, write)
    log.write(f"checkpoint: {path}, saved in {time.perf_counter() - began:.2f} s, untimed")

@torch.no_grad()
def restore(saved: dict, step: int, params: dict, muon: Muon, adam: Adam, ranks: Ranks):
    """Give every rank the state that rank 0 has, whatever the number of ranks that saved it; zeros for what it lacks."""
    state = training_state(params, muon, adam)
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            tensor.copy_(saved[kind][name]) if kind in saved else tensor.zero_()
            if ranks.world_size > 1:
                dist.broadcast(tensor, src=0)
    for kind in Muon.STATE:
        muon.take(kind, {params[name]: tensor for name, tensor in state[kind].items()})
    adam.steps.fill_(step)

def find_checkpoint(hp: Hyperparameters, command: argparse.Namespace, data: dict) -> tuple[dict, list[str]]:
    """The checkpoint that --resume asks for, with its log's path, and lines about what was passed over to get to it. Without a
    path that is the newest unfinished run's of this name and these settings; one without a checkpoint is not passed over."""
    settings = {name: value for name, value in dataclasses.asdict(hp).items()  # a seed of -1 takes the run's own
                if name not in ("records", "save_every") and (name, value) != ("seed", -1)}
    asked, broken, refusals, what = Path(command.resume).absolute(), [], [], command.resume
    one_file = asked.suffix == ".pt" and asked.is_file()
    if what:
        folder = asked.parent if one_file else asked
        logs = [asked if asked.is_file() and not one_file else folder.parent / f"{folder.name}.log"]
    else:
        what, logs = f"a run named {hp.name} in {hp.records}", sorted(Path(hp.records).glob(f"*_{hp.name}*.log"), reverse=True)
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        named = command.resume or text.startswith(f"name = {hp.name!r}\n")
        if not text or not named or "\nfinal_val_loss: " in text:
            continue
        passed_over = []
        for path in checkpoints_in(log.with_suffix("")):
            if one_file and path.name > asked.name:
                continue
            try:
                payload = read_checkpoint(path)
                require(log.stat().st_size >= payload["log_bytes"], f"{log}: was cut to before {path.name}")
                break
            except UserError as e:
                passed_over.append(str(e))
        else:  # none is whole; is the run of these settings, as the log's first lines tell?
            mine = all(f"{name} = {value!r}\n" in text for name, value in settings.items())
            require(command.resume or not mine, f"{log}: this run has no whole checkpoint to go on from; start it anew, or name an "
                                                "older run with --resume=PATH")
            broken += passed_over
            continue
        differ = differences(payload, settings, data)
        if differ and not command.resume_anyway:
            refusals.append(f"{path}: {'; '.join(differ)}. Give the run its own settings back, or add --resume_anyway")
            continue
        with open(log, "rb") as file:
            require(lock(file), f"{log}: this run is alive; wait for its end or stop it")
        shapes = {name: p.shape for name, p in meta_model(hp).named_parameters()}
        require({name: p.shape for name, p in payload["model"].items()} == shapes,
                f"{path}: the checkpoint holds a model of another shape: {'; '.join(differ)}")
        require(payload["step"] <= hp.num_iterations, f"{path} is past --num_iterations={hp.num_iterations}")
        notes = [f"note: {reason}; going on from the checkpoint before it" for reason in passed_over]
        return dict(payload, log=os.path.relpath(log)), notes + [f"note: resumed although {line}" for line in differ]
    nothing = f"--resume: {what} is not there, is finished or has no checkpoint to go on from"
    raise UserError("; ".join(refusals[:1] or [*broken, nothing]))

def differences(payload: dict, settings: dict, data: dict) -> list[str]:
    """What would make the rest of a run differ from what it began as."""
    then = payload["hyperparameters"]
    lines = [f"--{name} was {then.get(name)} and is {value}" for name, value in settings.items() if then.get(name) != value]
    lines += ["this script is not the one in the log"] if payload["script"] != data["script"] else []
    shards = zip_longest(payload["data"], data["fingerprints"])
    return lines + [f"the data was {was} and is {now}" for was, now in shards if was != now][:1]

# ----------------------------------------------------------------------------------------------------------------------
# 10. Preflight checks: what can be known to go wrong is said before anything slow begins

def check_settings(hp: Hyperparameters, world_size: int):
    """Refuse settings that contradict themselves or each other."""
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    require((2, 11) <= version < (3, 0), f"torch {torch.__version__} is not between 2.11 and 3.0; requirements.txt has one")
    require(hp.name and all(c.isalnum() or c in "._-" for c in hp.name), f"--name={hp.name}: use letters, digits and ._- only")
    require(hp.dtype in ("auto", "bfloat16", "float32"), f"--dtype={hp.dtype} is not auto, bfloat16 or float32")
    for f in dataclasses.fields(hp):
        value, (least, most, multiple) = getattr(hp, f.name), f.metadata["range"]
        for number in value if isinstance(value, tuple) else [] if isinstance(value, str) else [value]:
            require(least <= number <= most and abs(number) < (math.inf if type(number) is float else 2**63),
                    f"--{f.name}={value} is not between {least} and {most}: {f.metadata['help']}")
            require(not multiple or number % multiple == 0, f"--{f.name}={value} is not a multiple of {multiple}")
    require(hp.window_start <= hp.window_end, f"--window_start={hp.window_start} is above --window_end={hp.window_end}")
    table = f"--windows={hp.windows} --value_embeds={hp.value_embeds} --attention={hp.attention}"
    require(len(hp.windows) == len(hp.value_embeds) == len(hp.attention) > 0, f"{table}: each needs one character a layer")
    for name, allowed in (("windows", "LS"), ("attention", "x."), ("value_embeds", "0123456789.")):
        strange = set(getattr(hp, name)) - set(allowed)
        require(not strange, f"--{name}={getattr(hp, name)} has {', '.join(sorted(strange))}; it takes {', '.join(allowed)}")
    require("x" in hp.attention, f"--attention={hp.attention} has no layer with attention")
    lost = [i for i, (a, v) in enumerate(zip(hp.attention, hp.value_embeds)) if a == "." != v]
    require(not lost, f"{table}: layer {lost and lost[0]} has a value embedding but no attention")
    fits = hp.num_heads % (hp.num_kv_heads or 1) == 0
    require(fits, f"--num_kv_heads={hp.num_kv_heads} does not divide --num_heads={hp.num_heads}")
    fits = [str(n) for n in range(1, hp.micro_batches + 1) if hp.micro_batches % n == 0]
    require(str(world_size) in fits, f"{world_size} ranks do not divide {hp.micro_batches} micro-batches: start "
                                     f"{', '.join(fits)} ranks, or set --micro_batches to a multiple of {world_size}")
    share = hp.micro_batches // world_size
    require(not hp.deterministic or world_size == 1 or share & (share - 1) == 0, "--deterministic sums in pairs: "
            f"{share} micro-batches a rank are no power of two; set --micro_batches to {world_size} times one")

def meta_model(hp: Hyperparameters) -> GPT:
    """The model's parameters without their numbers: names, shapes and types. (The angles have numbers; hence few of them.)"""
    with torch.device("meta"):
        return GPT(dataclasses.replace(hp, train_seq_len=BLOCK, val_seq_len=BLOCK), block_sparse, getattr(torch, hp.dtype))

def state_bytes(hp: Hyperparameters) -> tuple[int, int]:
    """Bytes of (the model, a checkpoint): Muon keeps one number for each of its weights, Adam two."""
    sizes = {name: p.nbytes for name, p in meta_model(hp).named_parameters()}
    return sum(sizes.values()), sum(n * (2 if name.startswith("blocks.") else 3) for name, n in sizes.items())

def check_disk(hp: Hyperparameters, start: dict):
    """Refuse a disk without room for the trained model, the two checkpoints that are kept and the one being written; of those a
    resumed run has some."""
    records, (model, state) = Path(hp.records).absolute(), state_bytes(hp)
    folder = next(path for path in (records, *records.parents) if os.path.exists(path))
    held = len(checkpoints_in(Path(start["log"]).with_suffix(""))) if start else 0
    states = max(1, (3 if hp.save_every else 1) - held)
    free, need = shutil.disk_usage(folder).free >> 20, (hp.save * model + states * state) >> 20
    require(free > need, f"{folder}: {free} MiB free, checkpoints take {need} MiB; free some, or choose another --records")

def check_memory(hp: Hyperparameters, device: torch.device):
    """Refuse a GPU whose free memory is less than a lower bound of what training takes."""
    if device.type == "cuda":
        a_token = (2 if hp.dtype == "bfloat16" else 4) * (10 * len(hp.windows) * hp.model_dim + hp.vocab_size)  # activations
        need = sum(state_bytes(hp)) + hp.train_seq_len * a_token  # gradients take what weights do
        free, total = torch.cuda.mem_get_info(device)
        require(free > need, f"{free >> 20} of {total >> 20} MiB of GPU memory are free, training takes more than {need >> 20}: "
                             "end other processes, or lower --train_seq_len and raise --micro_batches")

def check_data(hp: Hyperparameters) -> dict:
    """Check the shards; {train, val: paths, train_tokens, val_tokens: how many each holds, spans: what each step reads}."""
    data = {}
    for kind in ("train", "val"):
        pattern = getattr(hp, f"{kind}_files")
        data[kind] = sorted(glob.glob(pattern, recursive=True))
        require(data[kind], f"no file matches --{kind}_files={pattern}; ./run.sh makes or fetches a preset's data, "
                            "data/tokenize_text.py makes shards of your own text")
        data[f"{kind}_tokens"] = [check_shard(path, hp.vocab_size) for path in data[kind]]
    held = sum(data["val_tokens"]) - 1  # the first token is not predicted
    need = max(1, hp.val_tokens)
    require(need <= held, f"--val_files={hp.val_files} holds {held} tokens to predict, {need} are asked for: add shards, or lower "
                          "--val_tokens (0 takes all)")
    step_tokens = hp.micro_batches * hp.train_seq_len
    data["spans"] = plan_spans(data["train_tokens"], step_tokens, hp.train_seq_len, hp.epochs)
    steps = sum(span.steps for span in data["spans"])
    require(steps >= max(1, hp.num_iterations), f"{hp.num_iterations} steps of {step_tokens} tokens were asked for, "
            f"{len(data['train'])} shard(s) with {sum(data['train_tokens'])} tokens hold {steps} in {hp.epochs} pass(es): add shards, "
            "raise --epochs, or lower --num_iterations, --micro_batches or --train_seq_len")
    data["fingerprints"] = [fingerprint(path) for path in data["train"] + data["val"]]
    return data

def fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))

def resolve(hp: Hyperparameters, device: torch.device) -> tuple[Hyperparameters, list[str]]:
    """What was left open, decided: the number of key heads, what the hardware can do; and lines that say so."""
    cuda = device.type == "cuda"
    use_fp8 = hp.use_fp8 and cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    dtype = hp.dtype if hp.dtype != "auto" else "bfloat16" if fast_bf16(device) else "float32"
    fallbacks = (
        (dtype != hp.dtype and dtype == "float32", "activations in float32, since this hardware has no fast bfloat16"),
        (use_fp8 != hp.use_fp8, f"the head trains in {dtype}, since this hardware has no FP8 (GPUs of compute capability 8.9 on "
                                "have it)"),
        (not cuda, "block-sparse attention in plain PyTorch and no compiler, since there is no CUDA GPU"))
    notes = [f"note: {note}" for chosen, note in fallbacks if chosen]
    return dataclasses.replace(hp, dtype=dtype, use_fp8=use_fp8, num_kv_heads=hp.num_kv_heads or hp.num_heads), notes

def prepare(hp: Hyperparameters, command: argparse.Namespace, world_size: int, device: torch.device, script: str):
    """Every check that one process can do: (hyperparameters with nothing left open, lines, data, the checkpoint to resume)."""
    check_settings(hp, world_size)
    (hp, notes), data, start = resolve(hp, device), check_data(hp), {}
    hp = dataclasses.replace(hp, val_tokens=hp.val_tokens or sum(data["val_tokens"]) - 1)
    data["script"] = hashlib.sha256(script.encode()).hexdigest()
    if command.resume is not None:
        try:
            start, more = find_checkpoint(hp, command, data)
        except OSError as e:
            raise UserError(f"--resume: {e.filename} cannot be read ({e.strerror})") from None
        notes += more
    check_disk(hp, start)
    if hp.seed < 0:
        drawn = int(np.random.default_rng().integers(2**31))
        hp = dataclasses.replace(hp, seed=start["hyperparameters"]["seed"] if start else drawn)
    return hp, notes, data, start

# ----------------------------------------------------------------------------------------------------------------------
# 11. Main: build, warm up, restore, train

# Dense bf16 and FP8 with float32 sums, from the makers' data sheets
PEAK_TFLOPS = {"H200": (989, 1979), "H100 80GB HBM3": (989, 1979), "H100 PCIe": (756, 1513), "A100": (312, 312),
               "L40S": (362, 733), "RTX 4090": (165, 330)}

def hardware_limit(device: torch.device, dtype: torch.dtype) -> tuple[float, float, str]:
    """(FLOP/s of a rank in the main type, in FP8, where the figures come from)"""
    if device.type == "cuda" and dtype == torch.bfloat16:
        for name, (bf16, fp8) in PEAK_TFLOPS.items():
            if name in torch.cuda.get_device_name(device):
                return bf16 * 1e12, fp8 * 1e12, f"data sheet's {bf16} bf16 and {fp8} FP8 TFLOP/s of the {name}"
    n, best = 4096 if device.type == "cuda" else 1024, 0.0
    a = torch.randn(n, n, device=device, dtype=dtype)
    for _ in range(6):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # reading a value waits for the device
        best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best, best, f"{best / 1e12:.3g} TFLOP/s of {str(dtype)[6:]} matrix products that a rank reached at start"

def train_flops(model: GPT, hp: Hyperparameters) -> tuple[float, float]:
    """(FLOPs a token in the blocks, in the head), forward and backward, averaged over the steps' windows. Attention counts
    what window and diagonal leave visible; document borders, which hide more, are not subtracted."""
    sampled = range(0, max(1, hp.num_iterations), max(1, hp.num_iterations // 50))
    long = np.array([-(-window_tokens(step, hp) // BLOCK) for step in sampled])
    block = np.arange(1, hp.train_seq_len // BLOCK + 1)
    keys = {layer: np.minimum.outer(window, block).mean() * BLOCK - (BLOCK - 1) / 2
            for layer, window in (("L", long), ("S", np.maximum(1, long // 2)))}
    seen = sum(keys[layer] for layer, has_attention in zip(hp.windows, hp.attention) if has_attention == "x")
    blocks = 6 * sum(p.numel() for p in model.blocks.parameters()) + 12 * hp.num_heads * hp.head_dim * seen
    return blocks, 6 * model.lm_head.weight.numel()

@torch.no_grad()
def evaluate(model, sequences: list, window: Tensor, hp: Hyperparameters, ranks: Ranks, stop=None) -> tuple[float, bool]:
    """(mean loss in nats over exactly the validation tokens of all ranks, whether a signal cut this short on one)"""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for inputs, targets in sequences:
        if stop and stop.signal:
            total[1] = 1
            break
        total[0] += model(inputs, targets, window).double() * len(inputs)  # a sum, whatever share of the targets is padding
    model.train()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    return float(total[0]) / hp.val_tokens, bool(total[1] > 0)

def train_step(model, batches: list, window: Tensor, muon: Muon, adam: Adam, step: int, hp: Hyperparameters) -> Tensor:
    """One step on this rank's micro-batches; returns the sum of their losses. It only launches work: nothing here waits for
    the device, and ranks talk after the last micro-batch only."""
    buffers, losses = [group["grads"] for group in muon.groups + adam.groups], []

    def accumulate(inputs: Tensor, targets: Tensor):
        loss = model(inputs, targets, window)
        loss.backward()
        losses.append(loss.detach().double())

    if hp.deterministic:
        def alone(batch) -> list[Tensor]:
            torch._foreach_zero_(buffers)
            accumulate(*batch)
            return torch._foreach_div(buffers, hp.micro_batches)

        torch._foreach_copy_(buffers, tree_sum(map(alone, batches)))
    else:
        for batch in batches:
            accumulate(*batch)
        torch._foreach_div_(buffers, hp.micro_batches)
    # Muon's gradients travel first, since it has arithmetic to do; the embeddings' travel while it does.
    muon.reduce_gradients()
    adam.reduce_gradients()
    muon.step(hp.muon_lr * lr_scale(step, hp), muon_momentum(step, hp), hp.muon_beta2)
    adam.step(lr_scale(step, hp))
    return sum(losses)  # exact in float64, in any order

def warm_up(model, params: dict, muon: Muon, adam: Adam, hp: Hyperparameters, ranks: Ranks):
    """Compile and allocate by a step and a validation on random tokens, of which restore leaves no trace."""
    reached, generator = set(), torch.Generator().manual_seed(0)
    hooks = [p.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name)) for name, p in params.items()]
    window = torch.tensor(hp.window_start, dtype=torch.int32).to(ranks.device)

    def dummy(length: int):
        tokens = torch.randint(hp.vocab_size, (length + 1,), generator=generator).to(ranks.device)
        return tokens[:-1].int(), tokens[1:].clone()

    train_step(model, [dummy(hp.train_seq_len) for _ in range(2)], window, muon, adam, 0, hp)
    evaluate(model, [dummy(hp.val_seq_len)], window, hp, ranks)
    for hook in hooks:
        hook.remove()
    unreached = {name for name, p in params.items() if p.numel()} - reached  # one layer has no skip weights
    assert not unreached, f"no gradient reaches {sorted(unreached)}"
    assert all(not p.grad.any() for p in params.values()), "a step left a gradient behind"

class Stop:
    """The first SIGTERM, SIGINT or SIGHUP asks for an end as soon as all is saved; a second one ends the process at once."""

    def __init__(self):
        self.signal, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, self)

    def __call__(self, number, frame):
        if self.signal and time.monotonic() - self.when > 1:  # closer ones are one, sent to the launcher and by the launcher
            os._exit(128 + number)
        self.signal, self.when = number, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            say_error(f"{signal.Signals(number).name}: saving; a second signal ends at once")

def train(hp: Hyperparameters, ranks: Ranks, data: dict, log: RunLog, start: dict, saved: dict):
    device, cuda, dtype = ranks.device, ranks.device.type == "cuda", getattr(torch, hp.dtype)
    if hp.deterministic:
        torch.set_num_threads(1)  # which is all that a CPU needs
        if cuda:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(hp.seed)
    model = GPT(hp, flex if cuda else block_sparse, dtype).to(device)
    compiled = torch.compile(model, dynamic=False, fullgraph=True) if cuda else model
    params, first = dict(model.named_parameters()), start.get("step", 0)
    matrices, adam_groups = optimizer_groups(model, hp)
    muon = Muon(matrices, ranks.rank, ranks.world_size, dtype, hp.deterministic)
    adam = Adam(adam_groups, ranks.world_size, hp.deterministic)
    loader = TrainLoader(data["train"], data["spans"], hp, ranks.rank, ranks.world_size, device, first)
    val_sequences, text_bytes = load_validation(data["val"], data["val_tokens"], hp, ranks.rank, ranks.world_size, device)
    limit = hardware_limit(device, dtype)
    log.write(f"model: {sum(p.numel() for p in params.values())} parameters, {sum(p.numel() for p in matrices)} of them in the "
              f"blocks; {hp.micro_batches} x {hp.train_seq_len} tokens a step on {ranks.world_size} rank(s); seed {hp.seed}")

    began = time.perf_counter()
    saved.setdefault("model", {name: p.detach().clone() for name, p in params.items()})
    warm_up(compiled, params, muon, adam, hp, ranks)
    # What was resumed or, the warmup undone, rank 0's first weights: one seed can draw other last bits on another kind of CPU.
    restore(saved, first, params, muon, adam, ranks)
    saved.clear()
    if start:
        torch.set_rng_state(start["generator"])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.compiler.set_stance("fail_on_recompile")  # a recompile under the clock is an error, not a mystery
    log.write(f"warmup: {time.perf_counter() - began:.1f} s, untimed")

    unread, stopping = [], False  # losses are read two steps late, when reading them no longer waits for the device

    def read_losses(keep: int):
        nonlocal stopping
        while len(unread) > keep:
            step, shared, when = unread.pop(0)
            seconds = when()  # before this returns, what shared holds has not arrived
            loss, stopping = float(shared[0]) / hp.micro_batches, stopping or bool(shared[1] > 0)  # any rank may have the signal
            log.step_line(step, "train_loss", loss, seconds, hp)
            require(math.isfinite(loss), f"step {step}: the training loss is {loss}; {LOWER_RATES} or look at the data; the log "
                                         "and earlier checkpoints are kept", everywhere=True)

    def keep_state():  # all that decides the rest of the run
        facts = dict(step=step, seconds=clock.elapsed, position=loader.position, hyperparameters=dataclasses.asdict(hp),
                     script=data["script"], data=data["fingerprints"], ranks=ranks.world_size, torch=str(torch.__version__),
                     generator=torch.get_rng_state())
        save_checkpoint(training_state(params, muon, adam) | facts, ranks, log)

    clock, stop = Clock(device, start.get("seconds", 0.0)), Stop()
    clock.start()
    for step in range(first, hp.num_iterations + 1):
        last = step == hp.num_iterations
        save = step > first and hp.save_every and step % hp.save_every == 0
        validate = last or (hp.val_loss_every and step % hp.val_loss_every == 0)
        window = torch.tensor(window_tokens(step, hp), dtype=torch.int32).to(device, non_blocking=True)
        if save or validate or stopping:
            clock.stop()
            read_losses(keep=0)
            if save and not stopping:
                keep_state()
            if validate and not stopping:
                val_loss, stopping = evaluate(compiled, val_sequences, window, hp, ranks, stop)
                if not stopping:
                    log.step_line(step, "val_loss", val_loss, clock.elapsed, hp)
            if stopping:
                keep_state()
                number = stop.signal or signal.SIGTERM
                raise UserError(f"stopped by {signal.Signals(number).name}; step {step} is saved, the same command with "
                                "--resume goes on", everywhere=True, status=128 + number)
            if last:
                break
            clock.start()
        loss = train_step(compiled, loader.next_step(), window, muon, adam, step, hp)
        shared = torch.stack([loss, torch.full_like(loss, bool(stop.signal))])
        if ranks.world_size > 1:
            dist.all_reduce(shared)
        unread.append((step + 1, shared.to("cpu", non_blocking=True), clock.mark()))
        while loader.news:
            log.write(loader.news.pop(0))
        read_losses(keep=2 if cuda else 0)
    report(model, hp, ranks, limit, first, clock.elapsed - start.get("seconds", 0.0), loader.wait_seconds, val_loss, text_bytes, log)

def report(model: GPT, hp: Hyperparameters, ranks: Ranks, limit: tuple, first: int, seconds: float, wait_seconds: float,
           val_loss: float, text_bytes: int, log: RunLog):
    """The last lines of the log, the saved model and a sample of its text. seconds: the training from step first on."""
    steps, (in_blocks, in_head) = hp.num_iterations - first, train_flops(model, hp)
    tokens, since = steps * hp.micro_batches * hp.train_seq_len, f", since step {first}" if first else ""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else resident
    log.write(f"peak_memory: {peak / 2**20:.0f} MiB on rank 0")
    if tokens:
        rate, fp8_rate, source = limit
        floor = tokens * (in_blocks / rate + in_head / (fp8_rate if hp.use_fp8 else rate)) / ranks.world_size
        log.write(f"throughput: {tokens / seconds:.0f} tokens/s{since}\nhardware: {100 * floor / seconds:.1f} % of the limit "
                  f"({(in_blocks + in_head) / 1e6:.1f} MFLOP a token would take {floor:.2f} s at the {source}){since}\n"
                  f"data_wait: {1000 * wait_seconds / steps:.3f} ms a step{since}")
    require(math.isfinite(val_loss), f"the validation loss is {val_loss}; {LOWER_RATES}; the log is kept", everywhere=True)
    if ranks.rank == 0 and hp.save:  # before the line that makes the run a finished one
        path = log.folder / "model.pt"
        write_checkpoint(path, dict(step=hp.num_iterations, hyperparameters=dataclasses.asdict(hp), model=model.state_dict()))
        log.write(f"model: saved as {path}")
    bits = f", {val_loss / math.log(2) * hp.val_tokens / text_bytes:.4f} bits per byte" if text_bytes else ""
    log.write(f"final_val_loss: {val_loss:.4f} nats per token{bits}, on {hp.val_tokens} tokens")
    if ranks.rank == 0:
        log.write(f"log: {log.path}")
        if hp.sample_tokens:
            generator, window = torch.Generator().manual_seed(hp.seed), window_tokens(hp.num_iterations, hp)
            sample = generate(model, [hp.vocab_size - 1], hp.sample_tokens, window, generator=generator)
            log.write("sample:\n" + decode(sample[1:], hp.vocab_size))  # last, since it may look like anything

def decode(tokens: list[int], vocab_size: int) -> str:
    """Tokens as text where their vocabulary is at hand, else as numbers."""
    if vocab_size == 257:
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2").decode(tokens)
    except Exception as e:  # not installed, or its vocabulary cannot be fetched
        return f"{tokens} (in numbers, since GPT-2's vocabulary is not at hand: {type(e).__name__})"

def run(argv: list[str]):
    cuda, script = torch.cuda.is_available(), Path(__file__).read_text(encoding="utf-8")  # what runs, whatever the file becomes
    hp, command = parse_flags(argv, "speedrun" if cuda else "demo")
    ranks = Ranks(0, 1, torch.device("cuda" if cuda else "cpu")) if command.check else start_ranks()
    saved, log = {}, RunLog()

    def settle():
        *settled, start = prepare(hp, command, int(os.environ.get("WORLD_SIZE", 1)), ranks.device, script)
        saved.update({kind: start.pop(kind) for kind in STATE if kind in start})  # too large to send so
        return *settled, start

    hp, notes, data, start = agree(ranks, settle)
    agree(ranks, lambda: check_memory(hp, ranks.device), everyone=True)
    if command.check:
        shards = f"{len(data['train'])} training and {len(data['val'])} validation shard(s)"
        tokens = f"{sum(data['train_tokens'])} and {sum(data['val_tokens'])} tokens"
        print(f"checks passed: {shards}, {tokens}" + (f"; to resume at step {start['step']}" if start else ""), flush=True)
        return
    agree(ranks, lambda: log.begin(hp, start))
    if start:
        now = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}, on {ranks.world_size} rank(s) of {platform.node()}"
        log.write(f"resumed: step {start['step']} at {now} with torch {torch.__version__}; saved on {start['ranks']} with torch "
                  f"{start['torch']}")
    elif ranks.rank == 0:
        settings = [f"{name} = {value!r}" for name, value in dataclasses.asdict(hp).items()]
        environment = describe_environment(hp, ranks, data)
        log.write("\n".join([*settings, SEPARATOR, *environment, SEPARATOR, script, SEPARATOR]), console=False)
        log.write("clock: train_time counts everything from the first step on, except validation; compiling, a warmup on "
                  "dummy data that is undone, and reading the first shard come before it")
    for note in notes:
        log.write(note)
    try:
        train(hp, ranks, data, log, start, saved)
    finally:
        log.close()
    if ranks.world_size > 1:
        dist.barrier(ranks.control)  # rank 0 may still be writing, and a rank that ends takes the others with it

def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rank, error = os.environ.get("RANK", "0"), None
    try:
        run(sys.argv[1:])
    except UserError as e:
        error = e
    except KeyboardInterrupt:
        error = UserError("interrupted before or after training; the log is kept", everywhere=True, status=130)
    except BrokenPipeError:
        error = UserError("whoever read the console has gone", status=1)
    except Exception as e:
        status, asked = 1, re.search(r"(tried|unable) to allocate \S+ \w+|$", str(e), re.IGNORECASE)[0]
        if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):
            status, said = 2, (f"is out of memory ({asked or first_line(e)}): lower --train_seq_len (and raise --micro_batches) or "
                               "--val_seq_len")
        elif isinstance(e, dist.DistError) or "gloo" in str(e):
            said = f"lost contact with another rank ({first_line(e)}): {LOOK}"
        else:
            said = f"met a defect of the script, please report it:\n{traceback.format_exc()}"
        error = UserError(f"rank {rank} {said}", status=status)
    if error and (rank == "0" or not error.everywhere):
        say_error(f"error: {error}")
    if error or dist.is_initialized():  # an orderly exit could wait for ranks that wait for this one
        os._exit(error.status if error else 0)

if __name__ == "__main__":
    main()
