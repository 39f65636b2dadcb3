"""The requests of docs/service.md are taken by the service."""

import itertools
import re
import shlex
from pathlib import Path

from api_fixtures import PROGRAM, App

PAGE = (Path(__file__).parents[1] / "docs" / "service.md").read_text()


def requests() -> list[tuple[str, dict[str, str], str]]:
    """Path, headers and body of every curl of the page that has a body."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M):
        for command in re.findall(r"^curl .*?(?=^\w|\Z)", block, re.S | re.M):
            words = shlex.split(command.replace("\\\n", ""))
            given = dict(itertools.pairwise(words))
            body = given.get("-d") or given.get("--data-binary")
            if body is not None:
                (url,) = [word for word in words if word.startswith("http")]
                name, _, value = given["-H"].partition(": ")
                found.append((url.partition("8080")[2], {name: value}, body))
    return found


def test_every_endpoint_that_takes_a_body_has_an_example() -> None:
    posted = {path for path, _, _ in requests()}
    assert posted == set(re.findall(r"`POST (/v1/\w+)`", PAGE))


def test_every_example_is_accepted(app: App) -> None:
    program = ""
    for path, headers, body in requests():
        content = PROGRAM if body.startswith("@") else body.replace("$PROGRAM", program).encode()
        answer = app.client.post(path, headers=headers, content=content)
        assert answer.status_code in (201, 202), (path, answer.text)
        if path == "/v1/programs":
            program = answer.json()["id"]
