"""What surrounds the tokens: streaming, stopping, statistics, state, and clear refusals."""

from itertools import chain

import pytest
import torch
from lossless import assert_lossless
from tiny import CACHE, EOS, generate, letters, near_copy, tiny_model
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
)
from transformers.generation import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import hf_paradraft
from hf_paradraft.integration.look import check_reads
from hf_paradraft.rules.typical import Typical


class Recorder(BaseStreamer):
    def __init__(self):
        self.blocks, self.ended = [], 0

    def put(self, value):
        self.blocks.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


class Rounds(hf_paradraft.protocol.RoundStreamer):
    def __init__(self):
        self.blocks, self.accepted, self.ended = [], [], 0

    def put(self, value):
        self.blocks.append(value.flatten().tolist())

    def put_round(self, tokens, num_accepted):
        self.blocks.append(tokens)
        self.accepted.append(num_accepted)

    def end(self):
        self.ended += 1


def test_a_streamer_is_told_of_rounds_if_it_wants_that(target, drafter, prompt):
    streamer = Rounds()
    output = generate(target, drafter, prompt, streamer=streamer)
    shown, *blocks = streamer.blocks
    assert shown == prompt[0].tolist()
    assert [len(block) for block in blocks] == drafter.last_stats.emitted_per_round
    assert streamer.accepted == [count - 1 for count in drafter.last_stats.emitted_per_round]
    assert list(chain(*blocks)) == output[0, prompt.shape[1] :].tolist()
    assert streamer.ended == 1


def test_any_other_streamer_gets_what_plain_decoding_gives_it(target, drafter, prompt):
    """Token by token: many take `value.item()`."""
    heard = []
    for assistant in (None, drafter):
        streamer = Recorder()
        generate(target, assistant, prompt, streamer=streamer)
        heard.append((streamer.blocks, streamer.ended))
    assert heard[0] == heard[1]
    assert max(map(len, heard[0][0][1:])) == 1


@pytest.mark.slow
def test_nothing_after_the_end_of_text(target):
    """An end token inside an accepted draft ends the text there."""
    drafter = near_copy(target, noise=0.0)
    stopped_inside = 0
    for first in range(EOS):
        ids, streamer = torch.tensor([[first, 2]]), Recorder()
        plain = target.generate(ids, do_sample=False, max_new_tokens=30)
        eos = int(plain[0, -3])
        plain = target.generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=eos)
        drafted = generate(target, drafter, ids, eos_token_id=eos, streamer=streamer)
        assert torch.equal(plain, drafted)
        assert eos not in list(chain(*streamer.blocks[1:]))[:-1]
        stopped_inside += (
            drafter.last_stats.successes[:1] != [] and drafter.last_stats.emitted_per_round[-1] > 1
        )
    assert stopped_inside > 0


def test_stop_strings(target, drafter):
    tokenizer = letters()
    for first in range(8):
        ids = torch.tensor([[first, 3, 4]])
        text = tokenizer.decode(target.generate(ids, do_sample=False, max_new_tokens=20)[0, 6:8])
        options = {"stop_strings": text, "tokenizer": tokenizer, "max_new_tokens": 30}
        assert_lossless(target, drafter, ids, **options)


def test_own_criteria_are_asked_after_every_token(target, drafter, prompt):
    class Lengths(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= 17])

    criterion = Lengths()
    output = generate(target, drafter, prompt, stopping_criteria=[criterion])
    assert output.shape[1] <= 17
    assert criterion.seen == list(range(6, output.shape[1] + 1))


def test_max_time_and_max_length(target, drafter, prompt):
    assert generate(target, drafter, prompt, max_time=0.0).shape[1] == prompt.shape[1] + 1
    for limit in (3, 5, 6, 9, 60):
        options = {"stopping_criteria": [MaxLengthCriteria(limit)]}
        assert_lossless(target, drafter, prompt, **options)


def test_processors_see_plain_decodings_calls(target, drafter, prompt):
    """A processor with a memory works, because it is called once per token, in order, on the true
    prefix.
    """

    class Memory(LogitsProcessor):
        def __init__(self):
            self.prefixes = []

        def __call__(self, input_ids, scores):
            self.prefixes.append(input_ids[0].tolist())
            scores[:, len(self.prefixes) % 7] -= 3
            return scores

    ours, theirs = Memory(), Memory()
    plain = target.generate(prompt, do_sample=False, max_new_tokens=30, logits_processor=[theirs])
    assert_lossless(target, drafter, prompt, plain=plain, logits_processor=[ours])
    assert ours.prefixes == theirs.prefixes


def test_stats_agree_with_the_output(target, drafter, prompt):
    drafter.speculation_config = hf_paradraft.SpeculationConfig(5, None, never_slower=False)
    output = generate(target, drafter, prompt, return_dict_in_generate=True)
    stats = output.speculation
    assert stats is drafter.last_stats
    assert stats.num_rounds == len(stats.emitted_per_round)
    assert sum(stats.emitted_per_round) == output.sequences.shape[1] - prompt.shape[1]
    assert stats.mean_emitted == sum(stats.emitted_per_round) / stats.num_rounds
    assert max(stats.emitted_per_round) <= 6
    assert stats.num_drafted <= 5 * stats.num_rounds
    assert len(stats.acceptance_by_position) <= 5
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_position)
    # Every round emits its accepted drafts and one more, unless it ended on a draft.
    assert stats.num_emitted - stats.num_rounds <= sum(stats.successes) <= stats.num_emitted
    assert 0 < stats.draft_seconds + stats.verify_seconds < stats.total_seconds
    assert f"τ = {stats.mean_emitted:.2f}" in str(stats)
    doubled = stats + stats
    assert doubled.mean_emitted == stats.mean_emitted
    assert doubled.acceptance_by_position == stats.acceptance_by_position


