"""Names that look alike across scripts: new ones are refused."""

import pytest

from tests.support import api

LATIN, CYRILLIC, ALPHA = "gpu-a", "gpu-\u0430", "gpu-\u0251"


@pytest.mark.django_db
@pytest.mark.rule("R1.22", "R1.29", "http-1.1")
@pytest.mark.parametrize("name", [CYRILLIC, ALPHA, "gpu\u2013a", "\u0261pu-a"])
def test_a_name_of_another_script_that_looks_like_a_known_one_is_refused(name: str) -> None:
    """D-NAMES: 409 naming the field, in whichever order they come; names in ASCII are never alike."""
    assert api.register(api.registration(LATIN)).status_code == 201
    refused = api.register(api.registration(name))
    assert (refused.status_code, "too similar" in api.message(refused)) == (409, True)
    for other in ("gpu-o", "gpu-0", "gpu-l", "gpu-1", "gpu-i"):
        assert api.register(api.registration(other)).status_code == 201


@pytest.mark.django_db
def test_the_first_one_may_be_of_another_script() -> None:
    """Then the name in ASCII is the one that is too similar."""
    assert api.register(api.registration(CYRILLIC)).status_code == 201
    assert api.register(api.registration(LATIN)).status_code == 409
