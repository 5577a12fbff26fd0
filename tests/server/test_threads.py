"""Computations in threads that end with them."""

import threading

import pytest

from clearhead.server.threads import run_apart


def test_a_function_runs_in_a_thread_that_has_ended_when_its_result_is_there():
    thread, total = run_apart(lambda *numbers: (threading.current_thread(), sum(numbers)), 2, 3)
    assert total == 5
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_of_the_function_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0)
