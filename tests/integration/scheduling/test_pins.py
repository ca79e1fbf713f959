"""Pins of models, which set the minimum of a scheduling rule."""

import threading

import pytest
from django.db import transaction

from localai_cluster.kit import clock
from nodes.models import ModelSchedulingConfig
from nodes.scheduling import store
from nodes.scheduling.rules import Rule
from tests.support.fleet import at_once
from tests.support.races import waiting


@pytest.mark.django_db(transaction=True)
def test_a_pin_keeps_the_rule_that_was_created_at_the_same_time() -> None:
    """http-2.12: the pin waits for the transaction that creates the rule, and changes only its minimum."""
    thread = threading.Thread(target=lambda: at_once(lambda: store.set_pinned("m", True, clock.now())))
    with transaction.atomic():
        store.set_rule(Rule("m", node_selector={"tier": "fast"}, max_replicas=5), clock.now())
        thread.start()
        waiting()
    thread.join()
    rule = ModelSchedulingConfig.objects.get()
    assert (rule.node_selector, rule.min_replicas, rule.max_replicas) == ({"tier": "fast"}, 1, 5)


@pytest.mark.django_db
def test_a_model_without_a_rule_is_pinned_and_unpinned() -> None:
    store.set_pinned("m", False, clock.now())
    assert not ModelSchedulingConfig.objects.exists()
    store.set_pinned("m", True, clock.now())
    assert ModelSchedulingConfig.objects.get().min_replicas == 1
    store.set_pinned("m", False, clock.now())
    assert not ModelSchedulingConfig.objects.exists()
