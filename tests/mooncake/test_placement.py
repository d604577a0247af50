from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from mooncake_pool.placement import Placement, parse_placement, unix_time

HEAD = "I1130 11:12:48.767220  7245 allocator.cpp:353] "
A, B = "10.0.0.5:12345", "10.0.0.6:12400"


def init(segment: str, size: int) -> str:
    return f"{HEAD}initializing_offset_buffer_allocator segment_name={segment} base_address=0x7f0 size={size}\n"


def placed(segment: str, size: int, address: int) -> str:
    return f"{HEAD}allocation_succeeded size={size} segment={segment} address={address:#x}\n"


def freed(segment: str, size: int, address: int) -> str:
    return f"{HEAD}deallocation_succeeded address={address:#x} size={size} segment={segment}\n"


def test_live_peak_and_freed() -> None:
    lines = [init(A, 1000), placed(A, 100, 1), placed(A, 200, 2), freed(A, 100, 1), placed(B, 50, 1)]
    lines.append(f"{HEAD}[EVICT-RESULT] evicted_count=7, eviction_base=63, actual_evict_ratio=1\n")
    lines.append(f"{HEAD}allocation_failed size=300 segment={A} current_size=200\n")
    lines.append(f"{HEAD}buf_handle_deallocated size=100\n")
    lines.append("WARNING: Logging before InitGoogleLogging() is written to STDERR\n")
    result = parse_placement(lines)
    a, b = result.segments[A], result.segments[B]
    assert (a.capacity, a.live_blocks, a.live_bytes, a.peak_bytes) == (1000, 1, 200, 300)
    assert (a.placed_blocks, a.placed_bytes, a.freed_blocks, a.freed_bytes) == (2, 300, 1, 100)
    assert (b.capacity, b.live_bytes, b.host, b.port) == (None, 50, "10.0.0.6", "12400")
    assert (result.evicted_keys, result.refused_allocations, result.placed_blocks) == (7, 1, 3)


def test_an_expired_or_remounted_segment_has_lost_its_blocks() -> None:
    lines = [placed(A, 100, 1), placed(B, 10, 1), placed(B, 10, 2)]
    lines.append(f"{HEAD}client_id=1-2, segment_name={A}, action=unmount_expired_mem_segment\n")
    lines.append(init(B, 500))
    result = parse_placement(lines)
    assert (result.segments[A].live_bytes, result.segments[A].lost_bytes) == (0, 100)
    assert (result.segments[B].live_bytes, result.segments[B].lost_blocks) == (0, 2)


def test_a_new_master_starts_from_nothing() -> None:
    lines = [placed(A, 100, 1), "I1130 master.cpp:1522] Master service started on port 50051, max_threads=2\n"]
    result = parse_placement([*lines, placed(A, 30, 1)])
    assert (result.segments[A].live_bytes, result.segments[A].lost_bytes, result.master_starts) == (30, 100, 1)


def test_hostnames_and_ipv6_are_segments_too() -> None:
    result = parse_placement([placed("node-7.example:1", 1, 1), placed("[::1]:2", 1, 1)])
    assert {use.host for use in result.segments.values()} == {"node-7.example", "[::1]"}


def test_the_end_of_a_log_that_is_being_written() -> None:
    whole = placed(A, 100, 0x7F8E3A010000)
    for cut in range(len(whole)):
        assert parse_placement([whole[:cut]]).placed_blocks == 0


def at(clock: str, thread: int, said: str) -> str:
    return f"I1130 {clock}.000001 {thread:5} master_service.cpp:1] {said.removeprefix(HEAD)}"


