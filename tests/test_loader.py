"""The loader's stream: the same for any number of ranks, without gap or repeat, and validation on exactly what was asked."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from conftest import write_shard

import train_gpt
from train_gpt import (PRESETS, TrainLoader, UserError, count_cut_documents, load_validation, plan_spans, read_tokens)

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path):
    """Shards whose tokens count up across them, so that a token says where it comes from."""
    sizes, start, paths = [5000, 130, 9000], 0, []
    for i, size in enumerate(sizes):
        paths.append(write_shard(tmp_path / f"s_{i}.bin", np.arange(start, start + size)))
        start += size
    return paths, sizes


def hyperparameters(**changes):
    return dataclasses.replace(PRESETS["demo"], **(dict(vocab_size=65536, train_seq_len=128, micro_batches=12) | changes))


def stream(files, sizes, world_size, epochs=1):
    """Per step the inputs of all ranks, rank after rank, and a check that targets are one ahead."""
    hp = hyperparameters(epochs=epochs)
    spans = plan_spans(sizes, 12 * 128, 128, epochs)
    loaders = [TrainLoader(files, spans, hp, rank, world_size, CPU) for rank in range(world_size)]
    for _ in range(sum(s.steps for s in spans)):
        step = []
        for loader in loaders:
            batches = loader.next_step()
            assert len(batches) == 12 // world_size
            for inputs, targets in batches:
                assert inputs.shape == targets.shape == (128,)
                assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
                assert torch.equal(inputs[1:].long(), targets[:-1]) and targets[-1] == inputs[-1] + 1
                step.append(inputs)
        yield torch.cat(step)


def test_the_union_over_ranks_is_one_stream(files):
    paths, sizes = files
    steps = list(stream(paths, sizes, 1))
    # 3 steps of 1536 in the first shard, none in the second, 5 in the third; the tails are left out.
    assert torch.equal(torch.cat(steps[:3]), torch.arange(4608, dtype=torch.int32))
    assert torch.equal(torch.cat(steps[3:]), torch.arange(5130, 5130 + 7680, dtype=torch.int32))
    for world_size in (2, 3, 4, 6, 12):
        for a, b in zip(steps, stream(paths, sizes, world_size), strict=True):
            assert torch.equal(a, b), world_size


def test_a_further_pass_has_other_borders(files):
    paths, sizes = files
    steps = list(stream(paths, sizes, 2, epochs=2))
    first, second = steps[:8], steps[8:]
    assert first[0][0] == 0 and second[0][0] == int(0.6180339887 * 128)
    assert len(second) in (7, 8)
    assert {int(s[0]) % 128 for s in first[:3]} != {int(s[0]) % 128 for s in second[:3]}


def test_tokens_above_32767_survive_the_copy(files):
    paths, sizes = files
    path = write_shard(paths[0], np.arange(60000, 60000 + 5000))
    loader = TrainLoader([path], plan_spans([5000], 1536, 128, 1), hyperparameters(), 0, 1, CPU)
    inputs, targets = loader.next_step()[0]
    assert inputs[0] == 60000 and targets[0] == 60001 and targets.min() > 0


def test_the_next_shard_is_read_in_a_thread_before_it_is_needed(files, monkeypatch):
    paths, sizes = files
    read, readers = [], set()

    def spy(path, *args, **kwargs):
        read.append(path)
        readers.add(threading.current_thread())
        return read_tokens(path, *args, **kwargs)

    monkeypatch.setattr(train_gpt, "read_tokens", spy)
    loader = TrainLoader(paths, plan_spans(sizes, 1536, 128, 1), hyperparameters(), 0, 1, CPU)
    loader.ahead.result()
    assert read == [paths[0], paths[2]] and threading.main_thread() not in readers
    for _ in range(8):
        loader.next_step()
    assert read == [paths[0], paths[2]], "each shard is read once"


def test_a_shard_that_shrinks_or_disappears_is_an_error(files):
    paths, sizes = files
    loader = TrainLoader(paths[:1], plan_spans(sizes[:1], 1536, 128, 2), hyperparameters(), 0, 1, CPU)
    assert loader.next_step()
    write_shard(paths[2], range(100))
    with pytest.raises(UserError, match="shorter while the run"):
        read_tokens(paths[2], 9000)
    with pytest.raises(UserError, match="cannot be read on "):
        read_tokens(str(paths[2]) + "gone", 9000)


def test_cut_documents_are_counted():
    tokens = torch.zeros(40, dtype=torch.uint16)
    for begin in (0, 5, 10, 18, 39):
        tokens[begin] = 7
    # Sequences of 10: [0, 5) and [5, 10) are whole, [10, 18) too, [18, 39) is cut twice, [39, 40) whole.
    assert count_cut_documents(tokens, 7, 10) == (5, 1)
    assert count_cut_documents(torch.zeros(10, dtype=torch.uint16), 7, 10) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("val_tokens", [256 * 10, 256 * 10 + 1, 6000])
def test_validation_predicts_exactly_val_tokens(files, world_size, val_tokens):
    paths, sizes = files
    hp = hyperparameters(val_tokens=val_tokens, val_seq_len=256)
    parts = [load_validation(paths, sizes, hp, rank, world_size, CPU) for rank in range(world_size)]
    sequences = sum((part[0] for part in parts), [])
    predicted = torch.cat([targets[targets >= 0] for _, targets in sequences]).sort().values
    assert torch.equal(predicted, torch.arange(1, val_tokens + 1))
    for inputs, targets in sequences:
        assert inputs.shape == targets.shape == (256,)
        real = targets >= 0
        assert torch.equal(inputs[real].long() + 1, targets[real])
    assert max(len(p[0]) for p in parts) - min(len(p[0]) for p in parts) <= 1
    assert parts[0][1] == 0


def test_validation_counts_the_bytes_of_text(tmp_path):
    path = write_shard(tmp_path / "v.bin", [256, 65, 66, 256, 67, 68])
    hp = hyperparameters(vocab_size=257, val_tokens=5, val_seq_len=128)
    assert load_validation([path], [6], hp, 0, 1, CPU)[1] == 4
