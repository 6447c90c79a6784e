"""The packs that a server offers, by name, and their tokenizers; knows no loaded model."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from moepack.formats.errors import MoepackError, SourceError
from moepack.formats.pack import Pack, is_pack
from moepack.runtime.loading import pack_tokenizer
from moepack.tools.packs import open_pack
from moepack.tools.serving.bounds import bytes_per_token
from moepack.tools.serving.errors import ApiError, invalid, not_loaded

__all__ = ["Catalog", "open_packs"]

T = TypeVar("T")


def open_packs(arguments: Sequence[str]) -> dict[str, Pack]:
    """Packs by name, from paths of packs, folders of packs, and names on the hub.

    Raises SourceError, of two packs of one name too, and FormatError.
    """
    found: dict[str, Pack] = {}
    for argument in arguments:
        for name, pack in _packs_of(argument):
            other = found.setdefault(name, pack)
            if other.path.resolve() != pack.path.resolve():
                raise SourceError(
                    f"two packs are named {name!r}: {other.path} and {pack.path}; rename one"
                )
    return found


def _packs_of(argument: str) -> Iterator[tuple[str, Pack]]:
    folder = Path(argument)
    inside: list[Path] = []
    if folder.is_dir() and not is_pack(folder):
        found = list(folder.iterdir())
        inside = sorted(p for p in found if not p.name.startswith(".") and is_pack(p))
        if not inside and not any(path.is_file() for path in found):
            raise SourceError(f"{folder}: no packs are in this folder, and it is none itself")
    for path in inside:
        yield path.name.removesuffix(".moepack"), Pack.open(path)
    if not inside:
        pack = open_pack(argument)
        name = pack.path.resolve().name if folder.exists() else argument
        yield name.removesuffix(".moepack"), pack


class Catalog:
    """Packs by name, for requests on any thread. `context`: tokens of a prompt and its answer."""

    def __init__(self, packs: dict[str, Pack], context: int) -> None:
        self._packs = packs
        # With the bytes of text that may fit the context at most, where that is known.
        self._tokenizers: dict[str, tuple[TokenizerWrapper, int | None]] = {}
        self._lock = threading.Lock()  # tokenizers serve one thread at a time
        self._created = int(time.time())
        self.context = context

    @property
    def names(self) -> list[str]:
        """The models, in the order given."""
        return list(self._packs)

    @property
    def only(self) -> str | None:
        """The model, where there is one alone."""
        return self.names[0] if len(self._packs) == 1 else None

    def pack(self, name: str) -> Pack:
        """The pack of a model."""
        return self._packs[name]

    def chosen(self, name: str | None) -> str:
        """The model that a request asks for. Raises ApiError for one that is not here."""
        if name is None:
            name = self.only
        if name is None:
            raise invalid(f"model: name one of {', '.join(self._packs)}", "model")
        if name not in self._packs:
            text = f"no model {name!r} here; this server has {', '.join(map(repr, self._packs))}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return name

    def as_map(self, name: str) -> dict[str, Any]:
        """A model, as /v1/models lists it."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "moepack",
            "max_model_len": self.context,
        }

    def tokenizer(self, name: str) -> TokenizerWrapper:
        """A model's tokenizer, loaded if it is not there. Raises SourceError, FormatError."""
        with self._lock:
            return self._held(name)[0]

    def with_tokenizer(self, name: str, use: Callable[[TokenizerWrapper, int | None], T]) -> T:
        """What `use` makes of a model's tokenizer, which no other request uses meanwhile.

        It is also given the bytes of text that may fit the context at most, None if that is not
        known. Raises ApiError when there is no tokenizer.
        """
        with self._lock:
            try:
                held = self._held(name)
            except (MoepackError, OSError) as error:  # a pack's files may be gone by now
                raise not_loaded(name, str(error)) from error
            return use(*held)

    def _held(self, name: str) -> tuple[TokenizerWrapper, int | None]:
        if name not in self._tokenizers:
            tokenizer = pack_tokenizer(self._packs[name])
            n_bytes = bytes_per_token(getattr(tokenizer, "backend_tokenizer", None))
            most = None if n_bytes is None else n_bytes * self.context
            self._tokenizers[name] = tokenizer, most
        return self._tokenizers[name]

    def keep_tokenizer(self, name: str) -> None:
        """Drop the tokenizers of all other models: their memory belongs to this one now."""
        with self._lock:
            self._tokenizers = {n: t for n, t in self._tokenizers.items() if n == name}
