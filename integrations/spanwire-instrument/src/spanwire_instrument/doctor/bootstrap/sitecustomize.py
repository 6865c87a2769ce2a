"""Found first on PYTHONPATH by every Python that ``spanwire doctor`` starts, or that those start.

It may run in any Python 3, and in environments without spanwire, of which it leaves a note. Whatever goes wrong,
the program runs. A ``sitecustomize`` that this one stands before is run as well.
"""

import os
import sys


def _note(folder: str, error: str) -> None:
    import json
    import time

    line = {"e": "failed", "pid": os.getpid(), "t": time.time(), "python": sys.executable, "error": error}
    try:
        with open(os.path.join(folder, "events.jsonl"), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(json.dumps(line) + "\n")
    except OSError:
        pass


def _chain(here: str) -> None:
    """Run the environment's own, as if this one were not there."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one or os.curdir) != here]  # noqa: PTH100
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine  # as without a file of that name, but for the reload


def _start() -> None:
    folder = os.environ.get("SPANWIRE_DOCTOR")
    if not folder or not os.path.isdir(folder):  # noqa: PTH112
        return  # the doctor has gone home: a process that outlived it
    try:
        from spanwire_instrument.doctor.recorder import start
    except Exception as error:  # noqa: BLE001
        _note(folder, type(error).__name__ + ": " + str(error))
        return
    try:
        start(folder)
    except Exception as error:  # noqa: BLE001
        _note(folder, type(error).__name__ + ": " + str(error))


_start()
_chain(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
