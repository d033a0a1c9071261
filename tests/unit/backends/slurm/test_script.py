"""What is asked of Slurm: options are checked before anything is sent, and the script is exactly what is shown."""

import subprocess
from pathlib import Path

import pytest

from pollux.backends.slurm.script import SlurmOptions, array_words, batch_script, node_range, pool_name
from pollux.core.errors import InvalidInput
from pollux.testing.waiting import PATIENCE_SECONDS

FOLDER = Path("/shared/someone/slurm")


def script(**given):
    return batch_script(SlurmOptions(**{"gpus_per_node": 4, **given}), FOLDER, "10.0.0.1")


def test_every_option_is_in_the_script():
    text = script(
        partition="gpu", account="lab", qos="high", time_limit="4:00:00", gres="gpu:a100:4", memory="64G",
        cpus_per_node=16, words="--nice=100 '--constraint=a b'", setup="module load cuda",
    )  # fmt: skip
    for line in (
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--time=4:00:00",
        "--gres=gpu:a100:4",
        "--mem=64G",
        "--cpus-per-task=16",
        "--nice=100",
        "'--constraint=a b'",
        "--no-requeue",
        f"--job-name={pool_name(FOLDER)}",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "\nmodule load cuda\nsrun " in text
    assert "--gpus-per-node 4" in text


def test_what_is_not_given_is_left_to_the_cluster():
    text = script()
    assert not any(word in text for word in ("--partition", "--account", "--qos", "--time=", "--mem=6"))
    assert "#SBATCH --gres=gpu:4\n" in text


def test_slots_ask_for_no_gpu_unless_told_to():
    text = batch_script(SlurmOptions(slots=2), FOLDER, "10.0.0.1")
    assert "--gres" not in text
    assert "--slots 2" in text


def test_each_slot_has_a_cpu_unless_told_otherwise():
    assert "#SBATCH --cpus-per-task=4\n" in script(slots=4)
    assert "#SBATCH --cpus-per-task=8\n" in script(slots=4, cpus_per_node=8)
    assert "--cpus-per-task" not in script()


def test_the_script_is_sound_shell(tmp_path):
    path = tmp_path / "pilot.sh"
    path.write_text(script(words="--nice=1", setup="export A='b c'"))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=PATIENCE_SECONDS)


def test_another_home_is_another_pool():
    assert pool_name(FOLDER) != pool_name(FOLDER / "other")


def test_an_array_of_pilots_is_one_command():
    assert array_words(3) == ["sbatch", "--parsable", "--array=0-2"]
    assert array_words(1, "bad[1-2]")[-1] == "--exclude=bad[1-2]"


def test_a_range_of_nodes():
    assert (node_range("4"), node_range("1..8"), node_range("0..2")) == ((4, 4), (1, 8), (0, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": "many"}, "nodes is 'many'"),
        ({"nodes": "3..1"}, "nodes is '3..1'"),
        ({"nodes": "0"}, "nodes is '0'"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"account": "$(reboot)"}, "account is"),
        ({"time_limit": "soon"}, "time_limit is 'soon'"),
        ({"time_limit": "0:02:00", "margin_seconds": 180.0}, "a smaller margin_seconds"),
        ({"gpus_per_node": 0}, "give --option gpus_per_node=N, or --slots N for CPU slots"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1"),
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"words": "--array=1-3"}, "which Pollux sets itself"),
        ({"words": "--job-nam=mine"}, "which Pollux sets itself"),
        ({"words": "--nice=1 -Jmine"}, "'-Jmine', which Pollux sets itself"),
        ({"words": "-N2"}, "which Pollux sets itself"),
        ({"words": "-Mother"}, "which Pollux sets itself"),
        ({"words": "--clusters=other"}, "which Pollux sets itself"),
        ({"gres": "gpu:a100:2", "gpus_per_node": 4}, "name different numbers of GPUs for a node"),
        ({"gres": "gpu:a100:2", "gpus_per_node": 0, "slots": 0}, "gpus_per_node=N beside gres=gpu:a100:2"),
        ({"mode": "job", "nodes": "1..4"}, "nodes is '1..4', which is for pilots"),
        ({"words": "rm -rf"}, "give sbatch options"),
        ({"words": "'"}, "cannot be split"),
        ({"setup": "a\nb"}, "line break"),
        ({"poll_seconds": 0.0}, "poll_seconds is 0.0"),
        ({"wait_seconds": 0.0}, "wait_seconds is 0.0"),
        ({"idle_seconds": -1.0}, "idle_seconds is -1.0"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, words):
    with pytest.raises(InvalidInput) as refused:
        SlurmOptions(**{"gpus_per_node": 4, **given})
    assert words in str(refused.value)
