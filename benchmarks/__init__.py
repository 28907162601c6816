"""The benchmarks: every figure of lazyckpt against a named peer, measured in the same run on the same files.

    python -m benchmarks                      # everything: about an hour and 40 GiB of disk
    python -m benchmarks --quick              # smaller data and fewer pairs: at most 3 minutes on 2 cores
    python -m benchmarks slices opening       # some areas
    python -m benchmarks --only "16 columns"  # the rows whose text contains this
    python -m benchmarks --list               # what there is
    python -m benchmarks --history FILE       # adds the result to a history
    python -m benchmarks plots FILE --to docs/assets/speed
    python -m benchmarks page FILE            # writes the tables of docs/explanation/speed.md, README.md

Every ratio is ours divided by the peer's: below 1 means that lazyckpt took less. `benchmarks/NOTES.md` explains the
rows that miss their goal. The modules:

- `row`, `report`: a figure as data; tables, JSON and history;
- `sample`, `host`, `contest`: how one call, one fresh process and one series of alternating pairs are measured;
- `case`, `suite`: which rows there are, and the run of them;
- `areas/`: the rows, one module for each area;
- `data`, `sparse_zero`, `sparse_megatron`, `sparse_dcp`, `sparse_hf`: the files that are measured;
- `plots`, `page`: what the documentation shows.
"""
