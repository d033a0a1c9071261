import pytest

from pollux.core import InvalidInput
from pollux.sim.workloads.workload import Workload, WorkloadJob, check_applications, read_workload, write_workload
from pollux.testing import FakeApplication

HEADER = "name,time,application,num_replicas,batch_size\n"


@pytest.fixture
def read(tmp_path):
    def read(rows, header=HEADER):
        path = tmp_path / "day-1.csv"
        path.write_text(header + rows)
        return read_workload(path)

    return read


def test_jobs_come_in_order_of_submission(read):
    workload = read("b,20,bert,4,48\na,10.5,ncf,1,32768\nc,20,bert,1,12\n")
    assert workload.name == "day-1"
    assert [(job.name, job.time, job.application, job.num_gpus, job.batch_size) for job in workload.jobs] == [
        ("a", 10.5, "ncf", 1, 32768),
        ("b", 20.0, "bert", 4, 48),
        ("c", 20.0, "bert", 1, 12),
    ]
    assert workload.jobs[0].source.endswith("day-1.csv, line 3")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "no jobs in it"),
        ("a,1,bert,1,12\na,2,bert,1,12\n", "line 3, field 'name': 'a': was used in line 2"),
        ("a,-1,bert,1,12\n", "field 'time': '-1'"),
        ("a,soon,bert,1,12\n", "field 'time': 'soon'"),
        ("a,1,,1,12\n", "field 'application'"),
        ("a,1,bert,0,12\n", "field 'num_replicas': '0'"),
        ("a,1,bert,1.5,12\n", "field 'num_replicas': '1.5'"),
        ("a,1,bert,1,\n", "field 'batch_size'"),
        (",1,bert,1,12\n", "line 2, field 'name'"),
    ],
)
def test_lines_that_will_not_do(read, rows, said):
    with pytest.raises(InvalidInput, match=said):
        read(rows)


def test_a_file_with_other_columns_is_refused(read):
    with pytest.raises(InvalidInput, match="field 'batch_size': column is missing"):
        read("a,1,bert,1\n", header="name,time,application,num_replicas\n")


def test_what_was_written_is_read_again(read, tmp_path):
    workload = read("a,10.5,ncf,1,32768\nb,20,bert,4,48\n")
    (tmp_path / "again.csv").write_text(write_workload(workload.jobs))
    again = read_workload(tmp_path / "again.csv")
    assert [(job.name, job.time, job.num_gpus) for job in again.jobs] == [("a", 10.5, 1), ("b", 20.0, 4)]


def test_times_keep_their_seconds_through_a_file(read, tmp_path):
    late = WorkloadJob("a", 1_234_567.0, "bert", 1, 12)
    (tmp_path / "late.csv").write_text(write_workload([late]))
    assert read_workload(tmp_path / "late.csv").jobs[0].time == 1_234_567.0


def checked(**fields):
    request = WorkloadJob(
        **{"name": "a", "time": 0.0, "application": "fake", "num_gpus": 4, "batch_size": 40, **fields}
    )
    check_applications(Workload("w", (request,)), {"fake": FakeApplication()}, num_gpus=8)


def test_a_workload_that_fits():
    checked()
    checked(num_gpus=8, batch_size=40)
    checked(num_gpus=1, batch_size=10)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"application": "fame"}, "field 'application': 'fame': no such profile; did you mean 'fake'"),
        ({"num_gpus": 9, "batch_size": 160}, "field 'num_replicas': '9': the cluster has 8 GPUs"),
        ({"batch_size": 9}, "field 'batch_size': '9': fake takes 10 to 160"),
        ({"batch_size": 161}, "field 'batch_size': '161'"),
        ({"num_gpus": 3, "batch_size": 10}, "field 'num_replicas': '3': .*at most 2"),
        ({"num_gpus": 9, "batch_size": 160, "source": "w.csv, line 7"}, "^w.csv, line 7, field"),
    ],
)
def test_a_workload_that_cannot_run_is_refused_before_it_starts(fields, said):
    with pytest.raises(InvalidInput, match=said):
        checked(**fields)


def test_a_time_that_is_a_date_names_its_line(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("name,time,application,num_replicas,batch_size\na,1e15,net,1,8\n")
    with pytest.raises(InvalidInput, match=r"w\.csv, line 2, field 'time': '1e\+15': give seconds from"):
        read_workload(path)
