"""Traces: what is recorded comes back, public ones are read, and strangers' files are refused."""

import io
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moepack.formats.errors import SourceError
from moepack.runtime import trace as trace_module
from moepack.runtime.trace import Call, TraceRecorder, load_trace


def recorder() -> TraceRecorder:
    """Two layers, of 4 and 6 experts, top-2: a chunk of three tokens, then two of one."""
    made = TraceRecorder()
    first, second = made.layer(0), made.layer(1)
    first([0, 1, 3], [3, 2, 1], 3, False)
    second([2, 5], [3, 3], 3, False)
    for experts in ([3, 0], [1, 2]):
        first(experts, [1, 1], 1, True)
        second([5, 4], [1, 1], 1, True)
    return made


def public(**changes: Any) -> dict[str, Any]:
    """A trace as others publish it: two layers of four experts, a prompt of two tokens."""
    arrays = {
        "step_layer_expert": np.array(
            [[s, layer, e] for s in range(4) for layer in range(2) for e in (s, (s + 1) % 4)],
            np.int32,
        ),
        "n_layers": 2,
        "n_experts": 4,
        "top_k": 2,
        "first_decode_step": 2,
        "source": "someone/something, Apache-2.0",
    }
    return {k: v for k, v in {**arrays, **changes}.items() if v is not None}


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    """Every call of every layer, in order."""
    file = tmp_path / "t.npz"
    assert recorder().save(file, [4, 6], [2, 3], "a run") == 6
    trace = load_trace(file)
    assert (trace.source, trace.top_k) == ("a run", 2)
    assert (trace.n_experts, trace.slots) == ((4, 6), (2, 3))
    assert trace.layers[0] == (
        Call((0, 1, 3), (3, 2, 1), 3, False),
        Call((3, 0), (1, 1), 1, True),
        Call((1, 2), (1, 1), 1, True),
    )
    assert trace.layers[1][0] == Call((2, 5), (3, 3), 3, False)
    assert list(tmp_path.iterdir()) == [file]


def test_a_saved_trace_has_the_public_form(tmp_path: Path) -> None:
    """Others need to know nothing of moepack to read it."""
    recorder().save(tmp_path / "t.npz", [4, 6], [2, 3], "a run")
    with np.load(tmp_path / "t.npz", allow_pickle=False) as arrays:
        rows = arrays["step_layer_expert"]
        assert rows.dtype == np.int32
        assert rows[:6].tolist() == [
            [0, 0, 0],
            [0, 0, 1],
            [0, 0, 3],
            [0, 1, 2],
            [0, 1, 5],
            [1, 0, 3],
        ]
        names = ("n_layers", "n_experts", "top_k", "first_decode_step", "source")
        assert [arrays[name].item() for name in names] == [2, 6, 2, 1, "a run"]


def test_without_calls_there_is_no_file(tmp_path: Path) -> None:
    assert TraceRecorder().save(tmp_path / "t.npz", [4], [2], "a run") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_nothing_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.npz"
    recorder().save(file, [4, 6], [2, 3], "old")

    def full_disk(path: Path, **arrays: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="No space"):
        recorder().save(file, [4, 6], [2, 3], "new")
    assert list(tmp_path.iterdir()) == [file]
    assert load_trace(file).source == "old"


def test_a_public_trace_has_uses_of_one_and_one_token_a_step(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **public())
    trace = load_trace(tmp_path / "t.npz")
    assert trace.slots is None
    assert trace.n_experts == (4, 4)
    assert trace.layers[1] == tuple(
        Call((s, (s + 1) % 4), (1, 1), 1, is_decode=s >= 2) for s in range(4)
    )


def test_a_public_chunk_has_the_tokens_that_its_rows_need(tmp_path: Path) -> None:
    """Rows that name an expert twice are uses of one expert; the order of steps does not matter."""
    rows = np.array([[1, 0, 1], [0, 0, 2], [0, 0, 0], [0, 0, 2]], np.int64)
    np.savez(tmp_path / "t.npz", **public(step_layer_expert=rows, first_decode_step=1))
    trace = load_trace(tmp_path / "t.npz")
    assert trace.layers == ((Call((2, 0), (2, 1), 2, False), Call((1,), (1,), 1, True)), ())


