"""The job file: every key read, every mistake refused with file, line, key, value and remedy."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pollux.controller.messages.job_spec import limits_from
from pollux.core.errors import InvalidInput, PolluxError, TooLarge
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.environment import JOB_VARIABLES, TORCHRUN_VARIABLES
from pollux.wire.job import BatchSizes, CheckpointRequest, JobRequest, Resources
from pollux.wire.jobfile import (
    JOB_KEYS,
    check_paths,
    is_job_name,
    job_to_mapping,
    legal_name,
    parse_job,
    read_job_file,
)

EVERY_KEY = """\
name: resnet18-cifar10
run: python train.py --epochs 90          # or a list
gpus: 1..16
batch_size: {initial: 128, max: 4096, per_gpu_max: 512}
resources: {cpus: 4, memory: 16GiB, gpu_type: [h100, a100]}
workdir: sub
env: {SEED: 1}
priority: high
queue: vision
preemptible: true
after: [other-job]
time_limit: 24h
retries: 5
grace: 90s
on_resize: live
checkpoint: {dir: ./ckpt, every: 10min, keep: 2}
group: search
kind: resnet
deadline: 1900000000
"""


def write(folder: Path, text: str | bytes, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def parse(**keys: Any) -> JobRequest:
    return parse_job({"run": "true", **keys}, "/w")


def refused(**keys: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse(**keys)
    return str(caught.value)


def refused_file(folder: Path, text: str | bytes) -> str:
    path = write(folder, text)
    with pytest.raises(InvalidInput) as caught:
        read_job_file(path)
    return str(caught.value).replace(str(path), "job.yaml")


def test_every_key(tmp_path):
    folder = str(tmp_path / "sub")
    assert read_job_file(write(tmp_path, EVERY_KEY)) == JobRequest(
        name="resnet18-cifar10",
        run=("python", "train.py", "--epochs", "90"),
        min_gpus=1,
        max_gpus=16,
        batch_size=BatchSizes(128, 4096, 512),
        resources=Resources(4.0, 16 * 2.0**30, ("h100", "a100")),
        workdir=folder,
        env={"SEED": "1"},
        priority="high",
        queue="vision",
        preemptible=True,
        after=("other-job",),
        time_limit_seconds=86_400.0,
        retries=5,
        grace_seconds=90.0,
        on_resize="live",
        checkpoint=CheckpointRequest(f"{folder}/ckpt", 600.0, 2),
        group="search",
        kind="resnet",
        deadline=1.9e9,
    )
    assert [line.partition(":")[0] for line in EVERY_KEY.splitlines()] == list(JOB_KEYS)


def test_the_command_is_enough(tmp_path):
    path = write(tmp_path, "run: python train.py\n", "Vision_Run 2.yaml")
    assert read_job_file(path) == JobRequest("vision_run-2", ("python", "train.py"), workdir=str(tmp_path))


def test_a_json_file_is_a_job_file(tmp_path):
    path = write(tmp_path, json.dumps({"run": ["python", "a.py"], "gpus": "1:4"}), "a.json")
    assert read_job_file(path) == JobRequest("a", ("python", "a.py"), 1, 4, workdir=str(tmp_path))


def test_a_relative_path_is_from_where_we_are(tmp_path, monkeypatch):
    write(tmp_path, "run: 'true'\nworkdir: ../x\n")
    monkeypatch.chdir(tmp_path)
    assert read_job_file("job.yaml").workdir == str(tmp_path.parent / "x")


def test_a_home_folder_is_written_out(tmp_path):
    job = read_job_file(write(tmp_path, "run: 'true'\nworkdir: ~/a\ncheckpoint: {dir: ~/c}\n"))
    assert (job.workdir, job.checkpoint.dir) == (str(Path.home() / "a"), str(Path.home() / "c"))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("python train.py --lr 0.1", ("python", "train.py", "--lr", "0.1")),
        ("  python 'my script.py' \"a b\" ", ("python", "my script.py", "a b")),
        (["python", "train.py", "--lr", 0.1, 3, True], ("python", "train.py", "--lr", "0.1", "3", "true")),
        (["a|b", "$HOME", ""], ("a|b", "$HOME", "")),
        *(
            (text, ("sh", "-c", text))
            for text in (
                *("a | b", "a & b", "a; b", "a < b", "a > b", "echo $A", "echo `a`", "ls *.py", "ls ?", "a\nb"),
                *("(a)", "SEED=1 python a.py", "~/train.sh", "cat ~/x"),
            )
        ),
    ],
)
def test_commands(run, words):
    assert parse(run=run).run == words


@pytest.mark.parametrize(
    "run", [None, 3, True, "", "  ", "''", [], [""], [[]], [None], {}, "python 'a", "a \\", "a\0b", ["a\0"], [math.nan]]
)
def test_what_is_no_command_is_refused(run):
    assert refused(run=run).startswith(("job: run is ", "job: run[0] is "))


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("python train.py", "train"),
        ("torchrun --nproc 4 src/Fine_Tune.py", "fine_tune"),
        ("python -m my.module --x 1", "my.module"),
        ("python a.py | tee log", "a"),
        ("./Run.sh", "run"),
        (["sh", "-c"], "sh"),
        ("/", "job"),
        ("nvidia-smi", "nvidia-smi"),
        (["é"], "job"),
    ],
)
def test_a_name_that_is_not_given_is_made_of_the_command(run, name):
    assert parse(run=run).name == name


@given(st.text(max_size=100))
@example("x" * 62 + "-" + "y")
def test_a_made_name_is_legal(text):
    assert is_job_name(legal_name(text))


def test_a_file_called_job_says_nothing(tmp_path):
    assert read_job_file(write(tmp_path, "run: python train.py\n", "job.yaml")).name == "train"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "../etc"}, "name is '../etc': give 1 to 63 of a-z 0-9 . _ -"),
        ({"name": "Big Job"}, "such as big-job"),
        ({"name": "a" * 64}, "name is"),
        ({"name": "a-"}, "name is 'a-'"),
        ({"name": "a\n"}, "name is 'a\\n'"),
        ({"name": 3}, "name is 3"),
        ({"gpus": "0..4"}, "gpus is '0..4': give a number such as 4, or a range such as 1..16"),
        ({"gpus": None}, "gpus is empty: give a number such as 4, or a range such as 1..16, or leave the key out"),
        ({"gpus": True}, "gpus is true"),
        ({"batch_size": 0}, "batch_size is 0: give a whole number of samples"),
        ({"batch_size": True}, "batch_size is true"),
        ({"batch_size": {"initial": 129, "max": 128}}, "batch_size.max is 128: it is below initial, which is 129"),
        ({"batch_size": {"per_gpu_max": 0}}, "batch_size.per_gpu_max is 0: give a whole number"),
        ({"batch_size": {"intial": 1}}, "batch_size.intial is not a key here: did you mean 'initial'?"),
        ({"batch_size": {"max": 10**400}}, "batch_size.max is a number of 1329 bits"),
        ({"resources": {"cpus": -1}}, "resources.cpus is -1: give CPUs"),
        ({"resources": {"cpus": math.nan}}, "resources.cpus is nan"),
        ({"resources": {"memory": "16G"}}, "resources.memory is '16G': give bytes, or a size such as 16GiB"),
        ({"resources": {"gpu_type": ["a", "a"]}}, "resources.gpu_type[1] is 'a': it is given twice"),
        ({"resources": {"gpu_type": "../x"}}, "resources.gpu_type is '../x': give a type"),
        ({"resources": 4}, "resources is 4: give a mapping"),
        ({"memory": "1GiB"}, "memory is not a key here: write it as resources: {memory: ...}"),
        ({"workdir": ""}, "workdir is '': give a folder"),
        ({"workdir": "a\0"}, "workdir is"),
        ({"workdir": "\ud800"}, "give text that can be written as UTF-8"),
        ({"env": {"A-B": 1}}, "env: 'A-B' is not a name: give letters, digits and _"),
        ({"env": {1: 1}}, "env: 1 is not a name"),
        ({"env": {"A": [1]}}, "env.A is a list: give a string, number, true or false"),
        ({"env": {"A": None}}, "env.A is empty"),
        pytest.param({"env": {"A": "x" * 70_000}}, "give at most 65536 characters", id="long value"),
        ({"env": {"A": "\0"}}, "env.A is"),
        ({"env": ["A=1"]}, "env is a list: give a mapping"),
        ({"env": {"TORCHELASTIC_RUN_ID": 1}}, "env.TORCHELASTIC_RUN_ID is set by Pollux"),
        ({"priority": "hgih"}, "priority is 'hgih': did you mean 'high'? known: high, low, normal"),
        ({"priority": ["high"]}, "priority is a list"),
        ({"queue": "a/b"}, "queue is 'a/b'"),
        ({"preemptible": "yes"}, "preemptible is 'yes': give true or false"),
        ({"preemptible": 1}, "preemptible is 1"),
        ({"after": "a b"}, "after is 'a b': give a job's id, or a list of ids"),
        ({"after": ["x", "x"]}, "after[1] is 'x': it is given twice"),
        ({"after": ["me"], "name": "me"}, "after is a list: the job would wait for itself; take 'me' out"),
        ({"after": ["a"] * 10_001}, "after has 10001 items: give at most 10000"),
        ({"time_limit": 0}, "time_limit is 0: give 1s to 3650d"),
        ({"time_limit": None}, "time_limit is empty"),
        ({"retries": 101}, "retries is 101: give a number from 0 to 100"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": 1.5}, "retries is 1.5"),
        ({"grace": "2h"}, "grace is '2h': give 0s to 1h"),
        ({"on_resize": "nevr"}, "on_resize is 'nevr': did you mean 'never'?"),
        (
            {"on_resize": "never", "gpus": "1..4"},
            "on_resize is 'never': such a job keeps one number of GPUs, and gpus is 1..4",
        ),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0: give a number from 1"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every is 0"),
        ({"checkpoint": {"dir": 3}}, "checkpoint.dir is 3: give a folder"),
        ({"checkpoint": "./ckpt"}, "checkpoint is './ckpt': give a mapping"),
        ({"gpu": 4}, "gpu is not a key here: did you mean 'gpus'?"),
        pytest.param({"x" * 70_000: 4}, "is not a key here: known:", id="long key"),
        ({3: 4}, "3 is not a key here: known:"),
    ],
)
def test_mistakes_are_named(keys, message):
    with pytest.raises(InvalidInput) as caught:
        parse_job({"run": "true"} | keys, "/w")
    assert str(caught.value).startswith("job: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", [*JOB_VARIABLES, *TORCHRUN_VARIABLES, "POLLUX_ANYTHING"])
def test_the_launchers_variables_are_not_the_users(name):
    assert f"env.{name} is set by Pollux for each replica: take it out" in refused(env={name: "1"})


@pytest.mark.parametrize("mapping", [None, 3, "x", [], [["run", "x"]]])
def test_what_is_no_mapping_is_refused(mapping):
    with pytest.raises(InvalidInput, match=r"^body is .*give a mapping with the keys of a job file"):
        parse_job(mapping, "/w", "body")


def test_what_must_be_there():
    with pytest.raises(InvalidInput, match=r"^job: run is missing: give a command such as python train\.py"):
        parse_job({}, "/w")
    with pytest.raises(InvalidInput, match=r"^job: workdir is missing: give an absolute folder"):
        parse_job({"run": "true"})
    with pytest.raises(InvalidInput, match=r"^job: workdir is '~/x': give an absolute folder"):
        parse_job({"run": "true", "workdir": "~/x"})
    assert parse_job({"run": "true", "workdir": "/a/../b"}).workdir == "/b"
    assert parse_job({"run": "true"}, "a").workdir == os.path.abspath("a")


@pytest.mark.parametrize("key", JOB_KEYS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        object(),
        math.nan,
        math.inf,
        -1,
        pytest.param(10**5000, id="long"),
        b"x",
        [[[]]],
        {"a": {}},
        "\0",
        "\ud800",
    ],
)
def test_every_key_refuses_what_fits_nowhere(key, value):
    assert key in refused(**{key: value})


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True)
FOLDERS = WORDS.map(lambda text: os.path.normpath(f"/w/{text}"))
SECONDS = st.floats(1.0, 1e8)
SIZES = st.integers(1, 10**9)
VARIABLES = st.from_regex(r"[A-Z_]{1,8}", fullmatch=True).filter(
    lambda name: name not in TORCHRUN_VARIABLES and not name.startswith("POLLUX_")
)


@st.composite
def requests(draw: st.DrawFn) -> JobRequest:
    low, high = sorted((draw(st.integers(1, 100_000)), draw(st.integers(1, 100_000))))
    initial, largest = sorted((draw(SIZES), draw(SIZES)))
    name = draw(NAMES)
    return JobRequest(
        name=name,
        run=(draw(WORDS.filter(str.strip)), *draw(st.lists(WORDS, max_size=3))),
        min_gpus=low,
        max_gpus=high,
        batch_size=BatchSizes(
            draw(st.none() | st.just(initial)), draw(st.none() | st.just(largest)), draw(st.none() | SIZES)
        ),
        resources=Resources(
            draw(st.floats(0.0, 1e5)),
            draw(st.floats(0.0, 1e17)),
            tuple(draw(st.lists(st.sampled_from(["h100", "NVIDIA A100-SXM4", "cpu"]), unique=True))),
        ),
        workdir=draw(FOLDERS),
        env=draw(st.dictionaries(VARIABLES, WORDS, max_size=3)),
        priority=draw(st.sampled_from(["low", "normal", "high"])),
        queue=draw(NAMES),
        preemptible=draw(st.none() | st.booleans()),
        after=tuple(draw(st.lists(NAMES.filter(lambda other: other != name), unique=True, max_size=3))),
        time_limit_seconds=draw(st.none() | SECONDS),
        retries=draw(st.integers(0, 100)),
        grace_seconds=draw(st.floats(0.0, 3600.0)),
        on_resize=draw(st.sampled_from([None, "live", "restart"] + (["never"] if low == high else []))),
        checkpoint=CheckpointRequest(
            draw(st.none() | FOLDERS), draw(st.none() | SECONDS), draw(st.none() | st.integers(1, 1000))
        ),
    )


@given(requests())
def test_a_request_comes_back_from_its_mapping(request):
    mapping = job_to_mapping(request)
    assert parse_job(mapping) == request
    assert parse_job(json.loads(json.dumps(mapping))) == request


@given(request=requests())
def test_a_request_comes_back_from_a_file(tmp_path_factory, request):
    path = write(tmp_path_factory.getbasetemp(), json.dumps(job_to_mapping(request)), "round-trip.yaml")
    assert read_job_file(path) == request


def test_keys_without_a_value_are_left_out():
    assert job_to_mapping(parse(name="a")) == {
        "name": "a",
        "run": ["true"],
        "gpus": 1,
        "workdir": "/w",
        "priority": "normal",
        "queue": "default",
        "retries": 3,
        "grace": 60.0,
    }


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
INNER_KEYS = st.sampled_from(["initial", "max", "per_gpu_max", "cpus", "memory", "gpu_type", "dir", "every", "keep"])


@given(st.dictionaries(st.sampled_from(JOB_KEYS), ANYTHING | st.dictionaries(INNER_KEYS, ANYTHING)), st.booleans())
def test_random_mappings_are_taken_or_refused(mapping, with_folder):
    try:
        request = parse_job({"run": "true"} | mapping, "/w" if with_folder else None)
    except PolluxError:
        return
    assert parse_job(job_to_mapping(request)) == request


@given(text=st.text(st.sampled_from("abrun: \n-[]{}'\"|>&*!%#?,~01.\\\t\x00xU"), max_size=60) | st.binary(max_size=60))
@example(text='run: "\\UFFFFFFFF"')
@example(text="run: !!python/object:os.system x")
def test_random_files_are_taken_or_refused(tmp_path_factory, text):
    try:
        read_job_file(write(tmp_path_factory.getbasetemp(), text, "random.yaml"))
    except PolluxError:
        return


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run: x\n\ngpus: 0..4\n",
            "job.yaml line 3: gpus is '0..4': give a number such as 4, or a range such as 1..16",
        ),
        ("run: x\ngpus: 1:16\n", "job.yaml line 2: gpus is '1:16': older YAML reads that as a time: quote it"),
        ("run: x\ngpus:\n", "job.yaml line 2: gpus is empty"),
        ("run: x\nenv:\n  A: 1\n  RANK: 2\n", "job.yaml line 4: env.RANK is set by Pollux"),
        ("run: x\nafter:\n  - a\n  - B\n", "job.yaml line 4: after[1] is 'B'"),
        ("run: x\ngpu: 1\n", "job.yaml line 2: gpu is not a key here: did you mean 'gpus'?"),
        ("run: x\nrun: y\n", "job.yaml line 2: key 'run' is given twice, first in line 1: give it once"),
        ("run: x\n---\nrun: y\n", "job.yaml line 2: a second document begins: give one job in each file"),
        ("gpus: 4\n", "job.yaml: run is missing"),
        ("", "job.yaml is empty: give at least run:"),
        ("# nothing\n", "job.yaml is empty"),
        ("- a\n", "job.yaml is a list: give a mapping"),
        ("python train.py\n", "job.yaml is 'python train.py': give a mapping"),
        ("run: [x\n", "job.yaml line 2: not YAML"),
        ("run: x\n\tgpus: 4\n", "job.yaml line 2: not YAML"),
        ("run: &a x\n", "job.yaml line 1: anchors (&) and aliases (*) are not allowed"),
        ("run: x\nenv: *a\n", "job.yaml line 2: anchors (&) and aliases (*) are not allowed"),
        ("run: !!python/name:os.system x\n", "job.yaml line 1: the tag"),
        ("run: x\nenv: !foo {}\n", "job.yaml line 2: the tag '!foo' is not allowed"),
        ("run: x\n? [a]\n: 1\n", "job.yaml line 2: a list or mapping stands as a key"),
        ("%YAML 1.1\n---\nrun: x\n", "job.yaml line 2: this is read as YAML 1.2"),
        ("run: x\nname: \x07\n", "job.yaml line 2: character '\\x07' is not allowed"),
        (b"run: x\nname: \xff\n", "job.yaml line 2: byte 13 is not UTF-8: save it as UTF-8"),
        pytest.param("[" * 200_000, "job.yaml line 1: it is nested too deeply: give at most 20 levels", id="deep"),
        pytest.param("run: [" + "1," * 10_001 + "]", "job.yaml line 1: more than 10000 items", id="many items"),
        pytest.param("run: x\nretries: " + "9" * 5_000, "job.yaml line 2: retries is", id="many digits"),
        ('run: x\nname: "\\UFFFFFFFF"', "job.yaml: not YAML"),
    ],
)
def test_mistakes_in_a_file_name_file_and_line(tmp_path, text, message):
    assert refused_file(tmp_path, text).startswith(message)


def test_the_torchrun_spelling_is_taken_in_quotes(tmp_path):
    job = read_job_file(write(tmp_path, "run: x\ngpus: '1:16'\n"))
    assert (job.min_gpus, job.max_gpus) == (1, 16)


def test_values_of_the_environment_stay_as_they_were_written(tmp_path):
    text = (
        "run: [python, a.py, --lr, 1e-3]\nenv: {A: 1e-3, B: True, C: 010, D: yes, E: 'x', F: 0x10, G: 1_000, H: ''}\n"
    )
    job = read_job_file(write(tmp_path, text))
    assert job.run == ("python", "a.py", "--lr", "1e-3")
    expected = {"A": "1e-3", "B": "True", "C": "010", "D": "yes", "E": "x", "F": "0x10", "G": "1_000", "H": ""}
    assert job.env == expected
    assert parse(env={"A": 1e-3, "B": True, "C": 10}).env == {"A": "0.001", "B": "true", "C": "10"}


def test_numbers_are_those_of_yaml_1_2(tmp_path):
    job = read_job_file(write(tmp_path, "run: x\nretries: 0x10\nbatch_size: 010\ngrace: 1e3\nresources: {cpus: .5}\n"))
    assert (job.retries, job.batch_size.initial, job.grace_seconds, job.resources.cpus) == (16, 10, 1000.0, 0.5)
    assert read_job_file(write(tmp_path, "run: x\nretries: 0o17\n")).retries == 15


def test_a_long_value_in_a_file_is_refused(tmp_path):
    assert "give at most 65536 characters" in refused_file(tmp_path, "run: x\nenv:\n  A: " + "x" * 70_000)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    assert read_job_file(write(tmp_path, b"\xef\xbb\xbfrun: python a.py\n")).run == ("python", "a.py")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidInput, match="there is no such file: check the path"):
        read_job_file(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        read_job_file(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_job_file("a\0b")
    with pytest.raises(TooLarge, match="has more than 1048576 bytes"):
        read_job_file(write(tmp_path, "#" * (2**20 + 1)))


PYTHON = shlex.quote(sys.executable)


def executable(folder: Path, name: str) -> None:
    write(folder, "#!/bin/sh\n", name).chmod(0o755)


def test_a_job_that_is_all_there(tmp_path):
    executable(tmp_path, "go")
    write(tmp_path, "", "train.py")
    for run in ("./go", "sh -c true", f"{PYTHON} train.py", "echo a | cat"):
        assert check_paths(parse_job({"run": run}, str(tmp_path))) == ()
    assert check_paths(parse_job({"run": "go", "env": {"PATH": str(tmp_path)}}, str(tmp_path))) == ()


def test_python_is_always_there(tmp_path, monkeypatch):
    """Backends take it for the interpreter of Pollux, whether it is on PATH or not; and look beside that, too."""
    write(tmp_path, "", "train.py")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for command in ("python", "python3", f"python3.{sys.version_info.minor}", Path(sys.executable).name):
        assert check_paths(parse_job({"run": f"{command} train.py"}, str(tmp_path))) == ()
    (found,) = check_paths(parse_job({"run": "python2 train.py"}, str(tmp_path)))
    assert "there is no command python2 on PATH" in found


def test_gpu_types_may_be_mixed_where_that_is_said():
    job = parse_job({"run": "x", "resources": {"gpu_type": ["h100", "a100"], "mixed_types": True}}, "/")
    assert job.resources.mixed_types
    assert limits_from(job).mixed_types
    assert job_to_mapping(job)["resources"] == {"gpu_type": ["h100", "a100"], "mixed_types": True}
    assert not limits_from(parse_job({"run": "x"}, "/")).mixed_types
    with pytest.raises(InvalidInput, match=r"resources\.mixed_types is 'maybe': give true or false"):
        parse_job({"run": "x", "resources": {"mixed_types": "maybe"}}, "/")


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b/a/run", "hdfs://n:9000/x", "abfss://box@account.dfs/x"])
def test_checkpoints_may_be_in_a_store(address):
    job = parse_job({"run": "x", "checkpoint": {"dir": f"{address}/"}}, "/work")
    assert job.checkpoint.dir == address
    assert parse_job(job_to_mapping(job), "/work") == job


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("ftp://host/x", "stores are s3://"),
        ("file:" + "///disk/x", "or a folder that all nodes share"),
        ("memory://x/y", "stores are s3://"),
        ("s3://", "give a bucket and a path in it, such as s3://bucket/checkpoints/name"),
        ("s3://bucket", "give a bucket and a path"),
        ("gs://bucket/", "give a bucket and a path"),
        ("s3:///path", "give a bucket and a path"),
        ("s3://key:secret@bucket/x", "leave the key out"),
        ("abfss://key:secret@account/x", "leave the key out"),
        ("s3://bucket/../x", "leave out empty parts"),
        ("s3://bucket//x", "leave out empty parts"),
        ("s3://bucket/x?versionId=3", "leave out empty parts"),
        ("s3://bucket/x\ny", "all of them printable"),
        ("s3://bucket/" + "x" * 1000, "at most 1000 characters"),
    ],
)
def test_not_every_address_is_one_of_a_store(address, remedy):
    with pytest.raises(InvalidInput, match=r"checkpoint\.dir is .*: ") as refused:
        parse_job({"run": "x", "checkpoint": {"dir": address}}, "/work")
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("no-such-command-at-all", "there is no command no-such-command-at-all on PATH"),
        ("./missing", "there is no command ./missing on "),
        ("./inner", "./inner is a folder, not a command: name a program in it"),
        ("only-here", "only-here is in .*, which is not searched: write ./only-here"),
        ("./plain", "./plain may not be executed: chmod"),
        ("train.py", "train.py is a script, not a command: write python train.py"),
        (f"{PYTHON} gone.py", "there is no gone.py in .*: check the path, or set workdir"),
    ],
)
def test_commands_that_are_not_there(tmp_path, run, message):
    executable(tmp_path, "only-here")
    (tmp_path / "inner").mkdir()
    write(tmp_path, "", "plain")
    write(tmp_path, "", "train.py")
    (found,) = check_paths(parse_job({"run": run, "name": "a"}, str(tmp_path)))
    assert found.startswith("a: run: ")
    assert re.search(message, found)


def test_a_folder_that_is_not_there(tmp_path):
    (missing,) = check_paths(parse_job({"run": "true", "workdir": "gone"}, str(tmp_path)))
    assert missing.endswith("gone does not exist: create it, or name another")
    write(tmp_path, "", "file")
    (other,) = check_paths(parse_job({"run": "true", "workdir": "file"}, str(tmp_path)))
    assert other.endswith("file is not a folder: create it, or name another")


def test_importing_wire_loads_nothing_heavy():
    code = (
        # What the machine's own start-up files have imported is none of ours.
        "import sys\nbefore = {*sys.modules}\n"
        "from pollux.wire.jobfile import parse_job\nparse_job({'run': 'true'}, '/')\n"
        "print(*sorted({name.partition('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert {name for name in result.stdout.split() if not name.startswith("_")} == {"pollux"}
