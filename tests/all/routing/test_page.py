"""Five thousand orders are chosen for as the page says, by every strategy."""

from __future__ import annotations

import pytest

from backplane.routing import STRATEGIES
from tests.test_routing import compare_with_the_page


@pytest.mark.timeout(600)
def test_the_choice_is_that_of_the_page_on_5000_orders() -> None:
    met = compare_with_the_page(5000, seed=2)
    assert met["chosen"] + met["none"] == 5000 * len(STRATEGIES)
