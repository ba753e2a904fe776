"""Requests that are answered together: each has the text that it has alone, whoever joins, leaves,
or fails.
"""

import time
from queue import Queue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, SHARED, near_copy, tiny_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hf_paradraft import AutoregressiveDrafter, NgramDrafter, ParallelSpecDrafter, SpeculationConfig
from hf_paradraft.serve.errors import Refusal
from hf_paradraft.serve.scheduler import Job, Scheduler, Stopped

TARGET = tiny_model()
DRAFTERS = {
    "pard": near_copy(TARGET, 0.2),
    "autoregressive": AutoregressiveDrafter(near_copy(TARGET, 0.2)),
    "parallelspec": ParallelSpecDrafter.from_target(TARGET, "eagle", 3),
    "ngram": NgramDrafter(),
    "none": None,
}
GREEDY = {"do_sample": False, "pad_token_id": 0}


def job(ids, **options):
    """A request, and the queue of its news."""
    news = Queue()
    more = {name: options.pop(name) for name in ("seed", "drafts", "prediction") if name in options}
    return Job(ids, {**GREEDY, "max_new_tokens": 20, **options}, news.put, **more), news


def answer(news):
    """All tokens that come, or the error."""
    tokens = []
    while True:
        latest = news.get(timeout=60)
        if latest.error is not None:
            return latest.error
        tokens += latest.tokens
        if latest.over:
            return tokens


@torch.no_grad()
def answer_all(scheduler, asked):
    """Let a scheduler without a thread of its own answer requests that came at once."""
    for one, _ in asked:
        scheduler.submit(one)
    while scheduler.entering or scheduler.running:
        scheduler._read()
        scheduler._decode()


def alone(ids, seed=None, **options):
    """What `generate` writes behind a prompt."""
    options = {
        name: value for name, value in options.items() if name not in ("drafts", "prediction")
    }
    if seed is not None:
        torch.manual_seed(seed)
    out = TARGET.generate(torch.tensor([ids]), **{**GREEDY, "max_new_tokens": 20, **options})
    return out[0, len(ids) :].tolist()


@pytest.fixture
def serving():
    """Make schedulers, and end them."""
    made = []

    def make(drafter=None, **options):
        made.append(Scheduler(TARGET, drafter, **options))
        made[-1].start()
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.stop()
        scheduler.thread.join(30)
        assert not scheduler.thread.is_alive()


BEGINNING = st.sampled_from([[], [5, 3, 2, 9, 4], [5, 3, 2, 9, 4, 7, 7, 1], [5, 3, 8, 6, 2]])
REQUEST = st.tuples(
    st.builds(list.__add__, BEGINNING, st.lists(st.integers(1, EOS - 1), min_size=1, max_size=12)),
    st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 30),
            "drafts": st.booleans(),
            "prefill_chunk_size": st.sampled_from([None, 3]),
        },
        optional={"prediction": st.lists(st.integers(1, 6), min_size=1, max_size=30)},
    ),
    st.none() | st.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(DRAFTERS)),
    st.integers(1, 3),
    st.sampled_from([0, 20_000, 1 << 30]),
    st.lists(REQUEST, min_size=1, max_size=6),
)
def test_each_request_has_the_text_that_it_has_alone(name, places, prefix_bytes, requests):
    drafter = DRAFTERS[name]
    if drafter is not None:
        drafter.speculation_config = SpeculationConfig(4, "auto")
    scheduler = Scheduler(TARGET, drafter, places, prefix_bytes=prefix_bytes)
    scheduler.start()
    try:
        asked = []
        for ids, options, seed in requests:
            options = {name: value for name, value in options.items() if value is not None}
            options |= {} if seed is None else {"seed": seed, "do_sample": True}
            asked.append((ids, options, job(ids, **options)))
            scheduler.submit(asked[-1][2][0])
        answers = [answer(news) for _, _, (_, news) in asked]
    finally:
        scheduler.stop()
        scheduler.thread.join(60)
    for (ids, options, _), tokens in zip(asked, answers, strict=True):
        assert tokens == alone(ids, **options)


