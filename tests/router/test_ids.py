from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ids import RequestIds, default_node_id


@given(node=st.integers(0, 255), process=st.integers(0, 63), now=st.floats(0, 2**45))
def test_ids_stay_in_the_routers_range(node: int, process: int, now: float) -> None:
    assert 2**40 <= RequestIds(node, process, clock=lambda: now)() < 2**63


def test_fields_of_the_snowflake() -> None:
    ids = RequestIds(5, 3, clock=lambda: 1000.0)
    snowflake = ids() - 2**40
    assert snowflake >> 24 == 1_000_000
    assert (snowflake >> 16) & 0xFF == 5 and (snowflake >> 10) & 0x3F == 3 and snowflake & 0x3FF == 1


def test_ids_of_one_millisecond_differ_and_so_do_routers() -> None:
    first, second = RequestIds(1, 0, clock=lambda: 7.0), RequestIds(2, 0, clock=lambda: 7.0)
    taken = [ids() for ids in (first, second) for _ in range(1024)]
    assert len(set(taken)) == 2048


@pytest.mark.parametrize(("node", "process"), [(256, 0), (-1, 0), (0, 64)])
def test_places_out_of_range(node: int, process: int) -> None:
    with pytest.raises(ValueError, match=r"must be in range \[0,"):
        RequestIds(node, process)


def test_the_default_node() -> None:
    assert 0 <= default_node_id() < 256
