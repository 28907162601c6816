"""The explorer: one web application for the notebook, the browser and a single file.

`api` answers requests about a checkpoint, a run or a comparison with JSON or packed arrays, whatever carries them; the
modules of `endpoints` say what. `server`, `widget` and `report` are the three hosts. The application is written in
TypeScript in ``frontend``; ``assets`` holds what its build makes of it.
"""
