"""Which package may import which, read from the source: formats <- packer, runtime <- tools."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("formats", "packer", "runtime", "tools")

FORBIDDEN = [
    ("formats", "moepack.packer"),
    ("formats", "moepack.runtime"),
    ("formats", "moepack.tools"),
    ("formats", "mlx"),
    ("formats", "mlx_lm"),
    ("packer", "moepack.runtime"),
    ("packer", "moepack.tools"),
    ("runtime", "moepack.packer"),
    ("runtime", "moepack.tools"),
]


def imports_of(text: str, package: str) -> Iterator[str]:
    """Dotted names that a module of `moepack.<package>` imports, anywhere in it.

    `from a import b` gives `a.b`: whether b is a module cannot be seen from here.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ["moepack", package][: 3 - node.level] if node.level else []
            stem = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield ast.unparse(node.args[0]).strip("'\"")


def is_within(name: str, module: str) -> bool:
    """Whether a dotted name is a module or something in it."""
    return name == module or name.startswith(f"{module}.")


def package_imports(package: str) -> dict[str, set[str]]:
    """What each file of a package imports."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {
        str(file.relative_to(ROOT)): set(imports_of(file.read_text(encoding="utf-8"), package))
        for file in files
    }


@pytest.mark.parametrize(("package", "module"), FORBIDDEN)
def test_a_package_does_not_import_what_is_above_or_beside_it(package: str, module: str) -> None:
    found = [
        (file, name)
        for file, names in package_imports(package).items()
        for name in names
        if is_within(name, module)
    ]
    assert found == []


@pytest.mark.parametrize("package", ["packer", "runtime", "tools"])
def test_a_package_builds_on_formats(package: str) -> None:
    names = set().union(*package_imports(package).values())
    assert any(is_within(name, "moepack.formats") for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_by_its_full_name_only(package: str) -> None:
    found = [
        (file, name)
        for file, names in package_imports(package).items()
        for name in names
        if name.split(".")[0] in {*PACKAGES, "tests"}
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import moepack.packer",
        "import moepack.packer.convert as c",
        "from moepack import packer",
        "from moepack.packer import convert",
        "from moepack.packer.convert import convert",
        "from .. import packer",
        "from ..packer import convert",
        "def f():\n    from moepack.packer import convert",
        "if TYPE_CHECKING:\n    import moepack.packer",
        "importlib.import_module('moepack.packer.convert')",
    ],
)
def test_every_form_of_import_is_seen(text: str) -> None:
    assert any(is_within(name, "moepack.packer") for name in imports_of(text, "formats"))


def test_a_name_that_only_begins_alike_is_another_module() -> None:
    assert not is_within("mlx_lm.utils", "mlx")
    assert not is_within("moepack.packer_tools", "moepack.packer")
