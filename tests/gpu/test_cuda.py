"""What only a machine with a CUDA device can show: `make gpu`, with its report at the end."""

import copy
import json
import time
from queue import Queue

import pytest
import torch
from layouts import LAYOUTS, write
from lossless import assert_lossless
from scipy.stats import chisquare
from tiny import EOS, MASK, make_tokenizer, near_copy, tiny_model, with_prompts
from trained import (
    regenerate,
    train_dflash,
    train_dspark,
    train_eagle3,
    train_parallelspec,
    train_pard,
    train_ppd,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paradraft
from hf_paradraft.bench import Prompt, Settings, bench, drafted, plain, records
from hf_paradraft.decoding.latency import measure
from hf_paradraft.demo import FAMILY
from hf_paradraft.drafters.pard.training import PardTrainer
from hf_paradraft.serve.scheduler import Job, Scheduler
from hf_paradraft.training.rows import CodConfig, RowCollator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NAMES = ["llama", "qwen2", "qwen3", "gpt2", "mistral-sliding"]


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 would round fp32 products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def family():
    target = (
        AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32).cuda().eval()
    )
    return (
        target,
        hf_paradraft.AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32).cuda(),
        AutoTokenizer.from_pretrained(FAMILY / "target"),
    )


def drafters(target):
    return {
        "pard": near_copy(target, 0.05),
        "autoregressive": hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.05)),
        "ppd": hf_paradraft.PpdDrafter.from_model(with_prompts(copy.deepcopy(target), 2)),
        "prompted": hf_paradraft.PromptedDrafter(with_prompts(near_copy(target, 0.05), 2)),
        "n-grams": hf_paradraft.NgramDrafter(),
    }


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_plain(name, size, cache):
    on_cpu = tiny_model(name)
    made = drafters(on_cpu)
    target = copy.deepcopy(on_cpu).cuda()
    for kind, drafter in made.items():
        if kind in ("pard", "ppd"):
            drafter = drafter.cuda() if kind == "pard" else drafter
        elif kind != "n-grams":
            drafter.model.cuda()
        length = 2 if kind == "ppd" else 6
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            length, size, never_slower=False
        )
        for rows in (1, 3):
            ids = torch.randint(
                1, EOS, (rows, 6), generator=torch.Generator().manual_seed(rows)
            ).cuda()
            options = {
                "do_sample": False,
                "max_new_tokens": 24,
                "attention_mask": torch.ones_like(ids),
                "pad_token_id": 0,
            }
            options["cache_implementation"] = cache
            assert torch.equal(
                target.generate(ids, **options),
                target.generate(ids, assistant_model=drafter, **options),
            ), kind


@pytest.mark.parametrize("rule", ["sample_match", "rejection"])
def test_the_distribution(rule):
    target = tiny_model().cuda()
    drafter = near_copy(tiny_model(), 0.1).cuda()
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, 6, acceptance=rule, never_slower=False
    )
    ids = torch.tensor([[1, 2, 3]]).cuda()
    options = {
        "do_sample": True,
        "top_k": 4,
        "temperature": 2.0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "max_new_tokens": 2,
    }
    samples = target.generate(ids, num_return_sequences=2000, assistant_model=drafter, **options)[
        :, 3
    ].cpu()
    logits = target(ids).logits[0, -1].detach().cpu() / 2.0
    p = logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf).softmax(-1)
    counts = torch.bincount(samples, minlength=32).float()
    assert (counts[p == 0] == 0).all()
    assert chisquare(counts[p > 0].numpy(), (2000 * p[p > 0]).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("size", [None, 16])
def test_compiled_rounds_over_cuda_graphs(family, size):
    target, drafter, tokenizer = family
    ids = tokenizer("def f(x):", return_tensors="pt")["input_ids"].cuda()
    options = {"do_sample": False, "max_new_tokens": 64}
    expected = target.generate(ids, **options)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        12, size, compile=True, never_slower=False
    )
    for _ in range(2):
        assert_lossless(target, drafter, ids, plain=expected, **options)


