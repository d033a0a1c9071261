"""Claims and their placement groups."""

import pytest

from pollux.backends.ray.driver_messages import (
    FailedMessage,
    FreeClaims,
    GrantedMessage,
    RetryClaims,
    TakeClaims,
    WaitsMessage,
)


def test_a_claim_is_a_group_on_its_node_and_is_granted_with_its_gpu(ray, make):
    driver, told = make()
    driver.obey(TakeClaims({"pollux:s:j:1": "host-bbbbbb"}))
    group = ray.groups["pollux:s:j:1"]
    assert (group.selector, group.bundles) == ("b" * 56, [{"GPU": 1}])
    (options, ref) = ray.probes[0]
    assert (options["num_gpus"], options["num_cpus"], options["scheduling_strategy"]) == (1, 0, group)
    ref.done.set_result(["2"])
    ray.settle(driver)
    assert told.of(GrantedMessage) == [GrantedMessage("pollux:s:j:1", "2")]
    driver.obey(FreeClaims(("pollux:s:j:1", "unknown")))
    assert ray.groups == {}


def test_cpu_slots_need_no_process_to_be_found(ray, make):
    driver, told = make(slots=2)
    driver.obey(TakeClaims({"pollux:s:j:1": "host-aaaaaa"}))
    assert (ray.probes, ray.groups["pollux:s:j:1"].bundles) == ([], [{"CPU": 1}])
    driver.groups.check(driver.groups.pending())
    assert told.of(GrantedMessage) == []
    ray.groups["pollux:s:j:1"].state = "CREATED"
    driver.groups.check(driver.groups.pending())
    assert told.of(GrantedMessage) == [GrantedMessage("pollux:s:j:1", None)]
    assert driver.groups.pending() == []


@pytest.mark.parametrize(("count", "calls"), [(3, 3), (50, 1)])
def test_many_claims_are_asked_after_at_once(ray, make, count, calls):
    driver, told = make(slots=64)
    driver.obey(TakeClaims({f"pollux:s:j:{number}": "host-aaaaaa" for number in range(count)}))
    ray.tables = 0
    driver.groups.check(driver.groups.pending())
    assert (ray.tables, told.of(GrantedMessage)) == (calls, [])
    ray.groups["pollux:s:j:1"].state = "CREATED"
    driver.groups.check(driver.groups.pending())
    assert told.of(GrantedMessage) == [GrantedMessage("pollux:s:j:1", None)]
    ray.tables = 0
    driver.groups.check([])
    assert ray.tables == 0


@pytest.mark.parametrize("with_gpus", [True, False])
def test_a_claim_that_is_not_met_in_time_is_told_once(ray, make, with_gpus):
    driver, told = make(with_gpus=with_gpus)
    driver.obey(TakeClaims({"pollux:s:j:1": "host-aaaaaa"}))
    driver.groups.check(driver.groups.pending())
    assert told.of(WaitsMessage) == []
    ray.now += 6.0
    driver.groups.check(driver.groups.pending())
    driver.groups.check(driver.groups.pending())
    assert told.of(WaitsMessage) == [WaitsMessage("pollux:s:j:1")]
    driver.obey(RetryClaims(("pollux:s:j:1", "unknown")))
    ray.now += 6.0
    driver.groups.check(driver.groups.pending())
    assert len(told.of(WaitsMessage)) == 2


def test_a_group_that_is_there_is_not_late_however_slow_its_answer(ray, make):
    driver, told = make()
    driver.obey(TakeClaims({"pollux:s:j:1": "host-aaaaaa"}))
    ray.groups["pollux:s:j:1"].state = "CREATED"
    ray.now += 6.0
    driver.groups.check(driver.groups.pending())
    assert told.of(WaitsMessage) == []


def test_groups_of_before_are_kept_made_or_removed(ray, make):
    for name in ("pollux:s:kept", "pollux:s:orphan", "pollux:other:x", "foreign"):
        ray.put_group(name)
    make(claims={"pollux:s:kept": "host-aaaaaa", "pollux:s:lost": "host-bbbbbb"})
    assert sorted(ray.groups) == ["foreign", "pollux:other:x", "pollux:s:kept", "pollux:s:lost"]
    assert len(ray.probes) == 2


def test_a_claim_on_a_node_that_is_gone_makes_no_group(ray, make):
    driver, _ = make()
    driver.obey(TakeClaims({"pollux:s:j:1": "host-zzzzzz"}))
    assert ray.groups == {}


def test_a_group_that_fails_is_told_and_given_back(ray, make):
    driver, told = make()
    driver.obey(TakeClaims({"pollux:s:j:1": "host-aaaaaa"}))
    ray.probes[0][1].done.set_exception(RuntimeError("removed"))
    ray.settle(driver)
    assert told.of(FailedMessage) == [FailedMessage("pollux:s:j:1", "removed")]
    assert ray.groups == {}
    driver.groups.make_missing()
    assert ray.groups == {}, "asked again at once"


def test_a_group_that_fails_is_made_again_after_a_while_unless_it_was_given_back(ray, make):
    driver, _ = make()
    driver.obey(TakeClaims({"pollux:s:j:1": "host-aaaaaa", "pollux:s:j:2": "host-aaaaaa"}))
    for _, ref in [*ray.probes]:
        ref.done.set_exception(RuntimeError("removed"))
    ray.settle(driver)
    driver.obey(FreeClaims(("pollux:s:j:2",)))
    ray.now += 16.0
    driver.groups.make_missing()
    assert sorted(ray.groups) == ["pollux:s:j:1"]


def test_a_claim_finds_a_node_that_came_late(ray, make):
    driver, _ = make(claims={"pollux:s:j:1": "host-cccccc"})
    assert ray.groups == {}
    ray.rows.append(ray.row("c"))
    driver.find_nodes()
    driver.groups.make_missing()
    assert ray.groups["pollux:s:j:1"].selector == "c" * 56
