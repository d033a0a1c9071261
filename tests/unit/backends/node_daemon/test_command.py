"""The words that start a node daemon, as the daemon reads them."""

from pathlib import Path

from pollux.backends.node_daemon.command import daemon_words
from pollux.backends.node_daemon.daemon import _arguments


def test_the_daemon_reads_what_it_is_started_with():
    words = daemon_words("n1", 2, "10.0.0.1:4000", Path("/tmp/announce"), (4, 5), warm=False)
    given = _arguments(words[2:])
    assert words[:2] == ["-m", "pollux.backends.node_daemon.daemon"]
    assert (given.node, given.places, given.listen, given.announce) == ("n1", 2, "10.0.0.1:4000", Path("/tmp/announce"))
    assert (given.gpus, given.cold, given.with_parent, given.patient) == ("4,5", True, True, False)


def test_cpu_slots_have_no_gpus_and_imports_are_the_usual_case():
    given = _arguments(daemon_words("n1", 2, "127.0.0.1", Path("a"))[2:])
    assert (given.gpus, given.cold) == ("", False)
