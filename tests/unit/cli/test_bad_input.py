"""Whatever a user gets wrong: one line that names it and the remedy, exit code 2, nothing left behind."""

import shutil

import pytest

ROWS = "name,time,application,num_replicas,batch_size\n"
GOOD = "a,0,tiny,1,8\n"

BAD_WORKLOADS = {
    "missing column": (
        "name,time,application,num_replicas\na,0,tiny,1\n",
        ["line 1", "'batch_size'", "add it"],
    ),
    "empty file": ("", ["line 1", "'name'", "add it"]),
    "no jobs": (ROWS, ["no jobs", "at least one line"]),
    "missing value": (ROWS + GOOD + "b,5,tiny,1,\n", ["line 3", "'batch_size'", "is missing"]),
    "short line": (ROWS + "a,0,tiny\n", ["line 2", "'num_replicas'", "is missing"]),
    "word for a number": (ROWS + "a,soon,tiny,1,8\n", ["line 2", "'time'", "'soon'", "finite number"]),
    "negative time": (ROWS + "a,-1,tiny,1,8\n", ["line 2", "'time'", "'-1'", "0 or more"]),
    "not a number": (ROWS + "a,nan,tiny,1,8\n", ["line 2", "'time'", "'nan'", "finite"]),
    "infinite": (ROWS + "a,inf,tiny,1,8\n", ["line 2", "'time'", "'inf'", "finite"]),
    "no GPUs": (ROWS + "a,0,tiny,0,8\n", ["line 2", "'num_replicas'", "'0'", "1 or more"]),
    "half a GPU": (ROWS + "a,0,tiny,1.5,8\n", ["line 2", "'num_replicas'", "'1.5'", "whole number"]),
    "negative batch": (ROWS + "a,0,tiny,1,-8\n", ["line 2", "'batch_size'", "'-8'", "1 or more"]),
    "batch too large": (ROWS + "a,0,tiny,1,64\n", ["line 2", "'batch_size'", "'64'", "8 to 32"]),
    "GPUs without samples": (ROWS + "a,0,tiny,4,8\n", ["line 2", "'num_replicas'", "'4'", "at most 2"]),
    "more GPUs than there are": (ROWS + "a,0,tiny,8,32\n", ["line 2", "'num_replicas'", "'8'", "--nodes"]),
    "unknown application": (ROWS + "a,0,tinny,1,8\n", ["line 2", "'application'", "'tinny'", "known: tiny"]),
    "name used twice": (ROWS + GOOD + GOOD, ["line 3", "'name'", "'a'", "line 2"]),
    "not text": (b"\xff\xfe\x00\x01", ["UTF-8"]),
}


