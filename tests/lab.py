"""A private JupyterLab and a headless browser, for tests and measurements.

The server listens on a free loopback port with a fresh token, keeps its settings in a temporary folder and works on
copies of the notebooks, so neither the reader's JupyterLab nor the repository is touched. Only what was started here is
stopped.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SETTINGS = {
    # no news pop-up; every cell stays in the page, so that the browser finds them all
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',
}


@dataclass
class Lab:
    """A running JupyterLab. folder: the root of its file browser, with notebooks/ and figures/ in it."""

    url: str
    token: str
    folder: Path
    log: Path


def new_notebook(*cells: str) -> nbformat.NotebookNode:
    """A notebook of these code cells, for the kernel python3."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return notebook


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds: the outer limit around all inner ones (POSIX only)."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise TimeoutError(f"not finished after {seconds:g} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def jupyter_lab(notebooks: Iterable[Path], start_limit: float = 90) -> Iterator[Lab]:
    """Start JupyterLab on copies of these notebooks. Raises RuntimeError with the log's end if it does not start."""
    home = Path(tempfile.mkdtemp(prefix="minimind_lab_"))
    folder, log = home / "work", home / "lab.log"
    (folder / "notebooks").mkdir(parents=True)
    for notebook in notebooks:
        shutil.copy(notebook, folder / "notebooks")
    for beside in ("figures", "minimind_core"):  # what notebooks reach by a path: pictures, and the set-up check
        shutil.copytree(ROOT / beside, folder / beside)
    for name, text in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    private = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "IPYTHONDIR": "ipython",
    }
    env = os.environ | {name: str(home / part) for name, part in private.items()}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "MINIMIND_PROGRESS": "off"}
    port, token = free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--LabApp.news_url="]
    command += ["--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate"]
    lab = Lab(f"http://127.0.0.1:{port}", token, folder, log)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for_server(lab, process, start_limit)
        yield lab
    finally:
        _stop(lab, process)
        shutil.rmtree(home, ignore_errors=True)


def _request(lab: Lab, path: str, method: str = "GET", limit: float = 5) -> None:
    request = urllib.request.Request(f"{lab.url}{path}?token={lab.token}", method=method)
    urllib.request.urlopen(request, timeout=limit).read()


def _wait_for_server(lab: Lab, process: subprocess.Popen, limit: float) -> None:
    end = time.monotonic() + limit
    while True:
        try:
            return _request(lab, "/api/status", limit=1)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                tail = lab.log.read_text()[-2000:]
                raise RuntimeError(f"JupyterLab did not start within {limit:g} s:\n{tail}") from error
            time.sleep(0.2)


def _stop(lab: Lab, process: subprocess.Popen) -> None:
    """Let the server end its kernels and itself; after 10 s end its process group, and no other process."""
    with contextlib.suppress(OSError):
        _request(lab, "/api/shutdown", "POST")
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)


@contextlib.contextmanager
def browser_page(chromium: str, width: int = 1200, height: int = 900, **options) -> Iterator:
    """A page of this browser, headless. Errors that scripts throw are collected in page.problems."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height}, **options)
            page.problems = []
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            yield page
        finally:
            browser.close()


def open_notebook(page, lab: Lab, name: str, limit: float = 60) -> None:
    """Open notebooks/<name> in a fresh workspace and wait until its kernel is idle."""
    workspace = secrets.token_hex(4)
    page.goto(f"{lab.url}/lab/workspaces/auto-{workspace}/tree/notebooks/{name}?token={lab.token}&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=limit * 1000)
    page.wait_for_function(
        """() => {
            const session = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session;
            return session?.kernel?.connectionStatus === "connected" && session.kernel.status === "idle";
        }""",
        timeout=limit * 1000,
    )


def run_all(page, limit: float = 120) -> None:
    """Run every cell and wait until the kernel is idle and each code cell has its count."""
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(
        """() => {
            const panel = window.jupyterapp.shell.currentWidget;
            const code = panel.content.widgets.map(c => c.model).filter(m => m.type === "code");
            const counted = code.every(m => m.executionCount !== null || !m.sharedModel.getSource().trim());
            return counted && panel.sessionContext.session.kernel.status === "idle";
        }""",
        timeout=limit * 1000,
    )


def error_outputs(page) -> list[str]:
    """What the cells show as errors or on stderr, except errors of cells tagged raises-exception."""
    return page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.widgets.map(c => c.model)
            .filter(m => m.type === "code")
            .flatMap(m => {
                const wanted = (m.sharedModel.getMetadata("tags") || []).includes("raises-exception");
                return m.outputs.toJSON()
                    .filter(o => (o.output_type === "error" && !wanted) || o.name === "stderr")
                    .map(o => o.output_type === "error" ? `${o.ename}: ${o.evalue}` : [].concat(o.text).join(""));
            })"""
    )


def close_notebook(page) -> None:
    """End the notebook's kernel."""
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
