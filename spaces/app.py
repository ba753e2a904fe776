"""Plain decoding and a parallel drafter, side by side."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
import torch
from decoding import DRAFTED, OWN, Progress, Transcript, stream
from limits import BodyLimit
from pictures import acceptance, draft_tree, round_times
from starlette.middleware import Middleware
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paradraft import AutoDrafter, PpdDrafter, SpeculationConfig
from hf_paradraft.bench.methods import variants_of
from hf_paradraft.bench.questions import load_questions
from hf_paradraft.chat import encode_question
from hf_paradraft.demo import FAMILY, GENERAL, PUBLIC, QUESTIONS
from hf_paradraft.demo.public_model import MODEL
from hf_paradraft.demo.show import explain, first_difference
from hf_paradraft.hardware import fast_dtype
from hf_paradraft.protocol.config import TreeSize

TARGET, DRAFTER = os.environ.get("TARGET"), os.environ.get("DRAFTER")
MAX_PROMPT_TOKENS = int(os.environ.get("MAX_PROMPT_TOKENS", "512"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "256"))
SECONDS = float(os.environ.get("SECONDS_PER_REQUEST", "60"))

try:
    from spaces import GPU  # on ZeroGPU, where a function has to ask for it
except ImportError:

    def GPU(duration: int):
        return lambda function: function


TREE, CHAIN = "a tree of guesses", "a chain of guesses"
CHARACTERS = 20 * MAX_PROMPT_TOKENS  # a longer text is not even tokenised
# bytes of a request: a character may be written as two escapes of six
BODY = 2**16 + 12 * CHARACTERS
WAITING = 64  # requests in the queue; more are sent away
COLDEST, HOTTEST = 1e-3, 1.5  # temperatures; below the first, logits overflow
AUTO = 0  # the tree size that is chosen in every round

device = "cuda" if torch.cuda.is_available() else "cpu"
public = DRAFTER is None and TARGET is not None and TARGET.rstrip("/").endswith(MODEL.split("/")[1])
target_name = TARGET or str(FAMILY / "target")
drafter_name = DRAFTER or str(PUBLIC / "eagle3" if public else FAMILY / "pard")
if (TARGET is None) != (DRAFTER is None) and not public:
    raise ValueError(
        "TARGET and DRAFTER go together: set both, or neither for the embedded family."
    )
tokenizer = AutoTokenizer.from_pretrained(target_name, trust_remote_code=False)
target = (
    AutoModelForCausalLM.from_pretrained(target_name, dtype=fast_dtype(), trust_remote_code=False)
    .to(device)
    .eval()
)
drafter = AutoDrafter.from_pretrained(drafter_name, dtype=fast_dtype()).to(device).eval()
saved = drafter.speculation_config
LENGTH = 12 if TARGET is None else saved.num_draft_tokens
SIZE = AUTO if saved.tree_size == "auto" else saved.tree_size or 16

METHODS: dict[str, dict[str, Any]] = {}
if isinstance(drafter, PpdDrafter):
    METHODS["PPD, prompt tokens"] = {"assistant_model": drafter}
else:
    title = drafter.title.removesuffix(" drafter")
    METHODS |= {f"{title}, {shape}": {"assistant_model": drafter} for shape in (TREE, CHAIN)}
METHODS["transformers' prompt lookup"] = {"prompt_lookup_num_tokens": 10}
if TARGET is None or public:
    METHODS["PPD, prompt tokens"] = {
        "assistant_model": AutoDrafter.from_pretrained((PUBLIC if public else FAMILY) / "ppd").to(
            device
        )
    }
if TARGET is None:
    parent = (
        AutoModelForCausalLM.from_pretrained(FAMILY / "draft", dtype=fast_dtype()).to(device).eval()
    )
    METHODS["transformers' assisted generation"] = {"assistant_model": parent}
    EXAMPLES = [question.turns[0] for question in load_questions(QUESTIONS, 1)]
else:
    EXAMPLES = [question.turns[0] for question in load_questions(GENERAL)]


@dataclass
class Call:
    """What a finished comparison leaves for its pictures."""

    progress: Progress


def encode(prompt: str) -> torch.LongTensor:
    """Ids `(1, n)` of one user turn.

    Raises:
        gr.Error: it is empty or too long.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise gr.Error(
            "The prompt is empty: write something, or take an example.", print_exception=False
        )
    if len(prompt) > CHARACTERS:
        raise gr.Error(
            f"The prompt has {len(prompt):,} characters; at most {CHARACTERS:,} are read.",
            print_exception=False,
        )
    text = prompt.encode("utf-8", "replace").decode()
    ids = encode_question(tokenizer, text)
    if ids.shape[1] > MAX_PROMPT_TOKENS:
        raise gr.Error(
            f"The prompt has {ids.shape[1]:,} tokens; at most {MAX_PROMPT_TOKENS} are read.",
            print_exception=False,
        )
    return ids.to(device)


