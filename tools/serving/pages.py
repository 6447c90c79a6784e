"""The files of the live page: no build step, nothing from elsewhere."""

from importlib.resources import files

__all__ = ["PAGE_HEADERS", "page_files"]

KINDS = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "chat.js": "text/javascript",
    "charts.js": "text/javascript",
    "heat.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """(content, media type) by path of the URL."""
    folder = files("moepack.tools.serving") / "page"
    return {
        "/" if name == "index.html" else f"/{name}": ((folder / name).read_bytes(), kind)
        for name, kind in KINDS.items()
    }
