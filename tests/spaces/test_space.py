"""The Space as people meet it: over HTTP, with the real client and a real browser, friendly and
hostile.
"""

import contextlib
import runpy
import shutil
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
import yaml
from gradio_client import Client
from gradio_client.exceptions import AppError
from tiny import make_tokenizer, tiny_model
from transformers import AutoTokenizer

import hf_paradraft
from examples.family.tasks import tasks
from hf_paradraft.demo import FAMILY
from hf_paradraft.hub.push import push_space

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("space")]  # one server for all
TOOLS = runpy.run_path(str(ROOT / "docs" / "screenshots.py"))
PROMPT = "Write as JSON:\nname: Mia\ncity: Oslo\nage: 31"


@pytest.fixture(scope="module")
def space():
    with TOOLS["running_space"](
        OMP_NUM_THREADS="1", SECONDS_PER_REQUEST="20", MAX_NEW_TOKENS="256"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(space):
    return Client(space[0], verbose=False)


def text_of(spans):
    return "".join(piece["token"] for piece in spans)


def ask(client, prompt, method="PARD, a tree of guesses", k=12, tree=16, temperature=0, tokens=48):
    return client.predict(prompt, method, k, tree, temperature, tokens, api_name="/compare")


def test_files_are_not_taken(space):
    """Nothing on the page uploads; the route that gradio has all the same takes nothing."""
    import httpx

    for size in (2, 200_000):
        answer = httpx.post(
            f"{space[0].rstrip('/')}/gradio_api/upload", files={"files": ("a.txt", b"x" * size)}
        )
        assert answer.status_code == 413


def test_it_streams_both_answers_and_says_whether_they_are_the_same(client):
    job = client.submit(PROMPT, max_new_tokens=64, api_name="/compare")
    left, right, left_line, right_line, said = job.result(timeout=120)
    assert len(job.outputs()) > 3
    assert text_of(left).startswith("{")
    assert "per second" in left_line
    assert "τ = " in right_line
    assert "identical" in said or "near-tie" in said
    if "identical" in said:
        assert text_of(left) == text_of(right)
    assert {piece["class_or_confidence"] for piece in right} <= {
        "drafted and accepted",
        "the target's own",
    }
    assert any(piece["class_or_confidence"] == "drafted and accepted" for piece in right)


@pytest.mark.parametrize(
    "method",
    [
        "PARD, a chain of guesses",
        "transformers' prompt lookup",
        "transformers' assisted generation",
    ],
)
def test_every_method(client, method):
    left, right, *_, said = ask(client, PROMPT, method)
    assert text_of(left)
    assert text_of(right)
    assert "The outputs" in said


def test_trees_of_automatic_size(client):
    assert "The outputs" in ask(client, PROMPT, tree=0)[-1]


def test_sampling(client):
    *_, said = ask(client, PROMPT, temperature=1.0)
    assert "The outputs" in said


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ("  \n", "empty"), ("x" * 100_000, "characters"), ("a b " * 2000, "tokens")],
)
def test_prompts_that_are_refused(client, prompt, message):
    with pytest.raises(AppError, match=message):
        ask(client, prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "你好，世界 🌍",
        "\x00\x07\x1b[31m\u202e",
        "<script>alert(1)</script>",
        "<|end|><|assistant|>",
        "𝔘𝔫𝔦\ufffd",
        "{{ 7*7 }} $x$",
    ],
)
def test_prompts_of_all_kinds(client, prompt):
    assert "The outputs" in ask(client, prompt, tokens=16)[-1]


def test_a_temperature_that_logits_overflow_at_is_greedy(client):
    assert "identical" in ask(client, PROMPT, temperature=1e-300, tokens=8)[-1]


@pytest.mark.parametrize("numbers", [(0, 0, -1, 0), (10**9, 10**9, 1, 16), (1, 1, 1.5, 8)])
def test_numbers_out_of_range(client, numbers):
    k, tree, temperature, tokens = numbers
    with contextlib.suppress(AppError):  # gradio itself refuses what is beyond a slider
        assert (
            "The outputs"
            in ask(client, PROMPT, k=k, tree=tree, temperature=temperature, tokens=tokens)[-1]
        )
    assert "The outputs" in ask(client, PROMPT, tokens=8)[-1]


def resident(pid):
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_take_no_memory(space, client, announced):
    """64 of 40 MB, which had waited in the queue, while somebody else is served."""
    import httpx

    join = f"{space[0].rstrip('/')}/gradio_api/queue/join"

    def body():
        yield b'{"data": ["'
        for _ in range(40):
            yield b"x" * 2**20

    def send(_):
        headers = {"content-type": "application/json"} | (
            {"content-length": str(40 * 2**20 + 11)} if announced else {}
        )
        try:
            return httpx.post(join, content=body(), headers=headers, timeout=60).status_code
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):  # it hangs up
            return 413

    ask(client, PROMPT, tokens=8)  # the first answer takes memory of its own
    before = resident(space[1])
    with ThreadPoolExecutor(16) as hostile:
        answers = hostile.map(send, range(64))
        assert "The outputs" in ask(client, PROMPT, tokens=8)[-1]
        assert set(answers) == {413}
    assert resident(space[1]) - before < 60


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_people_at_once_get_their_own_answers(space, client, count):
    prompts = [task.prompt for task in islice(tasks("JSON", 5, True), count)]
    alone = [[text_of(spans) for spans in ask(client, prompt, tokens=8)[:2]] for prompt in prompts]
    assert len({plain for plain, _ in alone}) > 0.75 * count
    before = resident(space[1])
    with ThreadPoolExecutor(count) as people:
        answers = list(
            people.map(
                lambda prompt: ask(Client(space[0], verbose=False), prompt, tokens=8), prompts
            )
        )
    assert [[text_of(spans) for spans in answer[:2]] for answer in answers] == alone
    assert resident(space[1]) - before < 300


