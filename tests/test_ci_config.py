"""Wrong configurations and locks are told by file and key."""

import pytest

from shardwright.batch.ci_config import load_config
from shardwright.batch.ci_lock import load_lock
from shardwright.errors import InputError

JOB = '[jobs.a]\ntarget = "m:f"\ntopologies = ["v5e:2x2"]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "jobs: it is not given"),
        ("[jobs.a", "not TOML"),
        ('[jobs.a]\ntarget = "m:f"\n', "jobs.a.topologies: it is not given"),
        (JOB + "tolerence = 1\n", "jobs.a.tolerence: there is no such key; did you mean tolerance"),
        (JOB + "tolerance = -1\n", "jobs.a.tolerance: "),
        (JOB + 'tolerance = "much"\n', "jobs.a.tolerance: "),
        (JOB + "memory_fraction = 1.5\n", "jobs.a.memory_fraction: "),
        (JOB + "budget = { mfu = 40 }\n", "jobs.a.budget.mfu: "),
        (JOB + "budget = { fmu = 0.4 }\n", "jobs.a.budget.fmu: .* did you mean mfu"),
        (JOB + "budget = { cost_per_step = 1 }\n", "jobs.a.budget is of money: give prices"),
        (JOB + "pinned = { \"[0]\" = ['x'] }\n", "give mesh too"),
        (JOB + "[defaults]\ntopologys = 1\n", "defaults: no job has topologys"),
        ("topology = 1\n" + JOB, "topology: there is no such key"),
        ("[jobs]\n", "jobs: there is none"),
    ],
)
def test_a_wrong_configuration_is_told_by_file_and_key(tmp_path, text, words):
    path = tmp_path / "shardwright.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_configuration_says_what_to_write(tmp_path):
    with pytest.raises(InputError, match=r"jobs\.NAME"):
        load_config(tmp_path / "shardwright.toml")


def test_defaults_are_for_jobs_that_do_not_say_otherwise(tmp_path):
    path = tmp_path / "shardwright.toml"
    path.write_text(
        JOB + "seed = 3\n" + '[jobs.b]\ntarget = "m:f"\n[defaults]\nseed = 5\n'
        'topologies = ["v6e:2x2"]\n'
    )
    jobs = load_config(path).jobs
    assert (jobs["a"].seed, jobs["b"].seed) == (3, 5)
    assert jobs["b"].topologies == ("v6e:2x2",)
    assert jobs["a"].topologies == ("v5e:2x2",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "has version None"),
        ('{"version": 99}', "has version 99"),
        ('{"version": 1, "entries": {"a@v5e:2x2": {}}}', "damaged at entries.a@v5e:2x2"),
    ],
)
def test_a_wrong_lock_is_refused(tmp_path, text, words):
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_lock(path)
    assert "ci update" in str(caught.value)


def test_there_may_be_no_lock_yet(tmp_path):
    assert load_lock(tmp_path / "lock.json") is None
