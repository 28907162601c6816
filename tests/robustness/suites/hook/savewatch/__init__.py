"""Compare what libraries save with what lazyckpt reads, while the true tensors are still in memory.

- `hooks` wraps the functions that save, as soon as the module that defines them is imported.
- `truth` lists the tensors that an object holds.
- `compare` opens what was saved and compares every tensor.
- `report` appends one line of JSON per save to the report file, and sums such lines up.
"""
