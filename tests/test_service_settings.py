"""Settings of the service come from SHARDWRIGHT_ variables; a wrong one is told in one line."""

import os
from pathlib import Path

import pytest

from shardwright.api.settings import Settings, load_settings
from shardwright.api.store import Store
from shardwright.errors import InputError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SHARDWRIGHT_", "XDG_")):
            monkeypatch.delenv(name)


def test_by_default_everything_is_under_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr("sys.platform", "linux")
    settings = load_settings()
    assert settings.data_dir == Path("/home/ann/.local/share/shardwright")
    assert settings.resolved_database_url == f"sqlite:///{settings.data_dir}/shardwright.db"
    assert settings.resolved_files_url == f"file://{settings.data_dir}/files"
    assert settings.host == "127.0.0.1"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_settings().data_dir == Path("/data/shardwright")
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert load_settings().data_dir == Path("/home/ann/.local/share/shardwright")


def test_variables_set_fields_and_empty_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_WORKERS", "3")
    monkeypatch.setenv("SHARDWRIGHT_ENGINE", "RAY")
    monkeypatch.setenv("SHARDWRIGHT_DATABASE_URL", "postgresql+psycopg://host/name")
    monkeypatch.setenv("SHARDWRIGHT_PORT", "")
    settings = load_settings()
    assert (settings.workers, settings.engine, settings.port) == (3, "ray", 8080)
    assert settings.resolved_database_url == "postgresql+psycopg://host/name"


def test_a_relative_folder_is_absolute_for_workers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(data_dir="data").data_dir == tmp_path / "data"


def test_folders_may_have_spaces(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "Application Support")
    store = Store.open(settings)
    store.files.write("a/b", b"x")
    store.close()
    assert (settings.data_dir / "files/a/b").read_bytes() == b"x"
    assert (settings.data_dir / "shardwright.db").is_file()


@pytest.mark.parametrize("name", ["uploads", "scratch", "files"])
def test_a_folder_that_cannot_be_written_is_told_before_the_start(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"{tmp_path}/{name}"):
        Store.open(load_settings(data_dir=tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKERS", "0"),
        ("WORKERS", "many"),
        ("PORT", "65536"),
        ("ENGINE", "slurm"),
        ("QUEUE_LIMIT", "-1"),
        ("JOB_MEMORY_BYTES", "1000"),
        ("JOB_SECONDS", "0"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_told_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"SHARDWRIGHT_{name}", value)
    with pytest.raises(InputError, match=f"SHARDWRIGHT_{name}: '?{value}'? is wrong") as refused:
        load_settings()
    assert "\n" not in str(refused.value)


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in Settings.model_fields.values())