def placements(text):
    def change(folder):
        (folder / "tiny" / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n" + text)

    return change


def applications(value):
    return lambda folder: (folder / "applications.json").write_text(value)


def without(name):
    return lambda folder: (folder / "tiny" / name).unlink()


def first_epoch(values):
    return lambda folder: (folder / "tiny" / "validation-8.csv").write_text(
        f"progress,iteration,grad_sqr,grad_var\n{values}\n1200,1200,1,8\n1800,1800,1,12\n"
    )


BAD_PROFILES = {
    "no folder": (shutil.rmtree, ["no such profiles folder"]),
    "empty folder": (lambda folder: shutil.rmtree(folder / "tiny"), ["no application", "placements.csv"]),
    "no placements": (placements(""), ["placements.csv", "no rows", "at least one"]),
    "odd placement": (placements("1-1,4,0.1,0\n"), ["line 2", "'placement'", "'1-1'", "one digit"]),
    "no time at all": (placements("1,4,0,0\n"), ["line 2", "'step_time'", "'0'", "above 0"]),
    "negative time": (placements("1,4,0.1,-1\n"), ["line 2", "'sync_time'", "'-1'", "0 or more"]),
    "infinite time": (placements("1,4,inf,0\n"), ["line 2", "'step_time'", "'inf'", "finite"]),
    "no runs": (
        lambda folder: [path.unlink() for path in folder.glob("*/validation-*")],
        ["validation-B.csv"],
    ),
    "negative noise": (
        first_epoch("600,600,1,-4"),
        ["validation-8.csv, line 2", "'grad_var'", "'-4'", "0 or more"],
    ),
    "no progress": (first_epoch("0,600,1,4"), ["validation-8.csv, line 2", "'progress'", "'0'", "above 0"]),
    "broken JSON": (applications("{"), ["applications.json", "cannot be read as JSON"]),
    "unknown setting": (
        applications('{"tiny": {"initiall": 8}}'),
        ["applications.json", "tiny", "initiall", "did you mean 'initial'"],
    ),
    "impossible fixed batch": (
        applications('{"tiny": {"fixed": {"num_gpus": 1, "batch_size": 4}}}'),
        ["applications.json", "'tiny'", "'fixed'", "batch_size 4 on 1 GPUs", "8 to 32"],
    ),
    "setting for nobody": (applications('{"tinny": {}}'), ["tinny", "did you mean 'tiny'"]),
}

BAD_OPTIONS = {
    "unknown policy": (["--policies", "fifo,tiresia"], ["'tiresia'", "did you mean 'tiresias'"]),
    "policy twice": (["--policies", "fifo,fifo"], ["'fifo'", "twice", "leave one out"]),
    "no policy": (["--policies", ","], ["no policy", "choose from"]),
    "no nodes": (["--nodes", "0"], ["--nodes", "'0'", "1 or more"]),
    "nodes in words": (["--nodes", "two"], ["--nodes", "'two'", "whole number"]),
    "no GPUs": (["--gpus-per-node", "0"], ["--gpus-per-node", "'0'", "1 or more"]),
    "unknown trigger": (["--trigger", "round"], ["--trigger", "'round'", "did you mean 'rounds'"]),
    "no interval": (["--interval", "0"], ["--interval", "'0'", "above 0"]),
    "infinite interval": (["--interval", "inf"], ["--interval", "'inf'", "finite"]),
    "tiny interval": (["--interval", "1e-9"], ["interval is 1e-09", "give 1 to 86,400 seconds"]),
    "endless interval": (["--interval", "1e300"], ["interval is 1e+300", "give 1 to 86,400 seconds"]),
    "endless resize": (["--resize-seconds", "1e300"], ["resize-seconds is 1e+300", "give 0 to 86,400 seconds"]),
    "too many nodes": (["--nodes", "99999999999"], ["99999999999 x 2", "at most 1,000,000 GPUs"]),
    "huge exponent": (["--fairness", "-400"], ["fairness is -400", "from -50 to 50"]),
    "negative resize": (["--resize-seconds", "-1"], ["--resize-seconds", "'-1'", "0 or more"]),
    "no exponent": (["--fairness", "nan"], ["--fairness", "'nan'", "finite"]),
    "full interference": (["--interference", "1"], ["--interference", "'1'", "below 1"]),
    "negative interference": (["--interference", "-0.5"], ["--interference", "'-0.5'", "from 0"]),
    "no workers": (["--workers", "0"], ["--workers", "'0'", "1 or more"]),
    "no GPUs per job": (["--max-gpus-per-job", "0"], ["--max-gpus-per-job", "'0'", "1 or more"]),
    "negative seed": (["--seed", "-1"], ["--seed", "'-1'", "0 or more"]),
    "unknown option": (["--node", "2"], ["--node"]),
    "job of no workload": (
        ["--output", "OUT", "--job", "frist"],
        ["--job", "'frist'", "did you mean 'first'"],
    ),
    "job but no plots": (["--job", "first"], ["--job", "'first'", "--output"]),
    "output is a file": (["--output", "WORKLOAD"], ["--output", "is a file", "give a folder"]),
    "JSON is a folder": (["--output", "FOLDER.json"], ["--output", "is a folder", "give a file"]),
    "JSON below a file": (["--output", "WORKLOAD/r.json"], ["--output", "cannot be written", "another place"]),
}


def assert_refused(result, fragments, tmp_path, before):
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [fragment for fragment in fragments if fragment not in result.stderr] == [], result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("content", "fragments"), BAD_WORKLOADS.values(), ids=BAD_WORKLOADS)
def test_workload(simulate, workload, tmp_path, profiles, content, fragments):
    workload.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    result = simulate("--output", tmp_path / "out")
    assert_refused(result, [str(workload), *fragments], tmp_path, before)