def as_number(value: Any, least: float, most: float) -> float:
    """A slider's value, which a client may have sent as anything.

    Raises:
        gr.Error: it is no number.
    """
    try:
        return min(max(least, float(value)), most) if value == value else least
    except (TypeError, ValueError, OverflowError):
        raise gr.Error(
            "There is a value that is no number of that size.", print_exception=False
        ) from None


def speed(progress: Progress, plain: Progress | None = None) -> str:
    """One line of figures."""
    line = f"{len(progress.ids)} tokens · {progress.tokens_per_second:.0f} per second"
    if plain is None or not plain.tokens_per_second:
        return line
    tau = len(progress.ids) / max(1, progress.rounds)
    return (
        f"{line} · τ = {tau:.2f} · **{progress.tokens_per_second / plain.tokens_per_second:.2f}×** "
        "plain"
    )


def verdict(ids: torch.LongTensor, plain: Progress, drafted: Progress, temperature: float) -> str:
    """Whether the outputs are the same, and why if they are not."""
    if plain.late or drafted.late:
        return f"Stopped after {SECONDS:.0f} seconds."
    if plain.ids == drafted.ids:
        return f"✅ The outputs are **identical**, all {len(plain.ids)} tokens."
    if temperature > 0:
        where = first_difference(plain.ids, drafted.ids)
        return (
            f"The outputs differ from token {where + 1} on: two draws from the same distribution."
        )
    return f"⚠️ The outputs differ {explain(target, ids, plain.ids, drafted.ids)}."


