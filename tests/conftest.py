"""Shared by all tests: the repairs of nbval, and the browser for the tests that need one."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from nbval_repairs import repair

CHROMIUM_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)

repair()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; tests of interrupts need them
    signal.signal(signal.SIGINT, signal.default_int_handler)


def installed_chromium() -> str | None:
    """The path of a Chromium or Chrome: what MINIMIND_CHROMIUM names, else the first one installed, else None."""
    named = os.environ.get("MINIMIND_CHROMIUM")
    found = filter(None, map(shutil.which, [named] if named else CHROMIUM_NAMES))
    return next(found, None)


def find_chromium() -> str:
    """The path of a browser for the calling test.

    Without one the test is skipped. With CI=true it fails: there a missing browser is a fault of the set-up, which a
    skipped test would hide.
    """
    if path := installed_chromium():
        return path
    message = "no Chromium or Chrome found: install one (Debian: apt-get install chromium), or set MINIMIND_CHROMIUM"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
