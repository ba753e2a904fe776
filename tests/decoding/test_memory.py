"""Texts that drafts are copied from: what is found, what is forgotten, and never a change of the
output.
"""

import copy
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from safetensors.torch import save_file
from tiny import near_copy, tiny_model, with_prompts

import hf_paradraft
from hf_paradraft import Memory, NgramDrafter, SpeculationConfig
from hf_paradraft.copies.lookup import FIRST, PromptLookup
from hf_paradraft.copies.memory import END, MAX_MATCH, PLACES, HashChains

TARGET = tiny_model()
TEXT = [5, 3, 4, 9, 8, 7, 6, 5, 3, 4, 1, 2]


def slow_longest(tokens, tail, run):
    """The longest match by comparing everywhere, and the places behind such matches, the newest
    first.
    """
    lengths = {}
    for place in range(run, len(tokens)):
        length = 0
        while (
            length < min(MAX_MATCH, len(tail), place)
            and tokens[place - 1 - length] == tail[-1 - length]
        ):
            length += 1
        if length >= run and END not in tokens[place - run : place]:
            lengths[place] = length
    best = max(lengths.values(), default=0)
    return best, [place for place in sorted(lengths, reverse=True) if lengths[place] == best]


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(1, 3),
    st.integers(0, 20),
)
def test_matches_are_those_of_a_search_everywhere(tokens, tail, run, taken_back):
    chains = HashChains(run)
    for token in [*tokens, *[3] * taken_back]:
        chains.append(token)
    for _ in range(taken_back):
        chains.pop()
    assert chains.longest(tail) == slow_longest(tokens, tail, run)


@given(
    st.lists(st.integers(0, 3), min_size=20, max_size=120),
    st.integers(4, 19),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_a_full_memory_knows_its_newest_tokens_and_no_more(tokens, capacity, tail):
    chains = HashChains(2, capacity)
    for token in tokens:
        chains.append(token)
    length, places = chains.longest(tail)
    expected, wanted = slow_longest(tokens[-capacity:], tail, 2)
    assert (length, [place - len(tokens) + capacity for place in places]) == (expected, wanted)
    assert len(chains.tokens) == len(chains.before) == capacity


def test_the_most_frequent_continuations_come_first():
    memory = Memory()
    for last in (7, 8, 7, 9, 8, 7):
        memory.add([1, 2, 3, last])
    length, follows = memory.following([0, 1, 2, 3], 5)
    assert length == 3
    assert [(tokens, count) for _, tokens, count in follows] == [([7], 3), ([8], 2)]


def test_no_match_goes_from_one_text_into_the_next():
    memory = Memory()
    memory.add([1, 2])
    memory.add([3, 4])
    assert memory.following([1, 2, 3], 4) == (0, [])
    memory.add([1, 2, 3])
    assert memory.following([1, 2, 3], 4) == (3, [])


def test_its_length_is_bounded():
    memory = Memory(max_tokens=100)
    for start in range(50):
        memory.add(range(start, start + 9))
    assert len(memory) == 100
    memory.add(range(1000))
    assert len(memory) == 100
    assert memory.following([996, 997, 998], 5)[1][0][1] == [999]
    assert memory.following([1, 2, 3], 5) == (0, [])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5, 2.0], "A text's ids are wanted"),
        (torch.ones(2, 3, dtype=torch.long), "A text's ids are wanted"),
        ([-1, 2], "Ids of tokens are wanted: got -1 to 2"),
    ],
)
def test_what_is_no_text_is_refused(ids, message):
    memory = Memory()
    with pytest.raises(ValueError, match=message):
        memory.add(ids)
    assert len(memory) == 0


def test_all_forms_of_a_text_are_taken():
    for ids in (
        [1, 2, 3, 4],
        range(1, 5),
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([[1, 2, 3, 4]]),
    ):
        memory = Memory()
        memory.add(ids)
        memory.add([])
        assert memory.following([1, 2, 3], 2)[1][0][1] == [4]
    with pytest.raises(ValueError, match="more than 3 tokens"):
        Memory(3)


