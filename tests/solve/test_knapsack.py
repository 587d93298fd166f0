"""The knapsack against brute force: every combination of options."""

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmcompress.solve.knapsack import Choice, choose, mirrored

CHOICES = st.builds(Choice, st.integers(0, 30), st.integers(0, 100).map(float))
ITEMS = st.lists(st.lists(CHOICES, min_size=1, max_size=5), min_size=1, max_size=5)


def taken(items, numbers):
    picked = [options[number] for options, number in zip(items, numbers, strict=True)]
    return sum(choice.cost for choice in picked), sum(choice.loss for choice in picked)


def combinations(items):
    return [taken(items, numbers) for numbers in product(*(range(len(options)) for options in items))]


@given(ITEMS, st.integers(0, 150))
@settings(deadline=None, max_examples=300)
def test_it_keeps_within_the_budget_and_loses_at_most_one_step_more_than_the_best(items, budget):
    possible = [loss for cost, loss in combinations(items) if cost <= budget]
    assume(possible)
    cost, loss = taken(items, choose(items, budget))
    assert cost <= budget
    largest = max(max(o.loss for o in options) - min(o.loss for o in options) for options in items)
    assert min(possible) <= loss <= min(possible) + largest


@given(ITEMS, st.integers(1, 50))
@settings(deadline=None, max_examples=300)
def test_a_budget_that_a_price_of_bytes_would_fill_is_filled_with_the_least_loss(items, price):
    """Whatever minimises loss + cost * price, item by item, is the best of its own total cost."""
    priced = [min(options, key=lambda choice: (choice.loss * 7 + choice.cost * price, choice)) for options in items]
    budget = sum(choice.cost for choice in priced)
    least = min(loss for cost, loss in combinations(items) if cost <= budget)
    assert taken(items, choose(items, budget))[1] == pytest.approx(least)


@given(ITEMS, st.integers(0, 300))
@settings(deadline=None, max_examples=300)
def test_exchanged_it_keeps_within_a_loss_and_costs_at_most_one_step_more_than_the_least(items, bound):
    possible = [cost for cost, loss in combinations(items) if loss <= bound]
    assume(possible)
    cost, loss = taken(items, choose(mirrored(items), bound))
    assert loss <= bound
    largest = max(max(o.cost for o in options) - min(o.cost for o in options) for options in items)
    assert min(possible) <= cost <= min(possible) + largest


@given(ITEMS)
@settings(deadline=None)
def test_plenty_buys_the_best_and_too_little_is_refused(items):
    costs = [cost for cost, _ in combinations(items)]
    assert taken(items, choose(items, 10**6))[1] == min(loss for _, loss in combinations(items))
    assert taken(items, choose(items, min(costs)))[0] == min(costs)
    with pytest.raises(ValueError, match="1 more than the budget"):
        choose(items, min(costs) - 1)


def test_what_remains_is_filled_with_options_off_the_hull():
    items = [[Choice(0, 10.0), Choice(6, 6.0), Choice(10, 0.0)], [Choice(0, 30.0), Choice(10, 0.0)]]
    assert taken(items, choose(items, 16)) == (16, 6.0)
