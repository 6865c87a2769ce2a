"""``spanwire doctor -- python agent.py``: runs a program as it is, watches it, and says what to change, line by line.

::

    parent                                       the program, and every Python that it starts
    ──────                                       ────────────────────────────────────────────
    command.py   arguments
    launch.py    environment, signals ─────────► bootstrap/sitecustomize.py
                                                   recorder.py   each call, with the line that made it
                                                   probes.py     TLS contexts, look-ups, clients
                 a folder: events, call log ◄───── sites.py      which line of the user's code it was
    read.py      lines to facts
    findings.py  PURE: facts to findings, with code.py for the line to change
    text.py      findings to text and JSON
"""