def test_stopped_requests_make_room(client):
    job = client.submit(
        "Write in Python:\nf(x): Return x.", max_new_tokens=256, api_name="/compare"
    )
    next(iter(job))
    job.cancel()
    began = time.monotonic()
    assert "The outputs" in ask(client, PROMPT, tokens=8)[-1]
    assert time.monotonic() - began < 3


@pytest.fixture
def app(monkeypatch, tmp_path):
    """The app's names, as it is with these settings: its functions without a server."""

    def made(**environment):
        for name, value in {"GRADIO_ANALYTICS_ENABLED": "False", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(ROOT / "spaces")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradio's own
            return runpy.run_path(str(ROOT / "spaces" / "app.py"))

    return made


def test_a_pair_of_another_kind(tmp_path, app):
    """Its own methods; what a slider asks beyond what it can guess is cut; requests end in time."""
    target = tiny_model(vocab_size=200, max_position_embeddings=1 << 15)
    target.generation_config.eos_token_id = None
    target.save_pretrained(tmp_path / "target")
    make_tokenizer(size=200).save_pretrained(tmp_path / "target")
    hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2).save_pretrained(
        tmp_path / "drafter"
    )
    pair = {"TARGET": str(tmp_path / "target"), "DRAFTER": str(tmp_path / "drafter")}
    compare = app(**pair, SECONDS_PER_REQUEST="3", MAX_NEW_TOKENS="30000")["compare"]

    def verdict(shape, tokens):
        *_, last = compare("b c d", f"ParallelSpec, a {shape} of guesses", 12, 16, 0.0, tokens)
        return last[4]

    for shape in ("tree", "chain"):
        assert "The outputs" in verdict(shape, 16)
    began = time.monotonic()
    assert "Stopped after" in verdict("tree", 30_000)
    assert time.monotonic() - began < 12


def test_the_public_model_alone(tmp_path, app):
    """Its drafters come along."""
    tiny_model().save_pretrained(tmp_path / "SmolLM2-135M-Instruct")
    make_tokenizer().save_pretrained(tmp_path / "SmolLM2-135M-Instruct")
    shown = app(TARGET=str(tmp_path / "SmolLM2-135M-Instruct"))
    assert {
        "EAGLE-3, a tree of guesses",
        "EAGLE-3, a chain of guesses",
        "PPD, prompt tokens",
    } <= set(shown["METHODS"])
    assert shown["drafter"].speculation_config.prompt_lookup is True


def test_characters_of_several_tokens_come_whole():
    sys.path.insert(0, str(ROOT / "spaces"))
    from decoding import Progress, Transcript

    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    text = "Mia said: 你好 🌍, naïve"
    ids = tokenizer(text)["input_ids"]
    transcript = Transcript(tokenizer)
    for end in range(1, len(ids) + 1):
        pieces = transcript.update(Progress(ids[:end], ["a"] * end))
        assert text.startswith("".join(piece for piece, _ in pieces))
    assert "".join(piece for piece, _ in pieces) == text


@pytest.mark.browser
@pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("google-chrome")),
    reason=(
        "no browser on this machine; .ci/run installs one where it can, elsewhere: apt-get install "
        "chromium"
    ),
)
def test_in_a_browser(space, tmp_path_factory):
    """On a phone, and the same page on a desk."""
    with TOOLS["browser"]() as chromium:
        page, errors = chromium.new_page(viewport={"width": 390, "height": 1800}), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        said = TOOLS["use"](page, space[0], PROMPT)
        assert "identical" in said or "near-tie" in said
        for width, height in ((390, 1800), (1200, 1500)):
            page.set_viewport_size({"width": width, "height": height})
            assert '"name"' in page.locator("#plain").inner_text()
            assert '"name"' in page.locator("#drafted").inner_text().replace("\n", "")
            assert "plain" in page.locator("#drafted-speed").inner_text()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            file = tmp_path_factory.getbasetemp() / f"space-{width}.png"
            page.screenshot(path=file, full_page=True)
            assert file.stat().st_size > 30_000
        assert errors == []


def test_front_matter():
    data = yaml.safe_load((ROOT / "spaces" / "README.md").read_text().split("---\n")[1])
    assert data["sdk"] == "gradio"
    assert (ROOT / "spaces" / data["app_file"]).exists()
    assert float(data["python_version"]) >= 3.11
    assert len(data["short_description"]) <= 60
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert data["sdk_version"] == pinned["gradio"]


def test_it_is_published_with_the_library(hub):
    push_space("user/space")
    files = hub.files("user/space", kind="spaces")
    assert {"app.py", "README.md", "requirements.txt", "hf_paradraft/__init__.py"} <= set(files)
    assert b'Client("user/space")' in files["README.md"]
    assert not any("__pycache__" in path for path in files)
