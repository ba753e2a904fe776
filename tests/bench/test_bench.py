"""The bench counts what happens and reports what it counted."""

import dataclasses
import json
from itertools import zip_longest

import pytest
import torch
from peft import get_peft_model
from rich.console import Console
from tiny import near_copy, tiny_model
from transformers import AutoModelForCausalLM

import hf_paradraft
from hf_paradraft.bench import (
    Measurement,
    Prompt,
    Settings,
    assisted,
    bench,
    drafted,
    plain,
    prompt_lookup,
    records,
)
from hf_paradraft.bench.measure import check_equality
from hf_paradraft.bench.methods import Case, methods_of, replayed
from hf_paradraft.bench.questions import random_prompts
from hf_paradraft.bench.results import OF_RECORD
from hf_paradraft.drafters.ppd import PpdConfig
from hf_paradraft.report.figures import draw
from hf_paradraft.report.tables import markdown, read_bench, table


def pard_chain(drafter, length):
    config = hf_paradraft.SpeculationConfig(length, None, never_slower=False)
    return drafted(f"pard-chain-k{length}", drafter, config)


@pytest.fixture(scope="session")  # slow tests come before the module's others
def results():
    target = tiny_model(dtype=torch.float32)
    drafter = near_copy(target)
    prompts = [
        Prompt(name, torch.tensor([[i, 2, 3]])) for i, name in enumerate(["a", "a", "b", "b"])
    ]
    methods = [
        plain(),
        assisted(tiny_model(seed=3, dtype=torch.float32), 3),
        assisted(tiny_model(seed=3, dtype=torch.float32), None),
        prompt_lookup(),
        pard_chain(drafter, 2),
        pard_chain(drafter, 4),
    ]
    return bench(target, methods, prompts, Settings(16), progress=False)


@pytest.mark.slow
def test_every_method_gives_plain_output(results):
    assert len(results) == 6 * 4
    assert all(result.same for result in results)


@pytest.mark.slow
def test_forwards_are_counted(results):
    for result in results:
        if result.method == "plain":
            assert result.forwards == result.tokens
        assert 0 < result.forwards <= result.tokens


@pytest.mark.slow
def test_records_and_report(results):
    rows = records(results)
    names = [
        "plain",
        "assisted-k3",
        "assisted-default",
        "prompt-lookup",
        "pard-chain-k2",
        "pard-chain-k4",
    ]
    assert [row["method"] for row in rows] == names
    assert rows[0]["speedup"] == 1
    assert rows[0]["tau"] == 1
    assert rows[5]["tau"] > 1
    assert rows[5]["tau_drafted"] == rows[5]["tau"] - 1
    assert set(rows[0]["by_category"]) == {"a", "b"}
    read = json.loads(json.dumps(rows))
    runs = [
        Measurement(**{name: row[name] for name in OF_RECORD}, **run)
        for row in read
        for run in row["runs"]
    ]
    assert runs == sorted(results, key=lambda entry: names.index(entry.method))
    console = Console(record=True, width=200)
    console.print(table(rows, "title"))
    assert "pard-chain-k4" in console.export_text()
    assert markdown(rows).count("\n") == 2 + len(rows)


@pytest.mark.parametrize("count", [1, 6, 13])
def test_tables_can_be_read_in_80_columns(count):
    values = {f"category {index}": 1.01 + index / 100 for index in range(count)}
    row = {
        "method": "pard-tree-k12-n16-lookup", "batch_size": 1, "temperature": 0,
        "tokens_per_second": 1234.0, "speedup": 2.0,
        "speedup_quartiles": [0.66, 2.0, 12.06], "tau": 3.0, "matches_reference": 1.0,
        "by_category": values,
    }  # fmt: skip
    console = Console(record=True, width=80)
    console.print(table([row], "title"))
    shown = console.export_text()
    assert "0.66–12.06" in shown
    assert "…" not in shown
    assert count == 1 or all(f"{value:.2f}" in shown for value in values.values())


