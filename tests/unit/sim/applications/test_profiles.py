import json

import pytest

from pollux.core import InvalidInput, UnknownName
from pollux.sim.applications.application import FixedConfiguration
from pollux.sim.applications.profiles import load_profiles

PLACEMENTS = """placement,local_bsz,step_time,sync_time
1,10,1.0,0.0
1,20,2.0,0.0
4,10,1.5,0.5
4,20,2.5,0.5
12,10,2.0,1.0
12,20,3.0,1.0
13,10,2.6,1.6
22,10,2.2,1.2
"""
SCALABILITY = """num_nodes,num_replicas,local_bsz,step_time,sync_time
8,8,10,4.0,3.0
8,8,20,5.0,3.0
8,32,10,6.0,5.0
8,32,20,7.0,5.0
"""
RUN = "progress,iteration,metric,grad_sqr,grad_var\n{}"


@pytest.fixture
def folder(tmp_path):
    application = tmp_path / "net"
    application.mkdir()
    (application / "placements.csv").write_text(PLACEMENTS)
    (application / "scalability.csv").write_text(SCALABILITY)
    (application / "validation-10.csv").write_text(RUN.format("100,100,0.5,1.0,2.0\n210,210,0.7,0.5,4.0\n"))
    (application / "validation-40.csv").write_text(RUN.format("101,30,0.5,3.0,6.0\n205,60,0.7,0.5,8.0\n"))
    return tmp_path


@pytest.fixture
def net(folder):
    return load_profiles(folder)["net"]


# What is measured


def test_an_epoch_ends_when_the_fastest_run_would_have_ended_it(net):
    assert net.progress == (100.0, 205.0)
    assert net.batch_sizes == (10, 40)


def test_measured_placements_are_linear_in_the_local_batch(net):
    assert net.step_and_sync_seconds((1,), 10) == (1.0, 0.0)
    assert net.step_and_sync_seconds((1,), 15) == (1.5, 0.0)
    assert net.step_and_sync_seconds((4,), 12) == (pytest.approx(1.7), 0.5)


def test_where_the_numbering_of_nodes_begins_does_not_matter(net):
    assert net.step_and_sync_seconds((2, 1), 10) == net.step_and_sync_seconds((1, 2), 10) == (2.0, 1.0)
    assert net.step_and_sync_seconds((3, 1), 10) == (2.6, 1.6), "not the mean of all on two nodes and four GPUs"


def test_a_local_batch_that_was_not_measured_there_is_interpolated_from_the_means(folder):
    (folder / "net" / "scalability.csv").write_text(SCALABILITY + "2,4,20,4.4,2.4\n")
    found = load_profiles(folder)["net"].step_and_sync_seconds((2, 2), 15)
    assert list(found) == pytest.approx([(2.4 + 4.4) / 2, (1.4 + 2.4) / 2])


def test_other_placements_are_interpolated(net):
    step, sync = net.step_and_sync_seconds((4, 4, 4), 10)
    assert 1.0 < step < 6.0
    assert 0.0 < sync < 5.0


def test_a_measured_point_is_met_by_the_interpolation(net):
    assert list(net.step_and_sync_seconds((4,) * 8, 20)) == pytest.approx([7.0, 5.0])


def test_beyond_the_most_nodes_measured_their_number_is_clipped(net):
    assert net.max_nodes == 8
    twelve = net.step_and_sync_seconds((1,) * 12, 10)
    assert twelve == net.step_and_sync_seconds((2, 2, 2, 2, 1, 1, 1, 1), 10)


def test_outside_of_what_was_measured_one_error_says_so(net):
    with pytest.raises(InvalidInput, match=r"net: no measurement surrounds placement 4-4 .*local batch 500"):
        net.step_and_sync_seconds((4, 4), 500)


def test_gradient_statistics_are_linear_in_the_total_batch(net):
    assert net.gradient_statistics(10, 0) == (1.0, 2.0)
    assert net.gradient_statistics(25, 0) == (2.0, 4.0)
    assert net.gradient_statistics(40, 1) == (0.5, 8.0)
    assert net.gradient_statistics(1, 0) == (1.0, 2.0)
    assert net.gradient_statistics(400, 0) == (3.0, 6.0)


def test_iterations_are_those_of_the_recorded_run(net):
    assert [net.iterations(40, epoch) for epoch in range(3)] == [0.0, 30.0, 60.0]
    assert net.iterations(25, 1) == 65.0


# Limits


def test_limits_come_from_the_measurements_unless_they_are_known(net):
    limits = net.limits
    assert (limits.initial, limits.maximum, limits.local_min, limits.local_max) == (10, 40, 10, 20)
    assert net.fixed is None


def test_published_applications_have_their_published_limits(folder):
    (folder / "net").rename(folder / "ncf")
    ncf = load_profiles(folder)["ncf"]
    assert (ncf.limits.initial, ncf.limits.maximum) == (256, 32768)
    assert ncf.fixed == FixedConfiguration(1, 32768)
    assert ncf.state_bytes == 20_000_000


def test_the_state_may_be_said_beside_the_profiles(folder):
    assert load_profiles(folder)["net"].state_bytes is None
    (folder / "applications.json").write_text('{"net": {"state_bytes": 700}}')
    assert load_profiles(folder)["net"].state_bytes == 700