def test_a_memory_is_saved_and_loaded(tmp_path):
    memory = Memory(max_tokens=64)
    for start in range(9):
        memory.add(range(start, start + 12))
    memory.save(tmp_path / "memory.safetensors")
    loaded = Memory.load(tmp_path / "memory.safetensors", remember=True)
    assert (len(loaded), loaded.max_tokens, loaded.largest, loaded.remember) == (64, 64, 19, True)
    assert loaded.following([9, 10, 11], 9)[1][0][1] == memory.following([9, 10, 11], 9)[1][0][1]
    assert [file.name for file in tmp_path.iterdir()] == ["memory.safetensors"]


def test_a_file_that_asks_for_much_memory_gets_little(tmp_path):
    save_file(
        {"tokens": torch.tensor([3, 4, -1])},
        tmp_path / "large",
        metadata={"max_tokens": "99999999999999"},
    )
    assert len(Memory.load(tmp_path / "large")) == 3


def test_another_file_is_no_memory(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    near_copy(TARGET, 0.2).save_pretrained(tmp_path / "model")
    odd = {
        "scalar": (torch.tensor(3), "64"),
        "word": (torch.tensor([3]), "x"),
        "floats": (torch.tensor([0.5]), "64"),
        "no floats": (torch.tensor([]), "64"),
        "pairs": (torch.tensor([[1, -1], [2, -1]]), "64"),
    }
    for name, (tokens, most) in odd.items():
        save_file({"tokens": tokens}, tmp_path / name, metadata={"max_tokens": most})
    for file in (
        tmp_path / "text",
        tmp_path / "model" / "model.safetensors",
        *(tmp_path / name for name in odd),
    ):
        with pytest.raises(ValueError, match=r"holds no memory; Memory\.save writes one"):
            Memory.load(file)


MAKE = {
    "ngram": lambda: NgramDrafter(),
    "ngram-tree": lambda: NgramDrafter(speculation_config=SpeculationConfig(8, 20)),
    "pard": lambda: near_copy(TARGET, 0.2),
    "autoregressive": lambda: hf_paradraft.AutoregressiveDrafter(near_copy(TARGET, 0.2)),
    "parallelspec": lambda: hf_paradraft.ParallelSpecDrafter.from_target(TARGET, "eagle", 3),
    "ppd": lambda: hf_paradraft.PpdDrafter.from_model(
        with_prompts(copy.deepcopy(TARGET), 2, calibrated=True)
    ),
}
DRAFTERS = {name: make() for name, make in MAKE.items()}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(MAKE)),
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=10), min_size=1, max_size=3),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_copies_never_change_the_output(name, prompts, new, sampled, adaptive, seed):
    """A memory with edited answers, so that copies begin right, break, and go on."""
    drafter, change = DRAFTERS[name], random.Random(seed)
    if not name.startswith("ngram"):
        drafter.speculation_config = SpeculationConfig(
            2 if name == "ppd" else 4, "auto" if seed % 2 else None, never_slower=adaptive
        )
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "max_new_tokens": new, "pad_token_id": 0}
    memory = Memory(400, remember=True)
    for row in TARGET.generate(ids, do_sample=False, **options).tolist():
        memory.add([change.randrange(1, 7) if change.random() < 0.1 else token for token in row])
    drafter.memory = memory
    try:
        assert_lossless(
            TARGET, drafter, ids, seed=1, do_sample=sampled and len(prompts) == 1, **options
        )
    finally:
        drafter.memory = None


def rounds(drafter, prompt, **options):
    """The answer, and in how many rounds it came."""
    out = TARGET.generate(
        prompt,
        do_sample=False,
        max_new_tokens=60,
        eos_token_id=None,
        assistant_model=drafter,
        **options,
    )
    return out[0, prompt.shape[1] :].tolist(), drafter.last_stats.num_rounds


def test_an_edited_answer_is_copied_up_to_its_edits_and_behind_them():
    prompt = torch.tensor([[5, 3, 4]])
    config = SpeculationConfig(32, None, never_slower=False)
    answer, alone = rounds(NgramDrafter(speculation_config=config), prompt)
    memory = Memory()
    memory.add(
        [
            *prompt[0].tolist(),
            *(token if index % 20 else 31 - token for index, token in enumerate(answer)),
        ]
    )
    drafter = NgramDrafter(speculation_config=config, memory=memory)
    again, edited = rounds(drafter, prompt)
    assert again == answer
    assert edited <= 2 + 3 * 2 < alone, drafter.last_stats