def test_features_outlive_the_next_replay(family):
    target, _, tokenizer = family
    ids = tokenizer("def f(x):", return_tensors="pt")["input_ids"].cuda()
    plain_text = target.generate(ids, do_sample=False, max_new_tokens=32)

    class Reads(hf_paradraft.Drafter, hf_paradraft.Drafting):
        def __init__(self):
            self.speculation_config = hf_paradraft.SpeculationConfig(
                4, None, compile=True, never_slower=False
            )
            self.seen = {}

        def needs(self, target):
            return (0, "normed")

        def start_drafting(self, target, max_length):
            return self

        def propose(self, prefixes):
            length = prefixes[0].ids.shape[1]
            return [hf_paradraft.GuessedTokens(plain_text[0, length : length + prefixes[0].room])]

        def observe(self, observations):
            for place, row in enumerate(observations[0].features["normed"], observations[0].begin):
                self.seen[place] = row

    reader = Reads()
    assert_lossless(target, reader, ids, max_new_tokens=32)
    with torch.no_grad():
        states = target.model(plain_text).last_hidden_state[0]
    for place, row in reader.seen.items():
        torch.testing.assert_close(row, states[place], rtol=1e-3, atol=1e-3)


def test_flex_attention_trains_as_sdpa_does(tmp_path):
    from datasets import Dataset
    from transformers import TrainingArguments

    rows = [{"input_ids": list(range(1, 25)), "labels": list(range(1, 25)), "length": 24}] * 2
    losses = []
    for attention in ("sdpa", "flex_attention"):
        model = tiny_model(head_dim=16, attn_implementation=attention).cuda()
        drafter = hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=MASK)
        arguments = TrainingArguments(str(tmp_path), report_to="none", max_steps=1)
        trainer = PardTrainer(
            drafter, arguments, CodConfig(3, 1.0, 1.0), train_dataset=Dataset.from_list(rows)
        )
        batch = RowCollator(MASK, CodConfig(3, 1.0, 1.0), dense_masks=attention == "sdpa")(rows)
        losses.append(
            float(
                trainer.compute_loss(drafter, {name: part.cuda() for name, part in batch.items()})
            )
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_device_map(dtype):
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=dtype, device_map="auto")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(
        FAMILY / "pard", dtype=dtype, device_map="auto"
    )
    ids = torch.tensor([[5, 6, 7, 8]]).cuda()
    out = target.generate(ids, do_sample=False, max_new_tokens=32, assistant_model=drafter)
    assert out.shape[1] > 4
    assert drafter.last_stats.mean_emitted > 1


def test_speed(family, record_property, capsys):
    """No claim, but the figures: latency by rows, and a short bench."""
    target, drafter, tokenizer = family
    half = target.to(torch.bfloat16)
    small = drafter.to(torch.bfloat16)
    latency = measure(half)
    prompts = [
        Prompt("code", tokenizer(text, return_tensors="pt")["input_ids"].cuda())
        for text in ("def f(x):", "def g(y):")
    ]
    variants = [
        drafted("pard-chain-k12", small, hf_paradraft.SpeculationConfig(12, None)),
        drafted("pard-tree-n16", small, hf_paradraft.SpeculationConfig(12, 16)),
    ]
    started = time.perf_counter()
    rows = records(
        bench(
            half,
            [plain(), *variants],
            prompts,
            Settings(96, repeats=3),
            progress=False,
        )
    )
    lines = [
        f"{torch.cuda.get_device_name()}: rows {latency.rows}, ms "
        f"{[round(1000 * s, 2) for s in latency.seconds]}"
    ]
    lines += [
        f"{row['method']}: {row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f}, τ "
        f"{row['tau']:.2f}"
        for row in rows
    ]
    with capsys.disabled():
        print("\n".join(["", *lines, f"{time.perf_counter() - started:.0f} s"]))
    record_property("figures", "; ".join(lines))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize(
    "name", ["z-lab, sliding", "DeepSpec rnn", "speculators EAGLE-3", "speculators P-EAGLE"]
)
def test_drafters_that_read_the_target(name, size, compile, tmp_path):
    target = tiny_model("llama", num_hidden_layers=8).cuda()
    drafter = hf_paradraft.AutoDrafter.from_pretrained(
        write(tmp_path, *LAYOUTS[name]()), device_map="auto"
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, size, never_slower=False, compile=compile
    )
    ids = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], device="cuda")
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    assert_lossless(target, drafter, ids, **options)
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("place", ["cuda", "cpu", "cuda:1"])
@pytest.mark.parametrize("kind", ["pard", "autoregressive"])
def test_overlap(kind, place):
    """Two streams of one GPU, a GPU and the CPU, two GPUs."""
    if place == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    target = tiny_model().cuda()
    small = near_copy(tiny_model(), 0.03).to(place)
    drafter = small if kind == "pard" else hf_paradraft.AutoregressiveDrafter(small)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        5, None, overlap=True, never_slower=False
    )
    ids = torch.tensor([[1, 2, 3, 4, 5]], device="cuda")
    options = {"do_sample": False, "max_new_tokens": 80, "eos_token_id": None}
    assert_lossless(target, drafter, ids, **options)
    assert drafter.last_stats.hidden_seconds > 0