def test_a_file_beside_the_profiles_overrides_limits(folder):
    settings = {"net": {"initial": 20, "local_max": 16, "fixed": {"num_gpus": 2, "batch_size": 40}}}
    (folder / "applications.json").write_text(json.dumps(settings))
    net = load_profiles(folder)["net"]
    assert (net.limits.initial, net.limits.local_max, net.limits.maximum) == (20, 16, 40)
    assert net.fixed == FixedConfiguration(2, 40)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must map application names"),
        ('{"net": 5}', "must map application names"),
        ('{"net": {"initial_batch": 5}}', "did you mean 'initial'"),
        ('{"net": {"fixed": {"gpus": 1}}}', "application 'net', field 'fixed'"),
        ('{"net": {"initial": 50}}', "maximum is 40, below initial 50"),
        ('{"net": {"initial": "x"}}', "field 'initial': 'x': give a whole number"),
        ('{"net": {"initial": 0}}', "field 'initial': 0: give a whole number"),
        ('{"net": {"initial": 1e400}}', "field 'initial': inf: give a whole number"),
        ('{"net": {"fixed": {"num_gpus": "1", "batch_size": 8}}}', "field 'num_gpus': '1': give a whole number"),
        ('{"net": {"state_bytes": -1}}', "field 'state_bytes': -1: give a whole number"),
        ('{"nett": {}}', "did you mean 'net'"),
    ],
)
def test_overrides_that_will_not_do(folder, settings, said):
    (folder / "applications.json").write_text(settings)
    with pytest.raises(InvalidInput, match=said):
        load_profiles(folder)


def test_an_override_of_nothing_is_an_unknown_name(folder):
    (folder / "applications.json").write_text('{"nett": {}}')
    with pytest.raises(UnknownName):
        load_profiles(folder)


# Files


def test_scalability_is_optional(folder):
    (folder / "net" / "scalability.csv").unlink()
    net = load_profiles(folder)["net"]
    assert net.max_nodes == 2
    assert net.step_and_sync_seconds((1,), 10) == (1.0, 0.0)


def test_other_folders_and_files_are_ignored(folder):
    (folder / "notes").mkdir()
    (folder / "notes" / "read.me").write_text("")
    (folder / "stray.csv").write_text("")
    assert list(load_profiles(folder)) == ["net"]


def test_folders_without_applications(tmp_path):
    with pytest.raises(InvalidInput, match="no such profiles folder"):
        load_profiles(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="no application in it"):
        load_profiles(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "no rows"),
        ("placements.csv", PLACEMENTS + "104,10,1,0\n", "line 10, field 'placement': '104'"),
        ("placements.csv", PLACEMENTS + "1,10,0,0\n", "line 10, field 'step_time'"),
        ("placements.csv", PLACEMENTS + "1,10,1,-1\n", "line 10, field 'sync_time'"),
        ("placements.csv", "placement,local_bsz,step_time\n1,1,1\n", "field 'sync_time': column is missing"),
        ("scalability.csv", SCALABILITY + "0,8,10,1,1\n", "line 6, field 'num_nodes'"),
        ("validation-10.csv", RUN.format(""), "validation-10.csv: no rows"),
        ("validation-10.csv", RUN.format("100,100,0.5,1,2\n"), "runs have .1, 2. epochs"),
        ("validation-10.csv", RUN.format("0,100,0.5,1,2\n200,200,1,1,1\n"), "line 2, field 'progress'"),
        ("validation-10.csv", RUN.format("9,100,0.5,nan,2\n200,200,1,1,1\n"), "line 2, field 'grad_sqr'"),
        ("validation-big.csv", RUN.format("1,1,1,1,1\n"), "call it validation-B.csv"),
    ],
)
def test_files_that_will_not_do(folder, file, content, said):
    (folder / "net" / file).write_text(content)
    with pytest.raises(InvalidInput, match=said):
        load_profiles(folder)


def test_no_recorded_run_at_all(folder):
    for path in (folder / "net").glob("validation-*.csv"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"no validation-B\.csv"):
        load_profiles(folder)


def test_progress_must_grow(folder):
    path = folder / "net" / "validation-10.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[1]]) + "\n")
    with pytest.raises(InvalidInput, match=r"validation-10\.csv, line 3, field 'progress'.*not above the line before"):
        load_profiles(folder)


def test_synchronising_takes_less_than_the_step(folder):
    path = folder / "net" / "placements.csv"
    path.write_text("placement,local_bsz,step_time,sync_time\n1,10,0.5,0.5\n")
    with pytest.raises(InvalidInput, match=r"line 2, field 'sync_time': '0\.5': must be below step_time"):
        load_profiles(folder)


def test_measurements_in_one_plane_surround_nothing(folder):
    (folder / "net" / "scalability.csv").unlink(missing_ok=True)
    (folder / "net" / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n1,10,0.5,0.1\n1,20,0.9,0.1\n2,10,0.5,0.2\n2,20,0.9,0.2\n"
    )
    net = load_profiles(folder)["net"]
    with pytest.raises(InvalidInput, match="no measurement surrounds placement 4"):
        net.step_and_sync_seconds((4,), 10)