@GPU(duration=int(SECONDS) + 10)
def compare(
    prompt: str,
    method: str = next(iter(METHODS)),
    num_draft_tokens: int = 12,
    tree_size: int = 16,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
) -> Iterator[tuple]:
    """Answer a prompt plainly and with a method, streaming both.

    Yields what is on the page: both answers as (text, origin) pieces, their figures, the verdict,
    and the call for pictures.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise gr.Error(f"There is no method {method!r}.", print_exception=False)
    ids = encode(prompt)
    temperature = as_number(temperature, 0, HOTTEST)
    max_new_tokens = int(as_number(max_new_tokens, 1, MAX_NEW_TOKENS))
    tree_size = int(as_number(tree_size, AUTO, 64))
    num_draft_tokens = int(as_number(num_draft_tokens, 1, 16))
    temperature = temperature if temperature >= COLDEST else 0
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        arguments["temperature"] = temperature
    config = None
    size: TreeSize = "auto" if tree_size == AUTO else tree_size
    if method.endswith((TREE, CHAIN)):
        # no longer than it can guess
        chain, tree = variants_of(drafter, (num_draft_tokens,), (size,))
        shape = (tree if method.endswith(TREE) else chain).config
        config = replace(
            drafter.speculation_config,
            num_draft_tokens=shape.num_draft_tokens,
            tree_size=shape.tree_size,
            trace=True,
        )
    elif method.startswith("PPD"):
        prompts = METHODS[method]["assistant_model"].config
        size = size if size == "auto" else max(prompts.num_ids + 1, min(size, 63))
        config = SpeculationConfig(prompts.num_prompt_tokens, size, trace=True)
    deadline = time.monotonic() + SECONDS
    plain, text = Progress(), Transcript(tokenizer)
    for plain in stream(target, ids, {}, None, deadline, 0, **arguments):
        left = [(piece, None) for piece, _ in text.update(plain)]
        yield left, [], speed(plain), "", "Decoding plainly …", None
    drafted, text = Progress(), Transcript(tokenizer)
    for drafted in stream(target, ids, METHODS[method], config, deadline, 0, **arguments):
        yield (
            left,
            text.update(drafted),
            speed(plain),
            speed(drafted, plain),
            "Decoding with drafts …",
            None,
        )
    call = Call(drafted) if drafted.stats is not None else None
    yield (
        left,
        text.update(drafted),
        speed(plain),
        speed(drafted, plain),
        verdict(ids, plain, drafted, temperature),
        call,
    )


def show(call: Call | None) -> tuple:
    """The pictures of a finished call, and a slider over its rounds; nothing for methods that tell
    nothing.
    """
    if call is None:
        return None, None, gr.update(visible=False), None
    stats = call.progress.stats
    second = min(2, len(stats.trace))  # the first round reads the prompt, and drafts a chain
    slider = gr.update(visible=True, minimum=1, maximum=max(2, len(stats.trace)), value=second)
    return acceptance(stats), round_times(stats), slider, show_tree(call, second)


def show_tree(call: Call | None, place: int) -> Any:
    """The draft of one round."""
    if call is None:
        return None
    trace = call.progress.stats.trace
    return draft_tree(trace[int(as_number(place, 1, len(trace))) - 1], tokenizer)


COLOURS = {DRAFTED: "green", OWN: "gray"}

with gr.Blocks(title="Parallel drafting") as page:
    gr.Markdown(
        "# Parallel drafting\nA small model guesses several tokens at once, the big one checks "
        "them in one forward: **the same output, sooner**. "
        + (
            ""
            if TARGET
            else "These are small models trained for six kinds of tasks; take an example."
        )
    )
    with gr.Row():
        with gr.Column(scale=3):
            prompt = gr.Textbox(
                EXAMPLES[0], label="Prompt", lines=6, max_lines=12, max_length=CHARACTERS
            )
            gr.Examples(EXAMPLES, prompt, label="Examples", examples_per_page=12)
        with gr.Column(scale=2):
            method = gr.Dropdown(list(METHODS), value=next(iter(METHODS)), label="Method")
            with gr.Row():
                length = gr.Slider(
                    1, 16, min(LENGTH, 16), step=1, label="Draft length K", min_width=120
                )
                size = gr.Slider(
                    AUTO, 64, min(SIZE, 64), step=1, label="Tree size (0: auto)", min_width=120
                )
            with gr.Row():
                temperature = gr.Slider(0, HOTTEST, 0, step=0.1, label="Temperature", min_width=120)
                tokens = gr.Slider(
                    8,
                    MAX_NEW_TOKENS,
                    min(128, MAX_NEW_TOKENS),
                    step=8,
                    label="New tokens",
                    min_width=120,
                )
            with gr.Row():
                go = gr.Button("Run", variant="primary", min_width=120)
                stop = gr.Button("Stop", min_width=120)
    said = gr.Markdown(elem_id="verdict")
    with gr.Row():
        with gr.Column(min_width=320):
            gr.Markdown("### Plain `generate`")
            left_line = gr.Markdown(elem_id="plain-speed")
            left = gr.HighlightedText(
                label="Plain",
                color_map=COLOURS,
                show_legend=False,
                combine_adjacent=True,
                elem_id="plain",
                show_label=False,
            )
        with gr.Column(min_width=320):
            gr.Markdown("### With drafts")
            right_line = gr.Markdown(elem_id="drafted-speed")
            right = gr.HighlightedText(
                label="Drafted",
                color_map=COLOURS,
                show_legend=True,
                combine_adjacent=True,
                elem_id="drafted",
                show_label=False,
            )
    call = gr.State()
    with gr.Row():
        with gr.Column(min_width=320):
            rates = gr.Plot(show_label=False)
        with gr.Column(min_width=320):
            times = gr.Plot(show_label=False)
    number = gr.Slider(
        1,
        2,
        1,
        step=1,
        label="Round: what was drafted, and in green what was accepted",
        visible=False,
    )
    tree = gr.Plot(show_label=False)

    asked = [prompt, method, length, size, temperature, tokens]
    running = gr.on(
        [go.click, prompt.submit],
        compare,
        asked,
        [left, right, left_line, right_line, said, call],
        api_name="compare",
        concurrency_limit=1,
        show_progress="hidden",
    )
    running.then(show, call, [rates, times, number, tree], api_name=False)
    number.release(show_tree, [call, number], tree, api_name=False)
    stop.click(None, cancels=[running], api_name=False)

page.queue(max_size=WAITING, default_concurrency_limit=4)

if __name__ == "__main__":
    limit = Middleware(BodyLimit, bytes_at_most=BODY)
    # Nothing is uploaded here: the route that takes files takes none.
    page.launch(max_file_size=1, app_kwargs={"middleware": [limit]})
