"""The emulated terminal that the tests of chat read from."""

from tests.cli.screen import Screen


def test_text_after_joined_emoji_in_the_same_read_is_shown():
    with Screen(["printf", "a 👩\u200d👩\u200d👧 count"], columns=40) as screen:
        assert screen.wait_for_end() == 0
        while screen.read(0.1) and "count" not in screen.text:
            pass
        assert screen.lines == ["a 👩👩👧 count"]
