"""The pictures of a round, and who worked when, from runs of the embedded family: `make
pictures`.
"""

import sys
from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter, Memory, NgramDrafter, SpeculationConfig
from hf_paradraft.chat import encode_question
from hf_paradraft.decoding.tree_attention import tree_shape
from hf_paradraft.demo import FAMILY
from hf_paradraft.protocol import RoundTrace
from hf_paradraft.report import BLUE, GREEN, GREY, ORANGE

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from spaces.pictures import draft_tree  # noqa: E402

PROMPT = "Write as JSON:\nname: Mia\nage: 31\ncity: Oslo"
UNSURE = "class "  # a text of which neither side knows much
EDITED = (
    "Write in Python:\nget_over_5(points): Return the first of the points that is greater than 5, "
    "times 2, or None, with a loop.\nkeep_under_5(points): Return a list of the points that are "
    "less than 5, times 4, with a loop."
)
K, NODES = 6, 10
LINES, COLUMNS = 14, 68  # of a page


def a_round(target, drafter, ids: torch.LongTensor) -> RoundTrace:
    """One round in which something, but not everything, was accepted."""
    drafter.speculation_config = SpeculationConfig(K, NODES, trace=True, never_slower=False)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 60}
    target.generate(ids, assistant_model=drafter, **options)
    trace = drafter.last_stats.trace[1:]
    return max(trace, key=lambda entry: (len(set(entry.parents)) > 4, 3 <= len(entry.accepted) < K))


def shown(tokenizer, token: int) -> str:
    """A token's text, with its blanks visible."""
    return repr(tokenizer.decode([token]))[1:-1].replace(" ", "␣")


def boxes(axes, row: float, texts: list[str], colours: list[str], first: int = 0) -> None:
    """A line of boxes with texts."""
    for place, (text, colour) in enumerate(zip(texts, colours, strict=True), first):
        style = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour}
        axes.text(
            place, row, text, ha="center", va="center", fontsize=10, bbox=style, parse_math=False
        )


def draft(drafter, tokenizer, known: torch.LongTensor) -> Figure:
    """What the drafter is fed, and its two best guesses at every distance."""
    fed = torch.cat([known, known.new_full((1, K - 1), drafter.mask_token_id)], dim=1)
    with torch.no_grad():
        best = drafter(input_ids=fed).logits[0, -K:].softmax(-1).topk(2)
    tail = [shown(tokenizer, token) for token in known[0, -3:].tolist()]
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    boxes(axes, 0, [*tail, *["mask"] * (K - 1)], [GREEN] * 3 + [ORANGE] * (K - 1))
    for rank in range(2):
        texts = [
            f"{shown(tokenizer, token)}\n{100 * p:.0f} %"
            for token, p in zip(best.indices[:, rank], best.values[:, rank], strict=True)
        ]
        boxes(axes, 1.6 + 1.5 * rank, texts, [BLUE if rank == 0 else GREY] * K, first=2)
    for place in range(2, 2 + K):
        axes.annotate(
            "", (place, 1.05), (place, 0.4), arrowprops={"arrowstyle": "->", "color": GREY}
        )
    for row, text in ((0, "fed"), (1.6, "best guess"), (3.1, "second best")):
        axes.text(-1.9, row, text, va="center", fontsize=10)
    axes.set(xlim=(-2, K + 2.6), ylim=(-0.6, 3.9))
    return figure


