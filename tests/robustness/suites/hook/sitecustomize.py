"""Python imports this module at the start of every process that has this folder on its PYTHONPATH.

`run.py` puts the folder there and names a report file, so that the process that runs a suite and every process that it
spawns watch the functions that save checkpoints. Without a report file nothing happens.
"""

import os

if os.environ.get("SAVEWATCH_REPORT"):
    import savewatch.hooks

    savewatch.hooks.install()
