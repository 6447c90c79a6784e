"""How much text can fit a context at all, so that far too much is refused before it is split."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["bytes_per_token"]

# NFC makes UTF-8 shorter by this factor at most: 7 bytes of U+1FBE U+0308 U+0301 become 2.
NFC_FACTOR = 4


def bytes_per_token(tokenizer: Tokenizer | None) -> int | None:
    """Bytes of UTF-8 that one token may stand for at most; None where that is not certain.

    Certain it is of byte pairs that know every byte, unless something drops text before them.
    """
    if tokenizer is None or not isinstance(tokenizer.model, BPE):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # they take any number of spaces with them
    steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    if not all(_keeps_text(step) for step in steps):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if is_byte_level:
        has_bytes = all(character in vocabulary for character in ByteLevel.alphabet())
        longest = max(map(len, vocabulary))  # a character stands for a byte
    else:
        has_bytes = tokenizer.model.byte_fallback and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(256)
        )
        longest = max(len(token.encode()) for token in vocabulary)
    if not has_bytes:
        return None
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return longest * (NFC_FACTOR if any(step["type"] in ("NFC", "NFD") for step in steps) else 1)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer does, one thing after the other."""
    state = {"type": "Sequence"} if part is None else json.loads(part.__getstate__())
    waiting = [state]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
        else:
            yield step


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether no text is lost, nor made shorter but by NFC."""
    match step:
        case {"type": "NFC" | "NFD" | "ByteLevel" | "Prepend" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
    return False
