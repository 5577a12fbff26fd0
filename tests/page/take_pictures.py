"""Take a screenshot of every view of the page, wide and narrow, light and dark, to look at.

    clearhead serve smollm2 --runs runs
    python -m tests.page.take_pictures http://127.0.0.1:8000 pictures

Those of docs/pictures were chosen among them.
"""

import argparse
import shutil
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

TEXT = "When Mary and John went to the store, John gave a drink to"
QUESTION = "Name three animals that live in the sea."
WIDTHS = {"wide": (1280, 940), "phone": (400, 820)}
VIEWS = {  # what a view shows, and what must be there before the picture
    "tokens": ("tokens", "#token-table"),
    "attention": ("attention?layer=15&head=4&at=13", ".matrix canvas"),
    "lens": ("lens?at=13", ".lens-table table"),
    "circuit": ("circuit?at=13", ".parts"),
    "cost": ("cost", ".facts"),
    "engine": ("engine", ".pages span"),
    "runs": ("runs", ".chart"),
    "tour": ("circuit?example=names&tour=0", "#coach"),
}
TIMEOUT = 120_000  # milliseconds


def take_views(tab, url, folder, name):
    """Take the pictures of all views but the chat, in one size and theme."""
    tab.goto(url)
    tab.locator(".card").first.wait_for()
    tab.screenshot(path=folder / f"welcome-{name}.png")
    for view, (path, element) in VIEWS.items():
        text = "" if "example" in path else f"{'&' if '?' in path else '?'}text={quote(TEXT)}"
        tab.goto("about:blank")
        tab.goto(f"{url}/#/{path}{text}")
        tab.locator(element).first.wait_for()
        tab.wait_for_load_state("networkidle")
        tab.wait_for_timeout(1000)  # transitions
        tab.screenshot(path=folder / f"{view}-{name}.png", full_page=view != "tour")


def take_chat(tab, url, folder, name):
    """Take the picture of an answer and the alternatives to one of its tokens."""
    tab.goto(url)
    tab.evaluate("localStorage.setItem('clearhead-settings', JSON.stringify({maxTokens: 64, seed: 5}))")
    tab.reload()
    tab.locator("#message").fill(QUESTION)
    tab.keyboard.press("Enter")
    tab.locator("#send:not(.stop)").wait_for()
    tab.locator(".stats", has_text="tokens").first.wait_for()
    tab.locator(".tok").nth(5).hover()
    tab.locator("#popover .candidate").first.wait_for()
    tab.wait_for_timeout(500)
    tab.screenshot(path=folder / f"chat-{name}.png")


def main():
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, (columns, rows) in WIDTHS.items():
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": columns, "height": rows}, color_scheme=theme)
                context.set_default_timeout(TIMEOUT)
                for take in (take_views, take_chat):
                    take(context.new_page(), arguments.url.rstrip("/"), arguments.folder, f"{width}-{theme}")
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