@pytest.mark.slow
def test_records_split_the_time_and_count_acceptance(results):
    rows = records(results)
    assert "time_split" not in rows[0]
    assert sum(rows[5]["time_split"].values()) == pytest.approx(1)
    assert min(rows[5]["time_split"].values()) > 0
    runs = [result for result in results if result.method == "pard-chain-k4"]
    tried, right = (
        [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]
        for lists in ([run.attempts for run in runs], [run.successes for run in runs])
    )
    rates = rows[5]["acceptance_by_position"]
    assert rates == [good / count for good, count in zip(right, tried, strict=True)]
    assert tried[0] > 20  # nearly every round drafts
    # a place is judged where the one before was accepted
    assert all(count <= good for count, good in zip(tried[1:], right, strict=False))
    assert 0.5 < rates[0] < 1
    assert 2**20 < rows[0]["peak_bytes"] < 2**40


@pytest.mark.slow
def test_figures_come_from_the_records_alone(results, tmp_path):
    rows = json.loads(json.dumps(records(results)))
    assert [file.name for file in draw(rows, tmp_path / "one.svg")] == ["one.svg"]
    names = {file.stem for file in draw(rows, tmp_path / "figures")}
    assert names == {"speedup", "tau", "tau-by-length", "acceptance", "time"}
    more = [dict(row, batch_size=4) for row in rows]
    rows[0]["latency"] = {"rows": [1, 2, 4], "seconds": [1.0, 1.1, 1.5]}
    names = {file.stem for file in draw([*rows, *more], tmp_path / "more")}
    assert {"batches", "latency"} <= names
    assert all(file.stat().st_size > 1000 for file in (tmp_path / "more").iterdir())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_replay_is_always_right(batch_size):
    target = tiny_model(dtype=torch.float32)
    prompts = [Prompt("a", torch.tensor([[1, 2, 3]])), Prompt("b", torch.tensor([[4, 5]]))]
    method = replayed(4)
    # or it would rest: so small a target is the faster one
    method.config.never_slower = False
    settings = Settings(11, (batch_size,), (0.0, 1.0), warm_up=1)
    rows = bench(target, [plain(), method], prompts, settings, pad_token_id=0, progress=False)
    for row in rows:
        if row.method == "replayed":
            assert row.successes == row.attempts
            assert row.forwards < row.tokens / 2
            assert row.temperature or row.same


@pytest.mark.slow
def test_prompt_tokens_next_to_chains_and_trees():
    torch.manual_seed(0)
    accuracy = [[0.5 * 0.5**rank for rank in range(8)]] * 3
    adapter = hf_paradraft.PpdDrafter.from_model(
        get_peft_model(tiny_model(dtype=torch.float32), PpdConfig(accuracy=accuracy))
    )
    prompted = hf_paradraft.PromptedDrafter(
        get_peft_model(tiny_model(seed=3, dtype=torch.float32), PpdConfig())
    )
    prompts = [Prompt("a", torch.tensor([[1, 2, 3]]))]
    methods = methods_of(
        Case.methods, near_copy(tiny_model(dtype=torch.float32)), None, others=[adapter, prompted]
    )
    assert [method.name for method in methods[-2:]] == ["ppd-auto", "ppd-drafter-auto"]
    assert all(
        result.same
        for result in bench(
            tiny_model(dtype=torch.float32), methods, prompts, Settings(24), progress=False
        )
    )
    assert [method.name for method in methods_of(Case.methods, adapter, None)] == [
        "plain",
        "prompt-lookup",
        "ppd-auto",
    ]
    with pytest.raises(ValueError, match="hopeless"):
        methods_of(Case.hopeless, adapter, None)


def test_drafters_of_one_kind_are_told_apart():
    first = near_copy(tiny_model(dtype=torch.float32))
    second = near_copy(tiny_model(dtype=torch.float32))
    first.name_or_path, second.name_or_path = "somewhere/small", "user/large"
    other = hf_paradraft.ParallelSpecDrafter.from_target(
        tiny_model(dtype=torch.float32), num_masks=2
    )
    names = [
        method.name
        for method in methods_of(Case.methods, first, None, (2,), (6,), others=[second, other])
    ]
    assert names[2:6] == [
        "pard-chain-k2@small",
        "pard-tree-k2-n6@small",
        "pard-chain-k2@large",
        "pard-tree-k2-n6@large",
    ]
    assert names[6:] == ["parallelspec-chain-k2", "parallelspec-tree-k2-n6"]


def test_drafters_without_folders_are_numbered():
    first, second = hf_paradraft.NgramDrafter(), hf_paradraft.NgramDrafter()
    names = [
        method.name for method in methods_of(Case.methods, first, None, (2,), (), others=[second])
    ]
    assert names[2:] == ["ngram-chain-k2@1", "ngram-chain-k2@2"]


