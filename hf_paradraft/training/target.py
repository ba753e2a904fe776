"""Opening the causal LM that answers, and that drafters are trained for: a folder, a Hub id, or a
`.gguf` file.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..files import names_folder, refuse_missing
from ..hardware import fast_dtype
from ..outer_names import find_adapter_config_file

logger = logging.get_logger(__name__)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "tokenizer_config.json")
# raised by transformers where a file holds something else than it expects
NOT_A_MODELS = (AssertionError, AttributeError, KeyError, TypeError, ZeroDivisionError)


def is_packed(name: str | Path) -> bool:
    """Tell whether a name is that of a `.gguf` file.

    Raises:
        OSError: it would be one, and is not there.
    """
    if not str(name).endswith(".gguf"):
        return False
    if not Path(name).is_file():
        raise OSError(f"There is no file {name}.")
    return True


def refuse_packed(name: str | Path, why: str) -> None:
    """Refuse a `.gguf` file where ordinary weights are wanted.

    Raises:
        ValueError: it is one.
    """
    if is_packed(name):
        raise ValueError(
            f"{name} is a packed file, and {why}: paradraft export {name} DIR makes a folder of "
            "ordinary weights of it."
        )


def check_context(config: PreTrainedConfig, max_length: int) -> None:
    """Refuse samples that a model has no positions for.

    Args:
        config: the model's config.
        max_length: the tokens of a sample, at most.

    Raises:
        ValueError: they are longer than its context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and max_length > context:
        raise ValueError(
            f"max_length={max_length} is longer than the model's context of {context} tokens: "
            "lower it."
        )


def check_ids(rows: Mapping[str, Any] | None, model: PreTrainedModel) -> None:
    """Refuse samples with tokens for which a model has no embedding.

    Args:
        rows: the samples, from `encode_rows`; None for none.
        model: the model that reads them.

    Raises:
        ValueError: a sample has one.
    """
    size = model.get_input_embeddings().weight.shape[0]
    for number, row in enumerate(() if rows is None else rows["input_ids"], 1):
        if (largest := max(row)) >= size:
            raise ValueError(
                f"A sample (number {number}) has the token {largest}, and the model's embedding "
                f"{size} rows: the tokenizer is another model's, or tokens were added that the "
                "model was not resized for."
            )


def config_of(name: str | Path) -> PreTrainedConfig:
    """Load the config of a causal LM from a folder, the Hub or a `.gguf` file.

    Raises:
        OSError, ValueError: nothing readable there.
    """
    return _load(AutoConfig, name)


def open_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a causal LM from a folder, the Hub or a `.gguf` file.

    Raises:
        OSError, ValueError: as for `open_model`; or a folder has none.
    """
    found = (any(Path(name).glob(pattern)) for pattern in TOKENIZERS)
    if Path(name).is_dir() and not any(found):
        raise OSError(f"{name} has no tokenizer ({', '.join(TOKENIZERS)}): save the model's there.")
    return _load(AutoTokenizer, name)


@names_folder
def open_model(name: str | Path, *, whole: bool = False, **loading: Any) -> PreTrainedModel:
    """Load a causal LM in evaluation mode, with all of its weights.

    Args:
        name: a folder, a Hub id, or a `.gguf` file.
        whole: unpack a file's weights; else they stay packed where there is a kernel, and computing
            is in fp32.
        loading: further arguments of `from_pretrained`: `dtype`, `device_map`.

    Raises:
        OSError, ValueError: nothing loadable there, a damaged file, missing weights, or a packed
            file that cannot be read.
    """
    packed = is_packed(name)
    if packed and whole:
        loading["quantization_config"] = GgufConfig(dequantize=True)
    elif packed:
        loading["dtype"] = torch.float32
    model, info = _load(AutoModelForCausalLM, name, output_loading_info=True, **loading)
    if not packed and find_adapter_config_file(name) is None:
        refuse_missing(info, type(model).__name__, name)
    return model.eval()


def open_fast(name: str | Path, **loading: Any) -> PreTrainedModel:
    """Load a causal LM as `open_model`, in the number format that this hardware is fast at."""
    dtype = fast_dtype()
    logger.warning(
        "The target is run in %s, which this hardware is fast at.",
        str(dtype).removeprefix("torch."),
    )
    return open_model(name, dtype=dtype, **loading)


@names_folder
def _load(kind: Any, name: str | Path, **loading: Any) -> Any:
    """Load a config, a tokenizer or a model from a folder, the Hub or a `.gguf` file.

    Errors, which transformers raises of many kinds, become sentences.

    Args:
        kind: the class of transformers that chooses by what is there.
        name: the name of the folder, the repository or the file.
        loading: further arguments of `from_pretrained`.

    Raises:
        OSError, ValueError: nothing is there, or it cannot be read.
    """
    packed = is_packed(name)
    # as a name on the Hub, such a path would only be an odd one
    if str(name).startswith(("/", "./", "../", "~")) and not Path(name).exists():
        raise OSError(f"There is no folder {name}.")
    folder = Path(name).parent if packed else name
    if packed:
        loading["gguf_file"] = Path(name).name
    try:
        return kind.from_pretrained(folder, **loading, trust_remote_code=False)
    except SafetensorError as error:
        raise OSError(
            f"a weights file is truncated or damaged ({error}): download or save it again."
        ) from None
    except Exception as error:
        if packed:
            if isinstance(error, ImportError):
                raise OSError(
                    f"Reading {name} needs another package: pip install gguf ({error})."
                ) from error
            raise ValueError(
                f"{name} cannot be read: it is damaged, or of an architecture that transformers "
                f"has not ({error})."
            ) from error
        if isinstance(error, NOT_A_MODELS):
            raise ValueError(
                f"{name} has files that are not a model's: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error
        raise


def short_hash(text: str) -> str:
    """Hash a text to 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    """Hash the names and a few numbers of all weights.

    Another model of the same shape has another hash.

    Args:
        model: a model, of which some weights may be offloaded.
        dtype: the dtype that weights are rounded to first.
    """
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        if tensor.device.type != "meta":
            numbers = tensor.detach().flatten()[:: max(1, tensor.numel() // 8)][:8]
            digest.update(numbers.to(dtype).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