def verify(trace: RoundTrace, tokenizer) -> Figure:
    """Which rows of the target's one forward see which."""
    sees, _ = tree_shape(trace.parents, len(trace.parents) + 1)
    names = ["last known", *(shown(tokenizer, token) for token in trace.drafted)]
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    context = 4  # columns that stand for all the text before
    grid = [[2] * context + [2 if value else 0 for value in row] for row in sees]
    axes.imshow(grid, cmap=ListedColormap(["white", "white", GREEN]), vmin=0, vmax=2, aspect="auto")
    axes.set_xticks(
        range(context + len(names)),
        ["…"] * context + names,
        rotation=70,
        parse_math=False,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xticks([place - 0.5 for place in range(context + len(names) + 1)], minor=True)
    axes.set_yticks([place - 0.5 for place in range(len(names) + 1)], minor=True)
    axes.grid(which="minor", color=GREY, linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="keys: the text before, then the draft", ylabel="rows of the forward")
    return figure


def roll_back(trace: RoundTrace, tokenizer) -> Figure:
    """The cache after the forward, and after the round."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    drafted = [shown(tokenizer, token) for token in trace.drafted]
    accepted = [drafted[node] for node in trace.accepted]
    colours = [GREEN if node in trace.accepted else GREY for node in range(len(drafted))]
    boxes(axes, 1, ["…", "…", "last", *drafted], [BLUE] * 3 + colours)
    boxes(axes, 0, ["…", "…", "last", *accepted], [BLUE] * 3 + [GREEN] * len(accepted))
    for place, node in enumerate(trace.accepted):
        axes.annotate(
            "", (3 + place, 0.22), (3 + node, 0.78), arrowprops={"arrowstyle": "->", "color": GREEN}
        )
    axes.text(-0.7, 1, "after the forward", ha="right", va="center", fontsize=10)
    axes.text(-0.7, 0, "after the round", ha="right", va="center", fontsize=10)
    axes.set(xlim=(-3.4, 3.4 + len(drafted)), ylim=(-0.4, 1.4))
    return figure


def race(target, drafter, tokenizer, text: str) -> Figure:
    """One draw in which the noise decides: what both sides think of the likeliest tokens, and when
    each token arrives.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        p = target(ids).logits[0, -1].softmax(-1)
        q = drafter.draft_logits(ids, num_draft_tokens=1)[0, 0].softmax(-1)
    for seed in range(1000):
        waits = torch.empty_like(p).exponential_(generator=torch.Generator().manual_seed(seed))
        winner = int((p / waits).argmax())
        if winner == int((q / waits).argmax()) and winner not in (int(q.argmax()), int(p.argmax())):
            break
    tokens = torch.cat([(p + q).topk(7).indices, torch.tensor([winner])]).unique()
    tokens = tokens[q[tokens].argsort()]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    chances, arrivals = figure.subplots(1, 2, sharey=True)
    rows = torch.arange(len(tokens))
    for offset, side, colour, name in (
        (0.2, q, ORANGE, "drafter, q"),
        (-0.2, p, BLUE, "target, p"),
    ):
        chances.barh(rows + offset, side[tokens], 0.38, color=colour, label=name)
        arrivals.scatter((waits / side)[tokens], rows + offset, color=colour, s=60, zorder=2)
    row = int((tokens == winner).nonzero())
    arrivals.axhspan(row - 0.45, row + 0.45, color=GREEN, alpha=0.25)
    chances.set_yticks(
        rows, [shown(tokenizer, token) for token in tokens.tolist()], parse_math=False
    )
    chances.set(xlabel="chance of the next token")
    chances.legend(loc="lower right")
    arrivals.set(xscale="log", xlabel="arrives after E / chance: the first one wins, on both sides")
    return figure


def timeline(runs: dict[str, list[RoundTrace]]) -> Figure:
    """When the target and the drafter worked, in the rounds of each run; above each, how much of
    its time either was idle.
    """
    figure = Figure(figsize=(9, 1.5 * len(runs) + 0.5), layout="constrained")
    for axes, (name, rounds) in zip(
        figure.subplots(len(runs), sharex=True), runs.items(), strict=True
    ):
        begun, target, drafter = 0.0, [], []
        for one in rounds:
            behind = begun + one.verify_seconds
            if one.hidden_seconds:  # at once; what is left of drafting is waited for
                target.append((begun, one.verify_seconds))
                drafter += [(begun, one.hidden_seconds), (behind, one.draft_seconds)]
            else:
                drafter.append((begun, one.draft_seconds))
                target.append((begun + one.draft_seconds, one.verify_seconds))
            begun += one.total_seconds
        idle = {
            who: 1 - sum(length for _, length in bars) / begun
            for who, bars in (("target", target), ("drafter", drafter))
        }
        tokens = sum(len(one.emitted) for one in rounds)
        for row, (bars, colour) in enumerate(((drafter, ORANGE), (target, BLUE))):
            axes.broken_barh(
                [(1000 * start, 1000 * length) for start, length in bars],
                (row - 0.4, 0.8),
                color=colour,
            )
        axes.set_yticks([0, 1], ["drafter", "target"])
        shares = ", ".join(f"{who} {100 * share:.0f} % idle" for who, share in idle.items())
        axes.set_title(
            f"{name}: {tokens} tokens in {1000 * begun:.0f} ms; {shares}", fontsize=10, loc="left"
        )
    axes.set_xlabel("milliseconds")
    return figure


def page(axes, tokenizer, tokens: list[int], copied: list[bool], title: str) -> None:
    """A text in its lines, with what was copied on a ground of its own."""
    axes.axis("off")
    axes.set_title(title, fontsize=10, loc="left")
    column = line = 0
    for token, is_copy in zip(tokens, copied, strict=True):
        for index, part in enumerate(tokenizer.decode(token, skip_special_tokens=True).split("\n")):
            column, line = (0, line + 1) if index else (column, line)
            if part and is_copy:
                axes.axvspan(
                    column,
                    column + len(part),
                    1 - (line + 1) / LINES,
                    1 - line / LINES,
                    color=GREEN,
                    alpha=0.35,
                    lw=0,
                )
            for character in part:
                axes.text(
                    column + 0.5,
                    LINES - line - 0.5,
                    character,
                    family="monospace",
                    fontsize=8,
                    ha="center",
                    va="center",
                )
                column += 1
    axes.set(xlim=(0, COLUMNS), ylim=(0, LINES))


def copies(target, tokenizer) -> Figure:
    """An answer that is known, and one to nearly the same question: what was copied, and the
    target's own tokens between.
    """

    def answered(question: str, copier: NgramDrafter | None) -> list[int]:
        ids = encode_question(tokenizer, question)
        out = target.generate(ids, do_sample=False, max_new_tokens=120, assistant_model=copier)
        return out[0, ids.shape[1] :].tolist()

    known = answered(EDITED, None)
    memory = Memory()
    memory.add(known)
    copier = NgramDrafter(
        speculation_config=SpeculationConfig(16, None, trace=True, never_slower=False),
        memory=memory,
    )
    answer = answered(EDITED.replace("points", "prices").replace("5", "7"), copier)
    copied = [
        place + 1 < len(one.emitted)
        for one in copier.last_stats.trace
        for place in range(len(one.emitted))
    ]
    figure = Figure(figsize=(12, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    page(left, tokenizer, known, [False] * len(known), "in the memory")
    rounds = copier.last_stats.num_rounds
    page(
        right,
        tokenizer,
        answer,
        copied,
        f"written: {len(answer)} tokens in {rounds} rounds, {sum(copied)} of them copied",
    )
    return figure


def lanes(target, drafter, ids: torch.LongTensor) -> dict[str, list[RoundTrace]]:
    """Rounds one after the other and at once, a core each."""
    runs = {}
    for name, overlap in (
        ("one after the other, on one core", False),
        ("at once, a core each", True),
    ):
        torch.set_num_threads(2 if overlap else 1)
        drafter.speculation_config = SpeculationConfig(
            8, None, overlap=overlap, trace=True, never_slower=False
        )
        for _ in range(2):  # the first one warms up
            target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=60)
        runs[name] = drafter.last_stats.trace[1:13]
    return runs


def main() -> None:
    """Write all of them."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32).eval()
    drafter = AutoDrafter.from_pretrained(FAMILY / "pard", dtype=torch.float32).eval()
    ids = encode_question(tokenizer, PROMPT)
    trace = a_round(target, drafter, ids)
    stats = drafter.last_stats
    before = [token for entry in stats.trace[: stats.trace.index(trace)] for token in entry.emitted]
    known = torch.cat([ids, torch.tensor([before])], dim=1)
    folder = Path(__file__).parent / "round"
    for name, figure in {
        "draft": draft(drafter, tokenizer, known),
        "verify": verify(trace, tokenizer),
        "accept": draft_tree(trace, tokenizer),
        "roll-back": roll_back(trace, tokenizer),
        "race": race(target, drafter, tokenizer, UNSURE),
        "copies": copies(target, tokenizer),
    }.items():
        figure.savefig(folder / f"{name}.png", dpi=110)
    timeline(lanes(target, drafter, ids)).savefig(folder.parent / "methods" / "lanes.png", dpi=110)


if __name__ == "__main__":
    main()
