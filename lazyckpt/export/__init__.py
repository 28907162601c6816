"""From lazy tensors to files, in bounded memory.

`job` is the engine: independent tasks on threads, processes or a cluster. `stream` has those that write tensors into
files at their places, `chunks` those that write whole files of a zarr hierarchy. `destination` makes files appear
together, `staging` folders, which can be gone on with. `shards` says what goes into which file, `files` brings these
together, and a module for each format lays a file out.
"""
