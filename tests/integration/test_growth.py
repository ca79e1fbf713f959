"""What `make measure` measures at 100, 1,000 and 5,000 nodes takes equally many statements at any size."""

import pytest

from tests.measure import growth
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.rule("R1.107")
def test_statements_are_constant() -> None:
    """The list, the live feed, the passes, a decision, and an operation on all nodes."""
    counts = []
    for size in (10, 40):
        growth.plant(size)
        works = growth.Works(API_KEY)
        for _ in range(2):  # the first turn reads what later ones remember
            works.prepare()
            found = {name: growth.statements(work) for name, work in works.all()}
        counts.append(found)
    assert counts[0] == counts[1]
