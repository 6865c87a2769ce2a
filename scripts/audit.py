"""Are there known vulnerabilities in what the lock file names? Asks OSV, by `uv audit`: `python scripts/audit.py [options of uv audit]`.

Exit code: 0, also where nobody could be asked (with a warning; 1 if SPANWIRE_AUDIT=require, as in CI); 1 for a known
vulnerability.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Of uv audit: 0 nothing found, 1 something found, 2 it could not do its work.
_FOUND = 1


def main(arguments: list[str]) -> int:
    """Run the audit; the exit code."""
    done = subprocess.run(
        [
            "sh",
            ROOT / "scripts" / "bootstrap.sh",
            "audit",
            "--frozen",
            "--preview-features",
            "audit-command",
            *arguments,
        ],
        env={"UV_HTTP_RETRIES": "1", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode in (0, _FOUND):
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode
    required = os.environ.get("SPANWIRE_AUDIT") == "require"
    why = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no word from uv")
    if "unrecognized subcommand" in done.stderr:
        why = "this uv is too old for `uv audit`"
    print(
        f"{'error' if required else 'warning'}: no audit of dependencies: the advisory service could not be asked ({why}). "
        "It is api.osv.dev; SPANWIRE_AUDIT=require makes this an error.",
        file=sys.stderr,
    )
    return int(required)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