def test_a_request_that_is_given_up_gives_its_place_back(serving):
    scheduler = serving(max_batch_size=1)
    endless, news = job([5, 3], max_new_tokens=100_000, eos_token_id=None)
    scheduler.submit(endless)
    news.get(timeout=30)
    after, heard = job([4, 5])
    scheduler.submit(after)
    scheduler.cancel(endless)
    assert answer(heard) == alone([4, 5])
    deadline = time.monotonic() + 10
    while scheduler.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.running
    assert scheduler.batch is None


def test_a_request_that_fails_leaves_the_others_alone(serving):
    scheduler = serving(DRAFTERS["pard"])

    def broken(ids, scores):
        raise RuntimeError("a processor that breaks")

    good, news = job([5, 3], max_new_tokens=40, eos_token_id=None)
    refused, heard = job([5, 3], num_beams=2)
    failing, told = job([5, 3], logits_processor=[broken])
    for request in (good, refused, failing):
        scheduler.submit(request)
    assert "beam" in str(answer(heard))
    assert "a processor that breaks" in str(answer(told))
    assert answer(news) == alone([5, 3], max_new_tokens=40, eos_token_id=None)


def test_a_request_that_fails_in_a_round_of_all_fails_alone(serving):
    """Scores that nothing can be drawn from, a processor that breaks late: the others' answers were
    failed with it.
    """
    scheduler = serving(DRAFTERS["pard"])

    def late(ids, scores):
        if ids.shape[1] > 9:
            raise RuntimeError("a processor that breaks")
        return scores

    good = [job([5, 3, number], max_new_tokens=60, eos_token_id=None) for number in (4, 7)]
    failing, told = job([5, 3], logits_processor=[late], max_new_tokens=60, eos_token_id=None)
    odd, heard = job(
        [5, 3],
        do_sample=True,
        seed=0,
        repetition_penalty=1e-300,
        max_new_tokens=60,
        eos_token_id=None,
    )
    for request in (good[0][0], failing, odd, good[1][0]):
        scheduler.submit(request)
    assert "a processor that breaks" in str(answer(told))
    assert "probability tensor" in str(answer(heard))
    for (_, news), number in zip(good, (4, 7), strict=True):
        assert answer(news) == alone([5, 3, number], max_new_tokens=60, eos_token_id=None)


def test_who_waits_when_the_server_ends_is_told():
    scheduler = Scheduler(TARGET, None, max_batch_size=1)
    requests = [job([5, 3], max_new_tokens=200, eos_token_id=None) for _ in range(3)]
    scheduler.start()
    for request, _ in requests:
        scheduler.submit(request)
    assert requests[0][1].get(timeout=60).tokens
    scheduler.stop()
    assert not scheduler.thread.is_alive()
    assert all(isinstance(answer(news), Stopped) for _, news in requests)


def test_targets_that_could_read_images_answer_together():
    """Gemma 3's class hands on an empty mapping of images with every text."""
    torch.manual_seed(0)
    eyes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
    }
    mind = {**SHARED, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8}
    config = Gemma3Config(
        text_config=mind, vision_config={**eyes, "patch_size": 4}, mm_tokens_per_image=4
    )
    target = Gemma3ForConditionalGeneration(config).eval()
    scheduler = Scheduler(target, NgramDrafter(), max_batch_size=3)
    prompts = [[1, 2, 3, 4, 1, 2], [5, 6], [7, 8, 9]]
    jobs = [job(ids) for ids in prompts]
    for one, _ in jobs:
        scheduler.submit(one)
    scheduler.start()
    for ids, (_, news) in zip(prompts, jobs, strict=True):
        text = target.generate(torch.tensor([ids]), **GREEDY, max_new_tokens=20)[0, len(ids) :]
        assert answer(news) == text.tolist()
    scheduler.stop()


