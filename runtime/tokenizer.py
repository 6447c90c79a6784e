"""The tokenizer of a pack or checkpoint, by mlx-lm; code that it names never runs."""

from pathlib import Path
from typing import Any

import mlx_lm.utils
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from moepack.formats.errors import SourceError
from moepack.formats.pack import TOKENIZER_FILES, has_tokenizer

__all__ = ["load_tokenizer"]

# A tokenizer_config.json that names one of these says: tokenizer.json holds all of it.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(path: Path, config: dict[str, Any]) -> TokenizerWrapper:
    """As `mlx_lm.utils.load_tokenizer`, for the local folder `path`.

    For some model types transformers replaces what tokenizer.json says by a class of its own;
    where tokenizer_config.json states a generic class, the file is taken as it is. Raises
    SourceError when there is no usable tokenizer.
    """
    if not has_tokenizer(path):
        raise SourceError(f"{path}: no usable tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{path}: the path is not valid UTF-8, as the tokenizers library needs it; rename it"
        ) from error
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if get_tokenizer_config(path).get("tokenizer_class") in GENERIC_CLASSES:
            options["config"] = PreTrainedConfig()  # no model type, so no class chosen by it
        return mlx_lm.utils.load_tokenizer(path, options, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # tokenizer classes raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise SourceError(f"{path}: no usable tokenizer ({reason})") from error
