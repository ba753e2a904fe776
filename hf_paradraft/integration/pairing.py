"""Do this target and this drafter speak the same tokens?"""

from functools import lru_cache

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)


def check_same_tokenizer(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a drafter that was trained on other tokens; padded embeddings of different sizes are fine.

    Tokenizers are compared where both can be had without a download. A wrong drafter could only be slow, never change the
    output, so an unknown one passes, with a warning if the vocabulary sizes differ.

    Raises:
        ValueError: the tokenizers differ; the message says where.
    """
    if target_tokenizer is not None and drafter_tokenizer is not None:
        difference = _difference(target_tokenizer.get_vocab(), drafter_tokenizer.get_vocab())
    else:
        if target.name_or_path == drafter.name_or_path:
            return
        difference = _stored_difference(target.name_or_path, drafter.name_or_path)
    if difference:
        raise ValueError(
            f"The drafter's tokenizer is not the target's: {difference}. Use a drafter of the target's own model family."
        )
    sizes = [model.config.get_text_config().vocab_size for model in (target, drafter)]
    if difference is None and sizes[0] != sizes[1]:
        logger.warning_once(
            f"The target has {sizes[0]} token embeddings and the drafter {sizes[1]}, and their tokenizers could not be "
            "compared: drafting over the ids that both have."
        )


@lru_cache
def _stored_difference(target_name: str, drafter_name: str) -> str | None:
    """What differs, "" for nothing, None when a tokenizer is not stored here."""
    vocabularies = []
    for name in (target_name, drafter_name):
        try:
            vocabularies.append(AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False).get_vocab())
        except Exception:  # whatever a missing or foreign tokenizer raises, there is nothing to compare
            return None
    return _difference(*vocabularies)


def _difference(target: dict[str, int], drafter: dict[str, int]) -> str:
    """A clause that names the first id on which the vocabularies disagree; "" if every shared id is the same token.

    Tokens that only one side has at its end (a mask token, say) are no difference.
    """
    ours = {index: token for token, index in target.items()}
    theirs = {index: token for token, index in drafter.items()}
    shared = ours.keys() & theirs.keys()
    wrong = sorted(index for index in shared if ours[index] != theirs[index])
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(shared)} shared ids mean other tokens (vocabularies of {len(ours)} and {len(theirs)}), "
        f"first id {first}, {ours[first]!r} for the target and {theirs[first]!r} for the drafter"
    )
