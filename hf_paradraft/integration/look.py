"""One look at a target before the first drafted call: does it read drafts, and padded prompts, as
it reads tokens one by one?

Some targets make positions or masks themselves, or forget them. Their texts would be others with a
drafter than without, and no config says which they are. So a short text is decoded plainly, and
again with drafts of its own tokens, and logits are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.variants import ALoraLinearVariant
from torch import LongTensor, Tensor
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from ..decoding.checks import Refused
from ..decoding.loop import speculative_decoding
from ..drafters.feature_drafter import FeatureDrafter
from ..hardware import input_device
from ..names import ChangedTransformers, attention_of, is_foreign
from ..notes import notes_on
from ..outer_names import attention_function, plain_decoding
from ..protocol import Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig
from ..rules.same_seed import generator_of

NEW = 4  # tokens: two of a draft after the prompt, and two of a tree
NEW_OF_OTHERS = 16  # tokens, for a target with code of others: drafts are as wide as a call's
TEXT = 128, 512  # tokens of a text that such a target is looked at with, at least and at most
PROMPT = (11, 17, 23, 13, 19, 29, 12)  # ids that few tokenizers keep for something special
PADDED = 3  # tokens on the left of the second sequence of a batch
# How far logits may lie apart, of their spread: in fine dtypes a share, in coarse ones their steps
# times the root of the depth; or else so many times as far as the target's own rounding takes them.
# in float64 too, parts with a state may compute in float32 (Bamba, Falcon-H1)
FINE = {
    torch.float64: 1e-5,
    torch.float32: 1e-4,
}
STEPS, TIMES = 2.0, 6.0
# times as far one place may lie apart as the median: with 30 layers in bf16 the worst of 16 lay 2.1
# steps apart
WORST = 2.0
PACKED = 0.1  # of the spread, at most, for kernels that differ by the number of rows
PLAIN = vars(torch.nn.Module()).keys()  # attributes that every part has
PLAIN_VALUES = bool | int | float | str | None
LOOKS = 64  # verdicts that are kept of a target
logger = logging.get_logger(__name__)
OURS = "hf_paradraft."  # hooks of calls in other threads
CANNOT = "cannot decode a short text"
DRAWS = "draws random numbers in its forwards (dropout in training mode?)"
_count = itertools.count()


class OracleDrafter(Drafter, Drafting):
    """A drafter that guesses the tokens that are known to follow, among others.

    Args:
        texts: int64 `(B, n)`, without padding but on the left.
        padding: the tokens of padding in each text.
        vocab_size: V.
        new: the number of tokens that follow the prompts.
    """

    def __init__(self, texts: LongTensor, padding: list[int], vocab_size: int, new: int):
        self.vocab_size = vocab_size
        self.texts = [text[count:] for text, count in zip(texts, padding, strict=True)]
        self.speculation_config = SpeculationConfig(new, 2 * new, never_slower=False)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Propose one right token after the prompt, and later pairs of a wrong and a right one."""
        guesses = []
        for prefix, text in zip(prefixes, self.texts, strict=True):
            right = text[prefix.ids.shape[1] :].cpu()
            if prefix.kept == 0:
                guesses.append(GuessedTokens(right[:1]))
                continue
            right = right[: prefix.room]
            wrong = (right + 1) % self.vocab_size
            tokens = torch.stack([wrong, right], 1).flatten()
            # below the right node of the level before
            parents = [2 * (node // 2) - 1 for node in range(len(tokens))]
            guesses.append(GuessedTokens(tokens, parents, [0.4, 0.6] * len(right)))
        return guesses


def as_called(model: PreTrainedModel) -> tuple[tuple, bool]:
    """Describe everything but weights and inputs that decides what a forward of `model` does now.

    It may have changed since the last call: wrappers put methods over those of the class, hooks
    change what a layer gives, adapters are parts, attributes switch parts of others, and a part in
    training mode may draw random numbers.

    Returns:
        The forwards of the classes of its parts, hooks of every module, for each part its hooks,
        own methods, mode and switches, and the functions around the model; whether any code is of
        others than `KNOWN`.
    """
    kinds: set[Any] = set(map(type, model.modules()))
    strange = set(filter(is_foreign, kinds))
    everywhere = {**torch_module._global_forward_pre_hooks, **torch_module._global_forward_hooks}
    functions = attention_function(model), plain_decoding(model)
    forwards = [kind.forward for kind in kinds]
    others = any(map(is_foreign, (*everywhere.values(), *functions, *forwards)))
    parts: list[tuple] = []
    for part in model.modules():
        own, hooks = vars(part), {**part._forward_pre_hooks, **part._forward_hooks}
        hooks = {
            handle: hook
            for handle, hook in hooks.items()
            if not getattr(hook, "__module__", "").startswith(OURS)
        }
        methods = {
            name: own[name] for name in own.keys() - PLAIN if _covers(own[name], type(part), name)
        }
        foreign = type(part) in strange or any(
            map(is_foreign, (*hooks.values(), *methods.values()))
        )
        identities = tuple((name, _identity(method)) for name, method in methods.items())
        switches = _switches(own) if foreign else ()
        parts.append((tuple(hooks), identities, part.training, switches))
        others |= foreign
    how = (
        frozenset((kind, _identity(kind.forward)) for kind in kinds),
        tuple(everywhere),
        tuple(parts),
        tuple(map(_identity, functions)),
    )
    return how, others


def _switches(own: dict[str, Any]) -> tuple:
    """List a part's attributes that may switch its behaviour.

    Of counters, and of remembered values, only the type is listed.
    """
    return tuple(
        (name, value if isinstance(value, bool | float | str) else type(value))
        for name, value in own.items()
        if name not in PLAIN
    )


def _covers(value: Any, owner: type, name: str) -> bool:
    """Tell whether an object's own attribute covers a method of its class with something else."""
    method = getattr(owner, name, None)
    return callable(value) and callable(method) and getattr(value, "__func__", None) is not method


def _identity(method: Any) -> tuple[int, ...]:
    """Identify a function, or a bound method by its function and owner.

    A bound method is another object in every look at it.
    """
    parts = getattr(method, "__func__", method), getattr(method, "__self__", method)
    try:
        # for an id is used again
        return tuple(notes_on(part).setdefault("number", next(_count)) for part in parts)
    except TypeError:  # an object that cannot be hashed
        return tuple(map(id, parts))


def check_reads(
    model: PreTrainedModel,
    several: bool,
    needs_more: bool = False,
    text: LongTensor | None = None,
    limit: int = 0,
) -> bool:
    """Refuse a target whose texts would be others with a drafter.

    It is looked at once as it is called now (`as_called`). With code of others it is looked at once
    for each doubling of the text's length, for such code may begin to act anywhere.

    Args:
        model: the target.
        several: whether sequences are padded, or are of different lengths after the first round.
        needs_more: whether the call brings more than ids, without which the target may not be able
            to decode.
        text: int64 `(n,)`, a prompt of the call, which a target with code of others is looked at
            with; default: any.
        limit: tokens of the whole text at most.

    Returns:
        Whether it has code of others.

    Raises:
        ValueError: it does not read drafts, or padded prompts, as it reads tokens one by one.
    """
    if any(map(_adapts_by_place, model.modules())):
        raise Refused(
            "The adapters of this call differ from row to row (adapter_names), or are on from "
            "certain tokens on (aLoRA), and drafts have rows and tokens of their own: generate "
            "without a drafter, or once per adapter."
        )
    faults = notes_on(model).setdefault("faults", {})
    called, others = as_called(model)
    text = _text_of(model, text, limit) if others and not needs_more else None
    how = several, model.dtype, attention_of(model), called, None if text is None else len(text)
    fault = faults.get(how)
    if fault is None:
        if any(hooks for hooks, *_ in called[2]):
            logger.warning_once(
                "This target has hooks of others: they see a short text too, by which it is looked "
                "at."
            )
        fault = _fault(model, several, text)
        if fault is None:
            return others
        if len(faults) >= LOOKS:  # hooks that each call registers anew
            faults.clear()
        if fault != DRAWS:  # which another thread may have done: the next call looks again
            faults[how] = fault
    if fault and not (needs_more and fault.startswith(CANNOT)):
        alone = ", or one prompt at a time" if "padded" in fault else ""
        raise Refused(
            f"{type(model).__name__} {fault}, as it is loaded and called here: generate "
            f"without a drafter{alone}."
        )
    return others


def _text_of(model: PreTrainedModel, prompt: LongTensor | None, limit: int) -> LongTensor:
    """Make a text as long as the call's may become, within bounds, that ends like the prompt."""
    config, (shortest, longest) = model.config.get_text_config(), TEXT
    wanted = 1 << (max(limit, shortest) - 1).bit_length()
    size = (
        min(wanted, longest, getattr(config, "max_position_embeddings", None) or longest)
        - NEW_OF_OTHERS
    )
    text = torch.tensor(PROMPT, device="cpu") if prompt is None or not len(prompt) else prompt.cpu()
    return (text % config.vocab_size).repeat(-(-size // len(text)))[-max(size, len(PROMPT)) :]


def _adapts_by_place(part: torch.nn.Module) -> bool:
    """Tell whether PEFT adapts a part by rows (`adapter_names`, a hook) or by tokens (aLoRA)."""
    hooks, variants = part._forward_pre_hooks.values(), vars(part).get("lora_variant")
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks) or any(
        isinstance(variants.get(name), ALoraLinearVariant)
        for name in (part.active_adapters if variants else ())
    )


def reads_exactly(model: PreTrainedModel, several: bool) -> bool:
    """Tell whether `check_reads` has nothing against a target."""
    try:
        check_reads(model, several)
    except Refused:
        return False
    return True


def check_more_than_text(model: PreTrainedModel, drafter: Drafter) -> None:
    """Refuse a call with images, or the like, whose target or drafter cannot serve them.

    Raises:
        ValueError: the target's cache holds an image's keys with the text's, as Mllama's does,
            which drafts would crop; or it has several positions a token (M-RoPE), and the drafter
            one.
    """
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        raise Refused(
            f"{type(model).__name__} attends to images across, which drafts do not serve: generate "
            "without a drafter."
        )
    if isinstance(drafter, FeatureDrafter) and "mrope_section" in str(
        getattr(config, "rope_parameters", "")
    ):
        raise Refused(
            f"This {drafter.title} has one position a token, and images give "
            f"{type(model).__name__} several (M-RoPE): generate with images without it."
        )


@torch.no_grad()
def _fault(model: PreTrainedModel, several: bool, text: LongTensor | None = None) -> str | None:
    """Decode a short text plainly and with drafts, and name the target's fault, if any.

    Args:
        model: the target.
        several: whether padded prompts are wanted too.
        text: int64 `(n,)`, a prompt for a target with code of others; default: a few ids.

    Returns:
        The predicate of a sentence; "" for a sound target; None for one that the loop refuses, and
        says so.
    """
    device = input_device(model)
    vocab_size = model.config.get_text_config().vocab_size
    known, new = text is None, NEW if text is None else NEW_OF_OTHERS
    ids = torch.tensor(PROMPT, device=device) % vocab_size if known else text.to(device)
    ids = ids[None]
    mask = torch.ones_like(ids)
    if several:
        ids, mask = ids.repeat(2, 1), mask.repeat(2, 1)
        mask[1, :PADDED] = 0
    read = "padded prompts" if several else "drafts"
    misread = f"does not read {read} as it reads tokens one by one"
    generator, decodes = generator_of(device), False
    try:
        with _twin_of(model, device) as twin:
            before = None if generator is None else generator.get_state()
            texts, plain = _decoded(twin, ids, mask, new)
            moved = generator is not None and not torch.equal(before, generator.get_state())
            decodes = True
            if not known:  # code of others may know rows, or act after some forwards
                _decoded(twin, ids.repeat(2, 1), mask.repeat(2, 1), new)
            drafter = OracleDrafter(texts, (mask == 0).sum(1).tolist(), vocab_size, new)
            other, drafted = _decoded(
                twin, ids, mask, new, custom_generate=speculative_decoding, drafter=drafter
            )
    except Refused:
        return None
    except (torch.OutOfMemoryError, ChangedTransformers):
        raise
    except Exception as error:  # whatever a model raises that was not written for drafts
        return misread if decodes else f"{CANNOT} ({type(error).__name__}: {str(error)[:300]})"
    if moved:
        return DRAWS
    if plain.isnan().any():  # acceptance says what is wrong with it
        return ""
    # after two tokens that differ texts are others
    same = (texts == other)[:, ids.shape[1] - 1 : -1].cumprod(-1).bool()
    if not torch.equal(plain.isinf()[same], drafted.isinf()[same]):
        return misread
    apart = _distances(plain, drafted).masked_fill(~same, torch.nan)
    typical = apart[:, 1:].nanmedian(-1).values.nan_to_num().max()  # the first is the prompt's
    needed = float(torch.maximum(typical, apart.nan_to_num().max() / WORST))
    allowed = _rounding(model)
    if needed > allowed and known:
        try:
            with _twin_of(model, device) as twin:
                _, again = _decoded(twin, ids.repeat(2, 1), mask.repeat(2, 1), new)
        except RuntimeError:  # so many rows are more than it serves
            return misread
        noise = _distances(plain, again[: len(plain)]).masked_fill(~same, torch.nan).nanmedian()
        allowed = min(TIMES * float(noise.nan_to_num()), PACKED)
    return "" if needed <= allowed else misread


@contextmanager
def _twin_of(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """Lend a model whose generation config, memory and random numbers are not the caller's.

    No drafter is set on it either.
    """
    # Its own config is for other texts, and other threads may decode with it meanwhile.
    twin = object.__new__(type(model))
    twin.__dict__ = {**vars(model), "generation_config": GenerationConfig()}
    own = [vars(part) for part in model.modules()]
    kept = [
        {name: value for name, value in had.items() if isinstance(value, PLAIN_VALUES | Tensor)}
        for had in own
    ]
    # the caller's seed is the caller's
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield twin
        # its parts may remember a text (M-RoPE's `rope_deltas`), which has to be the caller's
        finally:
            for had, values in zip(own, kept, strict=True):
                had.update(values)


def _distances(plain: Tensor, logits: Tensor) -> Tensor:
    """Compute how far logits `(B, new, V)` lie apart, `(B, new)`, as shares of their spread."""
    barred = plain.isinf()
    apart = (plain - logits).masked_fill(barred | logits.isinf(), 0.0)
    return apart.square().mean(-1).sqrt() / plain.masked_fill(barred, 0.0).std(-1)


def _rounding(model: PreTrainedModel) -> float:
    """Estimate how far rounding may move logits, as a share of their spread."""
    exact = model.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    if exact and model.dtype in FINE:
        return FINE[model.dtype]
    coarse = torch.finfo(model.dtype if exact else torch.bfloat16).eps
    return STEPS * coarse * model.config.get_text_config().num_hidden_layers ** 0.5


def _decoded(
    model: PreTrainedModel, ids: LongTensor, mask: Tensor, new: int, **how: Any
) -> tuple[LongTensor, Tensor]:
    """Generate `new` tokens; return the whole text and the new tokens' logits.

    The logits are `(B, new, V)` float32.
    """
    config = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    made = GenerationMixin.generate(
        model, ids, attention_mask=mask, generation_config=config, **how
    )
    return made.sequences, torch.stack(made.logits, 1).float()