def test_what_was_answered_is_remembered_if_asked():
    prompt = torch.tensor([[5, 3, 4]])
    for remember in (False, True):
        memory = Memory(remember=remember)
        drafter = NgramDrafter(
            memory=memory, speculation_config=SpeculationConfig(32, None, never_slower=False)
        )
        answer, first = rounds(drafter, prompt)
        assert len(memory) == (len(answer) + 3 + 1 if remember else 0)
        assert (rounds(drafter, prompt)[1] < first) == remember


def test_a_memory_in_other_tokens_is_refused():
    drafter = NgramDrafter(memory=Memory())
    drafter.memory.add([1, 2, 10_000])
    with pytest.raises(
        ValueError, match="memory holds the id 10000, and the target's vocabulary ends at"
    ):
        TARGET.generate(
            torch.tensor([[5, 3, 4]]), max_new_tokens=4, do_sample=False, assistant_model=drafter
        )


def test_threads_share_one_memory():
    memory, prompt = Memory(400, remember=True), torch.tensor([[5, 3, 4]])
    plain = {
        seed: TARGET.generate(prompt + seed, do_sample=False, max_new_tokens=40, eos_token_id=None)
        for seed in range(3)
    }

    def call(seed):
        options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
        return TARGET.generate(
            prompt + seed, **options, assistant_model=NgramDrafter(memory=memory)
        )

    with ThreadPoolExecutor(3) as threads:
        for seed, out in zip([0, 1, 2] * 4, threads.map(call, [0, 1, 2] * 4), strict=True):
            assert torch.equal(out, plain[seed])
    assert len(memory) == 400


def test_a_lookup_compares_so_many_places_and_no_more():
    """Where one run stands everywhere, time still has a bound."""
    memory = Memory()
    memory.add([1] * 5000)
    length, follows = memory.following([0, 1, 1, 1], 4)
    assert length == 3
    assert 0 < sum(count for *_, count in follows) <= PLACES


def test_copies_learn_by_the_length_of_their_match():
    """Short matches that fail are believed less, long ones as before."""
    memory = Memory()
    memory.add([*range(10, 30)])
    lookup, text = PromptLookup(memory=memory), []
    for wrong in range(8):
        before, text = len(text), [*text, 100 + wrong, 10, 11, 12]
        lookup.read(torch.tensor(text), before)
        assert lookup.following(5)[0][0][0] == 13
    assert lookup.first[3][0] / lookup.first[3][1] < 0.3
    assert lookup.first[8][0] / lookup.first[8][1] == FIRST[-1]


def test_an_id_beyond_the_vocabulary_is_forgotten_with_its_text():
    memory = hf_paradraft.Memory(20)
    memory.add([1, 2, 500, 3])
    assert memory.largest == 500
    memory.add([1, 2, 3] * 6)
    assert memory.largest == 3
    memory.add([7])
    memory.clear()
    assert (memory.largest, len(memory)) == (-1, 0)
    memory.add([1, 2, 3, 4, 1, 2, 3])
    assert memory.following([1, 2, 3], 1)[0] == 3


def test_lookups_do_not_wait_for_a_long_text():
    memory = hf_paradraft.Memory(400_000)
    memory.add([1, 2, 3, 4])
    adding = threading.Thread(target=memory.add, args=(list(range(50)) * 2000,))
    adding.start()
    waits = []
    while adding.is_alive():
        begun = time.perf_counter()
        memory.following([1, 2, 3], 4)
        waits.append(time.perf_counter() - begun)
    adding.join()
    assert len(waits) > 20
    assert sorted(waits)[len(waits) * 9 // 10] < 0.1


@pytest.mark.parametrize("content", ["folder", "text", "ids"])
def test_what_holds_no_memory_is_named(content, tmp_path):
    file = tmp_path / "memory"
    if content == "folder":
        file.mkdir()
    elif content == "text":
        file.write_text("no memory")
    else:
        save_file(
            {"tokens": torch.tensor([1, -5, 2], dtype=torch.int32)},
            file,
            metadata={"max_tokens": "10"},
        )
    with pytest.raises(ValueError, match="holds no memory"):
        hf_paradraft.Memory.load(file)