@pytest.mark.parametrize("tree_size", [None, 10])
def test_the_trace_tells_every_round(target, drafter, tree_size):
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        5, tree_size, trace=True, never_slower=False
    )
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    output = generate(target, drafter, ids, attention_mask=torch.ones_like(ids), pad_token_id=0)
    trace = drafter.last_stats.trace
    assert len(trace) == len(drafter.last_stats.emitted_per_round)
    for row in range(2):
        emitted = [token for part in trace if part.row == row for token in part.emitted]
        assert emitted == output[row, 3 : 3 + len(emitted)].tolist()
    for part in trace:
        assert [part.drafted[node] for node in part.accepted] == part.emitted[: len(part.accepted)]
        assert [part.parents[node] for node in part.accepted] == [-1, *part.accepted][
            : len(part.accepted)
        ]
        assert part.total_seconds > max(part.draft_seconds, part.verify_seconds)
    drafter.speculation_config.trace = False
    generate(target, drafter, ids[:1])
    assert drafter.last_stats.trace == []


def test_one_forward_of_each_model_per_round(target, drafter, prompt):
    counts = {"target": 0, "drafter": 0}
    for name, model in (("target", target), ("drafter", drafter)):
        model.register_forward_pre_hook(
            lambda *_, name=name: counts.update({name: counts[name] + 1})
        )
    check_reads(target, several=False)  # once for each target as it is hooked
    counts.update(target=0)
    generate(target, drafter, prompt)
    rounds = drafter.last_stats.num_rounds
    assert counts["target"] == rounds
    assert rounds - 1 <= counts["drafter"] <= rounds  # the last token needs no draft


def test_a_perfect_drafter_emits_full_blocks(target):
    """A drafter whose only guess is right: K = 1 from the target's own weights."""
    drafter = near_copy(target, noise=0.0)
    drafter.speculation_config.num_draft_tokens = 1
    generate(target, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=20, min_new_tokens=20)
    assert set(drafter.last_stats.emitted_per_round) == {2}


def test_nothing_leaks_into_the_next_call(target, drafter, prompt):
    first = generate(target, drafter, prompt)
    other = tiny_model(seed=9)
    generate(other, drafter, torch.tensor([[7, 7, 7, 7]]))
    assert torch.equal(first, generate(target, drafter, prompt))


def test_other_assistants_are_left_to_transformers(target, prompt):
    parent = tiny_model(seed=2)
    assert_lossless(target, parent, prompt, max_new_tokens=20)


def test_a_static_cache_of_the_callers(target, drafter, prompt):
    plain = target.generate(prompt, do_sample=False, max_new_tokens=30)
    cache = StaticCache(config=target.config, max_cache_len=36)
    assert_lossless(target, drafter, prompt, plain=plain, **{CACHE: cache})
    assert int(cache.get_seq_length()) == plain.shape[1] - 1


@pytest.mark.slow
def test_typical_acceptance_takes_more_than_the_exact_rules(target, drafter, prompt):
    emitted = {}
    for rule in ("sample_match", "typical"):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            4, 12, acceptance=rule, never_slower=False
        )
        torch.manual_seed(0)
        rounds = 0
        for _ in range(20):
            generate(target, drafter, prompt, do_sample=True, eos_token_id=None)
            rounds += drafter.last_stats.num_rounds
        emitted[rule] = 20 * 30 / rounds
    assert emitted["typical"] > emitted["sample_match"]


def test_typical_acceptance_follows_its_threshold():
    """Two paths: the longer one wins although its first token is the less probable, and what is too
    improbable never does.
    """
    logits = torch.log(
        torch.tensor(
            [[0.6, 0.3, 0.08, 0.02], [0.25, 0.25, 0.25, 0.25], [0.1, 0.1, 0.1, 0.7], [1.0, 0, 0, 0]]
        )
    )
    draft = hf_paradraft.Draft(torch.tensor([0, 1, 3]), [-1, -1, 1])
    rule, text = Typical(), (torch.tensor([[0]]), LogitsProcessorList())
    assert rule.path(draft, logits[[0, 1, 2, 3]], *text) == ([1, 2], None)
    unlikely = hf_paradraft.Draft(torch.tensor([3]), [-1])
    assert rule.path(unlikely, logits, *text) == ([], None)


def test_trees_larger_than_the_context_left_are_lossless():
    target = tiny_model(max_position_embeddings=32)
    drafter = near_copy(target, 0.05)
    drafter.speculation_config.num_draft_tokens, drafter.speculation_config.tree_size = 12, 60
    ids = torch.arange(24)[None]
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    plain = target.generate(ids, **options)
    for cache in (None, "static"):
        assert torch.equal(
            plain, generate(target, drafter, ids, cache_implementation=cache, **options)
        )
