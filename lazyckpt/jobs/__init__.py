"""The engine of long work.

`executor` runs tasks on threads, processes or a cluster, in bounded memory; `progress` shows how far they are. An
export is a `plan`, which `write` carries out: into a staging folder (`publish`, which `guard` protects) or an object
store (`places`), with a `ledger` of what is finished, until the `destination` makes it appear.
"""
