"""The record attempt's memory: its tables against a dictionary, and its part of a prediction."""

import dataclasses

import pytest
import torch
from test_model import rms_norm
from test_speedrun_2026 import ALONE, TINY, attempt

LENGTHS = (2, 3, 5)
LAG = 100
HP = dataclasses.replace(TINY, memory="2,3,5", memory_rows=2**16, memory_lag=LAG)


class PlainMemory:
    """By the definition: {(context, next token % 8): [position, next token, repeats]} of all that
    was read, but for the newest tokens."""

    def __init__(self):
        self.text = []
        self.known = {}
        self.done = 0  # tokens of the text whose contexts are in `known`

    def remember(self, tokens):
        self.text += tokens.tolist()
        before = dict(self.known)  # a step looks up before it writes
        for at in range(self.done, len(self.text) - LAG):
            for length in LENGTHS:
                if at >= length:
                    key = (*self.text[at - length:at], self.text[at] % 8)
                    _, token, repeats = before.get(key, (0, -1, 0))
                    again = token == self.text[at]
                    self.known[key] = (at, self.text[at], min(7, repeats + 1) if again else 0)
        self.done = max(self.done, len(self.text) - LAG)

    def recall(self, tokens, at):
        """For each length the entries of the context that ends with tokens[at], by position."""
        found = []
        for length in LENGTHS:
            context = tuple(tokens[max(0, at + 1 - length):at + 1].tolist())
            found.append(sorted(self.known[(*context, way)] for way in range(8)
                                if len(context) == length and (*context, way) in self.known))
        return found


def texts(kind, length):
    generator = torch.Generator().manual_seed(1)
    if kind == "random":
        return torch.randint(257, (length,), generator=generator, dtype=torch.int32)
    if kind == "of few words":
        words = [torch.randint(257, (n,), generator=generator) for n in (1, 2, 3, 4, 7, 9)]
        chosen = torch.randint(6, (length,), generator=generator).tolist()
        return torch.cat([words[word] for word in chosen])[:length].int()
    # the same sentence again and again, with a document's border now and then
    text = torch.arange(17, dtype=torch.int32).repeat(length // 17 + 1)[:length]
    text[::100] = 256
    return text


@pytest.mark.parametrize("kind", ["random", "of few words", "repetitive"])
def test_the_memory_is_a_dictionary_of_what_was_read(kind):
    """Over steps of several sizes, shorter and longer than the lag."""
    # With so many rows no two contexts share an entry.
    memory = attempt.Memory(dataclasses.replace(HP, memory_rows=2**20))
    plain = PlainMemory()
    text = texts(kind, 1500)
    seen = 0
    for tokens in text.split([40, 300, 128, 512, 20, 500]):
        memory.remember(tokens)
        plain.remember(tokens)
        sample = text[200:600] if len(plain.text) % 3 else torch.cat((text[:300], tokens))
        candidates = memory.recall(sample)
        for at in range(len(sample)):
            expected = plain.recall(sample, at)
            kinds, named = candidates.kinds[at], candidates.tokens[at]
            known = kinds >= 0
            want = sorted(((length * 8 + repeats) * 8 + len(entries) - 1, token)
                          for length, entries in enumerate(expected)
                          for _, token, repeats in entries)
            assert sorted(zip(kinds[known].tolist(), named[known].tolist())) == want
            assert not named[~known].any()
            longest = [entries for entries in expected if entries]
            best = int(candidates.best[at, 0])
            if longest:
                assert kinds[best] >= 0 and int(named[best]) == longest[-1][-1][1]
            else:
                assert kinds[best] < 0
            seen += len(want)
    assert seen > 1000


@pytest.mark.parametrize("kind", ["random", "of few words", "repetitive"])
def test_what_the_document_has_had_before(kind):
    """Against a search through the document for each token and length."""
    text = texts(kind, 600)
    text[[0, 170, 171, 400]] = 256
    found = attempt.recall_from_document(text, 256, list(LENGTHS))
    text = text.tolist()
    seen = 0
    for at in range(600):
        begin = max(place for place in range(at + 1) if place == 0 or text[place] == 256)
        best = None
        for i, length in enumerate(LENGTHS):
            context = text[at - length + 1:at + 1]
            places = [place for place in range(begin + length - 1, at)
                      if text[place - length + 1:place + 1] == context
                      and at - length + 1 >= begin]
            kind, token = int(found.kinds[at, i]), int(found.tokens[at, i])
            if places:
                assert (kind, token) == (8 * i + min(8, len(places)) - 1, text[places[-1] + 1])
                best = i
            else:
                assert (kind, token) == (-1, 0)
            seen += len(places)
        assert best is None or int(found.best[at, 0]) == best
    assert seen > 500 or text[1] != 1


def test_nothing_lies_before_the_first_token():
    """Tokens of 0 do not look like what is before a sequence that begins within a document."""
    text = torch.tensor([7, 8, 0, 7, 9, 0, 0, 7, 5], dtype=torch.int32)
    found = attempt.recall_from_document(text, 256, [2, 3])
    assert found.kinds[:, 1].tolist() == [-1] * 9
    # Of pairs, only (0, 7) occurs again, and 9 followed it.
    assert found.kinds[:, 0].tolist() == [-1] * 7 + [0, -1] and int(found.tokens[7, 0]) == 9


def test_what_was_read_lately_is_not_known():
    """With a lag of 100 tokens, and a context that was read just before."""
    memory = attempt.Memory(HP)
    text = torch.arange(200, dtype=torch.int32)
    memory.remember(text)
    known = (memory.recall(text).kinds >= 0).any(1)
    # The tokens 0 to 99 are known as what came next, so contexts that end with 1 to 98.
    assert known.nonzero().flatten().tolist() == list(range(1, 99))


def test_a_full_table_keeps_the_newest_and_seldom_errs():
    """Of 50,000 contexts in 100 rows, nearly all that it finds have truly been followed so."""
    hp = dataclasses.replace(HP, memory="2", memory_rows=100, memory_lag=0)
    memory = attempt.Memory(hp)
    text = texts("of few words", 50_000)
    text = torch.where(torch.rand(len(text), generator=torch.Generator().manual_seed(2)) < 0.3,
                       texts("random", len(text)), text)
    memory.remember(text)
    pairs = {}
    for place, triple in enumerate(zip(*(text[i:].tolist() for i in range(3)))):
        pairs.setdefault(triple, []).append(place)
    recalled = memory.recall(text[-5000:])
    found = [(place, int(token)) for place, (tokens, kinds) in enumerate(zip(*recalled[:2]))
             for token, kind in zip(tokens, kinds) if kind >= 0]
    tail = text[-5000:].tolist()
    right = sum((tail[place - 1], tail[place], token) in pairs for place, token in found)
    assert len(found) > 1000 and right / len(found) > 0.98
    positions = memory.entries[memory.entries > 0] >> 31
    assert len(positions) == 800 and positions.float().mean() > 0.9 * len(text)


def model_that_has_read():
    """A model without weights of zero, and the text that its memory holds."""
    torch.manual_seed(0)
    model = attempt.GPT(HP, torch.float32, flex=False)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    text = texts("of few words", 2000)
    model.memory.remember(text)
    return model, text


def test_the_prediction_is_a_mixture_with_what_the_memory_names():
    """The softmax of `logits` against its definition, token by token, and the loss against both."""
    model, text = model_that_has_read()
    tokens, window = text[300:812], torch.tensor(256)
    features = model.features(tokens, window).detach()
    got = model.logits(features).detach().softmax(-1)
    D = HP.model_dim
    own = model.own_logits(features[:, :D]).detach().softmax(-1)
    own_score = features[:, :D] @ model.own_score.detach()
    candidates = model.candidates(tokens)
    mixed = 0
    for t in range(512):
        known = [(int(token), float(model.candidate_scores.detach()[kind]))
                 for token, kind in zip(candidates.tokens[t], candidates.kinds[t]) if kind >= 0]
        weights = [float(own_score[t].exp())] + [torch.tensor(s).exp().item() for _, s in known]
        want = own[t] * weights[0] / sum(weights)
        for (token, _), weight in zip(known, weights[1:]):
            want[token] += weight / sum(weights)
        torch.testing.assert_close(got[t], want, rtol=1e-4, atol=1e-7)
        mixed += len(known)
    assert mixed > 1000
    targets = text[301:813].long()
    targets[5] = -1
    want = torch.nn.functional.cross_entropy(model.logits(features), targets, reduction="sum",
                                             ignore_index=-1) / 512
    torch.testing.assert_close(model(tokens, targets, window), want, rtol=1e-5, atol=0)


def test_the_best_candidate_reaches_the_input():
    """A share of an embedding of it, by its kind, is added to the token's own; else nothing."""
    torch.manual_seed(0)
    model = attempt.GPT(HP, torch.float32, flex=False)
    text = texts("of few words", 2000)
    inputs = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: inputs.append(args[0].detach()))
    model.memory.remember(text)
    other = model.memory.recall(text[:512])
    own = attempt.recall_from_document(text[:512], 256, model.document_lengths)
    model.features(text[:512], torch.tensor(256))  # while the shares are zero
    with torch.no_grad():
        model.recalled_mix += torch.randn(len(model.recalled_mix))
    model.features(text[:512], torch.tensor(256))
    for t in range(512):
        want = model.embed.weight[text[t]]
        torch.testing.assert_close(inputs[0][t], rms_norm(want))
        for each, first_kind in ((own, 0), (other, 8 * len(model.document_lengths))):
            best = each.best[t, 0]
            kind, token = each.kinds[t, best], each.tokens[t, best]
            if kind >= 0:
                mix = model.recalled_mix[first_kind + kind]
                want = want + mix * model.recalled_embed.weight[token]
        torch.testing.assert_close(inputs[1][t], rms_norm(want))


