"""Tables fit their terminal, and the numbers in them are those of the results."""

import io

import pytest
from rich.console import Console

from pollux.cli.display.render import classes_table, print_table, progress_bar, results_table


def result(policy="pollux", workload="some", **values):
    return {
        "workload": workload, "policy": policy, "avg_jct_hours": 0.5, "p50_jct_hours": 0.25,
        "p99_jct_hours": 12.5, "makespan_hours": 20.0, "restarts_per_job": 3.25, "gpu_hours": 900.0,
        "utilization": 0.95,
        "worst_ftf": 2.5, "unfair_fraction": 0.5, "decision_ms_mean": 4.5, "decision_ms_max": 32.0,
        "cpu_seconds": 3.0, "jobs": [], **values,
    }  # fmt: skip


def rendered(results, width):
    console = Console(file=io.StringIO(), width=width)
    print_table(console, results_table(results, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_fits_and_cuts_nothing(width):
    text = rendered([result(), result("optimus-oracle", worst_ftf=870.85)], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for cell in ("0.500", "0.250", "12.50", "20.00", "3.25", "95%", "2.50", "871", "4.5", "1.00×"):
        assert cell in text


def test_wide_table_has_more_columns():
    assert "4.5 / 32" in rendered([result()], 120)
    assert "unfair" in rendered([result()], 120)


def test_ratio_is_to_the_first_policy_of_the_workload():
    results = [result(), result("fifo", avg_jct_hours=1.0)]
    results += [result(workload="other", avg_jct_hours=2.0), result("fifo", "other", avg_jct_hours=3.0)]
    lines = [line.split() for line in rendered(results, 120).splitlines()]
    assert [line[-1] for line in lines if line and line[0] == "fifo"] == ["2.00×", "1.50×", "1.60×"]


def test_several_workloads_end_with_their_mean():
    text = rendered([result(), result(workload="other", avg_jct_hours=1.0, worst_ftf=7.0)], 120)
    mean = text.splitlines()[-2].split()
    assert "mean of 2 workloads" in text
    assert mean[1] == "0.750"
    assert "7.00" in mean


def test_what_no_schedule_can_beat_ends_each_workload():
    console = Console(file=io.StringIO(), width=120)
    print_table(console, results_table([result()], 120, bounds={"some": 0.2}))
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-2]
    assert last.split() == ["lower", "bound", "0.200", "0.40×"]


def test_completion_times_by_class():
    console = Console(file=io.StringIO(), width=120)
    small, large = {"jobs": 3, "avg_jct_hours": 0.25}, {"jobs": 1, "avg_jct_hours": 4.0}
    results = [result(classes={"small": small, "large": large}), result("fifo", classes={"small": small})]
    print_table(console, classes_table(results))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[-3:] == [["some", "3", "jobs", "1", "jobs"], ["pollux", "0.250", "4.000"], ["fifo", "0.250"]]


def test_names_are_not_taken_for_markup():
    assert "[red]" in rendered([result(workload="[red]")], 80)


def test_no_bar_without_a_terminal(capsys):
    with progress_bar("working") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")