def test_a_full_queue_says_so():
    # not started: nobody is answered
    scheduler = Scheduler(TARGET, None, max_batch_size=1, max_queue=2)
    for _ in range(1 + 2):  # a place, and the queue
        scheduler.submit(job([5])[0])
    with pytest.raises(Refusal, match="2 requests are waiting already"):
        scheduler.submit(job([5])[0])


def test_what_is_predicted_is_copied(serving):
    scheduler = serving(None)
    tokens = alone([5, 3, 4], max_new_tokens=60, eos_token_id=None)
    plain, heard = job([5, 3, 4], max_new_tokens=60, eos_token_id=None)
    guessed, news = job([5, 3, 4], max_new_tokens=60, eos_token_id=None, prediction=tokens)
    scheduler.submit(plain)
    assert answer(heard) == tokens
    scheduler.submit(guessed)
    assert answer(news) == tokens
    assert guessed.stats.num_rounds < plain.stats.num_rounds == 60


def test_lessons_are_given_when_nobody_waits_and_end_when_somebody_does(serving, monkeypatch):
    monkeypatch.setattr("hf_paradraft.serve.scheduler.IDLE_SECONDS", 0.05)
    heard, told, lessons = [], [], Queue()
    drafter = near_copy(TARGET, 0.2)
    drafter.listener = lambda ids, prompt: told.append((ids.tolist(), prompt))

    def lesson(interrupted):
        lessons.put(interrupted())
        while not heard and not interrupted():
            time.sleep(0.01)

    scheduler = serving(drafter, lesson=lesson)
    assert lessons.get(timeout=30) is False  # it has begun
    request, news = job([1, 2, 3])
    gone, _ = job([4, 5], max_new_tokens=500)
    scheduler.submit(request)
    assert answer(news) == alone([1, 2, 3])
    heard.append(True)
    scheduler.submit(gone)
    scheduler.cancel(gone)
    assert lessons.get(timeout=30) is False
    assert told == [([1, 2, 3, *alone([1, 2, 3])], 3)]  # and of what was given up what was written


def test_what_is_taken_at_once_is_learned_from_all_the_same(serving):
    """Who has the end of an answer gives the request up, before the scheduler has let it go."""
    told, drafter = [], near_copy(TARGET, 0.2)
    drafter.listener = lambda ids, prompt: told.append(ids.tolist())
    scheduler = serving(drafter)
    for number in range(1, 13):
        request, news = job([number, 2, 3])
        tell = request.tell
        request.tell = lambda latest, request=request, tell=tell: (
            scheduler.cancel(request) if latest.over else None,
            tell(latest),
        )
        scheduler.submit(request)
        assert answer(news) == alone([number, 2, 3])
    request, news = job([1, 2])
    scheduler.submit(request)
    answer(news)
    assert [text[:3] for text in told[:12]] == [[number, 2, 3] for number in range(1, 13)]


def test_a_listener_that_fails_stops_nothing(serving):
    drafter = near_copy(TARGET, 0.2)
    drafter.listener = lambda ids, prompt: 1 / 0
    scheduler = serving(drafter)
    for _ in range(2):
        request, news = job([1, 2, 3])
        scheduler.submit(request)
        assert answer(news) == alone([1, 2, 3])


