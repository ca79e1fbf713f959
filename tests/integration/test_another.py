"""One more replica: where its load may go, and that one is under way at a time."""

import pytest

from nodes.loading import another, load
from tests.support import hot

pytestmark = pytest.mark.django_db


@pytest.mark.rule("R2.64")
def test_a_load_goes_to_the_nodes_that_were_chosen_and_beside_what_is_there() -> None:
    first, _, third = (hot.node(name) for name in ("first", "second", "third"))
    hot.replica(first, "m")
    asked = another.load_another("m", only=None, reason="test")
    assert load.besides(asked) == {first.id}
    assert another.load_another("m", only=[third.id], reason="test") == asked
    assert another.loads_under_way(["m", "other"]) == {"m": 1}
    chosen = another.load_another("other", only=[third.id], reason="test")
    assert third.id not in load.besides(chosen)
    assert len(load.besides(chosen)) == 2
