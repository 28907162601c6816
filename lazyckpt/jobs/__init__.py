"""The engine of long-running jobs.

`executor` runs tasks on threads, processes or a cluster, in bounded memory; `progress` displays their progress. An
export is a `plan`. `write` executes the plan in a staging directory (`publish`, protected by `guard`) and records
finished work in a `ledger`; the `destination` publishes the result. `upload` executes it in an object store
(`remote`; `unfinished` exports there): it sends `parts` of files, or a zip file (`zips`).
"""