TRAINED = {
    "pard": (train_pard, {"mask_token_id": MASK}),
    "ppd": (train_ppd, {}),
    "eagle3": (train_eagle3, {"vocab": 24}),
    "parallelspec": (train_parallelspec, {}),
    "dflash": (train_dflash, {}),
    "dspark": (train_dspark, {}),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A tiny target in a folder, and answers that it wrote on the device, some with a drafter's
    help.
    """
    folder = tmp_path_factory.mktemp("trained")
    model = tiny_model("llama", num_hidden_layers=8, dtype=torch.float32)
    model.save_pretrained(folder / "target")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"text": text}) + "\n"
            for text in ("a b c d e f", "g h i a b", "c d e f g h a b")
        )
    )
    for name, drafter in (("plain", None), ("drafted", near_copy(model, 0.05).cuda())):
        regenerate(
            model.cuda(), tokenizer, prompts, folder / f"{name}.jsonl", 16, 2, drafter=drafter
        )
    assert (folder / "plain.jsonl").read_text() == (folder / "drafted.jsonl").read_text()
    return folder


@pytest.mark.parametrize("kind", TRAINED)
def test_kinds_train(kind, rows, tmp_path):
    train, options = TRAINED[kind]
    train(
        rows / "target",
        rows / "plain.jsonl",
        tmp_path / "out",
        max_steps=3,
        max_length=64,
        eval_file=str(rows / "plain.jsonl"),
        **options,
    )
    target = AutoModelForCausalLM.from_pretrained(rows / "target", dtype=torch.float32).cuda()
    drafter = hf_paradraft.AutoDrafter.from_pretrained(
        tmp_path / "out", dtype=torch.float32, device_map="auto"
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(2, None, never_slower=False)
    ids = torch.tensor([[1, 2, 3, 4, 5]]).cuda()
    assert_lossless(
        target, drafter, ids, do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
    )
    assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("drafts", [True, False])
def test_joined_requests(drafts):
    """Prompts of different lengths, one of them sampled, answered together."""
    target = tiny_model().cuda()
    drafter = near_copy(tiny_model(), 0.05).cuda() if drafts else None
    scheduler = Scheduler(target, drafter)
    scheduler.start()
    options = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    texts, queues = [], []
    for seed, length in enumerate((3, 9, 5)):
        ids = torch.randint(
            1, EOS, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        sampled = (
            {"do_sample": seed == 1, "temperature": 1.5} if seed == 1 else {"do_sample": False}
        )
        torch.manual_seed(seed)
        texts.append(
            target.generate(torch.tensor([ids]).cuda(), **sampled, **options)[0, length:].tolist()
        )
        queues.append(news := Queue())
        scheduler.submit(
            Job(ids, {**sampled, **options}, news.put, seed=seed if seed == 1 else None)
        )
    for news, text in zip(queues, texts, strict=True):
        written = []
        while True:
            latest = news.get(timeout=60)
            assert latest.error is None
            written += latest.tokens
            if latest.over:
                break
        assert written == text
    scheduler.stop()
