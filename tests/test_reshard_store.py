"""Shardy's answers kept on disk between runs."""

from pathlib import Path

import numpy as np
import pytest

from shardwright.planner import reshard_patterns
from shardwright.planner.reshard_patterns import Changes, changes
from shardwright.planner.reshard_store import load_answers
from shardwright.planner.strategies import IntArray

SIZES = (2, 2, 4)
SHAPE = (16, 6)
"""A dimension that holds all axes, and one that some do not divide."""
CODES = np.arange(27)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    changes.cache_clear()
    return tmp_path


def told(made: Changes) -> list[tuple[object, ...]]:
    """The collectives of every change of a tensor."""
    numbers: IntArray = made.numbers(SHAPE, CODES, CODES).ravel()
    steps = [*made.steps, None]
    return [tuple(steps[i] for i in row if i >= 0) for row in made.step_rows()[numbers].tolist()]


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(sizes: tuple[int, ...], patterns: object) -> None:
        pytest.fail(f"Shardy was asked again for axes {sizes}")

    monkeypatch.setattr(reshard_patterns, "ask_shardy", asked)


def test_a_later_run_reads_what_an_earlier_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    first = told(Changes(SIZES))
    changes.cache_clear()
    refuse(monkeypatch)
    assert told(Changes(SIZES)) == first


def test_what_a_later_run_asks_besides_is_added() -> None:
    Changes(SIZES).numbers(SHAPE, CODES[:14], CODES[:14])
    few = load_answers(SIZES)
    first = told(Changes(SIZES))
    more = load_answers(SIZES)
    assert few is not None and more is not None
    assert len(few.patterns) < len(more.patterns) == len(np.unique(more.patterns, axis=0))
    changes.cache_clear()
    assert told(Changes(SIZES)) == first


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive"])
def test_a_file_that_cannot_be_read_is_asked_again(own_folder: Path, content: bytes) -> None:
    first = told(Changes(SIZES))
    for file in own_folder.rglob("*.npz"):
        file.write_bytes(content)
    changes.cache_clear()
    assert told(Changes(SIZES)) == first
    assert load_answers(SIZES) is not None


def test_without_a_place_to_keep_them_answers_are_asked_for(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = told(Changes(SIZES))
    (own_folder / "file").touch()
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(own_folder / "file"))
    changes.cache_clear()
    assert told(Changes(SIZES)) == first
