"""The largest batch within a latency, against steps whose time is a formula."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardwright as sw
from shardwright.cli import main
from shardwright.planner.latency import largest_batch


def planner(seconds: Any, most: int = 10**9) -> Any:
    """Plans whose step takes `seconds(batch)`, and which do not fit beyond `most`."""

    def plan_at(batch: int) -> Any:
        if batch > most:
            raise sw.DoesNotFitError("too large", where="memory", do="less")
        return SimpleNamespace(estimate=SimpleNamespace(step_time_s=seconds(batch)), batch=batch)

    return plan_at


@pytest.mark.parametrize("first", [1, 32, 4096])
def test_the_batch_is_within_an_eighth_of_the_largest_that_the_limit_allows(first: int) -> None:
    """A step of 10 ms and 0.1 ms a sequence: 30 ms allow 200."""
    found = largest_batch(planner(lambda b: 0.01 + 1e-4 * b), 0.0301, first=first)
    assert 200 * 8 / 9 <= found.batch <= 200
    assert found.plan.batch == found.batch  # type: ignore[attr-defined]
    batches = [trial.batch for trial in found.trials]
    assert batches == sorted(set(batches)) and len(batches) <= 12


def test_memory_bounds_the_batch_too() -> None:
    found = largest_batch(planner(lambda b: 0.01 + 1e-4 * b, most=100), 1.0, first=16)
    assert 88 <= found.batch <= 100
    assert [trial for trial in found.trials if trial.step_time_s is None]


def test_of_batches_within_the_limit_the_one_with_most_sequences_a_second_wins() -> None:
    """Here more than 64 take four times as long: 128 are allowed, and slower a sequence."""
    steps = planner(lambda b: 0.01 if b <= 64 else 0.04 if b <= 128 else 1.0)
    assert largest_batch(steps, 0.05, first=64).batch == 64


def test_a_limit_that_one_sequence_breaks_is_told() -> None:
    with pytest.raises(sw.InputError, match=r"one sequence takes 20 ms, and 5 ms are allowed"):
        largest_batch(planner(lambda b: 0.02), 0.005)
    with pytest.raises(sw.DoesNotFitError):
        largest_batch(planner(lambda b: 0.02, most=0), 0.005)
    with pytest.raises(sw.InputError, match="limit above 0"):
        largest_batch(planner(lambda b: 0.02), 0.0)


def test_the_command_line_finds_the_batch_of_a_decode_step(tmp_path: Path, capsys: Any) -> None:
    command = [
        "plan", "llama3-8b", "--step", "decode", "--context", "128", "--layers", "1",
        "--batch", "8", "--set", "vocab=1024", "--mesh", "x=4", "-t", "v5e:2x2",
        "--latency-limit", "1ms",
        "--time-limit", "1", "--json", "--quiet",
    ]  # fmt: skip
    assert main([*command, "-o", str(tmp_path / "plan.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["step_time_s"] <= 1e-3
    assert found["program"]["origin"]["options"]["batch"] > 8
    assert main([*command[:3], "train", *command[4:8], *command[8:]]) == 2