def test_what_the_evicting_thread_frees_was_evicted() -> None:
    lines = [placed(A, 100, 1), placed(A, 100, 2), placed(B, 100, 3), placed(B, 100, 4)]
    lines.append(at("10:00:00", 7, "[EVICT-TRIGGER] memory_ratio=0.95 high_watermark=0.9\n"))
    lines.append(at("10:00:00", 7, freed(A, 100, 1)))
    lines.append(at("10:00:00", 8, freed(A, 100, 2)))  # removed by a client meanwhile
    lines.append(at("10:00:00", 7, freed(B, 100, 3)))
    lines.append(at("10:00:01", 7, "[EVICT-RESULT] evicted_count=2, eviction_base=63\n"))
    lines.append(at("10:00:01", 7, freed(B, 100, 4)))
    lines.append(at("10:00:02", 9, "[EVICT-RESULT] evicted_count=1, eviction_base=63\n"))  # its beginning is cut off
    result = parse_placement(lines)
    a, b = result.segments[A], result.segments[B]
    assert (a.evicted_bytes, a.freed_bytes, b.evicted_bytes, b.freed_bytes) == (100, 200, 100, 200)
    assert result.evicted_keys == 3 and [keys for _, keys in result.evictions] == [2, 1]


def test_levels_of_hosts_and_of_all_and_their_times() -> None:
    near = "10.0.0.5:9"
    lines = [at("10:00:00", 1, placed(A, 100, 1)), at("10:00:05", 1, placed(near, 50, 1))]
    lines += [at("10:00:05", 1, placed(B, 10, 1)), at("10:00:09", 1, freed(A, 100, 1))]
    noon = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
    result = parse_placement(lines, noon)
    assert (result.hosts["10.0.0.5"].live_bytes, result.hosts["10.0.0.5"].peak_bytes) == (50, 150)
    assert (result.total.live_bytes, result.total.peak_bytes, result.total.peak_blocks) == (60, 160, 3)
    ten = noon - 7200
    assert list(result.timeline) == [(ten, 100, 100), (ten + 5, 160, 160), (ten + 9, 60, 60)]
    assert list(result.segments[A].timeline) == [(ten, 100, 100), (ten + 9, 0, 0)]


def test_the_year_of_a_line_is_the_nearest() -> None:
    new_year = time.mktime((2027, 1, 1, 0, 30, 0, 0, 0, -1))
    assert unix_time("1231", "23:30:00", new_year) == new_year - 3600
    assert unix_time("0229", "00:00:00", time.mktime((2027, 3, 1, 0, 0, 0, 0, 0, -1))) > 0
    assert unix_time("1340", "00:00:00", new_year) == 0.0


def test_what_a_segment_held_when_it_went_is_kept() -> None:
    lines = [init(A, 1000), placed(A, 100, 0x7F0), placed(A, 50, 0x800)]
    lines.append(f"{HEAD}client_id=1-2, segment_name={A}, action=unmount_expired_mem_segment\n")
    use = parse_placement(lines).segments[A]
    assert (use.live_bytes, use.held_bytes, use.base) == (0, 150, 0x7F0)


actions = st.lists(
    st.tuples(st.booleans(), st.sampled_from([A, B]), st.integers(0, 9), st.integers(1, 100)), max_size=60
)


def log_of(steps: list[tuple[bool, str, int, int]]) -> tuple[list[str], dict[str, dict[int, int]]]:
    live: dict[str, dict[int, int]] = {A: {}, B: {}}
    lines = []
    for allocate, segment, address, size in steps:
        if allocate and address not in live[segment]:
            live[segment][address] = size
            lines.append(placed(segment, size, address))
        elif not allocate and address in live[segment]:
            lines.append(freed(segment, live[segment].pop(address), address))
    return lines, live


def balanced(result: Placement) -> bool:
    return all(
        use.placed_bytes == use.live_bytes + use.freed_bytes + use.lost_bytes
        and use.live_bytes == sum(use.live.values())
        and use.peak_bytes >= use.live_bytes
        for use in result.segments.values()
    )


@given(actions)
def test_live_bytes_are_exact(steps: list[tuple[bool, str, int, int]]) -> None:
    lines, live = log_of(steps)
    result = parse_placement(lines)
    assert balanced(result) and result.unmatched_frees == 0
    for segment, blocks in live.items():
        use = result.segments.get(segment)
        assert (use.live_bytes if use else 0) == sum(blocks.values())


@given(actions, st.integers(0, 60), st.integers(0, 60))
def test_a_log_cut_at_both_ends_still_balances(steps: list[tuple[bool, str, int, int]], head: int, tail: int) -> None:
    text = "".join(log_of(steps)[0])
    assert balanced(parse_placement(text[head : len(text) - tail].splitlines(keepends=True)))
