import resource

from hypothesis import given
from hypothesis import strategies as st

from pollux.service.server import peers as module
from pollux.service.server.peers import ConnectionLimits, Peer, Peers, raise_open_files


def people(most=8, most_strangers=4):
    return Peers(ConnectionLimits(most=most, most_strangers=most_strangers))


def come(peers, address, gone):
    peer = peers.come(address)
    peer.drop = lambda: gone.append(peer)
    return peer


def test_the_oldest_stranger_of_the_address_that_has_most_goes():
    peers = people()
    gone: list[Peer] = []
    one = come(peers, "far", gone)
    many = [come(peers, "near", gone) for _ in range(3)]
    come(peers, "far", gone)
    assert gone == [many[0]]
    many[1].know()
    last = come(peers, "near", gone)
    come(peers, "other", gone)
    assert gone == [many[0], one], "far has two, as near has"
    assert peers.num_strangers == 4
    peers.leave(last)
    peers.leave(last)
    assert (peers.num_strangers, len(peers)) == (3, 4)


def test_where_all_are_known_an_idle_one_goes_and_else_the_oldest():
    peers = people(most=2)
    gone: list[Peer] = []
    first, second = (come(peers, "near", gone) for _ in range(2))
    for peer in (first, second):
        peer.know()
        peer.is_idle = False
    second.is_idle = True
    third = come(peers, "near", gone)
    assert gone == [second]
    third.know()
    third.is_idle = False
    come(peers, "near", gone)
    assert gone == [second, first]


@given(st.lists(st.tuples(st.sampled_from("ckl"), st.integers(0, 5)), max_size=200))
def test_there_are_never_more_than_allowed_and_nobody_is_counted_twice(steps):
    peers = people()
    there: list[Peer] = []

    def drop(peer):
        there.remove(peer)

    for step, number in steps:
        if step == "c":
            peer = peers.come(str(number))
            there.append(peer)
            peer.drop = lambda peer=peer: drop(peer)
        elif there:
            peer = there[number % len(there)]
            if step == "k":
                peer.know()
            else:
                peers.leave(peer)
                there.remove(peer)
        assert len(peers) == len(there) <= 8
        assert peers.num_strangers == sum(not peer.is_known for peer in there) <= 4


def test_open_files_are_raised_as_far_as_they_may(monkeypatch):
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(module.resource, "setrlimit", lambda what, limits: set_to.append(limits))
    for limits, wanted in (
        ((1024, 4096), [(4096, 4096)]),
        ((1024, resource.RLIM_INFINITY), [(65536, resource.RLIM_INFINITY)]),
        ((1024, 10**6), [(65536, 10**6)]),
        ((4096, 4096), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
        ((10**6, 10**6), []),
    ):
        set_to.clear()
        monkeypatch.setattr(module.resource, "getrlimit", lambda what, limits=limits: limits)
        raise_open_files()
        assert set_to == wanted, limits


def test_a_limit_that_may_not_be_raised_is_lived_with(monkeypatch):
    def refuses(what, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(module.resource, "setrlimit", refuses)
    monkeypatch.setattr(module.resource, "getrlimit", lambda what: (256, 4096))
    limits = ConnectionLimits.for_open_files(raise_open_files())
    assert (limits.most, limits.most_strangers) == (128, 32)
