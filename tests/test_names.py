"""transformers' insides are named in two modules; a name that is gone is one sentence, where it is
needed and nowhere else.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import CACHE, generate, near_copy, tiny_model
from transformers import DynamicCache, LlamaForCausalLM

import hf_paradraft
from hf_paradraft import names, outer_names

PACKAGE = Path(hf_paradraft.__file__).parent
DOCUMENTED = {"transformers", "transformers.utils"}  # and of the latter `logging` alone
PRIVATE = {
    "_attn_implementation", "_supports_sdpa", "_experts_implementation", "_is_stateful",
    "_supports_logits_to_keep", "_supports_default_dynamic_cache", "_pad_token_tensor",
    "_commit_hash", "_name_or_path", "_optimize_model_for_decode",
}  # fmt: skip


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_no_other_module_looks_inside(file):
    if file.name in ("names.py", "outer_names.py"):
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "transformers"
            and not node.level
        ):
            assert node.module in DOCUMENTED, f"line {node.lineno}: from {node.module} import"
            if node.module == "transformers.utils":
                assert {name.name for name in node.names} == {"logging"}, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in PRIVATE, f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Constant):
            assert node.value not in {"past_key_values", "cache_params"}, f"line {node.lineno}"


GONE = """
import os
import sys
import warnings
import torch
import transformers, transformers.cache_utils
import transformers.models.gemma4.modeling_gemma4, transformers.models.llama.modeling_llama
warnings.simplefilter("ignore")
sys.path.insert(0, "tests")
for gone in GONE:
    if os.fork():
        os.wait()
        continue
    kept = [getattr(sys.modules[owner], name) for owner, name in gone]
    for owner, name in gone:
        delattr(sys.modules[owner], name)
    import hf_paradraft
    for (owner, name), value in zip(gone, kept):
        setattr(sys.modules[owner], name, value)
    from tiny import near_copy, tiny_model
    target = tiny_model()
    drafter = near_copy(target)
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=8)
    try:
        options = {"do_sample": False, "max_new_tokens": 8, "assistant_model": drafter}
        print(torch.equal(plain, target.generate(ids, **options)), flush=True)
    except ImportError as error:
        print(error, flush=True)
    os._exit(0)
"""


def test_a_name_that_is_gone():
    """It is gone while the library is imported; transformers itself has it back after that."""
    not_needed = [  # by this call
        ("transformers.models.gemma4.modeling_gemma4", "Gemma4TextScaledWordEmbedding"),
        ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
    ]
    needed = [("transformers.cache_utils", "LinearAttentionCacheLayerMixin")]
    program = f"GONE = {[not_needed, needed]!r}\n{GONE}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drafted, refused = done.stdout.splitlines()
    assert drafted == "True", done.stderr
    assert "no cache_utils.LinearAttentionCacheLayerMixin, which" in refused


def test_an_attribute_that_is_gone():
    with pytest.raises(
        names.ChangedTransformers, match=r"no object\._supports_logits_to_keep, which"
    ):
        outer_names.keeps_logits(object())


def test_the_cache_has_one_name_in_calls_forwards_and_outputs():
    target = tiny_model()
    cache = DynamicCache(config=target.config)
    assert names.cache_argument(target) in names.CACHE_NAMES
    assert names.cache_in({"use_cache": True, CACHE: cache}) is cache
    assert names.cache_in({"past_key_values": None, "cache": cache}) is cache
    assert names.cache_in({"attention_mask": None}) is None
    out = target.generate(
        torch.tensor([[1, 2]]),
        max_new_tokens=4,
        return_dict_in_generate=True,
        assistant_model=near_copy(target),
    )
    assert out[CACHE].get_seq_length() == out.sequences.shape[1] - 1


class Former(LlamaForCausalLM):
    """A model as code on the Hub has it, whose forward still has the old name."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        logits_to_keep=0,
        **kwargs,
    ):
        return super().forward(
            input_ids, attention_mask, position_ids, **{CACHE: past_key_values}, **kwargs
        )


def test_a_models_own_name_counts():
    former = Former(tiny_model().config)
    assert names.with_cache(former, 1) == {"past_key_values": 1} or CACHE == "cache"
    assert list(names.with_cache(former.model, 1)) == [CACHE]


def test_experts_are_decoded_with_the_kernel_of_plain_decoding(monkeypatch, prompt):
    """transformers switches it behind the prompt; so does a drafted call."""
    target = tiny_model()
    drafter, modes = near_copy(target), []
    entered = []

    class Mode:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            entered.clear()

    monkeypatch.setattr(
        type(target), "_optimize_model_for_decode", lambda self: Mode(), raising=False
    )
    handle = target.register_forward_pre_hook(lambda *_: modes.append(bool(entered)))
    generate(target, drafter, prompt)
    modes.clear()
    generate(target, drafter, prompt)
    handle.remove()
    assert modes[0] is False
    assert all(modes[1:])
    assert len(modes) > 2
    assert not entered