ROWS = public()["step_layer_expert"]
ONES = np.ones(len(ROWS), np.int32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_layer_expert": None}, "no step_layer_expert"),
        ({"step_layer_expert": ROWS[:0]}, "no step_layer_expert"),
        ({"step_layer_expert": ROWS[:, :2]}, "no step_layer_expert"),
        ({"step_layer_expert": ROWS.astype(np.float32)}, "type float32"),
        ({"step_layer_expert": ROWS - 1}, "steps is not within"),
        ({"step_layer_expert": np.add(ROWS, [0, 1, 0])}, "layers is not within"),
        ({"step_layer_expert": np.add(ROWS, [0, 0, 1])}, "experts is not within"),
        ({"step_layer_expert": ROWS.astype(np.uint64) + np.uint64(2**63)}, "steps is not within"),
        ({"n_layers": None}, "no n_layers"),
        ({"n_layers": 10**9}, "n_layers is not within"),
        ({"n_experts": 0}, "n_experts is not within"),
        ({"top_k": 5}, "top_k is not within"),
        ({"top_k": [1, 2]}, "top_k is not 1 whole"),
        ({"first_decode_step": None}, "no first_decode_step"),
        ({"first_decode_step": -1}, "first_decode_step is not within"),
        ({"source": 3}, "source is no text"),
        ({"source": np.array({"a": 1}, object)}, "source has type object"),
        ({"uses": ONES - 1}, "uses is not within"),
        ({"uses": ONES[1:]}, "uses is not 16"),
        ({"tokens": ONES * 0}, "tokens is not within"),
        ({"tokens": np.arange(1, 17)}, "differ within a call"),
        ({"is_decode": ONES}, "is_decode is not 16"),
        ({"is_decode": np.arange(16) % 2 == 0}, "differ within a call"),
        ({"experts_per_layer": [4, 3]}, "an expert that its layer does not have"),
        ({"experts_per_layer": [4, 4, 4]}, "experts_per_layer is not 2"),
        ({"slots_per_layer": [0, 1]}, "slots_per_layer is not within"),
    ],
)
def test_a_trace_that_says_what_cannot_be_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "t.npz", **public(**changes))
    with pytest.raises(SourceError, match=r"t\.npz: not a routing trace") as error:
        load_trace(tmp_path / "t.npz")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def npy(header: bytes, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """An npy file with this header."""
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + body


HUGE = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000, 3), }\n"


@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"not an array",
        npy(HUGE, b"\0" * 12),
        npy(HUGE.replace(b"<i4", b"|O")),
        npy(HUGE.replace(b"1000000000000", b"-1"), b"\0" * 12),
        npy(b"(" * 5000),
        npy(HUGE, version=b"\x03\x00"),
    ],
    ids=["empty", "text", "huge", "objects", "negative", "deep", "version"],
)
def test_arrays_that_are_none_are_refused(member: bytes, tmp_path: Path) -> None:
    """Before memory is taken for what they claim."""
    np.savez(tmp_path / "t.npz", **public(step_layer_expert=None))
    with zipfile.ZipFile(tmp_path / "t.npz", "a") as archive:
        archive.writestr("step_layer_expert.npy", member)
    with pytest.raises(SourceError, match="not a routing trace"):
        load_trace(tmp_path / "t.npz")


def test_a_file_of_too_many_bytes_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed ones claim more than they have."""
    np.savez(tmp_path / "t.npz", **public())
    monkeypatch.setattr(trace_module, "MAX_NBYTES", 500)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(SourceError, match="at most 500 are read"):
        load_trace(tmp_path / "t.npz")


def test_every_damage_is_a_source_error(tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed, the file is read or refused in one line."""
    file = io.BytesIO()
    np.savez_compressed(file, **public())
    whole = file.getvalue()
    path = tmp_path / "t.npz"
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        for damaged in (whole[:at], bytes(changed)):
            path.write_bytes(damaged)
            with suppress(SourceError):
                load_trace(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.npz"):
        with pytest.raises(SourceError, match="no such file"):
            load_trace(path)
