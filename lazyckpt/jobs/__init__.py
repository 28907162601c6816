"""The engine of long-running jobs.

`executor` runs tasks on threads, processes or a cluster, in bounded memory; `progress` displays their progress. An
export is a `plan`. `write` executes the plan in a staging directory (`publish`, protected by `guard`) or in an object
store (`places`) and records finished work in a `ledger`; the `destination` publishes the result.
"""
