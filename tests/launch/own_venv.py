"""A virtual environment of a test's own, for what comes from the Python package index."""
import os, pathlib, subprocess, sys


def make(venv, package, module):
    """The environment's Python. It is made when it is not there, and kept; where the package cannot be installed, exit 77 says why."""
    python = pathlib.Path(venv).resolve() / "bin/python"
    if python.exists() and subprocess.run([str(python), "-c", f"import {module}"], capture_output=True).returncode == 0:
        return python
    for command in ([sys.executable, "-m", "venv", "--clear", str(venv)],
                    [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20",
                     package]):
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=240)
            reason = made.stderr.strip().splitlines()[-1:] if made.returncode else None
        except (OSError, subprocess.TimeoutExpired) as e:
            reason = [str(e)]
        if reason is not None:
            print(f"skipped: {' '.join(command[1:4])} failed: {' '.join(reason)}")
            sys.exit(77)
    return python


def enter(venv, package, module):
    """Runs this script again with the environment's Python."""
    if not os.environ.get("LOCKSTEP_TEST_VENV"):
        python = make(venv, package, module)
        os.environ["LOCKSTEP_TEST_VENV"] = "1"
        os.execv(python, [str(python), *sys.argv])
