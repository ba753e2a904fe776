"""Beginnings that were read before are not read again, and no text shows it."""

from queue import Queue

import pytest
import torch
from tiny import EOS, SHARED, near_copy, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    Qwen3NextConfig,
)

from hf_paradraft import ParallelSpecDrafter, SpeculationConfig
from hf_paradraft.serve.prefixes import reads_in_pieces
from hf_paradraft.serve.scheduler import Job, Scheduler

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}
COMMON = {
    **SHARED,
    "initializer_range": 0.3,
    "num_hidden_layers": 4,
    "eos_token_id": None,
    "pad_token_id": 0,
}
RECURRENT = {
    "lfm2": Lfm2Config(**COMMON, layer_types=["conv", "full_attention"] * 2),
    "bamba": BambaConfig(
        **COMMON, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        attn_layer_indices=[1, 3]
    ),
    "mamba2": Mamba2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None, pad_token_id=0, num_heads=8, head_dim=8, n_groups=1,
    ),
    "qwen3_next": Qwen3NextConfig(
        **COMMON, head_dim=8, layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
}  # fmt: skip


class Client:
    """Asks a scheduler, and compares with what `generate` writes alone."""

    def __init__(self, target, drafter, **options):
        self.target = target
        self.scheduler = Scheduler(target, drafter, **{"prefix_bytes": 1 << 30, **options})
        self.scheduler.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.scheduler.stop()
        self.scheduler.thread.join(60)

    def begin(self, ids, seed=None, drafts=True, **options):
        news = Queue()
        job = Job(
            ids,
            {**GREEDY, **({} if seed is None else {"do_sample": True}), **options},
            news.put,
            seed,
            drafts,
        )
        self.scheduler.submit(job)
        return job, news

    def ask(self, ids, seed=None, drafts=True, **options):
        """The answer, and how many tokens of the prompt were known."""
        return self.end(*self.begin(ids, seed, drafts, **options), seed, **options)

    def end(self, job, news, seed=None, **options):
        tokens = []
        while not (latest := news.get(timeout=60)).over:
            assert latest.error is None, latest.error
            tokens += latest.tokens
        tokens += latest.tokens
        if seed is not None:
            torch.manual_seed(seed)
            options["do_sample"] = True
        ids = torch.tensor([job.ids])
        plain = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options}
        )
        plain = plain[0, len(job.ids) :].tolist()
        assert tokens == plain
        return tokens, job.known


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", RECURRENT)
def test_states_go_on_where_turns_end(name, seed):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(RECURRENT[name]).eval()
    drafter = near_copy(tiny_model(), 0.2)
    drafter.speculation_config = SpeculationConfig(3, None)
    # generate itself cannot count what it has read
    options = {} if name == "mamba2" else {"prefill_chunk_size": 4}
    with Client(target, drafter) as client:
        first = [3, 5, 7, 9, 2, 6, 4, 4, 1]
        answer, known = client.ask(first, seed, **options)
        assert known == 0
        second = [*first, *answer, 5, 2, 6]
        more, known = client.ask(second, seed, **options)
        assert len(second) - 36 < known < len(second)
        assert known > len(first)
        assert client.ask([*second, *more, 8, 8], seed)[1] > known
        # another branch
        assert client.ask([*first, answer[0], 31 if answer[1] != 31 else 30, 4], seed)[1] == len(
            first
        )
        assert client.ask([*first[:6], 9], seed)[1] == 0  # no state stands there


@pytest.mark.parametrize("sliding", [False, True])
def test_texts_are_shared_while_they_grow(sliding):
    """Many at once with a common beginning: it is read once; seeds and greedy, with a drafter that
    reads features.
    """
    target = tiny_model("mistral-sliding" if sliding else "llama")
    drafter = ParallelSpecDrafter.from_target(target, "eagle", 3)
    system = [
        int(number)
        for number in torch.randint(1, EOS, (40,), generator=torch.Generator().manual_seed(0))
    ]
    with Client(target, drafter, max_batch_size=3) as client:
        asked = [
            client.begin([*system, 2 + number], number if number % 2 else None)
            for number in range(7)
        ]
        known = [
            client.end(*one, number if number % 2 else None)[1] for number, one in enumerate(asked)
        ]
    assert known == [0] + [39] * 6  # the newest of them is read again, for the drafter


def test_the_least_recently_used_go_first():
    target = tiny_model()
    with Client(target, None) as client:
        client.ask([1] * 30)
        [text] = client.scheduler.prefixes.texts
        size = text.nbytes
    with Client(target, None, prefix_bytes=2 * size + size // 2) as client:
        for ids in ([1] * 30, [2] * 30, [1] * 31, [3] * 30):
            client.ask(ids)
            assert sum(text.nbytes for text in client.scheduler.prefixes.texts) <= 2.5 * size
        assert client.ask([1] * 30)[1] == 29
        assert client.ask([2] * 30)[1] == 0
    with Client(target, None, prefix_bytes=2 * size) as client:  # what has no place puts nobody out
        client.ask([1] * 30)
        client.ask([2] * 200)
        assert client.ask([1] * 30)[1] == 29
    with Client(target, None, prefix_bytes=10) as client:
        client.ask([1] * 30)
        assert client.scheduler.prefixes.texts == []
    with Client(target, None, prefix_bytes=0) as client:
        client.ask([1] * 30)
        assert client.ask([1] * 30)[1] == 0


def test_what_rereads_its_prompt_keeps_nothing():
    """Positions that change their scale with the length of a text, static caches, states that are
    forgotten.
    """
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "factor": 4.0,
        "rope_theta": 10000.0,
    }
    scaled = tiny_model(
        rope_parameters={**rope, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    )
    assert not reads_in_pieces(scaled, None)
    compiled = near_copy(tiny_model())
    compiled.speculation_config = SpeculationConfig(3, compile=True)
    assert not reads_in_pieces(tiny_model(), compiled)
    assert reads_in_pieces(tiny_model(), near_copy(tiny_model()))
    forgets = AutoModelForCausalLM.from_config(
        JambaConfig(**COMMON, num_experts=2, attn_layer_period=2, attn_layer_offset=1)
    )
    assert not reads_in_pieces(forgets.eval(), None)


def test_what_a_drafter_has_not_read_is_not_kept_for_it():
    target = tiny_model()
    with Client(target, ParallelSpecDrafter.from_target(target, "eagle", 3)) as client:
        client.ask([1] * 30, drafts=False)
        assert client.ask([1] * 30)[1] == 0
        assert client.ask([1] * 30)[1] == 29
        assert all(text.drafting is not None for text in client.scheduler.prefixes.texts)
