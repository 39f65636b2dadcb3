"""Files of the store are whole or absent, in a folder and in an object store."""

from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardwright.api.store.files import Files
from shardwright.errors import InputError


@pytest.fixture(params=["folder", "objects"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """fsspec's store in memory has the interface of gs:// and s3://."""
    if request.param == "folder":
        yield Files((tmp_path / "files").as_uri())
        return
    yield Files("memory://bucket/files")
    fsspec.filesystem("memory").store.clear()


def test_a_file_is_what_was_written_last(files: Files) -> None:
    files.write("plans/a/plan.json", b"one")
    files.write("plans/a/plan.json", b"two")
    assert files.read("plans/a/plan.json") == b"two"
    assert files.size("plans/a/plan.json") == 3
    with files.open("plans/a/plan.json") as file:
        assert file.read(2) == b"tw"


def test_a_file_that_is_put_is_moved(files: Files, tmp_path: Path) -> None:
    source = tmp_path / "upload"
    source.write_bytes(b"program")
    files.put(source, "programs/ab/abcd")
    assert files.read("programs/ab/abcd") == b"program"
    assert not source.exists()


def test_a_file_that_is_not_there_is_told_as_such(files: Files) -> None:
    assert not files.exists("plans/none")
    with pytest.raises(FileNotFoundError):
        files.read("plans/none")


def test_folders_are_listed_and_deleted(files: Files) -> None:
    for name in ("one", "two"):
        files.write(f"plans/p/{name}/plan.json", b"x")
    assert sorted(files.folders("plans/p")) == ["one", "two"]
    files.delete_tree("plans/p/one")
    files.delete_tree("plans/p/none")
    assert files.folders("plans/p") == ["two"]
    assert files.folders("plans/q") == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "."])
def test_a_path_never_leads_out_of_the_store(files: Files, path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        files.read(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path.as_uri())
    files.write("plans/plan.json", b"old")

    def fail(*args: object) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        files.write("plans/plan.json", b"new")
    monkeypatch.undo()
    assert files.read("plans/plan.json") == b"old"
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["plan.json"]


def test_where_a_local_file_is_is_known_and_where_an_object_is_is_not(tmp_path: Path) -> None:
    local, objects = Files(tmp_path.as_uri()), Files("memory://bucket")
    assert local.local_path("a/b") == tmp_path / "a/b"
    assert objects.local_path("a/b") is None


@pytest.mark.parametrize("url", ["nosuch://bucket", "file:///proc/nothing/here"])
def test_a_place_that_cannot_be_used_is_told_by_its_setting(url: str) -> None:
    with pytest.raises(InputError, match="SHARDWRIGHT_FILES_URL"):
        Files(url)
