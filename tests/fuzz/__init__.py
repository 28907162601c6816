"""Fuzzing of every parser: targets (`targets/`), mutators (`mutate.py`), and what drives them (`drive.py`).

``./run fuzz --minutes N [TARGET...]`` runs the targets; `test_fuzz.py` replays the regression files and a short run of
each target. CONTRIBUTING.md describes how to add a target.
"""