def test_a_step_looks_up_before_it_remembers():
    """The loss of a step does not know the step's own text; the next one does."""
    hp = dataclasses.replace(HP, memory_lag=0, num_iterations=2, micro_batches=1)
    model = attempt.GPT(hp, torch.float32, flex=False)
    text = texts("repetitive", 513)
    batch = [(text[:-1], text[1:].long())]
    alone = float(model(*batch[0], torch.tensor(256)).detach())
    optimizers = attempt.build_optimizers(model, hp, ALONE)
    assert float(attempt.train_step(model, batch, optimizers, 0, hp, ALONE)) == pytest.approx(alone)
    assert int(model.memory.read) == 512
    known = model.memory.recall(text[:-1]).kinds >= 0
    assert known[5:-5].any(1).all()
    before = model.memory.entries.clone()
    attempt.evaluate(model, batch, 1, hp, ALONE)
    assert torch.equal(before, model.memory.entries) and int(model.memory.read) == 512


def test_no_token_knows_a_later_one():
    """With a full memory, other tokens from one on change no prediction before it."""
    model, text = model_that_has_read()
    tokens, window = text[300:812].clone(), torch.tensor(256)
    before = model.logits(model.features(tokens, window)).detach()
    for cut in (1, 100, 256, 511):
        others = torch.cat((tokens[:cut], text[1100:1612 - cut]))
        assert not torch.equal(others, tokens)
        after = model.logits(model.features(others, window)).detach()
        assert torch.equal(after[:cut], before[:cut])
        assert not torch.equal(after[cut:], before[cut:])
