"""One look at a target before the first drafted call: does it read drafts, and padded prompts, as it reads tokens one by one?

Some targets make positions or masks themselves, or forget them. Their texts would be others with a drafter than without, and no
config says which they are. So a short text is decoded plainly, and again with drafts of its own tokens, and logits are compared.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.constants import HF_HOME
from torch import LongTensor, Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, __version__

from ..decoding.checks import Refused
from ..decoding.loop import speculative_decoding
from ..drafters.feature_drafter import FeatureDrafter
from ..hardware import device_name, input_device
from ..protocol import Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig

NEW = 4  # tokens: two of a draft behind the prompt, and two of a tree
PROMPT = (11, 17, 23, 13, 19, 29, 12)  # ids that few tokenizers keep for something special
PADDED = 3  # tokens on the left of the second sequence of a batch
# How far logits may lie apart, of their spread: in fine dtypes a share, in coarse ones their steps times the root of the depth;
# or else so many times as far as the target's own rounding takes them.
FINE = {torch.float64: 1e-9, torch.float32: 1e-4}
STEPS, TIMES, PACKED = 2.0, 6.0, 0.1
FOLDER = Path(HF_HOME) / "paradraft" / "reads"
_reads: WeakKeyDictionary[PreTrainedModel, dict[tuple, bool]] = WeakKeyDictionary()


def _file(model: PreTrainedModel, several: bool) -> Path:
    """Named by what decides how a model reads: its code and its config, not its weights. It is there if the model is sound."""
    config = {**model.config.to_dict(), "_name_or_path": None}
    versions = __version__, torch.__version__, device_name(input_device(model))
    parts = sorted({type(part).__name__ for module in model.modules() for part in (module, vars(module).get("_hf_hook"))})
    key = type(model).__name__, config, str(model.dtype), model.config.get_text_config()._attn_implementation, parts, *versions
    return FOLDER / hashlib.sha256(json.dumps([*key, several], sort_keys=True, default=str).encode()).hexdigest()[:24]


class Known(Drafter, Drafting):
    """Guesses what is known to follow, beside tokens that do not.

    Args:
        texts: int64 `(B, n)`, without padding but on the left.
        padding: of each.
        vocab_size: V.
    """

    def __init__(self, texts: LongTensor, padding: list[int], vocab_size: int):
        self.vocab_size = vocab_size
        self.texts = [text[count:] for text, count in zip(texts, padding, strict=True)]
        self.speculation_config = SpeculationConfig(NEW, 2 * NEW, never_slower=False)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Itself: it serves one call."""
        return self

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Behind the prompt one token; later pairs, of which the first is wrong."""
        guesses = []
        for prefix, text in zip(prefixes, self.texts, strict=True):
            right = text[prefix.ids.shape[1] :].cpu()
            if prefix.kept == 0:
                guesses.append(GuessedTokens(right[:1]))
                continue
            right = right[: prefix.room]
            wrong = (right + 1) % self.vocab_size
            tokens = torch.stack([wrong, right], 1).flatten()
            parents = [-1 if depth == 0 else 2 * depth - 1 for depth in range(len(right)) for _ in range(2)]
            guesses.append(GuessedTokens(tokens, parents, [0.4, 0.6] * len(right)))
        return guesses


def check_reads(model: PreTrainedModel, several: bool) -> None:
    """Refuse a target whose texts would be others with a drafter; it is looked at once, and if it is sound, in one process.

    Args:
        model: the target.
        several: whether sequences are padded, or are of different lengths after the first round.

    Raises:
        ValueError: it does not read drafts, or padded prompts, as it reads tokens one by one.
    """
    verdicts = _reads.setdefault(model, {})
    how = several, model.dtype, model.config.get_text_config()._attn_implementation
    if how not in verdicts:
        file = _file(model, several)
        sound = file.exists() or _is_sound(model, several)
        if sound is None:
            return
        if sound:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        verdicts[how] = sound
    if not verdicts[how]:
        what = "padded prompts" if several else "drafts"
        raise Refused(
            f"{type(model).__name__} does not read {what} as it reads tokens one by one, as it is loaded here: generate without "
            f"a drafter{', or one prompt at a time' if several else ''}."
        )


def reads_padded(model: PreTrainedModel) -> bool:
    """Whether `check_reads` has nothing against padded prompts."""
    try:
        check_reads(model, True)
    except Refused:
        return False
    return True


def check_more_than_text(model: PreTrainedModel, drafter: Drafter) -> None:
    """Refuse a call with images, or the like, whose target or drafter cannot serve them.

    Raises:
        ValueError: the target's cache holds an image's keys beside the text's, as Mllama's does, which drafts would crop; or it
            has several positions a token (M-RoPE), and the drafter one.
    """
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        raise Refused(f"{type(model).__name__} attends to images across, which drafts do not serve: generate without a drafter.")
    if isinstance(drafter, FeatureDrafter) and "mrope_section" in str(getattr(config, "rope_parameters", "")):
        raise Refused(
            f"This {drafter.title} has one position a token, and images give {type(model).__name__} several (M-RoPE): generate "
            "with images without it."
        )


@torch.no_grad()
def _is_sound(model: PreTrainedModel, several: bool) -> bool | None:
    """None: it cannot be decoded plainly either."""
    device = input_device(model)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.tensor([PROMPT], device=device) % vocab_size
    mask = torch.ones_like(ids)
    if several:
        ids, mask = ids.repeat(2, 1), mask.repeat(2, 1)
        mask[1, :PADDED] = 0
    training = model.training
    model.eval()
    decodes = False
    try:
        texts, plain = _decoded(model, ids, mask)
        _, again = _decoded(model, ids.repeat(2, 1), mask.repeat(2, 1))
        decodes = True
        drafter = Known(texts, (mask == 0).sum(1).tolist(), vocab_size)
        _, drafted = _decoded(model, ids, mask, custom_generate=speculative_decoding, drafter=drafter)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises that was not written for drafts; the loop says what it does not serve
        if not decodes:  # whoever asks for it will be told
            return None
        return isinstance(error, Refused)
    finally:
        model.train(training)
    if not bool(plain.isfinite().all()):  # acceptance says what is wrong with it
        return True
    spread = plain.std(-1)
    noise = ((plain - again[: len(plain)]).square().mean(-1).sqrt() / spread).median()
    apart = ((plain - drafted).square().mean(-1).sqrt() / spread)[:, 1:].median(-1).values.max()
    return bool(apart <= max(_rounding(model), TIMES * float(noise)))


def _rounding(model: PreTrainedModel) -> float:
    """How far rounding may take logits, of their spread."""
    if getattr(model.config, "quantization_config", None) is not None:  # kernels differ by the number of rows
        return PACKED
    exact = model.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    if exact and model.dtype in FINE:
        return FINE[model.dtype]
    coarse = torch.finfo(model.dtype if exact else torch.bfloat16).eps
    return STEPS * coarse * model.config.get_text_config().num_hidden_layers ** 0.5


def _decoded(model: PreTrainedModel, ids: LongTensor, mask: Tensor, **how: Any) -> tuple[LongTensor, Tensor]:
    """The text, and the logits `(B, new, V)` float32 of its new tokens."""
    config = GenerationConfig(
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    made = GenerationMixin.generate(model, ids, attention_mask=mask, generation_config=config, **how)
    return made.sequences, torch.stack(made.logits, 1).float()