def test_speedup_is_the_mean_over_categories_of_medians():
    def of(method, category, seconds):
        return Measurement(method, category, 0, 1, 0.0, 10, 5, [seconds], True)

    results = [of("plain", c, 1.0) for c in "aaab"]
    results += [of("fast", "a", s) for s in (0.5, 0.5, 0.1)] + [of("fast", "b", 0.25)]
    assert records(results)[1]["by_category"] == {"a": 2.0, "b": 4.0}
    assert records(results)[1]["speedup"] == 3.0


def test_the_median_of_repeats_counts():
    results = [
        Measurement("plain", "a", 0, 1, 0.0, 10, 5, [1.0, 9.0, 1.0]),
        Measurement("fast", "a", 0, 1, 0.0, 10, 5, [0.5]),
    ]
    assert records(results)[1]["speedup"] == 2.0


@pytest.mark.slow
def test_batches_are_counted_by_their_own_tokens():
    target = tiny_model(dtype=torch.float32)
    drafter = near_copy(target)
    prompts = [Prompt("a", torch.tensor([[i, 2, 3][: 1 + i % 3]])) for i in range(1, 6)]
    methods = [plain(), prompt_lookup(), pard_chain(drafter, 4)]
    settings = Settings(16, batch_sizes=(1, 2), temperatures=(0.0, 1.0))
    results = bench(target, methods, prompts, settings, pad_token_id=0, progress=False)
    rows = [entry for entry in results if (entry.batch_size, entry.temperature) == (2, 0)]
    assert [row.method for row in rows] == [
        "plain",
        "pard-chain-k4",
    ] * 2  # prompt lookup takes one; the fifth prompt is no batch
    assert all(row.same for row in rows)
    assert rows[0].tokens == rows[1].tokens == rows[0].forwards
    assert rows[1].forwards < rows[0].forwards
    assert all(entry.same is None for entry in results if entry.temperature == 1)
    rows = records(results)
    assert len(rows) == 3 + 3 + 2 + 2
    assert all(row["speedup"] == 1 and row["tau"] == 1 for row in rows if row["method"] == "plain")
    assert markdown(rows).count("Batch ") == 4
    with pytest.raises(ValueError, match="Batches of 8"):
        bench(target, methods, prompts, Settings(batch_sizes=(8,)), progress=False)


@pytest.mark.slow
def test_equality_is_decided_in_fp32():
    # not `tiny_model(dtype=…)`, which has buffers of that type too
    target = AutoModelForCausalLM.from_config(tiny_model().config, dtype=torch.bfloat16).eval()
    target.generation_config.eos_token_id = None
    prompts = [Prompt("a", torch.tensor([[1, 2, 3]])), Prompt("a", torch.tensor([[4, 5, 6]]))]
    other = dataclasses.replace(plain(), name="other", arguments={"repetition_penalty": 5.0})
    methods = [
        plain(),
        pard_chain(near_copy(tiny_model(dtype=torch.float32)), 4),
        other,
    ]
    results = bench(target, methods, prompts, Settings(16), progress=False)
    assert [entry.same for entry in results] == [None] * 6
    assert [entry.same_here for entry in results][::3] == [True, True]
    saved, before = [], {name: buffer.clone() for name, buffer in target.named_buffers()}
    # what rounding would spoil
    assert any(buffer.dtype == torch.float32 for buffer in before.values())
    check_equality(
        target,
        methods,
        prompts,
        Settings(16),
        results,
        save=lambda entries: saved.append(len(entries)),
        progress=False,
    )
    assert all(torch.equal(buffer, before[name]) for name, buffer in target.named_buffers())
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}
    assert [entry.same for entry in results] == [True, True, False] * 2
    assert saved == [6, 6]


def test_stop_strings_of_a_targets_own_end_no_benchmark():
    """They want the tokenizer, which `generate` was not given: no method answered."""
    target = tiny_model(dtype=torch.float32)
    parent = tiny_model(seed=3, dtype=torch.float32)
    for model in (target, parent):
        model.generation_config.stop_strings = ["w1"]
    methods = [plain(), prompt_lookup(), assisted(parent, 3), pard_chain(near_copy(target), 4)]
    prompts = [Prompt("a", torch.tensor([[1, 2, 3]]))]
    results = bench(target, methods, prompts, Settings(8), progress=False)
    assert [(entry.tokens, entry.same) for entry in results] == [(8, True)] * 4
    assert parent.generation_config.stop_strings == ["w1"]