@pytest.mark.parametrize(("change", "fragments"), BAD_PROFILES.values(), ids=BAD_PROFILES)
def test_profiles(simulate, tmp_path, profiles, change, fragments):
    change(profiles)
    before = sorted(tmp_path.rglob("*"))
    result = simulate("--output", tmp_path / "out")
    assert_refused(result, fragments, tmp_path, before)


@pytest.mark.parametrize(("words", "fragments"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options(simulate, tmp_path, profiles, workload, words, fragments):
    (tmp_path / "folder.json").mkdir()
    places = {"OUT": tmp_path / "out", "PROFILES": profiles, "WORKLOAD": workload, "FOLDER": tmp_path / "folder"}
    for word, place in places.items():
        words = [given.replace(word, str(place)) for given in words]
    before = sorted(tmp_path.rglob("*"))
    assert_refused(simulate(*words), fragments, tmp_path, before)


def test_workload_that_is_not_there(run, tmp_path):
    assert_refused(run("simulate", tmp_path / "no.csv"), ["no.csv", "no such file", "check the path"], tmp_path, [])


def test_workload_that_is_a_folder(run, tmp_path):
    assert_refused(run("simulate", tmp_path), [str(tmp_path), "is a folder", "give a CSV file"], tmp_path, [])


def test_two_workloads_of_one_name(simulate, workload, tmp_path):
    other = tmp_path / "elsewhere" / "small.csv"
    other.parent.mkdir()
    other.write_text(workload.read_text())
    before = sorted(tmp_path.rglob("*"))
    assert_refused(simulate(other), [str(workload), str(other), "rename one"], tmp_path, before)


def test_application_that_is_not_built_in(run, workload, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    fragments = [f"{workload}, line 2", "'application'", "'tiny'", "--profiles"]
    assert_refused(run("simulate", workload), fragments, tmp_path, before)


def test_built_in_workload_on_too_small_a_cluster(run, tmp_path):
    result = run("simulate", "--nodes", 1, "--gpus-per-node", 1)
    assert_refused(result, ["'num_replicas'", "the cluster has 1 GPUs", "--nodes"], tmp_path, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_placement_that_no_measurement_surrounds(simulate, profiles, tmp_path, workers):
    table = profiles / "tiny" / "placements.csv"
    rows = [row for row in table.read_text().splitlines() if not row.startswith(("12", "22"))]
    table.write_text("\n".join(rows) + "\n")
    (profiles / "tiny" / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,3,4,0.2,0.06\n2,3,16,0.3,0.06\n"
    )
    before = sorted(tmp_path.rglob("*"))
    words = ["--policies", "fifo,las", "--workers", workers]
    result = simulate("--output", tmp_path / "out", *words)
    assert_refused(result, [str(profiles / "tiny"), "2-2", "local batch 8", "measure it"], tmp_path, before)


def test_more_nodes_than_were_measured(simulate, profiles, workload, tmp_path):
    table = profiles / "tiny" / "placements.csv"
    rows = [row for row in table.read_text().splitlines() if row.startswith(("placement", "1,", "2,"))]
    table.write_text("\n".join(rows) + "\n")
    before = sorted(tmp_path.rglob("*"))
    fragments = [f"{workload}, line 5", "'num_replicas'", "'4'", "needs 2 nodes", "ask for fewer"]
    assert_refused(simulate(), fragments, tmp_path, before)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--load", "0"], ["--load", "'0'", "above 0"]),
        (["--hours", "nan"], ["--hours", "'nan'", "finite"]),
        (["--jobs", "0"], ["--jobs", "'0'", "1 or more"]),
        (["--trace", "no.csv"], ["no.csv", "no such file"]),
        (["--profiles", "nowhere"], ["nowhere", "no such profiles folder"]),
        (["--jobs", "3", "--output", "."], ["--output", "is a folder"]),
    ],
)
def test_workload_generate(run, tmp_path, monkeypatch, words, fragments):
    monkeypatch.chdir(tmp_path)
    assert_refused(run("workload", "generate", *words), fragments, tmp_path, [])
