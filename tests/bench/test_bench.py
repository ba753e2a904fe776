"""The bench counts what happens and reports what it counted."""

import json

import pytest
import torch
from peft import get_peft_model
from rich.console import Console
from tiny import near_copy, tiny_model

import hf_paradraft as pd
from hf_paradraft.bench import assisted, bench, pard_chain, plain, prompt_lookup, records, table
from hf_paradraft.bench.cases import Case, methods_of, random_prompts
from hf_paradraft.bench.measure import Measurement, Prompt
from hf_paradraft.bench.report import markdown, plot
from hf_paradraft.drafters.ppd import PpdConfig


@pytest.fixture(scope="module")
def results():
    target = tiny_model()
    drafter = near_copy(target)
    prompts = [Prompt(name, torch.tensor([[i, 2, 3]])) for i, name in enumerate(["a", "a", "b", "b"])]
    methods = [
        plain(),
        assisted(tiny_model(seed=3), 3),
        assisted(tiny_model(seed=3), None),
        prompt_lookup(),
        pard_chain(drafter, 4),
    ]
    return bench(target, methods, prompts, max_new_tokens=16, progress=False)


def test_every_method_gives_plain_output(results):
    assert len(results) == 5 * 4
    assert all(result.same for result in results)


def test_forwards_are_counted(results):
    for result in results:
        if result.method == "plain":
            assert result.forwards == result.tokens
        assert 0 < result.forwards <= result.tokens


def test_records_and_report(results, tmp_path):
    rows = records(results)
    assert [row["method"] for row in rows] == ["plain", "assisted-k3", "assisted-default", "prompt-lookup", "pard-chain-k4"]
    assert rows[0]["speedup"] == 1
    assert rows[0]["tau"] == 1
    assert rows[4]["tau"] > 1
    assert set(rows[0]["by_category"]) == {"a", "b"}
    json.dumps(rows)
    console = Console(record=True, width=200)
    console.print(table(rows, "title"))
    assert "pard-chain-k4" in console.export_text()
    assert markdown(rows).count("\n") == 2 + len(rows)
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_prompt_tokens_their_trees_and_sizes():
    torch.manual_seed(0)
    accuracy = [[0.5 * 0.5**rank for rank in range(8)]] * 3
    adapter = pd.PpdDrafter.from_model(get_peft_model(tiny_model(), PpdConfig(accuracy=accuracy)))
    prompted = pd.PromptedDrafter(get_peft_model(tiny_model(seed=3), PpdConfig()))
    prompts = [Prompt("a", torch.tensor([[1, 2, 3]]))]
    methods = methods_of(Case.prompts, near_copy(tiny_model()), None, adapter=adapter)
    names = [method.name for method in methods]
    assert names[0] == "plain"
    assert {"ppd-n15", "ppd-auto", "ppd-static-n15", "ppd-chain-n15"} <= set(names)
    methods += methods_of(Case.methods, near_copy(tiny_model()), None, adapter=adapter, prompted_parent=prompted)[-2:]
    assert [method.name for method in methods[-2:]] == ["ppd-auto", "ppd-drafter-k4-n12"]
    assert all(result.same for result in bench(tiny_model(), methods, prompts, max_new_tokens=24, progress=False))
    trees = {method.name: method.drafter.trees(None) for method in methods if method.name in ("ppd-static-n15", "ppd-chain-n15")}
    assert all(max(tree.paths.ranks, default=0) == 0 for tree in trees["ppd-chain-n15"])
    assert all(set(tree.prompts) == {3} for tree in trees["ppd-static-n15"])
    assert all(len(tree.paths.parents) + sum(tree.prompts) <= 15 for tree in trees["ppd-static-n15"])
    with pytest.raises(ValueError, match="prompt tokens"):
        methods_of(Case.prompts, near_copy(tiny_model()), None)
    assert [method.name for method in methods_of(Case.methods, adapter, None)] == ["plain", "prompt-lookup", "ppd-auto"]
    with pytest.raises(ValueError, match="PARD drafters"):
        methods_of(Case.compiled, adapter, None)


def test_speedup_is_the_mean_over_categories_of_medians():
    def of(method, category, seconds):
        return Measurement(method, category, 10, seconds, 5, True)

    results = [of("plain", c, 1.0) for c in "aaab"]
    results += [of("fast", "a", s) for s in (0.5, 0.5, 0.1)] + [of("fast", "b", 0.25)]
    assert records(results)[1]["by_category"] == {"a": 2.0, "b": 4.0}
    assert records(results)[1]["speedup"] == 3.0


def test_batches_are_counted_by_their_own_tokens():
    target = tiny_model()
    drafter = near_copy(target)
    prompts = [Prompt("a", torch.tensor([[i, 2, 3][: 1 + i % 3]])) for i in range(1, 6)]
    rows = bench(target, [plain(), pard_chain(drafter, 4)], prompts, 16, progress=False, batch_size=2, pad_token_id=0)
    assert [row.rows for row in rows] == [2] * 4  # the fifth prompt makes no batch
    assert all(row.same for row in rows)
    assert rows[0].tokens == rows[1].tokens
    assert rows[1].forwards < rows[0].forwards


@pytest.mark.parametrize("case", [case for case in Case if case != Case.prompts])
def test_cases(case):
    target = tiny_model()
    drafter = near_copy(target)
    methods = methods_of(case, drafter, tiny_model(seed=3), (2, 4), (6,))
    assert methods[0].name.startswith("plain")
    assert len({method.name for method in methods}) == len(methods)
    if case == Case.compiled:
        return  # compiled in a test of its own
    rows = bench(target, methods, random_prompts(30, 2, 5), 12, progress=False)
    assert all(row.same for row in rows)