def test_transformers_internal_warnings_are_not_shown(caplog):
    target = tiny_model(dtype=torch.float32)
    methods = [plain(), assisted(tiny_model(seed=3, dtype=torch.float32), 3)]
    bench(target, methods, [Prompt("a", torch.tensor([[1, 2, 3]]))], Settings(4), progress=False)
    assert "Passing `generation_config`" not in caplog.text


@pytest.mark.parametrize("category", ["[/math]", "[math]", "[bold]x"])
def test_category_names_are_not_read_as_markup(results, category):
    rows = [{**row, "by_category": {category: 1.0, "other": 2.0}} for row in records(results)]
    console = Console(width=200)
    assert category in "".join(segment.text for segment in console.render(table(rows, "title")))


def test_a_narrow_terminal_shows_figures(results):
    """It showed empty cells."""
    rows = records(results)
    console = Console(record=True, width=40)
    console.print(table(rows, "title"))
    inside = console.export_text().partition("inside a call")[2]
    row = next(row for row in rows if "time_split" in row)
    assert f"{100 * row['time_split']['verify']:.0f} " in inside


def test_names_end_no_cell_and_command_nothing(results, tmp_path):
    """They come from files of others: a folder, a set of questions, a JSON file."""
    rows = [
        {
            **row,
            "method": f"x$a_$|{row['method']}",
            "by_category": {"a\nb|c": 1.0, "\x1b[31m$_$": 2.0},
        }
        for row in records(results)
    ]
    for text in (markdown(rows), markdown(rows, by_category=False)):
        assert len({line.count("|") for line in text.splitlines()}) == 1
    console = Console(width=200)
    assert "\x1b[31m" not in "".join(
        segment.text for segment in console.render(table(rows, "title"))
    )
    assert len([*draw(rows, tmp_path)]) > 2  # a dollar begins no mathematics


@pytest.mark.parametrize(
    "changes",
    [
        {"speedup": None},
        {"by_category": {"a": None}},
        {"method": 1},
        {"speedup_quartiles": [None]},
        # no table shows these
        {"tau_by_category": {"a": "2"}},
        {"acceptance_by_position": ["0.5"]},
        {"tau": 1e300},
    ],
)
def test_records_with_holes_are_refused(results, changes, tmp_path):
    (tmp_path / "bench.json").write_text(
        json.dumps([{**row, **changes} for row in records(results)])
    )
    with pytest.raises(ValueError, match="measure again"):
        read_bench(tmp_path / "bench.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly if case == Case.overlap else ())
        for case in Case
    ],
)
def test_methods_of_every_case_give_plain_output(case):
    target = tiny_model(dtype=torch.float32)
    drafter = near_copy(target)
    methods = methods_of(case, drafter, tiny_model(seed=3, dtype=torch.float32), (2, 4), (6,))
    assert methods[0].name.startswith("plain")
    assert len({method.name for method in methods}) == len(methods)
    if case == Case.compiled:
        return  # compiled in a test of its own
    rows = bench(target, methods, random_prompts(30, 2, 5), Settings(12), progress=False)
    assert all(row.same for row in rows)


def test_transformers_own_methods_are_left_out_for_recurrent_targets():
    names = [
        method.name
        for method in methods_of(
            Case.methods,
            near_copy(tiny_model(dtype=torch.float32)),
            tiny_model(dtype=torch.float32),
            recurrent=True,
        )
    ]
    assert not any(name.startswith(("assisted", "prompt-lookup")) for name in names)


def test_transformers_own_compiled_drafts_are_a_peer():
    """Since 5.24 its assisted generation compiles the verification over a static cache."""
    parent, drafter = tiny_model(seed=3), near_copy(tiny_model())
    names = [method.name for method in methods_of(Case.compiled, drafter, parent, (4,), (9,))]
    peers = ["assisted-default-compiled"] if hf_paradraft.outer_names.ASSISTS_COMPILED else []
    assert names == ["plain-compiled", *peers, "pard-chain-k4", "pard-tree-k4-n9"]