def test_nobody_waits_for_more_tokens_than_its_own_prompt_has():
    """What others have read is counted, whoever has left meanwhile; a long prompt is not overtaken
    by ever new short ones.
    """
    scheduler = Scheduler(TARGET, None, max_batch_size=2)  # not started: its rounds are run here
    scheduler.piece = 8

    def rounds(count):
        for _ in range(count):
            scheduler._drop_cancelled()
            scheduler._read()
            scheduler._decode()

    first, _ = job([3] * 150, max_new_tokens=2, eos_token_id=None)
    scheduler.submit(first)
    rounds(30)
    assert scheduler.num_read == 150
    running, _ = job([4] * 5, max_new_tokens=400, eos_token_id=None)
    scheduler.submit(running)
    long, heard = job([5] * 50, max_new_tokens=3, eos_token_id=None)
    scheduler.submit(long)
    passed = 0
    while heard.empty():
        short, _ = job([6] * 10, max_new_tokens=1, eos_token_id=None)
        scheduler.submit(short)
        rounds(1)
        passed += 10
        assert passed < 200
    assert scheduler.num_read <= 150 + 5 + 50 + passed
    scheduler.cancel(running)


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 30])
@pytest.mark.parametrize("name", ["pard", "parallelspec", "none"])
def test_short_prompts_are_read_in_one_forward(name, prefix_bytes, monkeypatch):
    """All but the one that begins as another does, which waits for what is then known."""
    monkeypatch.setattr("hf_paradraft.serve.scheduler.READ_SECONDS", 60)
    scheduler = Scheduler(TARGET, DRAFTERS[name], max_batch_size=4, prefix_bytes=prefix_bytes)
    prompts = [[3, 5, 7], [4] * 9, [6, 2, 8, 8, 1], [4] * 9 + [5]]
    asked = [job(prompt) for prompt in prompts]
    for one, _ in asked:
        scheduler.submit(one)
    shapes = []
    handle = TARGET.get_input_embeddings().register_forward_hook(
        lambda module, args, out: shapes.append(tuple(out.shape[:2]))
    )
    scheduler._read()
    handle.remove()
    while scheduler.running:
        scheduler._decode()
    assert [answer(news) for _, news in asked] == [alone(prompt) for prompt in prompts]
    assert ((3, 8) if prefix_bytes else (4, 9)) in shapes
    assert asked[3][0].known == (8 if prefix_bytes else 0)


def test_of_prompts_that_are_read_together_one_fails_alone():
    """Its id has no embedding; the others are read by themselves."""
    scheduler = Scheduler(TARGET, NgramDrafter(), max_batch_size=8)
    prompts = [[3, 4, 5], [7, 999, 9], [1, 2, 6, 6]]
    asked = [job(prompt) for prompt in prompts]
    answer_all(scheduler, asked)
    first, failed, last = (answer(news) for _, news in asked)
    assert (first, last) == (alone(prompts[0]), alone(prompts[2]))
    assert isinstance(failed, IndexError)


def test_no_hook_stays_after_prompts_that_could_not_be_read_together(monkeypatch):
    drafter = DRAFTERS["parallelspec"]
    drafting = type(drafter.start_drafting(TARGET, 100))
    observe, left = drafting.observe, [1]

    def fails_once(self, observations):
        if left:
            raise torch.OutOfMemoryError(left.pop())
        return observe(self, observations)

    monkeypatch.setattr(drafting, "observe", fails_once)
    scheduler = Scheduler(TARGET, drafter, max_batch_size=8)
    prompts = [[3, 4, 5], [7, 8]]
    asked = [job(prompt) for prompt in prompts]
    answer_all(scheduler, asked)
    assert [answer(news) for _, news in asked] == [alone(prompt) for prompt in prompts]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in TARGET.modules())


def test_a_beginning_that_cannot_be_kept_fails_nobody(monkeypatch):
    """There is no memory for it, say, just when there is none."""
    scheduler = Scheduler(TARGET, DRAFTERS["pard"], prefix_bytes=1 << 20)
    monkeypatch.setattr(scheduler.prefixes, "keep", lambda *_: 1 / 0)
    scheduler.start()
    asked = [job([5, 3, number], max_new_tokens=10 + 20 * number) for number in (1, 2)]
    for one, _ in asked:
        scheduler.submit(one)
    for number, (_, news) in zip((1, 2), asked, strict=True):
        assert answer(news) == alone([5, 3, number], max_new_tokens=10 + 20 * number)
    scheduler.stop()
    with pytest.raises(Stopped):
        scheduler.submit(job([5])[0])
