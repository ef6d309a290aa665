"""Two real processes for the tests of DistributedDataParallel. They meet through a file, so no port has to be free."""

import json
import subprocess
import sys
from pathlib import Path

LIMIT = 90  # seconds for both processes; then they are killed


def run_two(module: str, folder: Path) -> list[dict]:
    """Run module.process(rank, folder) in two processes. Returns what each printed as lines of JSON."""
    paths = [Path(__file__).parent, Path(__file__).parents[1]]
    code = f"import sys; sys.path[:0] = {list(map(str, paths))}; import {module}; {module}.process"
    commands = [[sys.executable, "-c", f"{code}({rank}, {str(folder)!r})"] for rank in range(2)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        outputs = [one.communicate(timeout=LIMIT) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()
    assert all(one.returncode == 0 for one in processes), "\n".join(error for _, error in outputs)
    return [dict(item for line in output.splitlines() for item in json.loads(line).items()) for output, _ in outputs]
