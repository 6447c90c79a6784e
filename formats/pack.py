"""A pack on disk, opened: its manifest, and paths that were checked against it.

Opening reads the manifest and the sizes of the files, never their content; `digests.py` does that.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from moepack.formats.codec import decode
from moepack.formats.errors import FormatError, SourceError
from moepack.formats.manifest import MAX_MANIFEST_NBYTES, ExpertModule, Manifest

__all__ = [
    "MANIFEST_NAME",
    "SHARED_NAME",
    "TOKENIZER_FILES",
    "Pack",
    "has_tokenizer",
    "is_pack",
    "link_leaves",
]

MANIFEST_NAME = "manifest.msgpack"
SHARED_NAME = "shared.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json")


def is_pack(path: Path) -> bool:
    """Whether `path` is a folder with a manifest in it."""
    return (path / MANIFEST_NAME).is_file()


def has_tokenizer(path: Path) -> bool:
    """Whether a pack or checkpoint folder has a file that can be a tokenizer."""
    return any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES)


def link_leaves(folder: Path, name: str) -> bool:
    """Whether a file of a folder, there or not, is reached by a link out of it.

    Of a snapshot in the Hugging Face cache, out of the model's folder `models--org--name`: every
    file there is a link into its `blobs`.
    """
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    return not Path(os.path.realpath(folder / name)).is_relative_to(root)


@dataclass(frozen=True, slots=True)
class Pack:
    """The folder of a pack and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Pack":
        """The pack at `path`: manifest validated, every file there, of the right size, in the pack.

        Raises SourceError when there is no pack, FormatError when one is damaged.
        """
        pack = cls.open_unchecked(path)
        for name, nbytes in pack.file_nbytes().items():
            pack._check_file(name, nbytes)
        return pack

    @classmethod
    def open_unchecked(cls, path: str | os.PathLike[str]) -> "Pack":
        """The pack at `path` by its manifest alone: its files may be missing, cut or elsewhere.

        Raises SourceError when there is no pack, FormatError when its manifest is damaged.
        """
        folder = Path(path)
        try:
            is_folder, exists = folder.is_dir(), folder.exists()
        except OSError as error:
            raise SourceError(f"{folder}: {_reason(error)}") from error
        if not is_folder:
            what = "not a folder" if exists else "no such folder"
            raise SourceError(f"{folder}: {what}; a pack is made by moepack convert")
        if not is_pack(folder):
            _check_manifest(folder / MANIFEST_NAME)
            hint = "not a pack, or an unfinished one"
            if (folder / SHARED_NAME).exists():
                hint = "the pack is incomplete, convert again"
            elif (folder / "config.json").is_file():
                hint = "it is a checkpoint: run moepack convert on it first"
            raise SourceError(f"{folder}: no {MANIFEST_NAME}; {hint}")
        return cls(folder, _read_manifest(folder))

    def file_nbytes(self) -> dict[str, int]:
        """The size that each file of the pack must have, by name, weights first."""
        manifest = self.manifest
        return (
            {SHARED_NAME: manifest.shared_nbytes}
            | {module.file: module.stride * module.n_experts for module in manifest.modules}
            | {file.name: file.nbytes for file in manifest.files}
        )

    @property
    def shared_file(self) -> Path:
        """The path of the shared weights."""
        return self.path / SHARED_NAME

    def expert_file(self, module: ExpertModule) -> Path:
        """The path of one module's records."""
        return self.path / module.file

    def _check_file(self, name: str, nbytes: int) -> None:
        path = self.path / name
        try:
            status = path.stat()
        except OSError as error:
            raise FormatError(
                f"{path}: {_reason(error)}; the pack is incomplete, convert again, or "
                "moepack repair it"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path}: not a regular file")
        if status.st_size != nbytes:
            raise FormatError(
                f"{path}: {status.st_size:,} bytes, the manifest says {nbytes:,}; "
                "the file is damaged, convert again, or moepack repair it"
            )
        self.check_link(name)

    def check_link(self, name: str) -> None:
        """Raise FormatError where a file, there or not, is reached by a link out of the pack."""
        if link_leaves(self.path, name):
            path = self.path / name
            raise FormatError(f"{path}: a link that leaves the pack; copy the file in its place")


def _check_manifest(path: Path) -> None:
    """Raise FormatError where something that is no file is in the manifest's place."""
    if not os.path.lexists(path):
        return
    try:
        path.stat()
    except OSError as error:
        raise FormatError(f"{path}: {_reason(error)}") from error
    raise FormatError(f"{path}: not a regular file")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_MANIFEST_NBYTES:
            raise FormatError(
                f"{path}: {nbytes:,} bytes, a manifest has at most {MAX_MANIFEST_NBYTES:,}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {_reason(error)}") from error
    try:
        return decode(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
