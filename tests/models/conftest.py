"""Keeps the compiled programs of one row in memory, not those of all."""

import helpers


def pytest_runtest_teardown(item, nextitem):
    from models.cases import runner

    helpers.drop_programs(item, nextitem, runner)
