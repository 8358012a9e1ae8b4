"""Keeps the compiled programs of one mixer in memory, not those of all."""

import helpers


def pytest_runtest_teardown(item, nextitem):
    from layers.contract import probe

    helpers.drop_programs(item, nextitem, probe)
