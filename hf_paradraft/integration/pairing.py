"""Do this target and this drafter speak the same tokens?"""

from functools import lru_cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..decoding.checks import Refused
from ..outer_names import commit_of
from ..protocol import Drafter

logger = logging.get_logger(__name__)


def check_same_tokenizer(
    target: PreTrainedModel,
    drafter: Drafter,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a drafter that was trained on other tokens than the target's.

    Padded embeddings of different sizes are fine. Tokenizers are compared where both can be had
    without a download. A wrong drafter could only be slow, never change the output, so an unknown
    one passes, with a warning if the vocabulary sizes differ.

    Raises:
        Refused: the tokenizers differ; the message says where.
    """
    if target_tokenizer is not None and drafter_tokenizer is not None:
        difference = _difference(target_tokenizer, drafter_tokenizer)
    else:
        if not drafter.name_or_path or target.name_or_path == drafter.name_or_path:
            return
        commit = commit_of(target)
        options = {} if commit is None else {"revision": commit}
        difference = _stored_difference(
            (target.name_or_path, *options.items()),
            (drafter.name_or_path, *drafter.found_under.items()),
        )
    if difference:
        raise Refused(
            f"The drafter's tokenizer is not the target's: {difference}. Use a drafter of the "
            "target's own model family."
        )
    config = getattr(drafter, "config", None)  # drafters with a tokenizer have one
    sizes = [
        model_config.get_text_config().vocab_size
        for model_config in (target.config, config)
        if model_config is not None
    ]
    if difference is None and len(set(sizes)) > 1:
        logger.warning_once(
            f"The target has {sizes[0]} token embeddings and the drafter {sizes[1]}, and their "
            "tokenizers could not be compared: drafting over the ids that both have."
        )


@lru_cache
def _stored_difference(target: tuple, drafter: tuple) -> str | None:
    """Compare two stored tokenizers, and describe the difference.

    The description is "" for no difference, and None if one of them is not stored here.
    """
    tokenizers = []
    for name, *found_under in (target, drafter):
        options = {**dict(found_under), "local_files_only": True, "trust_remote_code": False}
        if Path(name).is_dir() and not any(Path(name).glob("*token*")):
            return None  # drafters that stand on their target have none of their own, and need none
        try:
            tokenizers.append(AutoTokenizer.from_pretrained(name, **options))
        # whatever a missing or foreign tokenizer raises, there is nothing to compare
        except Exception:
            return None
    return _difference(*tokenizers)


def _difference(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> str:
    """Name the first id on which two tokenizers disagree, as a clause.

    It is "" if every shared id is the same token. Tokens that only one side has at its end (a mask
    token, say) are no difference. Special tokens of another name are one that a warning is enough
    for: newer models of a family rename reserved ones.
    """
    ours, theirs = (
        {index: token for token, index in side.get_vocab().items()} for side in (target, drafter)
    )
    shared = ours.keys() & theirs.keys()
    wrong = sorted(index for index in shared if ours[index] != theirs[index])
    special = [
        {index for index, token in side.added_tokens_decoder.items() if token.special}
        for side in (target, drafter)
    ]
    if renamed := special[0] & special[1] & {*wrong}:
        first = min(renamed)
        logger.warning_once(
            f"{len(renamed)} special tokens have another name for the drafter than for the target "
            f"(first id {first}: {theirs[first]!r} and {ours[first]!r}): where they are used, "
            "fewer of its guesses are right."
        )
    if not (wrong := [index for index in wrong if index not in renamed]):
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(shared)} shared ids mean other tokens (vocabularies of {len(ours)} "
        f"and {len(theirs)}), first id {first}, {ours[first]!r} for the target and "
        f"{theirs[first]!r} for the drafter"
    )
