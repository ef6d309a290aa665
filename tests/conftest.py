"""Shared by all tests: the repairs of nbval, and where the browser is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from nbval_repairs import repair

ROOT = Path(__file__).parents[1]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"

repair()


def find_chromium() -> str:
    """The path of a Chromium or Chrome for the browser tests: `MINIMIND_CHROMIUM`, or the first one installed.

    Where there is none, the calling test is skipped. With `CI=true` it fails: there a missing browser is a fault of the
    set-up, and a skipped test would hide it.
    """
    if (named := os.environ.get("MINIMIND_CHROMIUM")) is not None:
        if not shutil.which(named):
            pytest.fail(f"MINIMIND_CHROMIUM={named} is not a program that can be run", pytrace=False)
        return named
    for name in (*CHROMIUM_NAMES, MAC_CHROME):
        if found := shutil.which(name):
            return found
    message = "no Chromium or Chrome found: install one (Debian: apt-get install chromium) or set MINIMIND_CHROMIUM"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
